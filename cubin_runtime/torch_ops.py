"""The call as one operator of torch, `torch.ops.cubin_runtime.ragged_attention`, for whatever traces it.

Dynamo, FakeTensorMode, AOTAutograd and export look at a call without running it, and must see neither
addresses nor the loader. For them it is one opaque operator that writes into tensors it is given. Eager calls
go past it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from cubin_runtime.arguments import Call, out_dtype
from cubin_runtime.errors import InvalidArgumentError

TRACED = (FakeTensor, FunctionalTensor)
"""What tensors are while a call is traced, except by Dynamo, which reads the code instead."""

Result = Tensor | tuple[Tensor, Tensor]

# The arguments of the public call, except that out is always there, lse is there if it is to be written, and
# a scale is a float or a tensor, since a schema has no unions. All are positional: Dynamo takes a keyword
# `out` for that of torch's own functions and applies rules that do not hold here.
_SCHEMA = """ragged_attention(
    Tensor query,
    Tensor key,
    Tensor value,
    Tensor(a!) workspace_buffer,
    Tensor seq_lens,
    SymInt max_q_len,
    SymInt max_kv_len,
    float? bmm1_scale,
    Tensor? bmm1_scale_tensor,
    float? bmm2_scale,
    Tensor? bmm2_scale_tensor,
    float o_sf_scale,
    SymInt batch_size,
    SymInt window_left,
    Tensor cum_seq_lens_q,
    Tensor cum_seq_lens_kv,
    bool? enable_pdl,
    bool is_causal,
    Tensor? attention_sinks,
    float? skip_softmax_threshold_scale_factor,
    Tensor(b!) out,
    Tensor(c!)? lse,
    Tensor?[] sage_attn_sfs,
    int[] num_elts_per_sage_attn_blk,
    str backend,
    Tensor? q_seq_lens_cpu,
    Tensor? kv_seq_lens_cpu,
    bool? use_fp16_softmax,
    bool? uses_spcompress,
    bool skip_all_rows_active_check,
    Tensor(d!)? skip_softmax_counts
) -> ()"""

# Inductor may pick other strides for its intermediates than eager torch; what is legal here depends on them.
_STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)

_library = cast(Any, torch.library).Library("cubin_runtime", "FRAGMENT")
_library.define(_SCHEMA, tags=(_STRIDES, torch.Tag.pt2_compliant_tag))
_operator = torch.ops.cubin_runtime.ragged_attention.default

_CALL_NAMES = Call.__struct_fields__
_OPERATOR_NAMES = tuple(argument.name for argument in _operator._schema.arguments)
_SCALES = ("bmm1_scale", "bmm2_scale")


def implement(eager: Callable[..., Result]) -> None:
    """Makes `eager`, the public call, what the operator runs."""

    def ragged_attention(*arguments: Any) -> None:
        given = dict(zip(_OPERATOR_NAMES, arguments, strict=True))
        for name in _SCALES:
            tensor = given.pop(f"{name}_tensor")
            if tensor is not None:
                given[name] = tensor
        eager(**given)

    _library.impl("ragged_attention", ragged_attention, "CompositeExplicitAutograd")


def record(*arguments: Any) -> Result:
    """The public call, its arguments in their order, as a call of the operator.

    A float scale is a constant of what is traced, a tensor's value is not.
    """
    given = dict(zip(_CALL_NAMES, arguments, strict=True))
    query, value = given["query"], given["value"]
    _require_dimensions("query", query)
    _require_dimensions("value", value)
    if given["out"] is None:
        shape = (query.shape[0], query.shape[1], value.shape[2])
        given["out"] = query.new_empty(shape, dtype=out_dtype(query.dtype))
    if given["lse"] is None and given["return_lse"]:
        given["lse"] = query.new_empty((query.shape[0], query.shape[1]), dtype=torch.float32)
    for name in _SCALES:
        is_tensor = isinstance(given[name], Tensor)
        given[f"{name}_tensor"] = given[name] if is_tensor else None
        given[name] = None if is_tensor else given[name]
    _operator(*[given[name] for name in _OPERATOR_NAMES])
    return (given["out"], given["lse"]) if given["return_lse"] else given["out"]


def _trace(*arguments: Any) -> None:
    """Refuses results of a wrong shape; whatever else is wrong is refused when it runs."""
    given = dict(zip(_OPERATOR_NAMES, arguments, strict=True))
    tokens, heads, _ = given["query"].shape
    _require_shape("out", given["out"], (tokens, heads, given["value"].shape[2]))
    if given["lse"] is not None:
        _require_shape("lse", given["lse"], (tokens, heads))


torch.library.register_fake("cubin_runtime::ragged_attention", _trace, lib=_library)


def _require_dimensions(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 3:
        raise InvalidArgumentError(f"{name} has shape {tuple(tensor.shape)}; expected 3 dimensions")


def _require_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise InvalidArgumentError(f"{name} has shape {tuple(tensor.shape)}; expected {expected}")
