"""Core data of a checkpoint: inventory, numbers, problems, manifest, and the reading of bytes from anywhere."""
