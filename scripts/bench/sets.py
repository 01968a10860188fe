"""The built-in workloads."""

from __future__ import annotations

from collections.abc import Iterator

from bench.drawn import draw
from bench.workloads import Dtype, Workload, unique

# Long, short and mixed prefill as serving engines run it; the set that kernels are tuned on.
_MAIN = (
    Workload("c192_1k", (1024,)),
    Workload("c192_2k", (2048,)),
    Workload("c192_4k", (4096,)),
    Workload("c192_8k", (8192,)),
    Workload("c192_16k_h16", (16384,), heads=16),
    Workload("c192_32k_h16", (32768,), heads=16),
    Workload("ragged192", (8192, 1, 777, 4096, 2048, 63, 1024, 191)),
    Workload("chunked192", (2048, 512), (16384, 8192)),
    Workload("dense192_4k", (4096,), mask="dense"),
    Workload("c128_4k_gqa32_8", (4096,), heads=32, kv_heads=8, head_dims=(128, 128)),
    Workload("c128_16k_gqa32_8", (16384,), heads=32, kv_heads=8, head_dims=(128, 128)),
    Workload("c256_4k_h16", (4096,), heads=16, head_dims=(256, 256)),
    Workload("b64x128_192_h16", (128,) * 64, heads=16),
    Workload("fp8_c192_8k", (8192,), dtype="e4m3"),
    Workload("fp8_c128_8k", (8192,), dtype="e4m3", head_dims=(128, 128)),
)

# Pruned and plain side by side.
_SPCOMPRESS = tuple(
    Workload(
        f"{'pruned' if spcompress else 'plain'}_{name}",
        q_lens,
        dtype="e4m3",
        heads=heads,
        head_dims=head_dims,
        mask=mask,
        window=4096 if mask == "window" else None,
        spcompress=spcompress,
    )
    for name, q_lens, heads, head_dims, mask in (
        ("c192_1k", (1024,), 128, (192, 128), "causal"),
        ("c192_8k", (8192,), 128, (192, 128), "causal"),
        ("dense192_4k", (4096,), 128, (192, 128), "dense"),
        ("c128_1k", (1024,), 128, (128, 128), "causal"),
        ("c128_8k", (8192,), 128, (128, 128), "causal"),
        ("dense128_16k", (16384,), 16, (128, 128), "dense"),
        ("w128_16k", (16384,), 64, (128, 128), "window"),
        ("c256_8k", (8192,), 64, (256, 256), "causal"),
        ("dense256_4k", (4096,), 64, (256, 256), "dense"),
    )
    for spcompress in (False, True)
)

# They show whether the main set's speed carries over. Some have served to check choices between variants
# (kernel_meta/fmha_sm90/NOTES.md).
_HELD_OUT = (
    Workload("c192_3001", (3001,)),
    Workload("c192_6k_h40", (6144,), heads=40),
    Workload("c192_1500x4_h64", (1500, 1511, 1489, 1523), heads=64),
    Workload("c192_12k_h8", (12345,), heads=8),
    Workload("c192_b256_h16", tuple(17 + 37 * n % 251 for n in range(256)), heads=16),
    Workload("dense192_2900_h40", (2900,), heads=40, mask="dense"),
    Workload("dense192_cross_h16", (500, 1900), (3300, 7100), heads=16, mask="dense"),
    Workload("prefix192_h128", (333, 700, 129), (9001, 5000, 12000)),
    Workload("w1024_192_16k_h16", (16000,), heads=16, mask="window", window=1024),
    Workload("fp16_c192_5k_h64", (5000,), dtype="fp16", heads=64),
    Workload("c128_2700_gqa64_8", (2700,), heads=64, kv_heads=8, head_dims=(128, 128)),
    Workload("c128_7k_h40", (7001,), heads=40, head_dims=(128, 128)),
    Workload("c128_mixed_gqa32_8", (5, 4000, 900, 2222, 64, 1), heads=32, kv_heads=8, head_dims=(128, 128)),
    Workload("c128_b100_gqa16_4", (250,) * 100, heads=16, kv_heads=4, head_dims=(128, 128)),
    Workload("dense128_5k_h16", (5000,), heads=16, head_dims=(128, 128), mask="dense"),
    Workload("prefix128_gqa64_8", (800, 1024), (20000, 11000), heads=64, kv_heads=8, head_dims=(128, 128)),
    Workload(
        "w128_128_8k_gqa64_8", (8000,), heads=64, kv_heads=8, head_dims=(128, 128), mask="window", window=128
    ),
    Workload(
        "w4096_128_20k_gqa32_8",
        (20000,),
        heads=32,
        kv_heads=8,
        head_dims=(128, 128),
        mask="window",
        window=4096,
    ),
    Workload("fp16_c128_3k_h16", (3333,), dtype="fp16", heads=16, head_dims=(128, 128)),
    Workload("c256_2500_h8", (2500,), heads=8, head_dims=(256, 256)),
    Workload("c256_10k_gqa16_4", (10000,), heads=16, kv_heads=4, head_dims=(256, 256)),
    Workload("c256_mixed_gqa8_1", (1800, 77, 3000), heads=8, kv_heads=1, head_dims=(256, 256)),
    Workload("dense256_3k_h16", (3000,), heads=16, head_dims=(256, 256), mask="dense"),
    Workload("prefix256_h16", (600, 300), (8000, 4100), heads=16, head_dims=(256, 256)),
    Workload("w1024_256_9k_h16", (9000,), heads=16, head_dims=(256, 256), mask="window", window=1024),
    Workload("fp16_c256_4k_gqa32_8", (4100,), dtype="fp16", heads=32, kv_heads=8, head_dims=(256, 256)),
)

