"""Thin adapters to other engines, each imported only when it is asked for."""
