"""What the tests of the command line share."""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Result(NamedTuple):
    """What one command came to."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)
