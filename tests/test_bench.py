"""scripts/bench_attention.py without a GPU: workloads, exact work, judging, statistics, what is written."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_attention
import msgspec
import pytest
import torch
from bench import fa4_files, run, timing
from bench.drawn import draw
from bench.peers import OURS, PEERS, Options, PeerMissingError
from bench.peers.base import require
from bench.problem import DTYPES, TOLERANCE, Check, Problem, make_problem
from bench.report import markdown
from bench.results import MATMUL_FLOPS, Entry, Line, Report, Summary, geometric_mean, views
from bench.run import Bench, DeviceLostError
from bench.sets import SETS
from bench.timing import PROTOCOLS, Timed, summarise
from bench.workloads import SAGE_BLOCKS, Mask, Workload, WorkloadError, matching, read_workloads

from cubin_runtime.reference import ragged_attention_reference
from cubin_runtime.request import SAGE_OFF

CPU = torch.device("cpu")
BURST = {"burst": PROTOCOLS["burst"]}


# ---- workloads


def visible(workload: Workload) -> int:
    """Pairs counted one by one, as the numerical contract words it."""
    count = 0
    for q_len, kv_len in zip(workload.q_lens, workload.kv_lens, strict=True):
        for row, key in itertools.product(range(q_len), range(kv_len)):
            distance = row + kv_len - q_len - key
            causal = workload.mask == "dense" or distance >= 0
            count += causal and (workload.window is None or distance <= workload.window)
    return count


@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [((7,), (7,)), ((3, 0, 9), (8, 5, 4)), ((1,), (40,)), ((13,), (1,)), ((5, 6), (0, 6))],
)
@pytest.mark.parametrize(
    "mask",
    [{"mask": "causal"}, {"mask": "dense"}, *({"mask": "window", "window": w} for w in (0, 3, 11, 100))],
)
def test_work_equals_brute_force(q_lens: tuple[int, ...], kv_lens: tuple[int, ...], mask: Any) -> None:
    workload = Workload("w", q_lens, kv_lens, heads=6, kv_heads=2, head_dims=(192, 128), **mask)
    assert workload.pairs == visible(workload)
    assert workload.flops == 2 * 6 * (192 + 128) * visible(workload)


def test_bytes_count_visible_keys_once() -> None:
    whole = Workload("w", (3,), (100,), heads=4, kv_heads=2, head_dims=(128, 64))
    assert whole.bytes == 2 * (3 * 4 * (128 + 64) + 100 * 2 * (128 + 64))
    window = Workload("w", (3,), (100,), heads=4, kv_heads=2, head_dims=(128, 64), mask="window", window=9)
    assert whole.bytes - window.bytes == 2 * (100 - 12) * 2 * (128 + 64)
    fp8 = Workload("w", (3,), (100,), heads=4, kv_heads=2, head_dims=(128, 64), dtype="e4m3")
    assert fp8.bytes == 3 * 4 * (128 + 2 * 64) + 100 * 2 * (128 + 64)


def test_file_has_the_documented_format(tmp_path: Path) -> None:
    assert bench_attention.__doc__ is not None
    example = "[{" + bench_attention.__doc__.partition("[{")[2].partition("}]")[0] + "}]"
    (tmp_path / "full.json").write_text(example)
    (tmp_path / "short.json").write_text('[{"name": "mine", "q_lens": [777, 4096]}]')
    assert read_workloads(tmp_path / "full.json") == read_workloads(tmp_path / "short.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"name": "a"}]', "q_lens"),
        ('[{"name": "a", "q_lens": [1], "kv_lens": [1, 2]}]', "need one length"),
        ('[{"name": "a", "q_lens": []}]', "need one length"),
        ('[{"name": "a", "q_lens": [-1]}]', "not negative"),
        ('[{"name": "a", "q_lens": [4], "heads": 6, "kv_heads": 4}]', "multiple of kv_heads"),
        ('[{"name": "a", "q_lens": [4], "mask": "window"}]', "mask 'window'"),
        ('[{"name": "a", "q_lens": [4], "window": 4}]', "mask 'window'"),
        ('[{"name": "a", "q_lens": [4], "mask": "sparse"}]', "sparse"),
        ('[{"name": "a", "q_lens": [4], "kv_lens": [0]}]', "sees a key"),
        ('[{"name": "a", "q_lens": [4], "colour": 1}]', "colour"),
        ('[{"name": "a", "q_lens": [4]}, {"name": "a", "q_lens": [5]}]', "used twice: a"),
        ("[{", "truncated"),
    ],
)
def test_bad_files_say_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "list.json"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=message) as caught:
        read_workloads(path)
    assert str(path) in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"absent\.json"):
        read_workloads(tmp_path / "absent.json")


def test_names_are_chosen_by_patterns() -> None:
    chosen = matching(SETS["main"], "c192_1k,fp8_*")
    assert [workload.name for workload in chosen] == ["c192_1k", "fp8_c192_8k", "fp8_c128_8k"]


def test_what_is_drawn_is_the_same_everywhere() -> None:
    drawn = SETS["drawn"]
    assert drawn == tuple(draw(seed=2026, count=60))
    assert drawn[:20] == tuple(draw(seed=2026, count=20))
    assert set(drawn).isdisjoint(draw(seed=2027, count=60))
    lengths = repr([(w.name, w.q_lens, w.kv_lens) for w in drawn]).encode()
    assert hashlib.sha256(lengths).hexdigest()[:16] == "7c34c00ea89cd9a1"


def test_held_out_set_shares_nothing_with_the_main_set() -> None:
    shapes = [{(w.q_lens, w.kv_lens, w.heads, w.head_dims, w.mask) for w in SETS[s]} for s in SETS]
    main, held_out = shapes[0], shapes[1]
    assert not main & held_out


# ---- judging


def attention(problem: Problem) -> torch.Tensor:
    workload, out = problem.workload, problem.new_out()
    ragged_attention_reference(
        problem.query,
        problem.key,
        problem.value,
        cum_seq_lens_q=problem.edges_q,
        cum_seq_lens_kv=problem.edges_kv,
        bmm1_scale=problem.scale,
        bmm2_scale=1.0,
        is_causal=workload.mask != "dense",
        window_left=-1 if workload.window is None else workload.window,
        sage_attn_sfs=problem.sage_scales,
        num_elts_per_sage_attn_blk=SAGE_BLOCKS if workload.sage else SAGE_OFF,
        uses_spcompress=workload.spcompress,
        out=out,
    )
    return out


PROBLEMS = [
    Workload("causal", (70, 1, 33), (90, 64, 33), heads=4, kv_heads=2, head_dims=(64, 32)),
    Workload("window", (70, 5), (90, 3), heads=2, head_dims=(64, 32), mask="window", window=7),
    Workload("dense", (9, 20), (30, 40), heads=2, head_dims=(64, 32), mask="dense", dtype="fp16"),
    Workload("fp8", (40,), heads=2, head_dims=(64, 32), dtype="e4m3"),
    Workload("pruned", (300,), (511,), heads=2, head_dims=(64, 32), dtype="e4m3", spcompress=True),
    Workload(
        "pruned window",
        (300,),
        heads=1,
        head_dims=(64, 32),
        mask="window",
        window=260,
        dtype="e4m3",
        spcompress=True,
    ),
]
SAGE = [
    Workload(dtype, (70, 1, 33), (90, 64, 33), heads=4, kv_heads=2, head_dims=(64, 32), dtype=dtype)
    for dtype in ("sage-int8", "sage-e4m3")
]


@pytest.mark.parametrize("workload", PROBLEMS, ids=lambda workload: workload.name)
def test_right_results_pass_and_wrong_ones_do_not(workload: Workload) -> None:
    problem = make_problem(workload, CPU)
    check, out = Check(problem), attention(problem)
    assert check.error(out) < 3e-3
    assert check.error(out * 1.02) == pytest.approx(0.02, rel=0.3)
    other_mask: Mask = "causal" if workload.mask == "dense" else "dense"
    masked = Workload("w", workload.q_lens, workload.kv_lens, heads=2, head_dims=(64, 32), mask=other_mask)
    other = Problem(masked, *problem_tensors(problem))
    assert check.error(attention(other)) > 0.1
    out[-1, -1, -1] = math.nan
    assert math.isnan(check.error(out))


@pytest.mark.parametrize("workload", SAGE, ids=lambda workload: workload.name)
def test_sage_is_judged_by_what_it_was_made_from(workload: Workload) -> None:
    problem = make_problem(workload, CPU)
    check, out = Check(problem), attention(problem)
    assert problem.query.dtype == DTYPES[workload.dtype]
    assert 1e-3 < check.error(out) < TOLERANCE[workload.dtype]
    assert check.error(out * 1.2) > TOLERANCE[workload.dtype]


def problem_tensors(problem: Problem) -> tuple[torch.Tensor, ...]:
    names = ("query", "key", "value", "edges_q", "edges_kv", "kv_lens")
    return tuple(getattr(problem, name) for name in names)


def test_results_of_fixed_length_entries_are_judged_batched() -> None:
    problem = make_problem(Workload("w", (12, 12), heads=2, head_dims=(64, 32)), CPU)
    assert Check(problem).error(problem.batched(attention(problem))) < 3e-3


# ---- timing and statistics


def test_median_of_rounds_ignores_a_disturbed_one() -> None:
    summary = summarise([[1.0, 2.0, 3.0], [2.0, 2.0, 50.0], [90.0, 91.0, 92.0]])
    assert summary.median_us == 2.0
    assert summary.round_medians_us == (2.0, 2.0, 91.0)
    assert summary.fastest_us == 1.0
    assert summary.spread == pytest.approx(44.5)


def test_window_holds_as_many_replays_as_the_protocol_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def elapsed(replay: Callable[[], object], count: int) -> list[float]:
        asked.append(count)
        return [0.5] * count

    monkeypatch.setattr(timing, "_elapsed_ms", elapsed)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    warm_ups: list[None] = []
    timed = Timed(lambda: warm_ups.append(None), calls=10, estimate_ms=0.5, result=torch.empty(0), call=list)
    assert timing.measure(timed, PROTOCOLS["burst"]) == [50.0] * 24
    assert (asked, len(warm_ups)) == ([24], 6)
    slow = timed._replace(estimate_ms=60.0)
    assert len(timing.measure(slow, PROTOCOLS["burst"])) == 3


def test_geometric_mean() -> None:
    assert geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)
    assert geometric_mean([]) is None


# ---- a run, with the GPU's part replaced


class Fake:
    """Computes with the reference; `fault` says what is wrong with it."""

    version = "fake 1"

    def __init__(self, us: float, fault: str = "", ragged: bool = True) -> None:
        self.us, self.fault, self.ragged = us, fault, ragged

    def refusal(self, workload: Workload) -> str | None:
        return "not for it" if self.fault == "refuses" else None

    def bind(self, problem: Problem) -> Callable[[], torch.Tensor]:
        if self.fault == "raises":
            raise RuntimeError("no such kernel\nwith details")
        out = attention(problem) * (1.5 if self.fault == "wrong" else 1.0)
        out.us = self.us  # type: ignore[attr-defined]  # carried to the fake clock
        return lambda: out


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """capture copies the result of a call on replay; the clock reads what the tensor carries."""

    def capture(call: Callable[[], torch.Tensor]) -> Timed:
        value = call()
        result = value.clone()
        result.us = getattr(value, "us", 1000.0)  # type: ignore[attr-defined]
        return Timed(lambda: result.copy_(value), 1, 1.0, result, list)

    def measure(timed: Timed, protocol: object) -> list[float]:
        return [timed.result.us]  # type: ignore[attr-defined]

    def copies(size: int, device: torch.device) -> dict[str, Timed]:
        slow, fast = capture(lambda: torch.ones(1)), capture(lambda: torch.ones(1))
        fast.result.us = size / 2e6  # type: ignore[attr-defined]
        return {"slow": slow, "fast": fast}

    monkeypatch.setattr(run, "capture", capture)
    monkeypatch.setattr(run, "measure", measure)
    monkeypatch.setattr(run, "host_us", lambda call: 7.0)
    monkeypatch.setattr(run, "copies", copies)
    monkeypatch.setattr(run, "_matmul", lambda device: {run._MATMUL: capture(lambda: torch.ones(1))})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


WORKLOAD = PROBLEMS[0]


@pytest.mark.usefixtures("no_gpu")
def test_every_peer_is_accounted_for() -> None:
    peers = {
        OURS: Fake(10.0),
        "slow": Fake(12.0),
        "wrong": Fake(1.0, "wrong"),
        "raises": Fake(1.0, "raises"),
        "refuses": Fake(1.0, "refuses"),
        "fixed": Fake(5.0, ragged=False),
    }
    line = Bench(peers, BURST, CPU).line(WORKLOAD, host=True)
    assert [(entry.peer, entry.status) for entry in line.entries] == [
        (OURS, "ok"),
        ("slow", "ok"),
        ("wrong", "wrong"),
        ("raises", "failed"),
        ("refuses", "refused"),
        ("fixed", "ok"),
    ]
    notes = {entry.peer: entry.note for entry in line.entries}
    assert notes["raises"] == "RuntimeError: no such kernel"
    assert notes["refuses"] == "not for it"
    assert "error 0.5" in notes["wrong"]
    (view,) = views(report(line), "burst")
    assert view.ratio(OURS) == pytest.approx(1.2)
    assert view.ratio(OURS, ragged=False) == pytest.approx(0.5)


@pytest.mark.usefixtures("no_gpu")
def test_the_faster_copy_is_the_bound() -> None:
    assert Bench({}, BURST, CPU).copy_gbps() == {"burst": pytest.approx(4000.0)}


@pytest.mark.usefixtures("no_gpu")
def test_a_workload_without_a_kernel_of_ours_is_listed_only() -> None:
    peers = {OURS: Fake(1.0, "refuses"), "other": Fake(1.0)}
    line = Bench(peers, BURST, CPU).line(WORKLOAD, host=False)
    assert line == Line(WORKLOAD, (Entry(OURS, True, "refused", "not for it"),))
    assert f"{OURS}: refused (not for it): {WORKLOAD.name}" in markdown(report(line))


@pytest.mark.usefixtures("no_gpu")
def test_nobody_else_is_asked_for_scales_by_blocks() -> None:
    line = Bench({OURS: Fake(1.0), "other": Fake(1.0)}, BURST, CPU).line(SAGE[0], host=False)
    assert {entry.peer: entry.status for entry in line.entries} == {OURS: "ok", "other": "refused"}


@pytest.mark.usefixtures("no_gpu")
def test_a_broken_context_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    bench = Bench({OURS: Fake(1.0), "raises": Fake(1.0, "raises")}, BURST, CPU)
    with pytest.raises(DeviceLostError, match="raises broke the CUDA context on causal"):
        bench.line(WORKLOAD, host=False)


@pytest.mark.usefixtures("no_gpu")
def test_an_interrupted_run_leaves_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting(Bench):
        def line(self, workload: Workload, host: bool) -> Line:
            if workload is PROBLEMS[1]:
                raise KeyboardInterrupt
            return super().line(workload, host)

    monkeypatch.setattr(bench_attention, "machine", lambda: {"GPU": "none"})
    peers = {OURS: Fake(10.0), "slow": Fake(12.0)}
    recorder = bench_attention.Recorder("partial", tmp_path, peers, {"absent": "install it"})
    with pytest.raises(KeyboardInterrupt):
        recorder.run(Interrupting(peers, BURST, CPU), PROBLEMS[:2], host=False)
    assert not recorder.passed
    saved = Report.read(tmp_path / "partial.json")
    assert [line.workload for line in saved.lines] == PROBLEMS[:1]
    assert not saved.complete
    table = (tmp_path / "partial.md").read_text()
    assert "Interrupted" in table
    assert "absent: missing. install it" in table


@pytest.mark.usefixtures("no_gpu")
def test_a_whole_run_passes_unless_ours_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_attention, "machine", dict)
    for fault, passes in (("", True), ("refuses", True), ("wrong", False), ("raises", False)):
        peers = {OURS: Fake(10.0, fault)}
        recorder = bench_attention.Recorder("whole", tmp_path, peers, {})
        recorder.run(Bench(peers, BURST, CPU), PROBLEMS[:1], host=False)
        assert recorder.passed is passes


# ---- peers


def test_a_peer_that_is_not_installed_says_how_to_get_it() -> None:
    with pytest.raises(PeerMissingError, match=r"no_such_module cannot be imported.*; install nothing"):
        require("no_such_module", "install nothing")


def test_missing_and_failing_peers_are_kept_apart_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(options: Options) -> Fake:
        raise RuntimeError("no device")

    def absent(options: Options) -> Fake:
        raise PeerMissingError("install it")

    monkeypatch.setitem(PEERS, "fa3", absent)
    monkeypatch.setitem(PEERS, "cudnn", broken)
    peers, missing = bench_attention.make_peers([OURS, "fa3", "cudnn", "torch-flash"], Options())
    assert list(peers) == [OURS, "torch-flash"]
    assert missing == {"fa3": "install it", "cudnn": "RuntimeError: no device"}


def test_a_folder_without_kernels_is_refused(tmp_path: Path) -> None:
    _, missing = bench_attention.make_peers(["fa4"], Options(tmp_path))
    assert "tvm_ffi" in missing["fa4"] or "compile_fa4_kernels" in missing["fa4"]


def test_ours_knows_what_it_has_kernels_for() -> None:
    ours = PEERS[OURS](Options())
    assert ours.refusal(SETS["main"][0]) is None
    assert ours.refusal(Workload("w", (8,), head_dims=(96, 96))) == "no kernel for it yet"


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (Workload("w", (8, 9)), "one length"),
        (Workload("w", (8,), (9,)), "as many keys"),
        (Workload("w", (8,), mask="window", window=4), "window"),
        (Workload("w", (8,), dtype="e4m3"), "FP8"),
    ],
)
def test_torch_refuses_what_it_would_get_wrong(workload: Workload, reason: str) -> None:
    refusal = PEERS["torch-flash"](Options()).refusal(workload)
    assert refusal is not None
    assert reason in refusal


def test_torch_agrees_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.torch_sdpa.sdpa_kernel", lambda backend: torch.no_grad())
    workload = Workload("w", (20, 20), heads=4, kv_heads=2, head_dims=(64, 32))
    problem = make_problem(workload, CPU)
    out = PEERS["torch-flash"](Options()).bind(problem)()
    assert Check(problem).error(out) < 6e-3


def test_kernel_files_are_named_by_what_they_are_made_for() -> None:
    workload = Workload("w", (8,), heads=32, kv_heads=8, head_dims=(128, 128), mask="window", window=4)
    name = fa4_files.kernel_file(workload, fixed=False)
    assert name == "fa4_bf16_128_128_x4_window_ragged.so"
    other_lengths = Workload("v", (9, 1), heads=8, kv_heads=2, head_dims=(128, 128), mask="window", window=5)
    assert fa4_files.kernel_file(other_lengths, fixed=False) == name
    assert fa4_files.kernel_file(workload, fixed=True) != name


# ---- what is written


def timings(us: float) -> dict[str, Summary]:
    return {"burst": Summary(us, us, (us,), 0.0)}


def report(*lines: Line) -> Report:
    """A run on a machine of 1000 TFLOP/s and 4000 GB/s."""
    return Report(
        name="fixed",
        date="2026-01-02T03:04:05+00:00",
        command="python bench.py",
        seconds=1.0,
        complete=True,
        machine={"GPU": "Some GPU", "driver": "580.1"},
        peers={OURS: "cubin-runtime 0", "fa3": "fa3 1"},
        missing={"flashinfer": "install flashinfer-python"},
        copy_gbps={"burst": 4000.0},
        lines=lines,
    )


def fixed_report() -> Report:
    """One workload bound by the products and one by memory; ours is 1.25 and 0.8 times as fast as fa3."""
    matmul = {"burst": Summary(MATMUL_FLOPS / 1e9, 1.0, (1.0,), 0.0)}
    heavy = Workload("heavy", (4096,), mask="dense")
    light = Workload("light", (1,), (65536,), heads=8, head_dims=(128, 128))
    heavy_us, light_us = heavy.flops / 5e8, light.bytes / 2e6
    return report(
        Line(
            heavy,
            (
                Entry(OURS, True, "ok", "", 0.002, 11.0, timings(heavy_us)),
                Entry("fa3", True, "ok", "", 0.002, 21.0, timings(heavy_us * 1.25)),
                Entry("cudnn", True, "failed", "it broke"),
                Entry("torch-cudnn", False, "ok", "", 0.002, 31.0, timings(heavy_us * 0.5)),
            ),
            matmul,
        ),
        Line(
            light,
            (
                Entry(OURS, True, "ok", "", 0.002, None, timings(light_us)),
                Entry("fa3", True, "ok", "", 0.002, None, timings(light_us * 0.8)),
            ),
            matmul,
        ),
    )


def cells(table: str, name: str) -> list[str]:
    (row,) = (line for line in table.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_table_gives_rates_shares_and_ratios() -> None:
    table = markdown(fixed_report())
    timed = table[: table.index("## Host")]
    heavy, light = cells(timed, "heavy"), cells(timed, "light")
    assert heavy[3:] == ["500", "0.500", "-", "400", "1000 torch-cudnn", "1.250"]
    assert light[5:] == ["2000 (0.50)", light[6], "-", "0.800"]
    assert float(light[6]) == pytest.approx(1.25 * float(light[3]), rel=0.01)
    assert "over 2 workloads: **1.000** (lowest 0.800, highest 1.250)" in table
    assert cells(table[table.index("## Host") :], "heavy") == ["heavy", "11.0", "21.0", "31.0"]
    assert "- cudnn: failed (it broke): heavy" in table
    assert "- flashinfer: missing. install flashinfer-python" in table
    assert "1000 to 1000 TFLOP/s" in table


def test_json_comes_back_as_it_was(tmp_path: Path) -> None:
    saved = fixed_report()
    saved.save(tmp_path / "fixed.json")
    assert Report.read(tmp_path / "fixed.json") == saved
    assert [path.name for path in tmp_path.iterdir()] == ["fixed.json"]
    plain = json.loads((tmp_path / "fixed.json").read_text())
    assert plain["lines"][0]["workload"]["q_lens"] == [4096]


def test_the_machine_is_written_as_plain_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    machine = bench_attention.machine()
    assert (machine["GPU"], machine["torch"]) == ("Some GPU", torch.__version__)
    saved = msgspec.structs.replace(report(), machine=machine)
    saved.save(tmp_path / "fixed.json")
    assert Report.read(tmp_path / "fixed.json") == saved


def test_an_earlier_run_is_rendered(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    source, out = tmp_path / "in.json", tmp_path / "out"
    fixed_report().save(source)
    out.mkdir()
    assert bench_attention.main(["--render", str(source), "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["fixed.json", "fixed.md", "fixed_burst.png"]
    assert (out / "fixed_burst.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "fixed.md").read_text() == markdown(fixed_report())


# ---- the command line


def test_list_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_attention.main(["--list", "--set", "short", "--only", "c192_1_*"]) == 0
    assert "c192_1_h16" in capsys.readouterr().out


def test_nothing_matches(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_attention.main(["--only", "nothing"]) == 2
    assert "'nothing'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"), [("--peers", "fa3,fa9", "unknown: fa9"), ("--rounds", "0", "below 1")]
)
def test_bad_values_are_named(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_attention.main([option, value])
    assert message in capsys.readouterr().err


def test_ours_always_takes_part() -> None:
    assert bench_attention._parser().parse_args(["--peers", "fa3"]).peers == (OURS, "fa3")
