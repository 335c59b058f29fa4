"""Checkpoints of a run: written whole or not at all, looked at before they are read, and continued from."""
