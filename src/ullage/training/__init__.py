"""The Hugging Face Trainer on ragged batches, and resuming where DeepSpeed and the Trainer fall short."""
