"""TRL's trainers on packed sequences: what they log, weighed by what each microbatch holds."""
