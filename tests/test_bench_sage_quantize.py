"""scripts/bench_sage_quantize.py without a GPU: what is written, and what is refused."""

from __future__ import annotations

import bench_sage_quantize
import pytest
import torch
from bench.results import Summary
from bench_sage_quantize import CASES, Line, Report, markdown


def test_cases_have_names_of_their_own_and_sequences_of_whole_tokens() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.tokens % case.batch == 0 for case in CASES)


def test_the_table_has_rates_and_the_share() -> None:
    call, copy = (Summary(us, us, (us,), 0.0) for us in (50.0, 40.0))
    case = next(case for case in CASES if case.name == "64k-smooth")
    line = Line(case, "burst", 160_000_000, call, copy, 0.8)
    text = markdown(Report("now", "python bench.py", {"GPU": "Some GPU"}, (line,)))
    assert "now, GPU Some GPU. `python bench.py`" in text
    what = "1 x 65536 tokens, 32/32 heads of 128, blocks (1, 16), int8, smooth_k"
    assert f"| 64k-smooth | {what} | burst | 50.0 | 3200 | 4000 | 0.80 |" in text


def test_it_needs_a_gpu_and_a_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_sage_quantize.main([]) == 2
    assert bench_sage_quantize.main(["--only", "nothing"]) == 2
    assert capsys.readouterr().err == "torch finds no CUDA device\nno case matches\n"
