"""Kernel families: how the kernels of one kernel_meta folder are laid out, packed and launched.

A family is a module here with the name of its folder. It has

  workspace(problem, row, sm_count)                scratch areas that the call needs, from shapes alone
  grid(problem, row, sm_count)                     blocks of its launch, from shapes alone
  prepare(problem, kernel) -> PreparedCall         everything that a repeated call shares
  PreparedCall.__call__(arguments, stream, pdl)    pack and launch
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

import msgspec

from cubin_runtime.module import LoadedKernel
from cubin_runtime.request import DType, KernelRequest
from cubin_runtime.workspace import WorkspaceLayout
from kernel_meta.schema import KernelRow


class TensorLayout(msgspec.Struct, frozen=True):
    """Shape and strides (elements) of a tensor, without its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A checked call without its addresses and values: what may be prepared once and repeated."""

    request: KernelRequest
    query: TensorLayout
    key: TensorLayout
    value: TensorLayout
    out: TensorLayout
    lse_strides: tuple[int, int] | None
    batch_size: int
    max_q_len: int
    max_kv_len: int
    window_left: int
    """As in the call: keys left of the diagonal that a row of a sliding mask sees; -1 = all of them."""
    skip_softmax_factor: float = 0.0
    """0 = off."""
    bmm1_scale_on_device: bool = True
    """Whether bmm1_scale is read on the device; it can be where that is not known."""


class Arguments(msgspec.Struct, frozen=True):
    """What differs between repeated calls. Addresses are device addresses, 0 = not given.

    A scale is a float, or the address of a float32 on the device with the float ignored. `sage_scales` are
    those of q, k, p and v.
    """

    query: int
    key: int
    value: int
    out: int
    lse: int
    workspace: int
    cum_seq_lens_q: int
    cum_seq_lens_kv: int
    attention_sinks: int
    bmm1_scale: float
    bmm1_scale_pointer: int
    bmm2_scale: float
    bmm2_scale_pointer: int
    o_sf_scale: float
    seq_lens: int
    sage_scales: tuple[int, int, int, int]
    skip_counts: int = 0
    """Two 64-bit counters: tiles that skip-softmax left out, and all tiles, are added."""


class PreparedCall(Protocol):
    """A kernel ready for calls of one problem. Safe to call from several threads.

    handles_empty_rows  whether rows that see no key get their result, too; else they must be left out
    zeroed_bytes        how much of the workspace must be zero before its first use, from its start on
    """

    problem: Problem
    kernel: LoadedKernel
    handles_empty_rows: bool
    zeroed_bytes: int

    def __call__(self, arguments: Arguments, stream: int, pdl: bool) -> None:
        """Packs the parameters and launches into `stream`."""


class Family(Protocol):
    """The functions of a family's module."""

    def workspace(self, problem: Problem, row: KernelRow, sm_count: int) -> WorkspaceLayout:
        """The scratch areas that a call needs on a device of `sm_count` multiprocessors."""

    def grid(self, problem: Problem, row: KernelRow, sm_count: int) -> tuple[int, int, int]:
        """Blocks along x, y and z that a call launches on a device of `sm_count` multiprocessors."""

    def prepare(self, problem: Problem, kernel: LoadedKernel) -> PreparedCall:
        """Everything that repeated calls of a problem share."""


def family(name: str) -> Family:
    """The family called `name`, as in a row's `family` column."""
    return cast(Family, importlib.import_module(f"cubin_runtime.families.{name}"))
