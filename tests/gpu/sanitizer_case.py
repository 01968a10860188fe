"""A few small calls of every kernel, or of those for some types, for compute-sanitizer:

compute-sanitizer --tool memcheck python -m tests.gpu.sanitizer_case bf16 fp8
"""

from __future__ import annotations

import itertools
import sys

import torch

from tests.gpu.support import (
    FEW_AND_MANY_HEADS,
    HEAD_DIMS,
    MASKS,
    TYPES,
    assert_matches,
    call,
    expect,
    make_problem,
    make_workspace,
)

Q_LENS = [129, 1, 0, 127, 5]
KV_LENS = [257, 1, 3, 127, 0]


def main() -> None:
    """Runs and checks them all, in tensors that are exactly as large as the call may touch."""
    device = torch.device("cuda", 0)
    workspace = make_workspace(device, size=16 << 20)
    chosen = sys.argv[1:] or TYPES
    for dims, types, mask, heads in itertools.product(HEAD_DIMS, chosen, MASKS, FEW_AND_MANY_HEADS):
        problem = make_problem(
            Q_LENS, KV_LENS, device=device, dims=dims, heads=heads, types=TYPES[types], **MASKS[mask]
        )
        context = f"{dims} {types} {mask}, {heads} heads"
        assert_matches(problem, call(problem, workspace), expect(problem), context=context)


if __name__ == "__main__":
    main()
