"""Thin adapters to other training frameworks, imported only when asked for."""
