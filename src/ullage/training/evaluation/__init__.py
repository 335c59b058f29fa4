"""Evaluation and prediction: each sample once, in the order of the data set."""
