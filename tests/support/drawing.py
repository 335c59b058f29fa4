"""Strategies that sit on boundaries on purpose: exactly empty, exactly padded, exactly at capacity, and one beside."""

from hypothesis import strategies as st


def near(*edges: int, low: int = 0, high: int) -> st.SearchStrategy[int]:
    """Integers from ``low`` to ``high``, every other one an edge or beside one."""
    beside = sorted({edge + step for edge in (low, high, *edges) for step in (-1, 0, 1) if low <= edge + step <= high})
    return st.one_of(st.sampled_from(beside), st.integers(low, high))


def lengths(*edges: int, low: int = 0, high: int, max_size: int, min_size: int = 0) -> st.SearchStrategy[list[int]]:
    """Lists of such integers; now and then all of one length."""
    one = near(*edges, low=low, high=high)
    several = st.lists(one, min_size=min_size, max_size=max_size)
    equal = st.builds(lambda length, count: [length] * count, one, st.integers(min_size, max_size))
    return st.one_of(several, several, equal)
