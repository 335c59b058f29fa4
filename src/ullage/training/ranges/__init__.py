"""Loading of a checkpoint of any layout into a DeepSpeed engine: each rank reads the elements that it needs."""
