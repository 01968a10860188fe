"""Layout of scratch areas in the caller's buffer."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubin_runtime import _driver
from cubin_runtime.errors import InvalidArgumentError
from cubin_runtime.workspace import ALIGNMENT, WorkspaceLayout, zero_once


def test_areas_lie_behind_each_other_on_16_byte_boundaries() -> None:
    layout = WorkspaceLayout.of(counter=8, partials=100, flags=16)
    assert layout.slabs == {"counter": (0, 8), "partials": (16, 100), "flags": (128, 16)}
    assert layout.offset("partials") == 16
    assert layout.size == 144


def test_no_areas_need_no_bytes() -> None:
    assert WorkspaceLayout.of().size == 0
    WorkspaceLayout.of().check(0)


SIZES = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 1 << 40))


@given(SIZES)
def test_areas_are_aligned_inside_the_buffer_and_apart(sizes: dict[str, int]) -> None:
    layout = WorkspaceLayout.of(**sizes)
    end = 0
    for name, size in sizes.items():
        offset, kept = layout.slabs[name]
        assert kept == size
        assert offset % ALIGNMENT == 0
        assert end <= offset < end + ALIGNMENT
        end = offset + size
    assert layout.size == end


def test_a_buffer_too_small_by_one_byte_says_how_many_it_needs() -> None:
    layout = WorkspaceLayout.of(counter=8, partials=100)
    layout.check(116)
    message = "workspace_buffer has 115 bytes; this call needs 116 .*workspace_size"
    with pytest.raises(InvalidArgumentError, match=message):
        layout.check(115)


class Memory:
    """Stands for a tensor's memory."""


@pytest.fixture
def zeroed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(address, size, stream) of all memory that was zeroed; streams from 100 on are being captured."""
    done: list[tuple[int, int, int]] = []
    fakes = {
        "entered": lambda context: contextlib.nullcontext(),
        "is_capturing": lambda stream: stream >= 100,
        "set_memory": lambda address, value, size, stream, doing: done.append((address, size, stream)),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(_driver, name, fake)
    return done


def test_memory_is_zeroed_before_its_first_use_only(zeroed: list[tuple[int, int, int]]) -> None:
    memory = Memory()
    for stream in (1, 2):
        zero_once(memory, 64, 8, 0, stream)
    assert zeroed == [(64, 8, 1)]
    zero_once(memory, 128, 8, 0, 1)
    zero_once(memory, 64, 16, 0, 1)
    assert zeroed[1:] == [(128, 8, 1), (64, 16, 1)]


def test_other_memory_at_the_same_address_is_zeroed_again(zeroed: list[tuple[int, int, int]]) -> None:
    for _ in range(2):
        zero_once(Memory(), 64, 8, 0, 1)
    assert len(zeroed) == 2


def test_a_recorded_zeroing_counts_for_its_graph_alone(zeroed: list[tuple[int, int, int]]) -> None:
    memory = Memory()
    for stream in (100, 100, 1, 100):
        zero_once(memory, 64, 8, 0, stream)
    assert [stream for _, _, stream in zeroed] == [100, 100, 1]


def test_a_failure_is_not_remembered(
    zeroed: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory()
    with monkeypatch.context() as patch:
        patch.setattr(_driver, "set_memory", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            zero_once(memory, 64, 8, 0, 1)
    zero_once(memory, 64, 8, 0, 1)
    assert len(zeroed) == 1
