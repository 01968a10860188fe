"""The public call with backend="reference": its signature, defaults and results, on the CPU."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch

import cubin_runtime
from cubin_runtime import trtllm_ragged_attention_deepseek
from cubin_runtime.reference import ragged_attention_reference
from tests.ragged_call import SIGNATURE, cpu_call

REQUIRED = inspect.Parameter.empty


def attend(**arguments: Any) -> Any:
    return trtllm_ragged_attention_deepseek(**cpu_call(**arguments))


def expected(out_dtype: torch.dtype = torch.bfloat16, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference function's out and lse for the same call."""
    call = cpu_call(**arguments)
    out = torch.full((*call["query"].shape[:2], call["value"].shape[2]), math.nan, dtype=out_dtype)
    lse = torch.full(call["query"].shape[:2], math.nan)
    names = ("query", "key", "value", "cum_seq_lens_q", "cum_seq_lens_kv", "bmm1_scale", "bmm2_scale")
    ragged_attention_reference(
        **{name: call[name] for name in names},
        is_causal=call.get("is_causal", True),
        window_left=call["window_left"],
        out=out,
        lse=lse,
    )
    return out, lse


def test_names_order_and_defaults_are_those_that_engines_call_with() -> None:
    assert [(p.name, p.default) for p in SIGNATURE.parameters.values()] == [
        ("query", REQUIRED),
        ("key", REQUIRED),
        ("value", REQUIRED),
        ("workspace_buffer", REQUIRED),
        ("seq_lens", REQUIRED),
        ("max_q_len", REQUIRED),
        ("max_kv_len", REQUIRED),
        ("bmm1_scale", REQUIRED),
        ("bmm2_scale", REQUIRED),
        ("o_sf_scale", REQUIRED),
        ("batch_size", REQUIRED),
        ("window_left", REQUIRED),
        ("cum_seq_lens_q", REQUIRED),
        ("cum_seq_lens_kv", REQUIRED),
        ("enable_pdl", None),
        ("is_causal", True),
        ("return_lse", False),
        ("attention_sinks", None),
        ("skip_softmax_threshold_scale_factor", None),
        ("out", None),
        ("lse", None),
        ("sage_attn_sfs", (None, None, None, None)),
        ("num_elts_per_sage_attn_blk", (0, 0, 0, 0)),
        ("backend", "trtllm-gen"),
        ("q_seq_lens_cpu", None),
        ("kv_seq_lens_cpu", None),
        ("use_fp16_softmax", None),
        ("uses_spcompress", None),
        ("skip_all_rows_active_check", True),
        ("skip_softmax_counts", None),
    ]
    *kinds, last = [p.kind for p in SIGNATURE.parameters.values()]
    assert set(kinds) == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert last == inspect.Parameter.KEYWORD_ONLY


def test_the_package_exports_it() -> None:
    assert "trtllm_ragged_attention_deepseek" in cubin_runtime.__all__


def test_positional_and_keyword_calls_agree() -> None:
    arguments = cpu_call()
    by_keyword = trtllm_ragged_attention_deepseek(**arguments)
    bound = SIGNATURE.bind(**arguments)
    bound.apply_defaults()
    assert torch.equal(trtllm_ragged_attention_deepseek(*bound.args), by_keyword)
    assert torch.equal(by_keyword, expected()[0])


def test_return_lse_returns_a_pair() -> None:
    out, lse = attend(return_lse=True)
    assert (lse.shape, lse.dtype) == ((5, 4), torch.float32)
    for given, right in zip((out, lse), expected(), strict=True):
        assert torch.equal(given, right)


def test_lse_is_of_base_two() -> None:
    _, lse = attend(q_lens=[3], kv_lens=[8], is_causal=False, bmm1_scale=0.0, return_lse=True)
    assert torch.equal(lse, torch.full((3, 4), 3.0))


def test_out_and_lse_are_written_where_they_are_given() -> None:
    out = torch.full((5, 4, 256), math.nan, dtype=torch.float16)[..., :128]
    lse = torch.full((4, 5), math.nan).T
    result = attend(out=out, lse=lse, return_lse=True)
    assert result[0] is out
    assert result[1] is lse
    right = expected(out_dtype=torch.float16)
    assert torch.equal(out, right[0])
    assert torch.equal(lse, right[1])


def test_a_given_lse_is_written_without_being_returned() -> None:
    lse = torch.full((5, 4), math.nan)
    out = attend(lse=lse)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(lse, expected()[1])


