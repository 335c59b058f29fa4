"""Once per run: what is looked at before the first step, and the log."""
