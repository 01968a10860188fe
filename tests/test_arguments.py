"""Every check of the public call's arguments: what is refused, under which name, and what passes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cubin_runtime import trtllm_ragged_attention_deepseek
from cubin_runtime.arguments import check, check_mirrors, mask_type, out_dtype, workspace_address
from cubin_runtime.errors import InvalidArgumentError, UnsupportedError
from cubin_runtime.request import MaskType
from tests.driver.cuda_tensors import CudaTensor, cuda_call
from tests.ragged_call import as_call, cpu_call, edges

E4M3 = torch.float8_e4m3fn
F32 = torch.float32
Change = Callable[[dict[str, Any]], dict[str, Any]]


def sage(**changes: Any) -> dict[str, Any]:
    """A valid Sage call: int8 query and key, e4m3 value, blocks of 1 and 4 tokens, 4 heads over 2."""
    query, key, value = (cpu_call()[name] for name in ("query", "key", "value"))
    return {
        "query": query.to(torch.int8),
        "key": key.to(torch.int8),
        "value": value.to(E4M3),
        "num_elts_per_sage_attn_blk": (1, 4, 0, 1),
        # 5 query tokens in blocks of 1, 9 keys in blocks of 4, and one column more for the second sequence.
        "sage_attn_sfs": (torch.ones(4, 6), torch.ones(2, 4), None, torch.ones(2, 128)),
        **changes,
    }


def sage_scale(index: int, scale: object) -> Change:
    def change(arguments: dict[str, Any]) -> dict[str, Any]:
        scales = list(sage()["sage_attn_sfs"])
        scales[index] = scale
        return sage(sage_attn_sfs=tuple(scales))

    return change


def of(name: str, make: Callable[[Any], object]) -> Change:
    """Changes an argument into something made of it."""
    return lambda arguments: {name: make(arguments[name])}


SPARSE = torch.eye(3).to_sparse()

# What is wrong -> (the change, how the message starts).
BAD: dict[str, tuple[dict[str, Any] | Change, str]] = {
    "backend unknown": ({"backend": "cudnn"}, "backend is 'cudnn'; expected one of 'trtllm-gen'"),
    "backend no string": ({"backend": ["reference"]}, "backend is ['reference']"),
    "backend None": ({"backend": None}, "backend is None"),
    # query, key, value
    "query no tensor": ({"query": None}, "query is a NoneType; expected a torch.Tensor"),
    "key numpy": (of("key", lambda key: key.float().numpy()), "key is a ndarray"),
    "value sparse": ({"value": SPARSE}, "value has layout torch.sparse_coo"),
    "query float32": (of("query", torch.Tensor.float), "query has dtype torch.float32"),
    "key e5m2": (of("key", lambda t: t.to(torch.float8_e5m2)), "key has dtype torch.float8_e5m2"),
    "value int32": (of("value", torch.Tensor.int), "value has dtype torch.int32"),
    "query 2 dims": (of("query", lambda t: t.flatten(1)), "query has shape (5, 768)"),
    "query 4 dims": (of("query", lambda t: t[None]), "query has shape (1, 5, 4, 192)"),
    "key on another device": (
        of("key", lambda t: t.to("meta")),
        "key is on meta; expected the device of query",
    ),
    "value on another device": (of("value", lambda t: t.to("meta")), "value is on meta"),
    "query last dim strided": (
        of("query", lambda t: t.repeat(1, 1, 2)[..., ::2]),
        "query has stride 2 in its last dimension",
    ),
    "key last dim expanded": (of("key", lambda t: t[..., :1].expand(-1, -1, 192)), "key has stride 0 in its"),
    "value transposed": (
        of("value", lambda t: torch.empty(9, 128, 2).to(t).transpose(1, 2)),
        "value has stride 2",
    ),
    "key head_dim": (of("key", lambda t: t[..., :128]), "key has head_dim 128; expected that of query, 192"),
    "value tokens": (of("value", lambda t: t[:8]), "value has shape (8, 2, 128)"),
    "value heads": (of("value", lambda t: t[:, :1]), "value has shape (9, 1, 128)"),
    "heads no multiple": (of("query", lambda t: t[:, :3]), "query has 3 heads for 2 of key and value"),
    "no query heads": (of("query", lambda t: t[:, :0]), "query has 0 heads"),
    "no kv heads": (
        lambda a: {"key": a["key"][:, :0], "value": a["value"][:, :0]},
        "query has 4 heads for 0",
    ),
    "2**31 tokens": (
        lambda a: {"key": a["key"][:1].expand(2**31, -1, -1), "value": a["value"][:1].expand(2**31, -1, -1)},
        "key has 2147483648 tokens",
    ),
    # integers
    "max_q_len tensor": ({"max_q_len": torch.tensor(3)}, "max_q_len is a tensor; expected an int"),
    "max_q_len float": ({"max_q_len": 3.0}, "max_q_len is 3.0"),
    "max_q_len negative": ({"max_q_len": -1}, "max_q_len is -1"),
    "max_kv_len None": ({"max_kv_len": None}, "max_kv_len is None"),
    "max_kv_len huge": ({"max_kv_len": 2**31}, "max_kv_len is 2147483648; expected 0 to 2**31 - 1"),
    "batch_size string": ({"batch_size": "2"}, "batch_size is '2'"),
    "batch_size negative": ({"batch_size": -2}, "batch_size is -2"),
    "window_left -2": ({"window_left": -2}, "window_left is -2; expected -1 to"),
    "window_left tensor": ({"window_left": torch.tensor(1)}, "window_left is a tensor"),
    # flags
    "is_causal None": ({"is_causal": None}, "is_causal is a NoneType; expected a bool"),
    "is_causal tensor": ({"is_causal": torch.tensor(True)}, "is_causal is a Tensor"),
    "return_lse string": ({"return_lse": "no"}, "return_lse is a str"),
    "skip check": ({"skip_all_rows_active_check": None}, "skip_all_rows_active_check is a NoneType"),
    "enable_pdl": ({"enable_pdl": "on"}, "enable_pdl is a str; expected a bool or None"),
    "use_fp16_softmax": ({"use_fp16_softmax": [1]}, "use_fp16_softmax is a list"),
    "uses_spcompress": ({"uses_spcompress": 0.0}, "uses_spcompress is a float"),
    # lengths
    "seq_lens list": ({"seq_lens": [5, 4]}, "seq_lens is a list"),
    "seq_lens int64": (
        of("seq_lens", torch.Tensor.long),
        "seq_lens has dtype torch.int64; expected torch.int32",
    ),
    "seq_lens batch + 1": ({"seq_lens": edges([5, 4])}, "seq_lens has shape (3,); expected (2,)"),
    "seq_lens device": (of("seq_lens", lambda t: t.to("meta")), "seq_lens is on meta"),
    "cum_seq_lens_q int64": (of("cum_seq_lens_q", torch.Tensor.long), "cum_seq_lens_q has dtype torch.int64"),
    "cum_seq_lens_q batch": (
        of("cum_seq_lens_q", lambda t: t[1:]),
        "cum_seq_lens_q has shape (2,); expected (3,), that is batch_size + 1",
    ),
    "cum_seq_lens_q 2 dims": (of("cum_seq_lens_q", lambda t: t[None]), "cum_seq_lens_q has shape (1, 3)"),
    "cum_seq_lens_kv float": (of("cum_seq_lens_kv", torch.Tensor.float), "cum_seq_lens_kv has dtype"),
    "cum_seq_lens_kv device": (of("cum_seq_lens_kv", lambda t: t.to("meta")), "cum_seq_lens_kv is on meta"),
    "cum_seq_lens_kv strided": (
        of("cum_seq_lens_kv", lambda t: t.repeat_interleave(2)[::2]),
        "cum_seq_lens_kv has stride (2,); expected a contiguous tensor",
    ),
    # scales
    "bmm1_scale None": ({"bmm1_scale": None}, "bmm1_scale is a NoneType"),
    "bmm1_scale float64": (
        {"bmm1_scale": torch.ones(1).double()},
        "bmm1_scale is a torch.float64 tensor of 1",
    ),
    "bmm1_scale bf16": ({"bmm1_scale": torch.ones(1).bfloat16()}, "bmm1_scale is a torch.bfloat16 tensor"),
    "bmm1_scale 2 elements": ({"bmm1_scale": torch.ones(2)}, "bmm1_scale is a torch.float32 tensor of 2"),
    "bmm2_scale empty": ({"bmm2_scale": torch.ones(0)}, "bmm2_scale is a torch.float32 tensor of 0"),
    "bmm2_scale device": ({"bmm2_scale": torch.ones(1, device="meta")}, "bmm2_scale is on meta"),
    "bmm2_scale string": ({"bmm2_scale": "1"}, "bmm2_scale is a str"),
    "skip factor": (
        {"skip_softmax_threshold_scale_factor": -1.0},
        "skip_softmax_threshold_scale_factor is -1.0",
    ),
    "skip factor nan": (
        {"skip_softmax_threshold_scale_factor": float("nan")},
        "skip_softmax_threshold_scale_factor is nan",
    ),
    "skip factor tensor": (
        {"skip_softmax_threshold_scale_factor": torch.ones(1)},
        "skip_softmax_threshold_scale_factor is a Tensor",
    ),
    "skip counts without a factor": (
        {"skip_softmax_counts": torch.zeros(2, dtype=torch.int64)},
        "skip_softmax_counts is given without skip_softmax_threshold_scale_factor",
    ),
    **{
        f"skip counts {name}": (
            {"skip_softmax_threshold_scale_factor": 1.0, "skip_softmax_counts": counts},
            f"skip_softmax_counts {message}",
        )
        for name, counts, message in (
            ("list", [0, 0], "is a list"),
            ("int32", torch.zeros(2, dtype=torch.int32), "is torch.int32 with shape (2,)"),
            ("shape", torch.zeros(1, 2, dtype=torch.int64), "is torch.int64 with shape (1, 2)"),
            ("strided", torch.zeros(4, dtype=torch.int64)[::2], "is torch.int64 with shape (2,) and stride"),
            ("device", torch.zeros(2, dtype=torch.int64, device="meta"), "is on meta"),
        )
    },
    # sinks
    "sinks list": ({"attention_sinks": [0.0] * 4}, "attention_sinks is a list"),
    "sinks bf16": (
        {"attention_sinks": torch.zeros(4).bfloat16()},
        "attention_sinks has dtype torch.bfloat16",
    ),
    "sinks heads + 1": (
        {"attention_sinks": torch.zeros(5)},
        "attention_sinks has shape (5,) and stride (1,); expected a contiguous (4,)",
    ),
    "sinks strided": (
        {"attention_sinks": torch.zeros(8)[::2]},
        "attention_sinks has shape (4,) and stride (2,)",
    ),
    "sinks device": ({"attention_sinks": torch.zeros(4, device="meta")}, "attention_sinks is on meta"),
    # out, lse
    "out list": ({"out": []}, "out is a list"),
    "out float32": ({"out": torch.empty(5, 4, 128)}, "out has dtype torch.float32"),
    "out shape": (
        {"out": torch.empty(5, 4, 192).bfloat16()},
        "out has shape (5, 4, 192); expected (5, 4, 128)",
    ),
    "out device": ({"out": torch.empty(5, 4, 128, dtype=torch.half, device="meta")}, "out is on meta"),
    "out last dim": (
        {"out": torch.empty(5, 128, 4).bfloat16().transpose(1, 2)},
        "out has stride 4 in its last dimension",
    ),
    "out expanded": (
        {"out": torch.empty(1, 4, 128).bfloat16().expand(5, -1, -1)},
        "out has stride (0, 128, 1); expected no stride of 0",
    ),
    "lse bf16": ({"lse": torch.empty(5, 4).bfloat16()}, "lse has dtype torch.bfloat16"),
    "lse [heads, tokens]": (
        {"lse": torch.empty(4, 5)},
        "lse has shape (4, 5); expected (5, 4), that is [total_q, num_heads_q]",
    ),
    "lse device": ({"lse": torch.empty(5, 4, device="meta")}, "lse is on meta"),
    "lse expanded": ({"lse": torch.empty(5, 1).expand(-1, 4)}, "lse has stride (1, 0)"),
    "lse number": ({"lse": 0}, "lse is a int"),
    # workspace
    "workspace None": ({"workspace_buffer": None}, "workspace_buffer is a NoneType"),
    "workspace device": (of("workspace_buffer", lambda t: t.to("meta")), "workspace_buffer is on meta"),
    "workspace strided": (of("workspace_buffer", lambda t: t[::2]), "workspace_buffer has stride (2,)"),
    # mirrors
    "one mirror": ({"q_seq_lens_cpu": torch.tensor([3, 2])}, "kv_seq_lens_cpu is None"),
    "the other mirror": ({"kv_seq_lens_cpu": torch.tensor([5, 4])}, "q_seq_lens_cpu is None"),
    **{
        f"mirror {name}": ({"q_seq_lens_cpu": q, "kv_seq_lens_cpu": kv}, message)
        for name, q, kv, message in (
            ("list", [3, 2], torch.tensor([5, 4]), "q_seq_lens_cpu is a list"),
            (
                "float",
                torch.tensor([3.0, 2.0]),
                torch.tensor([5, 4]),
                "q_seq_lens_cpu is torch.float32 on cpu",
            ),
            (
                "device",
                torch.tensor([3, 2], device="meta"),
                torch.tensor([5, 4]),
                "q_seq_lens_cpu is torch.int64 on",
            ),
            ("shape", torch.tensor([3, 2]), torch.tensor([9]), "kv_seq_lens_cpu has shape (1,)"),
            ("negative", torch.tensor([3, 2]), torch.tensor([5, -1]), "kv_seq_lens_cpu holds -1 to 5"),
            ("above max_q_len", torch.tensor([4, 1]), torch.tensor([5, 4]), "q_seq_lens_cpu holds 1 to 4"),
            ("above max_kv_len", torch.tensor([3, 2]), torch.tensor([6, 3]), "kv_seq_lens_cpu holds 3 to 6"),
            ("sum", torch.tensor([3, 3]), torch.tensor([5, 4]), "q_seq_lens_cpu sums to 6; expected at most"),
        )
    },
    # Sage
    "sage no tuple": ({"sage_attn_sfs": None}, "sage_attn_sfs is a NoneType; expected a tuple of 4"),
    "sage blocks no tuple": ({"num_elts_per_sage_attn_blk": 4}, "num_elts_per_sage_attn_blk is a int"),
    "sage 3 scales": ({"sage_attn_sfs": (None,) * 3}, "sage_attn_sfs has 3 entries and 4 block sizes"),
    "sage 5 blocks": (
        {"num_elts_per_sage_attn_blk": (0,) * 5},
        "sage_attn_sfs has 4 entries and 5 block sizes",
    ),
    "sage scales without blocks": (
        lambda a: sage(num_elts_per_sage_attn_blk=(0, 0, 0, 0)),
        "num_elts_per_sage_attn_blk is all zero with Sage scales given",
    ),
    "int8 without sage": (
        lambda a: sage(num_elts_per_sage_attn_blk=(0, 0, 0, 0), sage_attn_sfs=(None,) * 4),
        "sage_attn_sfs is off for an int8 query",
    ),
    **{
        f"sage blocks {blocks}": (
            lambda a, blocks=blocks: sage(num_elts_per_sage_attn_blk=blocks),
            f"num_elts_per_sage_attn_blk is {blocks}",
        )
        for blocks in ((2, 4, 0, 1), (1, 8, 0, 1), (1, 4, 1, 1), (1, 4, 0, 0), (1, 4, 0, 16), (-1, 1, 0, 1))
    },
    "sage order q k v p": (
        lambda a: sage(sage_attn_sfs=(*sage()["sage_attn_sfs"][:2], torch.ones(2, 128), None)),
        "sage_attn_sfs[2] is a tensor; expected None: p has no scales (the order is q, k, p, v)",
    ),
    "sage q missing": (sage_scale(0, None), "sage_attn_sfs[0] is a NoneType"),
    "sage k bf16": (sage_scale(1, torch.ones(2, 4).bfloat16()), "sage_attn_sfs[1] is torch.bfloat16"),
    "sage k for q's tokens": (
        sage_scale(1, torch.ones(2, 3)),
        "sage_attn_sfs[1] is torch.float32 with shape (2, 3)",
    ),
    "sage q tokens first": (
        sage_scale(0, torch.ones(6, 4).T),
        "sage_attn_sfs[0] is torch.float32 with shape (4, 6)",
    ),
    "sage q head missing": (sage_scale(0, torch.ones(2, 6)), "sage_attn_sfs[0]"),
    "sage v": (sage_scale(3, torch.ones(128)), "sage_attn_sfs[3] is torch.float32 with shape (128,)"),
    "sage v device": (sage_scale(3, torch.ones(2, 128, device="meta")), "sage_attn_sfs[3] is on meta"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_is_named(case: str) -> None:
    change, message = BAD[case]
    arguments = cpu_call()
    arguments.update(change(arguments) if callable(change) else change)
    starts_with_it = "^" + re.escape(message)
    with pytest.raises(InvalidArgumentError, match=starts_with_it) as direct:
        check(as_call(arguments))
    with pytest.raises(ValueError, match=starts_with_it) as public:
        trtllm_ragged_attention_deepseek(**arguments)
    assert str(public.value) == str(direct.value)
    assert "; expected " in str(direct.value)


def test_every_argument_but_those_without_a_meaning_here_is_refused_somewhere() -> None:
    named = {re.split(r"[ \[]", message)[0] for _, message in BAD.values()}
    assert set(as_call(cpu_call()).__struct_fields__) - named == {"o_sf_scale"}


GOOD: dict[str, dict[str, Any] | Change] = {
    "plain": {},
    "native alias": lambda a: cuda_call(backend="trtllm-native"),
    "cute-dsl": lambda a: cuda_call(backend="cute-dsl"),
    "ints for floats": {"bmm1_scale": 1, "bmm2_scale": 1, "o_sf_scale": -1},
    "0-d scale": {"bmm1_scale": torch.tensor(1.0), "bmm2_scale": torch.ones(1, 1, 1)},
    "window of the reference": {"is_causal": False, "window_left": 2},
    "skip factor": {"skip_softmax_threshold_scale_factor": 0},
    "skip counts": {
        "skip_softmax_threshold_scale_factor": 1.0,
        "skip_softmax_counts": torch.zeros(2, dtype=torch.int64),
    },
    "sinks": {"attention_sinks": torch.zeros(4)},
    "lse transposed": {"lse": torch.empty(4, 5).T},
    "out of another dtype": {"out": torch.empty(5, 4, 128).half()},
    "e4m3 out": {"out": torch.empty(5, 4, 128).to(E4M3)},
    "halves of one buffer": lambda a: {
        "key": torch.empty(9, 2, 320).bfloat16()[..., :192],
        "value": torch.empty(9, 2, 320).bfloat16()[..., 192:],
    },
    "one head dim of any stride": lambda a: {
        "value": torch.empty(9, 2, 128).bfloat16()[..., ::128],
        "out": torch.empty(5, 4, 2).bfloat16()[..., ::2],
    },
    "heads outermost": of("query", lambda t: torch.empty(4, 5, 192).to(t).transpose(0, 1)),
    "expanded key": lambda a: {"key": a["key"][:1].expand(9, -1, -1)},
    "larger maxima": {"max_q_len": 2**31 - 1, "max_kv_len": 2**31 - 1},
    "smaller maxima": {"max_q_len": 0, "max_kv_len": 0},  # kernels follow the device's lengths
    "mirrors": {
        "q_seq_lens_cpu": torch.tensor([3, 2]),
        "kv_seq_lens_cpu": torch.tensor([5, 4], dtype=torch.int32),
    },
    "mirrors with padding": {"q_seq_lens_cpu": torch.tensor([3, 0]), "kv_seq_lens_cpu": torch.tensor([0, 0])},
    "workspace of floats": {"workspace_buffer": torch.empty(4, 4)},
    "no sequence": lambda a: cpu_call([], []),
    "no sequence with mirrors": lambda a: cpu_call(
        [], [], q_seq_lens_cpu=torch.empty(0).long(), kv_seq_lens_cpu=torch.empty(0).long()
    ),
    "sage": lambda a: sage(),
    "sage as lists": lambda a: sage(
        num_elts_per_sage_attn_blk=[1, 4, 0, 1], sage_attn_sfs=list(sage()["sage_attn_sfs"])
    ),
    "sage e4m3": lambda a: sage(query=a["query"].to(E4M3), key=a["key"].to(E4M3)),
    "mixed": of("value", lambda t: t.to(E4M3)),
    "flags as ints": {"is_causal": 1, "return_lse": 0, "enable_pdl": 1},
}


@pytest.mark.parametrize("case", GOOD)
def test_a_valid_call_passes(case: str) -> None:
    change = GOOD[case]
    arguments = cpu_call()
    arguments.update(change(arguments) if callable(change) else change)
    check(as_call(arguments))


@pytest.mark.parametrize("backend", ["trtllm-gen", "trtllm-native", "cute-dsl"])
def test_kernels_need_a_cuda_device(backend: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^query is on cpu; expected a CUDA device .*reference"):
        check(as_call(cpu_call(backend=backend)))


@pytest.mark.parametrize("backend", ["trtllm-gen", "cute-dsl"])
def test_kernels_have_no_window_without_causal(backend: str) -> None:
    arguments = cuda_call(backend=backend, is_causal=False, window_left=0)
    with pytest.raises(UnsupportedError, match="window_left is 0 with is_causal=False") as caught:
        check(as_call(arguments))
    assert isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize("name", ["key", "value", "cum_seq_lens_q", "workspace_buffer", "out", "lse"])
def test_another_gpu_is_another_device(name: str) -> None:
    arguments = cuda_call()
    tensor = arguments[name]
    arguments[name] = CudaTensor(tensor.shape, tensor.dtype, device=1)
    with pytest.raises(InvalidArgumentError, match=f"^{name} is on cuda:1; expected .* cuda:0"):
        check(as_call(arguments))


def test_fp8_out_of_an_fp8_query_is_refused() -> None:
    arguments = cuda_call(dtype=E4M3)
    assert arguments["out"].dtype == E4M3
    with pytest.raises(InvalidArgumentError, match=r"^out has dtype .*e4m3fn with a query of that"):
        check(as_call(arguments))


def test_checking_reads_no_device_memory() -> None:
    """The tensors raise when an operation runs on them."""
    everything = {
        "attention_sinks": CudaTensor((32,), F32),
        "bmm1_scale": CudaTensor((), F32),
        "bmm2_scale": CudaTensor((1,), F32),
    }
    check(as_call(cuda_call(**everything)))


def test_mirrors_are_optional() -> None:
    check_mirrors(as_call(cpu_call()))


@pytest.mark.parametrize(
    ("is_causal", "window_left", "max_kv_len", "expected"),
    [
        (False, -1, 8, MaskType.DENSE),
        (True, -1, 8, MaskType.CAUSAL),
        (True, 0, 8, MaskType.SLIDING),
        (True, 6, 8, MaskType.SLIDING),
        (True, 7, 8, MaskType.CAUSAL),  # the last row sees all 8 keys: 7 to its left and its own
        (True, 8, 8, MaskType.CAUSAL),
        (True, 0, 1, MaskType.CAUSAL),
        (True, 0, 0, MaskType.CAUSAL),
    ],
)
def test_a_window_over_the_longest_row_is_no_window(
    is_causal: bool, window_left: int, max_kv_len: int, expected: MaskType
) -> None:
    assert mask_type(is_causal, window_left, max_kv_len) is expected


@pytest.mark.parametrize(
    ("query", "out"),
    [
        (torch.half, torch.half),
        (torch.bfloat16, torch.bfloat16),
        (E4M3, torch.bfloat16),
        (torch.int8, torch.bfloat16),
    ],
)
def test_out_has_querys_dtype_or_bfloat16(query: torch.dtype, out: torch.dtype) -> None:
    assert out_dtype(query) is out


@pytest.mark.parametrize("address", [0, 1, 8, (1 << 40) + 4])
def test_a_misaligned_workspace_is_refused(address: int) -> None:
    with pytest.raises(
        InvalidArgumentError, match=f"workspace_buffer starts at {address:#x}; expected .* 16"
    ):
        workspace_address(CudaTensor((64,), torch.uint8, address=address))


def test_an_aligned_workspace_is_its_address() -> None:
    assert workspace_address(CudaTensor((64,), torch.uint8, address=4096)) == 4096
