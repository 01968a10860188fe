"""What of the Blackwell family runs on a Hopper GPU: its tensor maps, its steps, zeroing and cut batches."""

from __future__ import annotations

import math
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import torch
from check_golden import read
from golden.driver import RecordingDriver, kernels_without_files
from golden.replay import RefusedError, prepare, run, seen

from cubin_runtime import _driver, trtllm_ragged_attention_deepseek
from cubin_runtime.arguments import Call
from cubin_runtime.empty_rows import attend, split
from cubin_runtime.families.fmha_trtllm_gen import FAMILY, LSE_PARAMETERS, SCALE_PARAMETERS
from cubin_runtime.launch import LaunchPlan, launch
from cubin_runtime.module import Loaded, device_info, load_step
from cubin_runtime.workspace import zero_once
from kernel_meta.tables import find_step
from tests.ragged_call import SIGNATURE

pytestmark = pytest.mark.gpu

RECORDED = Path(__file__).parents[1] / "golden" / "trtllm_gen_0_6_13.json.gz"


def test_the_driver_takes_every_tensor_map_that_breaks_no_rule(device):
    """And where a rule is broken, ours is the first to say so."""
    torch.zeros(1, device=device)  # the driver encodes for the current context's device
    encode, encoded = _driver.encode_tiled, []

    def count(**arguments: object) -> bytes:
        encoded.append(encode(**arguments))
        return encoded[-1]

    recorder, accepted, refused = RecordingDriver(), 0, 0
    with recorder.installed(), kernels_without_files(), mock.patch.object(_driver, "encode_tiled", count):
        for call in read(RECORDED):
            if call["outputs"]["status"] != "ok":
                continue
            inputs = seen(call["inputs"])
            prepared = prepare(inputs, recorder)
            before = len(encoded)
            if any(tma["documented_rule_violations"] for tma in call["outputs"]["tma"]):
                with pytest.raises(RefusedError, match="cannot be read in tiles"):
                    run(prepared, inputs)
                refused += 1
            else:
                run(prepared, inputs)
                assert len(encoded) == before + 4
                accepted += 1
    assert (accepted, refused) == (367, 6)
    assert all(len(each) == _driver.TENSOR_MAP_BYTES for each in encoded)


def load(step: str) -> Loaded:
    return load_step(find_step(FAMILY, step, device_info(0).capability), 0)


