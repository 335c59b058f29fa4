"""Formats of a whole checkpoint: how each is found, read, and laid out."""
