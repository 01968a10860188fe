"""Imports the ragged kernels of a flashinfer-cubin release: facts into the table, digests into the manifest.

    python scripts/import_trtllm_gen.py                    the installed flashinfer_cubin package
    python scripts/import_trtllm_gen.py flashinfer_cubin-0.6.13-py3-none-any.whl     or an unpacked one

The cubins stay where they are: what is written are names, digests, sizes and columns. Each cubin is read, and
what its header entry, its checksum and its ELF say of it must agree. A release whose format differs from what
this script knows is refused, with the field or value that is new.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import re
import sys
import zipfile
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from cubin_runtime.cubin import inspect
from cubin_runtime.errors import CubinRuntimeError
from cubin_runtime.manifest import FILE_NAME, Artifact, Manifest, load_manifest
from cubin_runtime.request import DType, MaskType
from kernel_meta.schema import KernelRow, Resources, Scheduler

ROOT = Path(__file__).resolve().parents[1]
FAMILY = "fmha_trtllm_gen"
PACKAGE = "flashinfer_cubin"
HEADER = "include/flashInferMetaInfo.h"
CHECKSUMS = "checksums.txt"

_RAGGED_LAYOUT = "0"  # separate, ragged q, k and v

_DTYPES = {
    "DATA_TYPE_BF16": DType.BF16,
    "DATA_TYPE_FP16": DType.FP16,
    "DATA_TYPE_E4M3": DType.E4M3,
    "DATA_TYPE_INT8": DType.INT8,
    "DATA_TYPE_E2M1": DType.E2M1,
}
_MASKS = {"0": MaskType.DENSE, "1": MaskType.CAUSAL, "2": MaskType.SLIDING}
_SCHEDULERS = {"0": Scheduler.STATIC, "1": Scheduler.PERSISTENT}
_ARCHS = {"kSM_100": "sm_100a", "kSM_100f": "sm_100f", "kSM_103": "sm_103a", "kSM_107": "sm_107a"}
_FLAGS = {"false": False, "true": True}

# Fields of the header's struct that the columns come from.
_USED = frozenset(
    (
        *("mDataTypeQ", "mDataTypeK", "mDataTypeV", "mDataTypeO", "mHeadDimQk", "mHeadDimV"),
        *("mTileSizeQ", "mTileSizeKv", "mStepQ", "mSM", "mFuncName", "mSharedMemBytes", "mThreadsPerCTA"),
        *("mQkvLayout", "mMaskType", "mTileScheduler", "mSkipsSoftmaxWhenPossible", "sha256"),
        *(f"mNumEltsPerSageAttnBlk{operand}" for operand in "QKPV"),
    )
)
# Fields that earlier releases reserve.
_OPTIONAL = frozenset({"mFp16Softmax", "mUsesSpcompress"})
# Fields that follow from others, or that say nothing about a kernel.
_REDUNDANT = frozenset({"mDataTypeKv", "mStepKv", "mHeadDimPerCtaV", "mCubin", "mCubinSize"})
# Every other field is a variant that this family's launcher does not know, so it has to be off.
_OFF = ("0", "false")


_T = TypeVar("_T")


class ReleaseError(RuntimeError):
    """The release cannot be imported; the message names the file and what is unexpected."""


class Release(NamedTuple):
    """An unpacked release. `folder` holds the header, the checksums and the cubins; `path` is its place."""

    version: str
    folder: Path | zipfile.Path
    path: str


class Kernel(NamedTuple):
    """One ragged kernel: its row and its artifact."""

    row: KernelRow
    artifact: Artifact


# ---- finding the release


def find_release(location: Path | None) -> Release:
    """The release at a wheel or folder; default: the installed package, which is not imported."""
    root = _package(_installed() if location is None else location)
    found = [
        folder
        for digest in _folders(root / "cubins")
        if (folder := digest / "fmha" / "trtllm-gen").is_dir() and (folder / HEADER).is_file()
    ]
    if len(found) != 1:
        raise ReleaseError(f"{root}: {len(found)} folders cubins/*/fmha/trtllm-gen with {HEADER}; expected 1")
    digest = found[0].parent.parent.name
    return Release(_version(root), found[0], f"{digest}/fmha/trtllm-gen")


def _installed() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ReleaseError(
            f"no package {PACKAGE} is installed; install flashinfer-cubin, or name its wheel or a folder"
        )
    return Path(spec.submodule_search_locations[0])


def _package(location: Path) -> Path | zipfile.Path:
    """The package's own folder: `location`, or a folder below it, or in the wheel that it is."""
    if location.is_file() and zipfile.is_zipfile(location):
        return zipfile.Path(location) / PACKAGE
    below = location / PACKAGE
    return below if below.is_dir() else location


