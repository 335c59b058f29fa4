"""One optimizer step: drawn on every rank, planned and exchanged, and trained on as microbatches."""
