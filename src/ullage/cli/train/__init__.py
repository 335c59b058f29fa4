"""``ullage train``: the verb, its settings and arguments, the model, the output folder, and what a person sees."""

from ullage.cli.train.verb import app

__all__ = ["app"]