# Launch, first loads and the end of a kernel decide these.
_SHORT = (
    Workload("c192_1_h16", (1,), heads=16),
    Workload("c192_128_h16", (128,), heads=16),
    Workload("c192_64x128_h16", (128,) * 64, heads=16),
    Workload("c192_512_h16", (512,), heads=16),
    Workload("c192_1k_h8", (1024,), heads=8),
    Workload("c192_1k_h16", (1024,), heads=16),
    Workload("c192_2k_h4", (2048,), heads=4),
    Workload("c192_256_over_2k_h16", (256,), (2048,), heads=16),
    Workload("c128_1_gqa32_8", (1,), heads=32, kv_heads=8, head_dims=(128, 128)),
    Workload("c128_128_gqa32_8", (128,), heads=32, kv_heads=8, head_dims=(128, 128)),
    Workload("c128_64x128_gqa32_8", (128,) * 64, heads=32, kv_heads=8, head_dims=(128, 128)),
    Workload("c128_1k_gqa32_8", (1024,), heads=32, kv_heads=8, head_dims=(128, 128)),
    Workload("c256_1_h16", (1,), heads=16, head_dims=(256, 256)),
    Workload("c256_128_h16", (128,), heads=16, head_dims=(256, 256)),
    Workload("c256_64x128_h16", (128,) * 64, heads=16, head_dims=(256, 256)),
    Workload("c256_1k_h16", (1024,), heads=16, head_dims=(256, 256)),
)


def _tail(name: str, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], heads: int = 64) -> Workload:
    return Workload(name, q_lens, kv_lens, heads=heads, kv_heads=8, head_dims=(128, 128))


# Few rows over many keys: too few tiles to fill the device unless the keys are split.
_TAILS = (
    _tail("t1_8k", (1,), (8192,)),
    _tail("t1_128k", (1,), (131072,)),
    _tail("t1x16_8k", (1,) * 16, (8192,) * 16),
    _tail("t4_32k", (4,), (32768,)),
    _tail("t16_8k_h32", (16,), (8192,), heads=32),
    _tail("t16_128k", (16,), (131072,)),
    _tail("t64_32k", (64,), (32768,)),
    _tail("t128_8k_h32", (128,), (8192,), heads=32),
    _tail("t128_32k", (128,), (32768,)),
    _tail("t128_128k", (128,), (131072,)),
    _tail("tmixed", (1, 128, 7, 33), (65536, 8192, 131072, 16384)),
    Workload("t64_32k_192", (64,), (32768,), heads=64, kv_heads=8),
    Workload("t64_32k_256", (64,), (32768,), heads=32, kv_heads=8, head_dims=(256, 256)),
)


def _sage(name: str, q_lens: tuple[int, ...], heads: int, head_dims: tuple[int, int]) -> Iterator[Workload]:
    for prefix, dtype in _SAGE_PREFIXES.items():
        yield Workload(prefix + name, q_lens, dtype=dtype, heads=heads, head_dims=head_dims)


# The same shapes in bf16, which Sage attention has to be faster than, in e4m3 and with scales.
_SAGE_PREFIXES: dict[str, Dtype] = {
    "": "bf16",
    "fp8_": "e4m3",
    "sage_int8_": "sage-int8",
    "sage_fp8_": "sage-e4m3",
}
_SAGE = (
    *_sage("c192_8k", (8192,), 128, (192, 128)),
    *_sage("b8x1k_192", (1024,) * 8, 128, (192, 128)),
    *_sage("c128_8k", (8192,), 128, (128, 128)),
    *_sage("b8x1k_128", (1024,) * 8, 128, (128, 128)),
    *_sage("c256_8k_h64", (8192,), 64, (256, 256)),
)

SETS = {
    "main": unique(_MAIN, "main"),
    "held-out": unique(_HELD_OUT, "held-out"),
    "short": unique(_SHORT, "short"),
    "tails": unique(_TAILS, "tails"),
    "drawn": unique(tuple(draw(seed=2026, count=60)), "drawn"),
    "sage": unique(_SAGE, "sage"),
    "spcompress": unique(_SPCOMPRESS, "spcompress"),
}
