"""The dictionary that cannot grow without end."""

from __future__ import annotations

from cubin_runtime.bounded import Bounded


def test_starts_over_where_one_more_key_comes() -> None:
    kept: Bounded[str, int] = Bounded(2)
    kept["a"] = 1
    kept["b"] = 2
    assert kept == {"a": 1, "b": 2}
    kept["c"] = 3
    assert kept == {"c": 3}


def test_a_key_that_it_has_is_not_one_more() -> None:
    kept: Bounded[str, int] = Bounded(2)
    kept["a"] = 1
    kept["b"] = 2
    kept["a"] = 3
    assert kept == {"a": 3, "b": 2}
