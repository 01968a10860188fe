"""What an implementation of attention must offer to be timed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, Protocol

import torch

from bench.problem import Problem
from bench.workloads import Workload

# Starts one attention on torch's current stream; returns [total_q, heads, head_dim_v], or batched the same.
Call = Callable[[], torch.Tensor]


class PeerMissingError(Exception):
    """A peer is not installed; the message says what would bring it."""


class Options(NamedTuple):
    """What peers are made with."""

    fa4_aot: Path | None = None  # folder of FlashAttention-4 kernels compiled ahead of time


class Peer(Protocol):
    """One implementation. Its constructor takes Options and raises PeerMissingError."""

    ragged: bool  # takes sequences of different lengths, as ours does; the others are listed apart
    version: str

    def refusal(self, workload: Workload) -> str | None:
        """Why this workload is not for it, or None."""

    def bind(self, problem: Problem) -> Call:
        """The call as a user would write it, with everything that can be prepared once prepared."""


def require(module: str, remedy: str) -> ModuleType:
    """Imports a peer's module, untyped as it is. Whatever breaks its import counts as missing."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise PeerMissingError(
            f"{module} cannot be imported ({type(error).__name__}: {error}); {remedy}"
        ) from error


def package_version(*distributions: str) -> str:
    """Version of those of these distributions that are installed."""
    found = [
        f"{name} {metadata.version(name)}"
        for name in distributions
        if any(metadata.Distribution.discover(name=name))
    ]
    return ", ".join(found) or f"{distributions[0]} of unknown version"


def refuse_unequal(workload: Workload) -> str | None:
    """The refusal of a fixed-length entry."""
    return None if workload.equal_lengths else "takes sequences of one length only"
