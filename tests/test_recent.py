"""The shortcut of repeated calls."""

from __future__ import annotations

import gc
import sys
import types
import weakref

import pytest
import torch

from cubin_runtime.recent import Recent


def tensors() -> list[torch.Tensor]:
    return [torch.empty(4, 3, 8, dtype=torch.bfloat16), torch.empty(5, dtype=torch.int32)]


@pytest.fixture
def recent() -> Recent[str]:
    kept: Recent[str] = Recent(2)
    kept.remember("key", tensors(), "value")
    return kept


def test_finds_what_it_was_given(recent: Recent[str]) -> None:
    assert recent.find("key", tensors()) == "value"
    assert recent.find("another", tensors()) is None


@pytest.mark.parametrize(
    "other",
    [
        torch.empty(6, dtype=torch.int32),
        torch.empty(5, dtype=torch.int64),
        torch.empty(10, dtype=torch.int32)[::2],
        torch.empty(1, 5, dtype=torch.int32),
        torch.empty(5, dtype=torch.int32, device="meta"),
        torch.nn.Parameter(torch.empty(5, dtype=torch.int32), requires_grad=False),
        5,
    ],
    ids=["shape", "dtype", "stride", "rank", "device", "type", "no tensor"],
)
def test_does_not_find_it_for_another(recent: Recent[str], other: torch.Tensor) -> None:
    first, _ = tensors()
    assert recent.find("key", [first, other]) is None


def test_the_latest_replaces_the_one_before(recent: Recent[str]) -> None:
    longer = [*tensors()[:1], torch.empty(6, dtype=torch.int32)]
    recent.remember("key", longer, "longer")
    assert recent.find("key", longer) == "longer"
    assert recent.find("key", tensors()) is None


def test_is_bounded_and_forgets(recent: Recent[str]) -> None:
    recent.remember("second", tensors(), "2")
    recent.remember("third", tensors(), "3")
    found = [recent.find(key, tensors()) for key in ("key", "second", "third")]
    assert found == [None, None, "3"]
    recent.clear()
    assert recent.find("third", tensors()) is None


def test_keeps_no_tensor_alive(recent: Recent[str]) -> None:
    given = tensors()
    alive = weakref.ref(given[0])
    recent.remember("key", given, "value")
    del given
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("interface", [{}, {"TensorGuards": lambda *_: None}], ids=["missing", "another"])
def test_another_torch_only_makes_calls_slower(
    interface: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("torch._C._dynamo.guards")
    module.__dict__.update(interface)
    monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", module)
    recent: Recent[str] = Recent(2)
    recent.remember("key", tensors(), "value")
    assert recent.find("key", tensors()) is None
