"""What a run is given before it begins: its arguments, the memory of its device, and how its model is sharded."""
