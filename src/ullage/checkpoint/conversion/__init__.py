"""Conversion of an inventory into files of another format, and the proof that they are equal."""
