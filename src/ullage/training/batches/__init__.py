"""The batches of a run: from samples to a batch, what is in it, and the form in which the model takes it."""