def _folders(parent: Path | zipfile.Path) -> list[Path | zipfile.Path]:
    if not parent.is_dir():
        raise ReleaseError(f"{parent} is no folder; expected a flashinfer-cubin release")
    return sorted((child for child in parent.iterdir() if child.is_dir()), key=lambda child: child.name)


def _version(root: Path | zipfile.Path) -> str:
    text = (root / "_build_meta.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    if match is None:
        raise ReleaseError(f"{root}/_build_meta.py states no __version__")
    return match[1]


# ---- reading the header


def header_entries(text: str) -> list[dict[str, str]]:
    """The entries of the header's array, as field -> value, both as text."""
    struct = re.search(r"struct TllmGenFmhaKernelMetaInfo\s*\{(.*?)\};", text, re.DOTALL)
    array = re.search(r"sTllmGenFmhaKernelMetaInfos\[\]\s*=\s*\{(.*)\};", text, re.DOTALL)
    if struct is None or array is None:
        raise ReleaseError(f"{HEADER} has no TllmGenFmhaKernelMetaInfo and array of them; its format is new")
    fields = re.findall(r"(\w+);", struct[1])
    missing = sorted(_USED.difference(fields))
    if missing:
        raise ReleaseError(f"{HEADER} has no field {', '.join(missing)}; its format is new")
    entries = []
    for number, entry in enumerate(re.findall(r"\{([^{}]*)\}", array[1]), start=1):
        values = [value.strip().strip('"') for value in entry.split(",")]
        if len(values) != len(fields):
            raise ReleaseError(f"{HEADER}, entry {number}: {len(values)} values for {len(fields)} fields")
        entries.append(dict(zip(fields, values, strict=True)))
    return entries


def read_kernels(release: Release, abi: str) -> Iterator[Kernel]:
    """The ragged kernels in the header's order; raises ReleaseError where header and files disagree."""
    checksums = _checksums(release)
    for entry in header_entries((release.folder / HEADER).read_text(encoding="utf-8")):
        if entry["mQkvLayout"] == _RAGGED_LAYOUT:
            yield _kernel(entry, release, checksums, abi)


def _checksums(release: Release) -> dict[str, str]:
    lines = (release.folder / CHECKSUMS).read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, name in (line.split() for line in lines)}


def _kernel(entry: dict[str, str], release: Release, checksums: dict[str, str], abi: str) -> Kernel:
    name = entry["mFuncName"]
    known = _USED | _OPTIONAL | _REDUNDANT
    for field, value in entry.items():
        if field not in known and value not in _OFF:
            raise ReleaseError(f"{name}: {field} is {value}; this script knows it only as off")
    data = (release.folder / f"{name}.cubin").read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if not digest == entry["sha256"] == checksums.get(f"{name}.cubin"):
        raise ReleaseError(
            f"{name}: sha256 {digest}, in the header {entry['sha256']}, "
            f"in {CHECKSUMS} {checksums.get(f'{name}.cubin')}"
        )
    row = _row(entry, data, abi)
    artifact = Artifact(
        name=row.name,
        set_name=PACKAGE,
        version=release.version,
        sha256=digest,
        size=len(data),
        published=f"{release.path}/{name}.cubin",
    )
    return Kernel(row, artifact)


def _row(entry: dict[str, str], data: bytes, abi: str) -> KernelRow:
    name = entry["mFuncName"]
    cubin = inspect(data)
    facts = cubin.kernels.get(name)
    if facts is None:
        raise ReleaseError(f"{name}: its cubin has the entries {', '.join(cubin.kernels)}")
    told = (_meaning(name, entry, "mSM", _ARCHS), int(entry["mThreadsPerCTA"]))
    if told != (str(cubin.arch), facts.threads):
        raise ReleaseError(
            f"{name}: {told[0]} with {told[1]} threads in the header, "
            f"{cubin.arch} with {facts.threads} in its ELF"
        )
    sage = tuple(int(entry[f"mNumEltsPerSageAttnBlk{operand}"]) for operand in "QKPV")
    return KernelRow(
        family=FAMILY,
        arch=told[0],
        dtype_q=_meaning(name, entry, "mDataTypeQ", _DTYPES),
        dtype_k=_meaning(name, entry, "mDataTypeK", _DTYPES),
        dtype_v=_meaning(name, entry, "mDataTypeV", _DTYPES),
        dtype_o=_meaning(name, entry, "mDataTypeO", _DTYPES),
        head_dim_qk=int(entry["mHeadDimQk"]),
        head_dim_v=int(entry["mHeadDimV"]),
        mask_type=_meaning(name, entry, "mMaskType", _MASKS),
        tile_q=int(entry["mTileSizeQ"]),
        tile_kv=int(entry["mTileSizeKv"]),
        scheduler=_meaning(name, entry, "mTileScheduler", _SCHEDULERS),
        fp16_softmax=_optional_flag(name, entry, "mFp16Softmax"),
        uses_spcompress=_optional_flag(name, entry, "mUsesSpcompress"),
        skips_softmax=_meaning(name, entry, "mSkipsSoftmaxWhenPossible", _FLAGS),
        sage_blocks=sage,
        abi=abi,
        entry=name,
        step_q=int(entry["mStepQ"]),
        resources=Resources(
            threads=told[1],
            registers=facts.registers,
            shared_memory=int(entry["mSharedMemBytes"]),
            static_shared_memory=facts.static_shared_memory,
            parameter_bytes=facts.parameter_bytes,
        ),
    )


