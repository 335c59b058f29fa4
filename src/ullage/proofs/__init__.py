"""Proofs that a packed row gives each sequence what it gets alone, for the model types of transformers."""