@pytest.mark.parametrize(
    ("dtype", "default"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float8_e4m3fn, torch.bfloat16),
    ],
)
def test_default_dtype_of_out(dtype: torch.dtype, default: torch.dtype) -> None:
    out = attend(dtype=dtype)
    assert (out.dtype, out.shape) == (default, (5, 4, 128))
    assert torch.equal(out, expected(out_dtype=default, dtype=dtype)[0])


def test_strided_views_are_read_by_their_strides() -> None:
    arguments = cpu_call()
    packed = torch.cat([arguments["key"], arguments["value"]], dim=-1)
    out = trtllm_ragged_attention_deepseek(
        **{**arguments, "key": packed[..., :192], "value": packed[..., 192:]}
    )
    assert torch.equal(out, expected()[0])


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": False},
        {"window_left": 2},
        {"is_causal": False, "window_left": 2},
        {"bmm1_scale": torch.tensor(0.25), "bmm2_scale": torch.tensor([0.5])},
        {"bmm1_scale": 1, "bmm2_scale": 2},
    ],
)
def test_options_reach_the_computation(options: dict[str, Any]) -> None:
    out, lse = attend(**options, return_lse=True)
    for given, right in zip((out, lse), expected(**options), strict=True):
        assert torch.equal(given, right)
    assert not torch.equal(out, attend())


def test_sinks_reach_the_computation() -> None:
    sinks = torch.tensor([math.log(4.0), -math.inf, 0.0, 0.0])
    out, lse = attend(
        q_lens=[1], kv_lens=[4], is_causal=False, bmm1_scale=0.0, attention_sinks=sinks, return_lse=True
    )
    plain = attend(q_lens=[1], kv_lens=[4], is_causal=False, bmm1_scale=0.0)
    torch.testing.assert_close(lse[0, :2], torch.tensor([3.0, 2.0]))
    torch.testing.assert_close(out[0, 0].float(), plain[0, 0].float() / 2, rtol=1e-2, atol=1e-3)
    assert torch.equal(out[0, 1], plain[0, 1])


def test_sage_scales_reach_the_computation() -> None:
    arguments = cpu_call()
    query, key = ((8 * arguments[name]).to(torch.int8) for name in ("query", "key"))
    value = arguments["value"].to(torch.float8_e4m3fn)
    scales = (torch.ones(4, 6), torch.ones(2, 4), None, torch.full((2, 128), 2.0))
    result = trtllm_ragged_attention_deepseek(
        **{**arguments, "query": query, "key": key, "value": value, "bmm1_scale": 1e-3},
        sage_attn_sfs=scales,
        num_elts_per_sage_attn_blk=(1, 4, 0, 1),
    )
    floats = {"query": query.bfloat16(), "key": key.bfloat16(), "value": value.bfloat16()}
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, expected(**floats, bmm1_scale=1e-3, bmm2_scale=2.0)[0])


def test_rows_without_keys_are_zero() -> None:
    out, lse = attend(q_lens=[3, 2], kv_lens=[0, 4], return_lse=True)
    assert not out[:3].any()
    assert torch.equal(lse[:3], torch.full((3, 4), -math.inf))
    assert torch.isfinite(lse[3:]).all()


def test_an_empty_batch_has_an_empty_result() -> None:
    out, lse = attend(q_lens=[], kv_lens=[], return_lse=True)
    assert (out.shape, lse.shape) == ((0, 4, 128), (0, 4))


def test_padding_rows_are_not_written() -> None:
    arguments = cpu_call(q_lens=[3, 2], out=torch.full((5, 4, 128), 7.0).half(), lse=torch.full((5, 4), 7.0))
    arguments["cum_seq_lens_q"] = torch.tensor([0, 3, 3], dtype=torch.int32)
    mirrors = {"q_seq_lens_cpu": torch.tensor([3, 0]), "kv_seq_lens_cpu": torch.tensor([5, 4])}
    out = trtllm_ragged_attention_deepseek(**arguments, **mirrors)
    assert (out[3:] == 7).all()
    assert (arguments["lse"][3:] == 7).all()
    assert (out[:3] != 7).any()


def test_a_bad_call_leaves_the_next_one_alone() -> None:
    with pytest.raises(ValueError, match="max_q_len"):
        attend(max_q_len=-1)
    assert torch.equal(attend(), expected()[0])