def launch_lse(stats, lse, cum_seq_lens_q, total_q, heads):
    parameters = LSE_PARAMETERS.pack(
        stats.data_ptr(),
        lse.data_ptr(),
        cum_seq_lens_q.data_ptr(),
        *lse.stride(),
        cum_seq_lens_q.numel() - 1,
        heads,
        total_q,
    )
    kernel = load("lse")
    blocks = -(-total_q * heads // kernel.resources.threads)
    stream = torch.cuda.current_stream().cuda_stream
    launch(LaunchPlan(kernel, (blocks, 1, 1)), parameters, stream, pdl=True)


@pytest.mark.parametrize("heads", [1, 3, 16, 128])
@pytest.mark.parametrize("layout", ["packed", "transposed", "every other"])
def test_the_lse_is_log2e_max_plus_log2_sum(device, heads, layout):
    total_q, covered = 1000, 873
    torch.manual_seed(heads)
    stats = torch.stack(
        (
            torch.randn(total_q, heads, device=device) * 50,
            torch.rand(total_q, heads, device=device) * 1000 + 1e-3,
        ),
        dim=-1,
    )
    stats[5] = torch.tensor([-math.inf, 0.0], device=device)
    untouched = 12345.0
    storage = torch.full((2 * total_q, heads), untouched, device=device)
    lse = {
        "packed": storage[:total_q],
        "transposed": torch.full((heads, total_q), untouched, device=device).T,
        "every other": storage[::2],
    }[layout]
    cum_seq_lens_q = torch.tensor([0, 800, 800, covered], dtype=torch.int32, device=device)
    launch_lse(stats, lse, cum_seq_lens_q, total_q, heads)
    expected = stats[..., 0].double() * math.log2(math.e) + stats[..., 1].double().log2()
    torch.testing.assert_close(lse[:covered].double(), expected[:covered], rtol=2e-6, atol=2e-6)
    assert bool((lse[5] == -math.inf).all())
    assert bool((lse[covered:] == untouched).all())
    if layout == "every other":
        assert bool((storage[1::2] == untouched).all())


def test_lengths_beyond_the_tensor_are_cut(device):
    stats = torch.ones(4, 2, 2, device=device)
    lse = torch.zeros(8, 2, device=device)
    launch_lse(stats, lse[:4], torch.tensor([0, 1000], dtype=torch.int32, device=device), 4, 2)
    assert lse.count_nonzero() == 8


def test_a_scale_is_converted_and_a_replay_sees_a_new_one(device):
    scale, converted = torch.tensor([0.125], device=device), torch.zeros(1, device=device)
    kernel = load("scale")

    def step() -> None:
        parameters = SCALE_PARAMETERS.pack(scale.data_ptr(), converted.data_ptr())
        stream = torch.cuda.current_stream().cuda_stream
        launch(LaunchPlan(kernel, (1, 1, 1)), parameters, stream, pdl=True)

    step()
    assert converted.item() == pytest.approx(0.125 * math.log2(math.e), rel=1e-6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    scale.fill_(3.0)
    graph.replay()
    assert converted.item() == pytest.approx(3 * math.log2(math.e), rel=1e-6)


def test_a_buffer_is_zeroed_once_and_by_every_graph_that_came_first(device):
    buffer = torch.full((1 << 20,), 7, dtype=torch.uint8, device=device)
    context = _driver.current_context()

    def zero() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        zero_once(buffer.untyped_storage(), buffer.data_ptr(), 1 << 19, context, stream)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        zero()
    assert int(buffer.min()) == 7  # recorded only
    graph.replay()
    assert (int(buffer[: 1 << 19].max()), int(buffer[1 << 19 :].min())) == (0, 7)
    buffer.fill_(7)
    zero()
    assert int(buffer[: 1 << 19].max()) == 0
    buffer.fill_(7)
    zero()
    assert int(buffer.min()) == 7  # once is enough


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("captured", [False, True])
def test_a_cut_batch_gives_the_results_of_the_whole(device, workspace, is_causal, captured):
    """With our own kernels in NVIDIA's place: they take the whole batch, too, so both can be compared."""
    lengths = [(0, 0), (5, 0), (70, 300), (0, 40), (300, 20), (1, 1), (0, 7), (129, 129), (3, 0)]
    q_lens, kv_lens = zip(*lengths, strict=True)
    torch.manual_seed(0)

    def normal(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, 128, device=device, dtype=torch.bfloat16)

    def edges(each: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0, *each], device=device).cumsum(0).to(torch.int32)

    bound = SIGNATURE.bind(
        query=normal(sum(q_lens), 8),
        key=normal(sum(kv_lens), 2),
        value=normal(sum(kv_lens), 2),
        workspace_buffer=workspace,
        seq_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        max_q_len=max(q_lens),
        max_kv_len=max(kv_lens),
        bmm1_scale=128**-0.5,
        bmm2_scale=1.0,
        o_sf_scale=1.0,
        batch_size=len(lengths),
        window_left=-1,
        cum_seq_lens_q=edges(q_lens),
        cum_seq_lens_kv=edges(kv_lens),
        is_causal=is_causal,
        return_lse=True,
        out=torch.full((sum(q_lens), 8, 128), math.nan, device=device, dtype=torch.bfloat16),
        lse=torch.full((sum(q_lens), 8), math.nan, device=device),
    )
    bound.apply_defaults()
    call = Call(**bound.arguments)

    def work() -> None:
        attend(
            call,
            split(lengths, is_causal),
            lambda smaller: trtllm_ragged_attention_deepseek(**msgspec.structs.asdict(smaller)),
        )

    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        graph.replay()
    else:
        work()
    whole = msgspec.structs.replace(call, out=torch.empty_like(call.out), lse=torch.empty_like(call.lse))
    trtllm_ragged_attention_deepseek(**msgspec.structs.asdict(whole))
    # Tiles begin at other rows of a sequence, so the last bits may differ.
    torch.testing.assert_close(call.out, whole.out, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(call.lse, whole.lse, rtol=1e-4, atol=1e-4)
