"""How thorough the slow tests are: a sample by default, everything with PROOF=full in the environment."""

from __future__ import annotations

import os


def rounds(sample: int, full: int) -> int:
    """How often to repeat."""
    return full if os.environ.get("PROOF") == "full" else sample