def _meaning(name: str, entry: dict[str, str], field: str, meanings: Mapping[str, _T]) -> _T:
    try:
        return meanings[entry[field]]
    except KeyError:
        known = ", ".join(meanings)
        raise ReleaseError(f"{name}: {field} is {entry[field]}; this script knows {known}") from None


def _optional_flag(name: str, entry: dict[str, str], field: str) -> bool:
    return field in entry and _meaning(name, entry, field, _FLAGS)


# ---- writing table and manifest


def layout_file(release: str) -> Path:
    """Where the byte layout of a release's parameter struct is described."""
    return ROOT / "kernel_meta" / FAMILY / f"params_{release.replace('.', '_')}.yaml"


def table_text(kernels: list[Kernel], release: Release) -> str:
    """The table: columns that all rows share as defaults, the others as aligned lines of words."""
    usual = {field.name for field in msgspec.structs.fields(KernelRow) if _is_usual(field, kernels)}
    rows = [_words(kernel.row, usual) for kernel in kernels]
    shared = {
        name: word
        for name, word in rows[0].items()
        if name != "entry" and all(row[name] == word for row in rows)
    }
    names = [name for name in rows[0] if name not in shared]
    widths = [max(len(row[name]) for row in rows) for name in names]
    return "\n".join(
        [
            f"# Ragged kernels of flashinfer-cubin {release.version}, published by NVIDIA. Written by",
            "# scripts/import_trtllm_gen.py from the release's own metadata and cubins; not to be edited.",
            f"family: {FAMILY}",
            f"defaults: {_flow(shared)}",
            f"columns: [{', '.join(names)}]",
            "rows:",
            *(
                "  - "
                + " ".join(row[name].ljust(width) for name, width in zip(names, widths, strict=True)).rstrip()
                for row in rows
            ),
            "",
        ]
    )


def _is_usual(field: msgspec.structs.FieldInfo, kernels: list[Kernel]) -> bool:
    """Whether no row says anything about the column that KernelRow does not say by itself."""
    return all(getattr(kernel.row, field.name) == field.default for kernel in kernels)


def _words(row: KernelRow, usual: Container[str]) -> dict[str, str]:
    """The columns of a row but the usual ones and the family, each as one word."""
    columns = {n: v for n, v in msgspec.to_builtins(row).items() if n != "family" and n not in usual}
    resources = columns.pop("resources")
    entry = columns.pop("entry")
    flat = {**columns, **{f"resources.{name}": value for name, value in resources.items()}, "entry": entry}
    return {name: _word(value) for name, value in flat.items()}


def _word(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value)


def _flow(shared: dict[str, str]) -> str:
    plain = [
        f"{name}: [{word}]" if "," in word else f"{name}: {word}"
        for name, word in shared.items()
        if "." not in name
    ]
    resources = [
        f"{name.partition('.')[2]}: {word}" for name, word in shared.items() if name.startswith("resources.")
    ]
    return "{" + ", ".join([*plain, f"resources: {{{', '.join(resources)}}}"]) + "}"


def install(kernels: list[Kernel], release: Release, root: Path = ROOT) -> None:
    """Writes the table, and puts the set in the manifest in place of an earlier release's."""
    (root / "kernel_meta" / FAMILY / "table.yaml").write_text(table_text(kernels, release))
    path = root / FILE_NAME
    others = {name: a for name, a in load_manifest(path).artifacts.items() if a.set_name != PACKAGE}
    path.write_text(Manifest(artifacts={**others, **{k.row.name: k.artifact for k in kernels}}).to_yaml())


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        release = find_release(options.release)
        layout = options.layout or release.version
        if not layout_file(layout).is_file():
            raise ReleaseError(
                f"{layout_file(layout)} does not exist: nothing here describes the parameter struct of "
                f"{release.version}. Describe it there, or name a release with the same struct with --layout"
            )
        kernels = list(read_kernels(release, f"{FAMILY}/{layout}"))
        install(kernels, release)
    except (ReleaseError, CubinRuntimeError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"kernels imported from flashinfer-cubin {release.version}: {len(kernels)}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "release", nargs="?", type=Path, help="wheel, or folder of one (default: the installed package)"
    )
    parser.add_argument(
        "--layout", metavar="RELEASE", help="release whose parameter struct this one has (default: itself)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
