"""Layout of scratch areas in the caller's buffer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubin_runtime.errors import InvalidArgumentError
from cubin_runtime.workspace import ALIGNMENT, WorkspaceLayout


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
