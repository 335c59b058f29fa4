"""The losses of TRL's trainers on packed sequences."""
