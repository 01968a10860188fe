"""What a recorded call and the package's own differ in."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from cubin_runtime.errors import CubinRuntimeError
from cubin_runtime.families import fmha_trtllm_gen as family
from cubin_runtime.families.packing import field_size
from cubin_runtime.manifest import default_manifest
from cubin_runtime.request import MaskType
from cubin_runtime.tensormap import TiledMap
from golden.driver import Driver, Launch
from golden.replay import Inputs, Prepared, RefusedError, faults, prepare, run, seen

Outputs = dict[str, Any]

_SLOTS = {"tmaQ_": "query", "tmaK_": "key", "tmaV_": "value", "tmaO_": "out"}
_MASKS = {MaskType.DENSE: 0, MaskType.CAUSAL: 1, MaskType.SLIDING: 2}
_OPT_IN = "8"  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PDL = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


def differences(config: dict[str, Any], driver: Driver) -> list[str]:
    """Everything in which the package and a recorded call differ, a sentence each."""
    inputs, outputs = config["inputs"], config["outputs"]
    driver.take()
    if outputs["status"] == "error":
        return list(_compare_failure(inputs, outputs["error"], driver))
    if _sage_blocks(outputs["func_name"]) != inputs["sage_blocks"]:
        return list(_compare_mistaken_kernel(inputs, outputs, driver))
    return list(_compare_launch(inputs, outputs, driver))


# ---- calls that fail


def _compare_failure(inputs: Inputs, error: dict[str, Any], driver: Driver) -> Iterator[str]:
    expected = error["code"]
    if expected == "unsupported_dtype":
        expected = f"{expected} {error['operand'][0].lower()}"
    elif expected.startswith("tma_"):
        expected = f"{expected} {_SLOTS[error['slot']]}"
    try:
        run(prepare(seen(inputs), driver), seen(inputs))
    except RefusedError as refusal:
        if refusal.code != expected:
            yield f"fails there with {expected}, here with {refusal.code}: {refusal}"
    else:
        yield f"fails there with {expected}, launches here"


def _compare_mistaken_kernel(inputs: Inputs, outputs: Outputs, driver: Driver) -> Iterator[str]:
    """A kernel for other Sage blocks than those of the call: here there must be none."""
    try:
        prepare(inputs, driver)
    except RefusedError as refusal:
        if refusal.code == "no_kernel":
            return
    yield f"takes {outputs['func_name']} for Sage blocks {inputs['sage_blocks']}; nothing refuses that here"


def _sage_blocks(function: str) -> list[int]:
    """The Sage block sizes that a kernel's name spells."""
    found = {operand: int(size) for operand, size in re.findall(r"Sage([QKPV])(\d+)", function)}
    return [found.get(operand, 0) for operand in "QKPV"]


# ---- calls that launch


def _compare_launch(inputs: Inputs, outputs: Outputs, driver: Driver) -> Iterator[str]:
    try:
        prepared = prepare(seen(inputs), driver)
        as_given = prepare(inputs, driver)
    except RefusedError as refusal:
        yield f"launches there, fails here with {refusal.code}: {refusal}"
        return
    yield from _compare_check(as_given, faults(inputs))
    broken = [_SLOTS[tma["slot"]] for tma in outputs["tma"] if tma["documented_rule_violations"]]
    if broken:
        yield from _compare_rules(prepared, seen(inputs), broken)
    if not driver.takes_anything and (broken or 0 in outputs["grid"]):
        return
    lenient = mock.patch.object(TiledMap, "violations", return_value=[])
    driver.take()
    try:
        with lenient if broken else contextlib.nullcontext():
            run(prepared, seen(inputs))
    except RefusedError as refusal:
        yield f"launches there, fails here with {refusal.code}: {refusal}"
    else:
        yield from _compare_sent(driver, prepared, outputs)


def _compare_check(as_given: Prepared, wrong: Sequence[str]) -> Iterator[str]:
    """The package must refuse what would be silently wrong, and nothing else."""
    try:
        family.check(as_given.problem)
    except CubinRuntimeError as error:
        if not wrong:
            yield f"launches there, is refused here: {error}"
    else:
        if wrong:
            yield f"there {'; '.join(wrong)}, and here nothing refuses it"


def _compare_rules(prepared: Prepared, inputs: Inputs, broken: Sequence[str]) -> Iterator[str]:
    """The package must refuse a tensor map that breaks a documented rule of the driver."""
    try:
        run(prepared, inputs)
    except RefusedError as refusal:
        if str(refusal).partition(" ")[0] in broken:
            return
    yield f"maps of {', '.join(broken)} break rules of the driver, and here nothing refuses them"


