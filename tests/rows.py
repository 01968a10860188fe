"""Kernel rows and requests for tests: one of each by hand, and hypothesis strategies of many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from cubin_runtime.many_keys import MANY_KEYS
from cubin_runtime.request import SAGE_ANY, SAGE_OFF, Capability, DType, KernelRequest, MaskType
from kernel_meta.schema import KernelRow, Resources, Scheduler

RESOURCES = Resources(
    threads=384, registers=168, shared_memory=213_760, static_shared_memory=0, parameter_bytes=512
)

FAMILIES = ("fmha_sm90", "fmha_trtllm_gen", "fmha_cute_dsl")
ARCHS = ("sm_80", "sm_90", "sm_90a", "sm_100f", "sm_100a", "sm_103a", "sm_120f")
CAPABILITIES = tuple(
    Capability(*c) for c in [(7, 5), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1), (13, 0)]
)
HEAD_DIMS = ((192, 128), (128, 128), (256, 256))
SAGE_BLOCKS = (SAGE_OFF, (1, 16, 0, 1), (4, 4, 0, 1))


def make_row(**changes: Any) -> KernelRow:
    """The bf16 causal (192, 128) row of Hopper, built, with `changes`."""
    columns: dict[str, Any] = {
        "family": "fmha_sm90",
        "arch": "sm_90a",
        **{f"dtype_{tensor}": DType.BF16 for tensor in "qkvo"},
        "head_dim_qk": 192,
        "head_dim_v": 128,
        "mask_type": MaskType.CAUSAL,
        "tile_q": 128,
        "tile_kv": 128,
        "scheduler": Scheduler.PERSISTENT,
        "abi": "fmha_sm90/1",
        "source": "fmha_fwd.cu",
        "resources": RESOURCES,
    }
    return KernelRow(**{**columns, **changes})


def make_request(**changes: Any) -> KernelRequest:
    """The request that `make_row()` answers, with `changes`."""
    return KernelRequest(**{"capability": Capability(9, 0), **changes})


@st.composite
def kernel_rows(draw: st.DrawFn) -> KernelRow:
    """Rows of every family, target and variant, some of them not built."""
    head_dims = draw(st.sampled_from(HEAD_DIMS))
    return make_row(
        family=draw(st.sampled_from(FAMILIES)),
        arch=draw(st.sampled_from(ARCHS)),
        **{f"dtype_{tensor}": draw(st.sampled_from(DType)) for tensor in "qkvo"},
        head_dim_qk=head_dims[0],
        head_dim_v=head_dims[1],
        mask_type=draw(st.sampled_from(MaskType)),
        tile_q=draw(st.sampled_from([64, 128])),
        tile_kv=draw(st.sampled_from([80, 128])),
        scheduler=draw(st.sampled_from(Scheduler)),
        fp16_softmax=draw(st.booleans()),
        uses_spcompress=draw(st.booleans()),
        skips_softmax=draw(st.booleans()),
        e4m3_p=draw(st.booleans()),
        sage_blocks=draw(st.sampled_from((*SAGE_BLOCKS, SAGE_ANY))),
        resources=draw(st.sampled_from([None, RESOURCES])),
    )


@st.composite
def kernel_requests(draw: st.DrawFn, capabilities: Sequence[Capability] = CAPABILITIES) -> KernelRequest:
    """Requests over the same values as `kernel_rows`, for any device or those of `capabilities`."""
    head_dims = draw(st.sampled_from(HEAD_DIMS))
    return make_request(
        capability=draw(st.sampled_from(capabilities)),
        backend=draw(st.sampled_from(["trtllm-gen", "cute-dsl"])),
        **{f"dtype_{tensor}": draw(st.sampled_from(DType)) for tensor in "qkvo"},
        head_dim_qk=head_dims[0],
        head_dim_v=head_dims[1],
        mask_type=draw(st.sampled_from(MaskType)),
        use_fp16_softmax=draw(st.booleans()),
        uses_spcompress=draw(st.booleans()),
        skips_softmax=draw(st.booleans()),
        sage_blocks=draw(st.sampled_from(SAGE_BLOCKS)),
        max_kv_len=draw(st.sampled_from([None, MANY_KEYS - 1, MANY_KEYS])),
        max_shared_memory=draw(st.sampled_from([None, 100_000, 232_448])),
    )


def row_for(request: KernelRequest, **changes: Any) -> KernelRow:
    """A row with the identity columns of `request`; arch stays sm_90a unless changed."""
    columns = {
        "family": "fmha_cute_dsl" if request.backend == "cute-dsl" else "fmha_sm90",
        **{f"dtype_{tensor}": getattr(request, f"dtype_{tensor}") for tensor in "qkvo"},
        "head_dim_qk": request.head_dim_qk,
        "head_dim_v": request.head_dim_v,
        "mask_type": request.mask_type,
        "fp16_softmax": request.use_fp16_softmax,
        "uses_spcompress": request.uses_spcompress,
        "skips_softmax": request.skips_softmax,
        "sage_blocks": request.sage_blocks,
    }
    return make_row(**{**columns, **changes})
