"""bench_skip_softmax.py and bench_fp16_softmax.py without a GPU: inputs, tables, and what is refused."""

from __future__ import annotations

from pathlib import Path

import bench_fp16_softmax
import bench_skip_softmax
import msgspec
import pytest
import torch
from bench.results import Summary
from bench.variants import Timing
from bench.workloads import Workload
from bench_skip_softmax import Case, Point, Report, Speed, markdown, plot, sparse_problem

WORKLOAD = Workload("small", (2048,), heads=1, head_dims=(128, 128))


def summary(us: float) -> Summary:
    return Summary(us, us, (us,), 0.0)


def report() -> Report:
    speeds = (
        Speed("burst", Point(1e-30, 0.0, 2e-3), summary(100.0), 1.0),
        Speed("burst", Point(8.0, 0.75, 3e-3), summary(80.0), 1.25),
    )
    sweep = (Point(1e-4, 0.0, 2e-3), Point(8.0, 0.75, 3e-3))
    case = Case(WORKLOAD, 2e-3, {"burst": summary(100.0)}, sweep, speeds)
    return Report("2026-01-01", "python bench.py", {"GPU": "Some GPU"}, (case,))


def test_logits_have_locality_heavy_keys_and_noise() -> None:
    problem = sparse_problem(WORKLOAD, torch.device("cpu"))
    query, key = problem.query[:, 0].float(), problem.key[:, 0].float()
    logits = query @ key.T * problem.scale
    near = logits.diagonal().mean()
    far = logits.diagonal(-2000).mean()
    assert near > far + 5
    heavy = logits[:, :: bench_skip_softmax._HEAVY_EVERY]
    assert heavy[:500, 1].mean() > logits[:500, 1000:1020].mean() + 3
    assert 0.7 < logits.diagonal(-700).std() < 1.3


def test_the_bound_is_what_the_products_allow() -> None:
    case = report().cases[0]
    assert case.bound(0.0) == 1.0
    assert case.bound(0.75) == pytest.approx(1.6)
    wide = msgspec.structs.replace(case, workload=Workload("wide", (8,)))
    assert wide.bound(0.75) == pytest.approx(320 / 224)


def test_the_tables_and_the_picture(tmp_path: Path) -> None:
    text = markdown(report())
    what = WORKLOAD.describe()
    assert f"| small | {what} | burst | 100 | 8 | 75.0% | 80 | 1.250 | 1.60 | 3.00e-03 |" in text
    assert "| small | 0.0001 | 0.0% | 2.00e-03 | 2.00e-03 |" in text
    plot(report(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_the_table_of_half_precision() -> None:
    line = bench_fp16_softmax.Line(
        WORKLOAD, "burst", Timing(summary(100.0), 1.0), Timing(summary(50.0), 2.0), 1e-3, 2e-3
    )
    text = bench_fp16_softmax.markdown(bench_fp16_softmax.Report("now", "python", {}, (line,)))
    rate = WORKLOAD.flops / 1e8
    assert f"| burst | {rate:.0f} | {2 * rate:.0f} | 2.000 | 1.00e-03 | 2.00e-03 |" in text


def test_they_need_a_gpu_and_a_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_skip_softmax.main([]) == 2
    assert bench_skip_softmax.main(["--only", "nothing"]) == 2
    assert bench_fp16_softmax.main([]) == 2
    missing = "torch finds no CUDA device\n"
    assert capsys.readouterr().err == f"{missing}no case matches\n{missing}"
