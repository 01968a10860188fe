"""A dictionary for what is kept between calls, in processes that run for months."""

from __future__ import annotations

from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Bounded(dict[_Key, _Value]):
    """Has at most `most` keys: where one more comes, it starts over.

    So a look-up stays a dictionary's, with nothing to note about use. What is in use is soon there again.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: _Key, value: _Value) -> None:
        if len(self) >= self.most and key not in self:
            self.clear()
        super().__setitem__(key, value)
