"""Checkpoints by URL: requests to stores of files, and paths in them."""
