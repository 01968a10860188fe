"""Selection: which rows answer a request, which of them wins, and what the reader of a miss is told."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cubin_runtime.errors import InvalidArgumentError, NoKernelError
from cubin_runtime.few_rows import FEW_KEYS, few_rows
from cubin_runtime.many_keys import MANY_KEYS, without_lengths
from cubin_runtime.request import SAGE_ANY, SAGE_OFF, Architecture, Capability, DType, KernelRequest, MaskType
from cubin_runtime.selection import FAMILIES, Selection, select
from kernel_meta.schema import KernelRow, Resources, Scheduler
from kernel_meta.tables import TABLES_DIR, load_table
from tests.rows import HEAD_DIMS, RESOURCES, kernel_requests, kernel_rows, make_request, make_row, row_for

PUBLISHED = load_table(Path(__file__).parent / "data" / "trtllm_gen_rows.yaml")

HOPPER = [
    make_row(head_dim_qk=qk, head_dim_v=v, mask_type=mask, **{f"dtype_{tensor}": dtype for tensor in "qkvo"})
    for dtype in (DType.BF16, DType.FP16)
    for qk, v in ((192, 128), (128, 128), (256, 256))
    for mask in MaskType
]


def fields(selection: Selection, name: str) -> list[str]:
    """The fields that ruled out the row called `name`."""
    (decision,) = [d for d in selection.decisions if d.row.name == name]
    return [m.field for m in decision.mismatches]


def answers(request: KernelRequest, row: KernelRow) -> bool:
    """The rules once more, as one expression, to judge `select` by."""
    limit = request.shared_memory_limit
    return (
        row.family in FAMILIES[request.backend]
        and Architecture.parse(row.arch).runs_on(request.capability)
        and (row.dtype_q, row.dtype_k, row.dtype_v, row.dtype_o)
        == (request.dtype_q, request.dtype_k, request.dtype_v, request.dtype_o)
        and (row.head_dim_qk, row.head_dim_v) == (request.head_dim_qk, request.head_dim_v)
        and row.mask_type == request.mask_type
        and row.fp16_softmax == request.use_fp16_softmax
        and row.uses_spcompress == request.uses_spcompress
        and row.skips_softmax == request.skips_softmax
        and row.sage_blocks
        in (request.sage_blocks, SAGE_OFF if request.sage_blocks == SAGE_OFF else SAGE_ANY)
        and (not row.e4m3_p or request.max_kv_len is None or request.max_kv_len >= MANY_KEYS)
        and row.resources is not None
        and (limit is None or row.resources.shared_memory + row.resources.static_shared_memory <= limit)
    )


CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "family": st.sampled_from(["fmha_sm90", "fmha_trtllm_gen", "fmha_cute_dsl"]),
    "arch": st.sampled_from(["sm_80", "sm_90", "sm_90a", "sm_100f", "sm_100a", "sm_103a"]),
    **{f"dtype_{tensor}": st.sampled_from(DType) for tensor in "qkvo"},
    "head_dim_qk": st.sampled_from([128, 192, 256]),
    "head_dim_v": st.sampled_from([128, 256]),
    "mask_type": st.sampled_from(MaskType),
    "fp16_softmax": st.booleans(),
    "uses_spcompress": st.booleans(),
    "skips_softmax": st.booleans(),
    "e4m3_p": st.booleans(),
    "sage_blocks": st.sampled_from([SAGE_OFF, (1, 16, 0, 1), SAGE_ANY]),
    "resources": st.sampled_from([None, RESOURCES]),
}


@st.composite
def near_misses(draw: st.DrawFn) -> tuple[KernelRequest, list[KernelRow]]:
    """A request with rows that fit it or differ in a column or two (random rows would hardly ever fit)."""
    request = draw(kernel_requests([Capability(9, 0), Capability(10, 0), Capability(10, 3)]))
    own_arch = st.sampled_from({9: ["sm_90", "sm_90a"], 10: ["sm_100", "sm_100f"]}[request.capability.major])
    rows = []
    for columns in draw(st.lists(st.lists(st.sampled_from(list(CHANGES)), max_size=2), max_size=6)):
        changes = {column: draw(CHANGES[column]) for column in columns}
        rows.append(row_for(request, **{"arch": draw(own_arch), **changes}))
    return request, rows


@given(near_misses())
def test_accepted_rows_are_exactly_those_that_match(case: tuple[KernelRequest, list[KernelRow]]) -> None:
    request, rows = case
    selection = select(request, rows)
    assert [d.row for d in selection.decisions if d.accepted] == [
        row for row in (d.row for d in selection.decisions) if answers(request, row)
    ]
    assert len(selection.decisions) == len(rows)
    assert (selection.row is None) == (not any(answers(request, row) for row in rows))


@given(kernel_requests(), st.lists(kernel_rows(), max_size=8))
def test_a_row_for_another_device_never_wins(request_: KernelRequest, rows: list[KernelRow]) -> None:
    for decision in select(request_, rows).decisions:
        if not Architecture.parse(decision.row.arch).runs_on(request_.capability):
            assert not decision.accepted


@given(near_misses(), st.randoms(use_true_random=False))
def test_order_of_rows_changes_no_decision(case: tuple[KernelRequest, list[KernelRow]], random: Any) -> None:
    request, rows = case
    shuffled = list(rows)
    random.shuffle(shuffled)
    one, other = select(request, rows), select(request, shuffled)
    assert set(one.decisions) == set(other.decisions)
    assert (one.row is None) == (other.row is None)


@given(near_misses())
def test_every_reason_names_both_sides(case: tuple[KernelRequest, list[KernelRow]]) -> None:
    request, rows = case
    for mismatch in (m for d in select(request, rows).decisions for m in d.mismatches):
        assert mismatch.message.startswith(f"{mismatch.field}: ")
        if mismatch.field not in ("resources", "shared_memory"):
            assert mismatch.requested in mismatch.message
            assert mismatch.available in mismatch.message


@given(near_misses())
def test_chosen_first_then_accepted_then_nearest(case: tuple[KernelRequest, list[KernelRow]]) -> None:
    request, rows = case
    selection = select(request, rows)
    accepted = [d.accepted for d in selection.decisions]
    assert accepted == sorted(accepted, reverse=True)
    assert selection.row is None or selection.decisions[0].row is selection.row
    distances = [d.distance for d in selection.decisions if not d.accepted]
    assert distances == sorted(distances)


@pytest.mark.parametrize(
    ("capability", "archs", "winner"),
    [
        ((10, 3), ["sm_100f", "sm_103a"], "sm_103a"),
        ((10, 0), ["sm_100f", "sm_100a", "sm_103a"], "sm_100a"),
        ((10, 3), ["sm_100", "sm_100f"], "sm_100f"),
        ((8, 9), ["sm_80", "sm_86"], "sm_86"),
        ((8, 9), ["sm_86", "sm_80"], "sm_86"),
        ((8, 0), ["sm_86", "sm_80"], "sm_80"),
        ((9, 0), ["sm_90", "sm_90a"], "sm_90a"),
    ],
)
def test_the_closest_target_wins(capability: tuple[int, int], archs: list[str], winner: str) -> None:
    request = make_request(capability=Capability(*capability))
    small = Resources(threads=128, registers=64, shared_memory=0, static_shared_memory=0, parameter_bytes=8)
    selection = select(request, [make_row(arch=arch, resources=small) for arch in archs])
    assert selection.require().arch == winner
    assert ("only" in selection.reason) or (f"{winner} is closer to the device than" in selection.reason)


def test_between_equals_the_first_in_the_tables_wins() -> None:
    rows = [make_row(family="fmha_sm90"), make_row(family="fmha_trtllm_gen")]
    assert select(make_request(), rows).require() is rows[0]
    assert select(make_request(), rows[::-1]).require() is rows[1]
    selection = select(make_request(), rows)
    assert selection.reason == "the first in the tables of 2 kernels that fit"
    assert f"also fit: {rows[1].name}" in selection.explain()


def test_a_hit_is_explained() -> None:
    text = select(make_request(num_heads_q=128, num_heads_kv=128), HOPPER).explain(limit=1)
    assert text.splitlines() == [
        "request: compute capability 9.0, backend trtllm-gen, q/k/v bf16, out bf16, head dims (192, 128), "
        "causal mask, 128 query heads over 128 kv heads",
        "chosen:  fmha_sm90_sm90a_bf16_bf16_bf16_bf16_h192x128_causal_t128x128_persistent",
        "why:     the only kernel that fits",
        "nearest of 17 other kernels:",
        "  fmha_sm90_sm90a_bf16_bf16_bf16_bf16_h192x128_dense_t128x128_persistent",
        "    - mask_type: the call asks for causal, this kernel has dense",
    ]


def test_bf16_in_and_fp8_out_is_explained_in_names() -> None:
    selection = select(make_request(dtype_o=DType.E4M3), HOPPER)
    with pytest.raises(NoKernelError) as caught:
        selection.require()
    assert str(caught.value).splitlines() == [
        "no kernel for compute capability 9.0, backend trtllm-gen, q/k/v bf16, out e4m3, "
        "head dims (192, 128), causal mask, 1 query head over 1 kv head",
        "cause: dtype_o e4m3: no kernel for compute capability 9.0 has it; they have bf16, fp16",
        "nearest of 18 kernels:",
        "  fmha_sm90_sm90a_bf16_bf16_bf16_bf16_h192x128_causal_t128x128_persistent",
        "    - dtype_o: the call asks for e4m3, this kernel has bf16",
        "  fmha_sm90_sm90a_bf16_bf16_bf16_bf16_h192x128_dense_t128x128_persistent",
        "    - dtype_o: the call asks for e4m3, this kernel has bf16",
        "    - mask_type: the call asks for causal, this kernel has dense",
        "  fmha_sm90_sm90a_bf16_bf16_bf16_bf16_h192x128_sliding_t128x128_persistent",
        "    - dtype_o: the call asks for e4m3, this kernel has bf16",
        "    - mask_type: the call asks for causal, this kernel has sliding",
        'alternative: backend="reference" computes the whole contract in torch, slowly',
    ]
    assert caught.value.selection is selection
    assert caught.value.exit_code == 3
    assert selection.explain() == str(caught.value)


def test_head_dims_that_no_kernel_has() -> None:
    text = select(make_request(head_dim_qk=96, head_dim_v=96), HOPPER).explain()
    assert (
        "cause: head_dims (96, 96): no kernel for compute capability 9.0 has it; "
        "they have (128, 128), (192, 128), (256, 256)" in text
    )


def test_a_combination_that_does_not_exist() -> None:
    text = select(make_request(dtype_q=DType.FP16, dtype_k=DType.FP16), HOPPER).explain()
    assert "cause: each value exists for compute capability 9.0, but not this combination" in text
    assert "- dtype_q, dtype_k: the call asks for fp16, this kernel has bf16" in text


@pytest.mark.parametrize("capability", [(7, 5), (11, 0), (12, 0), (12, 1), (13, 0)])
def test_a_device_without_kernels_learns_which_targets_exist(capability: tuple[int, int]) -> None:
    name = f"{capability[0]}.{capability[1]}"
    selection = select(make_request(capability=Capability(*capability)), [*HOPPER, *PUBLISHED])
    assert selection.row is None
    text = selection.explain()
    assert selection.reason == (
        f"no kernel runs on compute capability {name}; the tables have sm_100a, sm_100f, sm_103a, sm_90a"
    )
    assert f"cause: {selection.reason}" in text
    assert "this kernel is sm_90a, which runs on 9.0 only" in text
    assert 'backend="reference"' in text


def test_int8_sage_on_the_wrong_blackwell_names_the_arch_alone() -> None:
    """The row for another device is nearer than rows of this device that differ in several fields."""
    request = make_request(
        capability=Capability(10, 3),
        **{
            f"dtype_{t}": d
            for t, d in zip("qkvo", (DType.INT8, DType.INT8, DType.E4M3, DType.BF16), strict=True)
        },
        head_dim_qk=128,
        head_dim_v=128,
        mask_type=MaskType.DENSE,
        sage_blocks=(1, 4, 0, 1),
    )
    selection = select(request, PUBLISHED)
    nearest = selection.decisions[0]
    assert nearest.row.arch == "sm_100a"
    assert [m.field for m in nearest.mismatches] == ["arch"]
    assert "this kernel is sm_100a, which runs on 10.0 only" in selection.explain()
    assert select(make_request(**{**_columns(request), "capability": Capability(10, 0)}), PUBLISHED).row


def _columns(request: KernelRequest) -> dict[str, Any]:
    return {field: getattr(request, field) for field in request.__struct_fields__}


def test_published_rows_are_selected_by_capability() -> None:
    on_100 = select(make_request(capability=Capability(10, 0)), PUBLISHED).require()
    on_103 = select(make_request(capability=Capability(10, 3)), PUBLISHED).require()
    assert (on_100.arch, on_103.arch) == ("sm_100f", "sm_103a")
    assert on_100.entry_name.startswith("fmhaSm100fKernel_QkvBfloat16OBfloat16HQk192HV128SeparateQkvCausal")


def test_shared_memory_rules_a_row_out_with_both_numbers() -> None:
    row = make_row(
        resources=Resources(
            threads=384, registers=168, shared_memory=232_000, static_shared_memory=1000, parameter_bytes=8
        )
    )
    selection = select(make_request(), [row])
    assert fields(selection, row.name) == ["shared_memory"]
    assert (
        "needs 233000 bytes per block, the device allows 232448 (compute capability 9.0)" in selection.reason
    )
    assert select(make_request(max_shared_memory=233_000), [row]).require() is row


def test_a_row_that_was_not_built_says_so() -> None:
    row = make_row(resources=None)
    selection = select(make_request(), [row])
    assert fields(selection, row.name) == ["resources"]
    assert f"{row.name} would fit, but resources: this kernel is in the table but has not been built" in (
        selection.reason
    )


def test_backend_is_never_changed_silently() -> None:
    row = make_row()
    selection = select(make_request(backend="cute-dsl"), [row])
    assert fields(selection, row.name) == ["backend"]
    text = selection.explain()
    assert "cause: the tables have no kernel of backend cute-dsl" in text
    assert "alternative: backend='trtllm-gen' has a kernel for this call" in text


def test_no_alternative_backend_is_named_when_it_would_not_fit_either() -> None:
    text = select(make_request(backend="cute-dsl", head_dim_qk=96), [make_row()]).explain()
    assert "alternative: backend='trtllm-gen'" not in text


@pytest.mark.parametrize("backend", ["reference", "cutlass", ""])
def test_unknown_backend(backend: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"expected one of 'trtllm-gen', 'cute-dsl'"):
        select(make_request(backend=backend), [])


def test_no_rows_at_all() -> None:
    selection = select(make_request(), [])
    assert selection.row is None
    assert selection.explain().splitlines()[1] == (
        "cause: the tables have no kernel of backend trtllm-gen (families fmha_sm90, fmha_trtllm_gen)"
    )


def test_flags_are_spelled() -> None:
    request = make_request(use_fp16_softmax=True, sage_blocks=(1, 16, 0, 1))
    text = select(request, [make_row()]).explain()
    assert "use_fp16_softmax, Sage blocks (1, 16, 0, 1)" in text.splitlines()[0]
    assert "- use_fp16_softmax: the call asks for on, this kernel has off" in text
    assert "- sage_blocks: the call asks for (1, 16, 0, 1), this kernel has none" in text


def test_a_row_of_any_sage_blocks_has_those_that_exist() -> None:
    row = make_row(sage_blocks=SAGE_ANY)
    for q, k in itertools.product((1, 4, 16), repeat=2):
        assert select(make_request(sage_blocks=(q, k, 0, 1)), [row]).row is row
    for blocks in (SAGE_OFF, (2, 16, 0, 1), (1, 0, 0, 1), (1, 16, 1, 1), (1, 16, 0, 0)):
        assert select(make_request(sage_blocks=blocks), [row]).row is None
    text = select(make_request(), [row]).explain()
    assert "- sage_blocks: the call asks for none, this kernel has any of 1, 4, 16 for q and k" in text


BF16, FP16, E4M3 = DType.BF16, DType.FP16, DType.E4M3


def asked_with(q: DType, v: DType, o: DType, **variant: bool) -> KernelRequest:
    return make_request(dtype_q=q, dtype_k=q, dtype_v=v, dtype_o=o, **variant)


@pytest.mark.parametrize(
    ("request_", "cause"),
    [
        (
            asked_with(FP16, FP16, FP16, use_fp16_softmax=True),
            "use_fp16_softmax: no kernel for compute capability 9.0 has it for q/k/v fp16, out fp16; "
            "they have it for q/k/v bf16, out bf16",
        ),
        (
            asked_with(BF16, E4M3, BF16, skips_softmax=True),
            "skips_softmax: no kernel for compute capability 9.0 has it for q bf16, k bf16, v e4m3, "
            "out bf16; they have it for q/k/v bf16, out bf16; q/k/v e4m3, out bf16; q/k/v e4m3, out fp16; "
            "q/k/v fp16, out fp16",
        ),
    ],
)
def test_a_variant_of_other_dtypes_only_names_them(request_: KernelRequest, cause: str) -> None:
    selection = select(request_)
    assert selection.row is None
    assert selection.reason == cause


@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("mask", MaskType)
def test_variants_of_hopper(mask: MaskType, dims: tuple[int, int]) -> None:
    """For few query rows too, for which they have no kernels of their own."""
    some = {"head_dim_qk": dims[0], "head_dim_v": dims[1], "mask_type": mask}
    few = {"batch_size": 1, "max_q_len": 1, "max_kv_len": 100_000}
    for asked in (
        asked_with(BF16, BF16, BF16, use_fp16_softmax=True),
        asked_with(BF16, BF16, BF16, skips_softmax=True),
        asked_with(FP16, FP16, FP16, skips_softmax=True),
        asked_with(E4M3, E4M3, BF16, skips_softmax=True),
        asked_with(E4M3, E4M3, FP16, skips_softmax=True),
    ):
        wanted = msgspec.structs.replace(asked, **some)
        row = select(wanted).require()
        assert row.scheduler is Scheduler.PERSISTENT
        assert (row.fp16_softmax, row.skips_softmax) == (asked.use_fp16_softmax, asked.skips_softmax)
        assert select(msgspec.structs.replace(wanted, **few)).require() is row
        both = msgspec.structs.replace(wanted, use_fp16_softmax=True, skips_softmax=True)
        assert select(both).row is None


def test_selection_needs_neither_torch_nor_a_driver() -> None:
    code = (
        "import sys; from cubin_runtime.request import *; from cubin_runtime.selection import select;"
        "select(KernelRequest(capability=Capability(9, 0))).explain();"
        "sys.exit(bool({'torch', 'cuda', 'requests', 'rich'} & sys.modules.keys()))"
    )
    root = Path(__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_persistent_kernels_are_preferred_to_static_ones() -> None:
    static, persistent = make_row(scheduler=Scheduler.STATIC), make_row(scheduler=Scheduler.PERSISTENT)
    for rows in ([static, persistent], [persistent, static]):
        selection = select(make_request(), rows)
        assert selection.row is persistent
        assert selection.reason == "persistent blocks are preferred to static ones"
    portable = make_row(arch="sm_90", scheduler=Scheduler.PERSISTENT)
    assert select(make_request(), [portable, static]).row is static  # the target counts first


@pytest.mark.parametrize("sage", [(SAGE_OFF, SAGE_OFF), ((1, 16, 0, 1), SAGE_ANY)], ids=["plain", "sage"])
@pytest.mark.parametrize("max_kv_len", [None, MANY_KEYS, 2**31 - 1])
def test_many_keys_get_the_product_of_8_bits(max_kv_len: int | None, sage: tuple[Any, Any]) -> None:
    asked, available = sage
    rows = [make_row(sage_blocks=available), make_row(e4m3_p=True, sage_blocks=available)]
    for order in (rows, rows[::-1]):
        selection = select(make_request(max_kv_len=max_kv_len, sage_blocks=asked), order)
        assert selection.row is rows[1]
        assert selection.reason == f"it is made for {MANY_KEYS} keys and more"
        assert f"also fit: {rows[0].name}" in selection.explain()


def test_few_keys_keep_more_bits_of_the_probabilities() -> None:
    plain, for_many = make_row(), make_row(e4m3_p=True)
    selection = select(make_request(max_kv_len=MANY_KEYS - 1), [for_many, plain])
    assert selection.row is plain
    why_not = f"this kernel is for {MANY_KEYS} keys and more, the call has {MANY_KEYS - 1}"
    assert why_not in selection.explain()
    split = make_row(scheduler=Scheduler.SPLIT, tile_q=64)  # few query rows count first
    few = make_request(batch_size=1, max_q_len=1, max_kv_len=MANY_KEYS)
    assert select(few, [for_many, plain, split]).row is split


def test_few_rows_over_few_keys_get_a_pair() -> None:
    plain, pair = make_row(), make_row(scheduler=Scheduler.PAIR, tile_q=64)
    split = make_row(scheduler=Scheduler.SPLIT)
    few = {"num_heads_q": 16, "num_heads_kv": 16, "batch_size": 1, "max_q_len": 512}
    selection = select(make_request(**few, max_kv_len=FEW_KEYS), [plain, split, pair])
    assert selection.row is pair
    tiles = "no more than 128 64-row tiles for 132 multiprocessors"
    assert selection.reason == f"made for few query rows or uneven tiles: {tiles}"
    assert "this kernel has 128-row tiles" in selection.explain()
    assert select(make_request(**few, max_kv_len=FEW_KEYS + 1), [plain, split, pair]).row is split
    many = select(make_request(**{**few, "max_q_len": 577}, max_kv_len=FEW_KEYS), [plain, split, pair])
    assert many.row is plain
    assert "this kernel is for few query rows or tiles of uneven work" in many.explain()


@pytest.mark.parametrize(
    ("lens", "heads", "changes", "is_pair"),
    [
        ((768, 1024), 16, {}, True),  # 192 tiles
        ((1024, 1024), 16, {}, True),  # 256
        ((1088, 1088), 16, {}, False),  # 272
        ((512, 512), 24, {}, True),  # 192 short ones
        ((512, 512), 32, {}, False),  # 256 of these
        ((256, 256), 40, {}, False),  # 160 shorter ones
        ((767, 1024), 16, {}, False),  # hardly a short one
        ((768, 1024), 16, {"mask_type": MaskType.DENSE}, False),
        ((384, 384), 16, {"batch_size": 2}, False),
        ((768, 768), 16, {"dtype_v": DType.E4M3}, False),
    ],
)
def test_one_causal_sequence_may_have_two_tiles_for_a_multiprocessor(
    lens: tuple[int, int], heads: int, changes: dict[str, Any], is_pair: bool
) -> None:
    few = {"num_heads_q": heads, "num_heads_kv": heads, "max_q_len": lens[0], "max_kv_len": lens[1]}
    request = make_request(**{**few, "batch_size": 1, **changes})
    plain, pair = row_for(request), row_for(request, scheduler=Scheduler.PAIR, tile_q=64)
    selection = select(request, [plain, pair])
    assert selection.row is (pair if is_pair else plain)
    dealt = "64-row tiles for 132 multiprocessors, the longest with the shortest"
    assert (dealt in selection.reason) == is_pair


LONG = {"num_heads_q": 16, "num_heads_kv": 16, "max_kv_len": 16_000}


@pytest.mark.parametrize(
    ("lengths", "is_split"),
    [
        ({"batch_size": 1, "max_q_len": 640, "total_kv": 16_000}, True),  # 80 equal tiles
        ({"batch_size": 1, "max_q_len": 768, "total_kv": 16_000}, False),  # 96: halves would gain nothing
        ({"batch_size": 8, "max_q_len": 1, "total_kv": 8 * 16_000}, False),  # 128
        ({"batch_size": 8, "max_q_len": 1}, False),  # as long as can be
        ({"batch_size": 8, "max_q_len": 1, "total_kv": 30_000}, True),  # one long one
        ({"batch_size": 13, "max_q_len": 519, "total_q": 531, "total_kv": 32_000}, True),  # 272 tiles
        ({"batch_size": 13, "max_q_len": 519, "total_q": 531, "total_kv": 150_000}, False),
        ({"batch_size": 1, "max_q_len": 4096, "total_kv": 16_000}, False),
    ],
)
def test_keys_are_divided_where_the_longest_sequence_would_end_late(
    lengths: dict[str, int], is_split: bool
) -> None:
    request = make_request(**LONG, **lengths)
    plain, split = row_for(request), row_for(request, scheduler=Scheduler.SPLIT)
    assert select(request, [plain, split]).row is (split if is_split else plain)


@pytest.mark.parametrize(
    ("lengths", "total_kv"),
    [
        ({"batch_size": 1, "max_q_len": 8192}, 8192),
        ({"batch_size": 1, "max_q_len": 768}, 16_000),
        ({"batch_size": 8, "max_q_len": 1024, "total_q": 8192}, 8192),  # no prefixes
        ({"batch_size": 4, "max_q_len": 2048, "total_q": 8000}, 10_000),  # short ones
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_a_loose_bound_of_keys_makes_no_long_sequence(
    lengths: dict[str, int], total_kv: int, dtype: str
) -> None:
    types = dict.fromkeys(("dtype_q", "dtype_k", "dtype_v"), DType.parse(dtype))
    request = make_request(**{**LONG, "max_kv_len": 131_072}, **lengths, total_kv=total_kv, **types)
    plain, split = row_for(request), row_for(request, scheduler=Scheduler.SPLIT)
    assert select(request, [plain, split]).row is plain


def test_eight_bit_probabilities_are_not_given_up_for_a_guess() -> None:
    lengths = {"batch_size": 4, "max_q_len": 900, "total_q": 1500, "total_kv": 37_000}
    types = dict.fromkeys(("dtype_q", "dtype_k", "dtype_v"), DType.E4M3)
    half, eight = make_request(**LONG, **lengths), make_request(**LONG, **lengths, **types)
    assert few_rows(half) is not None
    assert few_rows(eight) is None


def test_a_long_sequence_among_many_tiles_is_the_reason() -> None:
    request = make_request(**LONG, batch_size=13, max_q_len=519, total_q=531, total_kv=32_000)
    few = few_rows(request)
    assert few is not None
    assert few.reason == (
        "no more than 272 128-row tiles for 132 multiprocessors, "
        "and the longest has about 3.2 times a multiprocessor's share of all keys"
    )


@pytest.mark.parametrize(
    ("heads", "max_kv_len", "is_split"),
    [((28, 4), 1000, True), ((28, 4), 9000, True), ((32, 4), 1000, False), ((40, 8), 1000, True)],
)
def test_heads_that_do_not_fill_a_tile_are_packed_where_queries_are_few(
    heads: tuple[int, int], max_kv_len: int, is_split: bool
) -> None:
    """Of 7 heads side by side 9 tokens fill 63 rows of 64; one by one, each has a tile."""
    lengths = {"batch_size": 60, "max_q_len": 1, "max_kv_len": max_kv_len, "total_kv": 60 * max_kv_len}
    request = make_request(num_heads_q=heads[0], num_heads_kv=heads[1], **lengths)
    plain, split = row_for(request), row_for(request, scheduler=Scheduler.SPLIT)
    selection = select(request, [plain, split])
    assert selection.row is (split if is_split else plain)
    assert ("heads of a kv head side by side" in selection.reason) == is_split


@given(kernel_requests(), st.lists(kernel_rows(), max_size=8))
def test_lengths_that_decide_nothing_can_be_left_out(request_: KernelRequest, rows: list[KernelRow]) -> None:
    assert select(without_lengths(request_), rows).row is select(request_, rows).row


@given(st.lists(kernel_rows(), max_size=8), kernel_requests(), st.data())
def test_of_few_rows_only_the_tile_counts(
    rows: list[KernelRow], request_: KernelRequest, data: st.DataObject
) -> None:
    lengths = st.fixed_dictionaries(
        {
            "batch_size": st.integers(1, 4),
            "max_q_len": st.integers(1, 2000),
            "max_kv_len": st.integers(1, 3000),
            "total_kv": st.none() | st.integers(1, 9000),
        }
    )
    one, other = (msgspec.structs.replace(request_, **data.draw(lengths)) for _ in range(2))
    tiles = [few.tile_q if (few := few_rows(each)) else None for each in (one, other)]
    assume(tiles[0] == tiles[1] and without_lengths(one) == without_lengths(other))
    assert select(one, rows).row is select(other, rows).row


TRTLLM_GEN = load_table(TABLES_DIR / "fmha_trtllm_gen" / "table.yaml")
ROW_COLUMNS = (
    "dtype_q",
    "dtype_k",
    "dtype_v",
    "dtype_o",
    "head_dim_qk",
    "head_dim_v",
    "mask_type",
    "skips_softmax",
    "sage_blocks",
)


@pytest.mark.parametrize(
    ("arch", "changes", "entry"),
    [
        ((10, 0), {}, "fmhaSm100fKernel_QkvBfloat16OBfloat16HQk192HV128SeparateQkvCausalVarSeqQ128Kv128"),
        ((10, 3), {}, "fmhaSm103aKernel_QkvBfloat16OBfloat16HQk192HV128SeparateQkvCausalVarSeqQ128Kv128"),
        (
            (10, 0),
            {
                "dtype_q": DType.INT8,
                "dtype_k": DType.INT8,
                "dtype_v": DType.E4M3,
                "head_dim_qk": 128,
                "mask_type": MaskType.DENSE,
                "sage_blocks": (1, 4, 0, 1),
                "skips_softmax": True,
            },
            "fmhaSm100aKernel_QkInt8VE4m3OBfloat16H128SeparateQkvDenseVarSeqSkipsSoftmaxQ128Kv128"
            "SageQ1SageK4SageV1",
        ),
    ],
)
def test_blackwell_gets_nvidias_kernels(arch: tuple[int, int], changes: dict[str, Any], entry: str) -> None:
    row = select(make_request(capability=Capability(*arch), **changes)).require()
    assert row.entry == f"{entry}PersistentContext"


@pytest.mark.parametrize(
    ("arch", "changes", "cause"),
    [
        ((10, 7), {}, "no kernel runs on compute capability 10.7; the tables have .*sm_100f, sm_103a"),
        ((12, 0), {}, "no kernel runs on compute capability 12.0; the tables have .*sm_100f, sm_103a"),
        ((10, 0), {"mask_type": MaskType.SLIDING}, "mask_type sliding: .* they have causal, dense"),
        ((10, 3), {"use_fp16_softmax": True}, "use_fp16_softmax on: no kernel .*; they have off"),
        ((10, 3), {"uses_spcompress": True}, "uses_spcompress on: no kernel .*; they have off"),
        ((10, 0), {"head_dim_qk": 96, "head_dim_v": 96}, r"head_dims \(96, 96\): no kernel for .* 10.0"),
        ((10, 0), {"sage_blocks": (16, 16, 0, 1)}, r"sage_blocks \(16, 16, 0, 1\): .* they have "),
    ],
)
def test_a_miss_on_blackwell_says_why(arch: tuple[int, int], changes: dict[str, Any], cause: str) -> None:
    with pytest.raises(NoKernelError, match=cause):
        select(make_request(capability=Capability(*arch), **changes)).require()


@pytest.mark.parametrize("minor", [0, 3])
def test_published_static_kernels_are_never_chosen(minor: int) -> None:
    capability = Capability(10, minor)
    for row in TRTLLM_GEN:
        if row.architecture.runs_on(capability):
            asked = {name: getattr(row, name) for name in ROW_COLUMNS}
            chosen = select(make_request(capability=capability, **asked), TRTLLM_GEN).require()
            assert chosen.scheduler is Scheduler.PERSISTENT
