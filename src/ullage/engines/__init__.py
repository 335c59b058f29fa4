"""Thin adapters to other training frameworks, each imported only when it is asked for."""
