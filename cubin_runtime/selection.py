"""Which kernel answers a request, and why every other one does not.

A pure function over plain values: no GPU, driver or torch. Its trace (one `Decision` per row, with every
reason) is what the exception, the API and the command line print.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from cubin_runtime.errors import InvalidArgumentError, NoKernelError
from cubin_runtime.few_rows import few_rows
from cubin_runtime.many_keys import MANY_KEYS, many_keys
from cubin_runtime.request import SAGE_ANY, SAGE_OFF, SAGE_TOKENS, Architecture, Capability, KernelRequest

if TYPE_CHECKING:
    from kernel_meta.schema import KernelRow

FAMILIES = {
    "trtllm-gen": ("fmha_sm90", "fmha_trtllm_gen"),
    "cute-dsl": ("fmha_cute_dsl",),
}
"""Families of kernels behind each backend."""

# Nobody can change the device, and nobody should change the backend unasked: such a row is farther away
# than one that differs in a flag, though nearer than one that differs in several.
# A blocked one is what would have been chosen.
_DISTANCE = {"arch": 2, "backend": 2, "blocked": 0}

_FAMILY_OF_SUFFIX = {"a": 2, "f": 1, "": 0}
_RANK_OF_SCHEDULER = {"split": 2, "pair": 2, "persistent": 1, "static": 0}

_FLAGS = ("use_fp16_softmax", "uses_spcompress", "skips_softmax")

_NOT_BUILT = "this kernel is in the table but has not been built (scripts/build_cubins.py)"


class Mismatch(msgspec.Struct, frozen=True):
    """One reason why a row does not answer a request; both sides are spelled as names."""

    field: str
    requested: str
    available: str
    message: str


class Decision(msgspec.Struct, frozen=True):
    """What selection made of one row: accepted, or every reason why not."""

    row: KernelRow
    mismatches: tuple[Mismatch, ...] = ()

    @property
    def accepted(self) -> bool:
        """Whether the row answers the request."""
        return not self.mismatches

    @property
    def distance(self) -> tuple[int, int]:
        """Sorts rejected rows: the one that needs the least change first."""
        return sum(_DISTANCE.get(m.field, 1) for m in self.mismatches), len(self.mismatches)


class Selection(msgspec.Struct, frozen=True):
    """The answer to a request.

    row         the chosen row; None when no row fits
    reason      why that row won, or what ruled out all of them
    rows        the candidates, in the order of the tables
    blocked     names of rows that must not be chosen, with the reason
    """

    request: KernelRequest
    row: KernelRow | None
    reason: str
    rows: tuple[KernelRow, ...]
    blocked: Mapping[str, str]

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """One for each row: the chosen one, other accepted ones, then the nearest miss first.

        Made when asked for, because a call that finds its kernel needs no reasons against all the others.
        """
        return _decide(self.request, self.rows, self.blocked)

    def require(self) -> KernelRow:
        """The chosen row; raises NoKernelError with `format_miss()` when there is none."""
        if self.row is None:
            raise NoKernelError(self.format_miss(), self)
        return self.row

    def explain(self, limit: int = 3) -> str:
        """The decision as text: the request, the outcome and why, and up to `limit` nearest misses."""
        if self.row is None:
            return self.format_miss(limit)
        lines = [
            f"request: {describe(self.request)}",
            f"chosen:  {self.row.name}",
            f"why:     {self.reason}",
            *self._other_accepted(),
            *self._nearest(limit),
        ]
        return "\n".join(lines)

    def format_miss(self, limit: int = 3) -> str:
        """The same text for a request that no row answers: cause first, then rows, then the way out."""
        lines = [
            f"no kernel for {describe(self.request)}",
            f"cause: {self.reason}",
            *self._nearest(limit),
            *self._alternatives(),
        ]
        return "\n".join(lines)

    def _other_accepted(self) -> list[str]:
        names = [d.row.name for d in self.decisions[1:] if d.accepted]
        return [f"also fit: {', '.join(names)}"] if names else []

    def _nearest(self, limit: int) -> list[str]:
        misses = [d for d in self.decisions if not d.accepted]
        if not misses or limit < 1:
            return []
        noun = "kernel" if self.row is None else "other kernel"
        lines = [f"nearest of {_count(len(misses), noun)}:"]
        for decision in misses[:limit]:
            lines.append(f"  {decision.row.name}")
            lines += [f"    - {message}" for message in _merged_messages(decision.mismatches)]
        return lines

    def _alternatives(self) -> list[str]:
        lines = [
            f"alternative: backend={backend!r} has a kernel for this call"
            for backend in _backends_that_fit(self.decisions)
        ]
        return [*lines, 'alternative: backend="reference" computes the whole contract in torch, slowly']


def select(
    request: KernelRequest,
    rows: Iterable[KernelRow] | None = None,
    blocked: Mapping[str, str] | None = None,
) -> Selection:
    """Chooses the row that answers `request` best; the result has a decision for every row.

    rows    candidates; default: every table in the package. Among rows that fit, code for exactly this
            device (sm_103a) beats code for its family (sm_100f), which beats portable code (a higher
            minor first); then a kernel made for few query rows, then a persistent one, then a static one;
            then one made for many keys; then the first in the tables wins.
    blocked names of rows that must not be chosen, with the reason; default: none of `rows`, and of the
            package's tables those on the user's block list

    Raises InvalidArgumentError for an unknown backend; finding no row is not an error (see `require`).
    """
    if request.backend not in FAMILIES:
        raise InvalidArgumentError(
            f"backend {request.backend!r} has no kernel tables; "
            f"expected one of {', '.join(map(repr, FAMILIES))}"
        )
    if rows is None:
        from cubin_runtime.blocklist import blocked_rows
        from kernel_meta.tables import all_rows

        rows = all_rows()
        blocked = blocked_rows() if blocked is None else blocked
    rows, blocked = tuple(rows), blocked or {}
    accepted = sorted((r for r in rows if _fits(request, r, blocked)), key=_preference, reverse=True)
    return Selection(
        request=request,
        row=accepted[0] if accepted else None,
        reason=_why_chosen(request, accepted)
        if accepted
        else _why_none(request, _decide(request, rows, blocked)),
        rows=rows,
        blocked=blocked,
    )


def _fits(request: KernelRequest, row: KernelRow, blocked: Mapping[str, str]) -> bool:
    return next(_mismatches(request, row, blocked), None) is None


def _decide(
    request: KernelRequest, rows: Iterable[KernelRow], blocked: Mapping[str, str]
) -> tuple[Decision, ...]:
    decisions = [Decision(row, tuple(_mismatches(request, row, blocked))) for row in rows]
    accepted = sorted((d for d in decisions if d.accepted), key=lambda d: _preference(d.row), reverse=True)
    rejected = sorted((d for d in decisions if not d.accepted), key=lambda d: d.distance)
    return (*accepted, *rejected)


def describe(request: KernelRequest) -> str:
    """The request in one line of names."""
    parts = [
        f"compute capability {request.capability}",
        f"backend {request.backend}",
        _spell_dtypes(request),
        f"head dims ({request.head_dim_qk}, {request.head_dim_v})",
        f"{request.mask_type} mask",
        f"{_count(request.num_heads_q, 'query head')} over {_count(request.num_heads_kv, 'kv head')}",
    ]
    if request.batch_size is not None and request.max_q_len is not None:
        parts.append(f"{_count(request.batch_size, 'sequence')} of up to {request.max_q_len} queries")
    return ", ".join(parts + _variants(request))


def _spell_dtypes(of: KernelRequest | KernelRow) -> str:
    q, k, v, o = of.dtype_q, of.dtype_k, of.dtype_v, of.dtype_o
    return f"{f'q/k/v {q}' if q == k == v else f'q {q}, k {k}, v {v}'}, out {o}"


def _variants(request: KernelRequest) -> list[str]:
    """The variants that are asked for."""
    variants = [flag for flag in _FLAGS if getattr(request, flag)]
    if request.sage_blocks != SAGE_OFF:
        variants.append(f"Sage blocks {request.sage_blocks}")
    return variants


def _mismatches(request: KernelRequest, row: KernelRow, blocked: Mapping[str, str]) -> Iterator[Mismatch]:
    yield from _backend_mismatch(request, row)
    yield from _arch_mismatch(request, row)
    for field, requested, available in _compared(request, row):
        if requested != available:
            yield Mismatch(
                field,
                _spell(requested),
                _spell(available),
                f"{field}: the call asks for {_spell(requested)}, this kernel has {_spell(available)}",
            )
    yield from _work_mismatch(request, row)
    yield from _resource_mismatch(request, row)
    # The name takes longer to make than everything else.
    if blocked and (reason := blocked.get(row.name)):
        yield Mismatch("blocked", "a kernel that may run", "blocked", f"blocked: {reason}")


def _compared(request: KernelRequest, row: KernelRow) -> Iterator[tuple[str, object, object]]:
    """The fields that must agree: name, value of the request, value of the row."""
    for field in ("dtype_q", "dtype_k", "dtype_v", "dtype_o"):
        yield field, getattr(request, field), getattr(row, field)
    yield "head_dims", (request.head_dim_qk, request.head_dim_v), (row.head_dim_qk, row.head_dim_v)
    yield "mask_type", request.mask_type, row.mask_type
    yield "use_fp16_softmax", request.use_fp16_softmax, row.fp16_softmax
    yield "uses_spcompress", request.uses_spcompress, row.uses_spcompress
    yield "skips_softmax", request.skips_softmax, row.skips_softmax
    if not row.takes_sage_blocks(request.sage_blocks):
        yield "sage_blocks", request.sage_blocks, row.sage_blocks


def _backend_mismatch(request: KernelRequest, row: KernelRow) -> Iterator[Mismatch]:
    if row.family in FAMILIES[request.backend]:
        return
    owner = next((backend for backend, families in FAMILIES.items() if row.family in families), "no backend")
    message = f"backend: the call asks for {request.backend}, this kernel belongs to {owner}"
    yield Mismatch("backend", request.backend, owner, message)


def _arch_mismatch(request: KernelRequest, row: KernelRow) -> Iterator[Mismatch]:
    arch = row.architecture
    if arch.runs_on(request.capability):
        return
    message = (
        f"arch: the device has compute capability {request.capability}, "
        f"this kernel is {arch}, {_where_it_runs(arch)}"
    )
    yield Mismatch("arch", str(request.capability), str(arch), message)


def _work_mismatch(request: KernelRequest, row: KernelRow) -> Iterator[Mismatch]:
    if row.e4m3_p and not many_keys(request):
        message = f"e4m3_p: this kernel is for {MANY_KEYS} keys and more, the call has {request.max_kv_len}"
        yield Mismatch("e4m3_p", str(request.max_kv_len), str(MANY_KEYS), message)
    if not row.scheduler.is_for_few_rows:
        return
    wanted = few_rows(request)
    if wanted is None:
        message = (
            "scheduler: this kernel is for few query rows or tiles of uneven work, "
            "which by batch_size, max_q_len and total_kv the call has not"
        )
        yield Mismatch("scheduler", "many even tiles", f"{row.scheduler}, for few or uneven ones", message)
    elif row.tile_q != wanted.tile_q:
        message = f"tile_q: this kernel has {row.tile_q}-row tiles, {wanted.reason}"
        yield Mismatch("tile_q", str(wanted.tile_q), str(row.tile_q), message)


def _resource_mismatch(request: KernelRequest, row: KernelRow) -> Iterator[Mismatch]:
    if row.resources is None:
        message = f"resources: {_NOT_BUILT}"
        yield Mismatch("resources", "a built kernel", "not built", message)
        return
    needed = row.resources.shared_memory + row.resources.static_shared_memory
    limit = request.shared_memory_limit
    if limit is not None and needed > limit and row.architecture.runs_on(request.capability):
        message = (
            f"shared_memory: this kernel needs {needed} bytes per block, "
            f"the device allows {limit} (compute capability {request.capability})"
        )
        yield Mismatch("shared_memory", f"at most {limit}", str(needed), message)


def _where_it_runs(arch: Architecture) -> str:
    if arch.suffix == "a":
        return f"which runs on {arch.capability} only"
    if arch.suffix == "f":
        return f"which runs on the {arch.capability} family only"
    return f"which runs on {arch.major}.x from {arch.capability} up"


def _specificity(row: KernelRow) -> tuple[int, Capability]:
    arch = row.architecture
    return _FAMILY_OF_SUFFIX[arch.suffix], arch.capability


def _preference(row: KernelRow) -> tuple[tuple[int, Capability], int, bool]:
    return _specificity(row), _RANK_OF_SCHEDULER[row.scheduler], row.e4m3_p


def _why_chosen(request: KernelRequest, accepted: list[KernelRow]) -> str:
    winner, *others = accepted
    if not others:
        return "the only kernel that fits"
    if _specificity(winner) == _specificity(others[0]) and winner.scheduler.is_for_few_rows:
        wanted = few_rows(request)
        assert wanted is not None  # else no such row fits
        return f"made for few query rows or uneven tiles: {wanted.reason}"
    if _preference(winner) == _preference(others[0]):
        return f"the first in the tables of {len(accepted)} kernels that fit"
    reasons = []
    beaten = sorted({row.arch for row in others if row.arch != winner.arch})
    if beaten:
        reasons.append(f"its target {winner.arch} is closer to the device than {', '.join(beaten)}")
    if _specificity(winner) == _specificity(others[0]):
        if winner.scheduler != others[0].scheduler:
            reasons.append("persistent blocks are preferred to static ones")
        else:
            reasons.append(f"it is made for {MANY_KEYS} keys and more")
    return " and ".join(reasons)


def _why_none(request: KernelRequest, rejected: Iterable[Decision]) -> str:
    """What a reader should look at first: the one thing that rules out every kernel, if there is one."""
    ours = [d for d in rejected if not _differs(d, "backend")]
    if not ours:
        return f"the tables have no kernel of backend {request.backend} (families {_families(request)})"
    runnable = [d for d in ours if not _differs(d, "arch")]
    if not runnable:
        archs = ", ".join(sorted({d.row.arch for d in ours}))
        return f"no kernel runs on compute capability {request.capability}; the tables have {archs}"
    nearest = runnable[0].mismatches
    if [m.field for m in nearest] in (["resources"], ["shared_memory"], ["blocked"]):
        return f"{runnable[0].row.name} would fit, but {nearest[0].message}"
    for field in dict.fromkeys(m.field for d in runnable for m in d.mismatches):
        blocking = [m for d in runnable for m in d.mismatches if m.field == field]
        if len(blocking) == len(runnable):
            available = ", ".join(sorted({m.available for m in blocking}))
            return (
                f"{field} {blocking[0].requested}: no kernel for compute capability {request.capability} "
                f"has it; they have {available}"
            )
    others = _dtypes_with_variants(request, runnable)
    if others:
        return (
            f"{', '.join(_variants(request))}: no kernel for compute capability {request.capability} "
            f"has it for {_spell_dtypes(request)}; they have it for {'; '.join(others)}"
        )
    return f"each value exists for compute capability {request.capability}, but not this combination"


def _dtypes_with_variants(request: KernelRequest, rejected: Iterable[Decision]) -> list[str]:
    """The dtypes that have the variants asked for, if those of the request do not."""
    variants = {*_FLAGS, "sage_blocks"}
    having = (d.row for d in rejected if not variants & {m.field for m in d.mismatches})
    dtypes = {_spell_dtypes(row) for row in having}
    return [] if not _variants(request) or _spell_dtypes(request) in dtypes else sorted(dtypes)


def _differs(decision: Decision, field: str) -> bool:
    return any(m.field == field for m in decision.mismatches)


def _backends_that_fit(decisions: Iterable[Decision]) -> list[str]:
    """Other backends that have a kernel for exactly this request."""
    only_backend = (d.mismatches[0] for d in decisions if [m.field for m in d.mismatches] == ["backend"])
    return sorted({m.available for m in only_backend} & FAMILIES.keys())


def _merged_messages(mismatches: tuple[Mismatch, ...]) -> list[str]:
    """One line per reason; dtypes that differ in the same way share a line."""
    groups: dict[tuple[str, str] | str, list[Mismatch]] = {}
    for m in mismatches:
        key = (m.requested, m.available) if m.field.startswith("dtype_") else m.field
        groups.setdefault(key, []).append(m)
    return [
        group[0].message.replace(group[0].field, ", ".join(m.field for m in group), 1)
        for group in groups.values()
    ]


def _families(request: KernelRequest) -> str:
    return ", ".join(FAMILIES[request.backend])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _spell(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value == SAGE_OFF:
        return "none"
    if value == SAGE_ANY:
        return f"any of {', '.join(map(str, SAGE_TOKENS))} for q and k"
    return str(value)