def _compare_sent(driver: Driver, prepared: Prepared, outputs: Outputs) -> Iterator[str]:
    sent = driver.take()
    attention, *later = sent.launches
    kernel = prepared.call.kernel
    row = kernel.row
    pairs: dict[str, tuple[object, object]] = {
        "function": (outputs["func_name"], attention.kernel),
        "sha256": (outputs["sha256"], default_manifest().find(row.name).sha256),
        "step_q": (outputs["step_q"], row.step_q),
        "tiles": ([outputs["tile_q"], outputs["tile_kv"]], [row.tile_q, row.tile_kv]),
        "mask": (outputs["mask_type"], _MASKS[row.mask_type]),
        "threads": (outputs["threads_per_cta"], kernel.resources.threads),
        "smem_bytes": (outputs["smem_bytes"], kernel.resources.shared_memory),
        "grid": (outputs["grid"], attention.grid),
        "block": (outputs["block"], attention.block),
        "launch_smem": (outputs["launch_smem"], attention.shared_memory),
        "stream": (outputs["stream"], attention.stream),
        "cluster_dim": (outputs["cluster_dim"], list(row.cluster)),
        "launch_attrs": (outputs["launch_attrs"], attention.attributes),
        "func_attrs": (
            outputs["func_attrs"],
            {} if attention.opt_in is None else {_OPT_IN: attention.opt_in},
        ),
        "workspace": (outputs["workspace"], _workspace(prepared, outputs)),
        "tensor maps": ([tma["slot"] for tma in outputs["tma"]], list(_SLOTS)[: len(sent.maps)]),
        "LSE step": (_recorded_lse(outputs), _lse(later)),
    }
    for tma, encoded in zip(outputs["tma"], sent.maps, strict=False):
        # That code multiplies a stride as an unsigned number of bits.
        encoded["strides"] = [stride % 2**61 for stride in encoded["strides"]]
        pairs |= {f"{tma['slot']} {name}": (tma[name], encoded[name]) for name in encoded}
    for name, (there, here) in pairs.items():
        if there != here:
            yield f"{name}: there {there}, here {here}"
    yield from _compare_parameters(
        prepared, bytes.fromhex(outputs["params_hex"]), attention.parameters, driver
    )


def _workspace(prepared: Prepared, outputs: Outputs) -> dict[str, int | None]:
    """Offsets as the files give them: from the buffer's start, aligned or not."""
    layout = prepared.call.workspace
    misaligned = outputs["workspace"]["counter_offset"]
    has_lse = prepared.problem.lse_strides is not None
    scratch = layout.offset("scratch") + misaligned
    return {
        "counter_offset": layout.offset("counters") + misaligned,
        "counter_bytes": layout.slabs["counters"][1],
        "softmax_offset": layout.offset("softmax") + misaligned if has_lse else None,
        "softmax_bytes": layout.slabs["softmax"][1] if has_lse else None,
        "scratch_offset": scratch,
        "partial_o_offset": scratch + prepared.call.partial_stats_bytes,
    }


def _recorded_lse(outputs: Outputs) -> dict[str, Any] | None:
    lse = outputs["lse_launch"]
    if lse is None:
        return None
    names = ("md", "lse", "num_heads_q", "stride_tokens", "stride_heads", "n", "stream")
    return {**{name: lse[name] for name in names}, "attributes": [[lse["attr_id"], lse["attr_value"]]]}


def _lse(launches: Sequence[Launch]) -> dict[str, Any] | None:
    """The step that follows. Ours has blocks of its own size, and leaves out an attribute that is off."""
    if not launches:
        return None
    (launch,) = launches
    fields = family.LSE_PARAMETERS.unpack(launch.parameters)
    md, lse, _, stride_tokens, stride_heads, _, heads, tokens = fields
    elements = tokens * heads
    blocks = -(-elements // math.prod(launch.block))
    return {
        "md": md,
        "lse": lse,
        "num_heads_q": heads,
        "stride_tokens": stride_tokens,
        "stride_heads": stride_heads,
        "n": elements if launch.grid == [blocks, 1, 1] else f"{elements} with grid {launch.grid}",
        "stream": launch.stream,
        "attributes": launch.attributes or [[_PDL, 0]],
    }


def _compare_parameters(prepared: Prepared, there: bytes, here: bytes, driver: Driver) -> Iterator[str]:
    if len(there) != len(here):
        yield f"parameters: there {len(there)} bytes, here {len(here)}"
        return
    compared = bytearray(len(there))  # 1 = by a field
    for name, (offset, kind) in prepared.call.layout.fields.items():
        place = slice(offset, offset + field_size(kind))
        compared[place] = b"\1" * field_size(kind)
        is_opaque = name in _SLOTS and not driver.fills_slots
        if there[place] != here[place] and not is_opaque:
            yield f"{name}: there {there[place].hex()}, here {here[place].hex()}"
    gaps = [i for i, done in enumerate(compared) if not done and there[i] != here[i]]
    if gaps:
        yield f"parameters: bytes {gaps}, which no field covers, differ"
