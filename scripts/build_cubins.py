"""Builds the kernels of the tables: row -> macros -> nvcc -> checked cubin, facts into the row, digest into
the manifest.

    python scripts/build_cubins.py                 build what changed, install it, prune the rest
    python scripts/build_cubins.py --check         rebuild everything aside and compare with the manifest
    python scripts/build_cubins.py --rows '*h256*' --keep /tmp/look

Nothing is installed unless every row that was asked for builds and passes its checks.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fnmatch
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import yaml
from sass_check import check, disassemble
from toolchain import Toolchain, ToolchainError, find_toolchain

from cubin_runtime.cubin import inspect
from cubin_runtime.errors import CubinRuntimeError
from cubin_runtime.manifest import FILE_NAME, Artifact, Manifest, load_manifest
from cubin_runtime.request import SAGE_OFF
from kernel_meta.schema import KernelRow, Resources, Step
from kernel_meta.tables import load_steps, load_table

ROOT = Path(__file__).resolve().parents[1]
Row = KernelRow | Step
FLAGS = ("-cubin", "-std=c++20", "-O3", "-Xptxas=-v,-warn-spills", "-I", "kernel_meta")

# Macro <- what the row says. A value of None leaves the macro undefined.
MACROS: dict[str, Callable[[KernelRow], object]] = {
    "DTYPE_Q": lambda row: f"DType::{row.dtype_q}",
    "DTYPE_K": lambda row: f"DType::{row.dtype_k}",
    "DTYPE_V": lambda row: f"DType::{row.dtype_v}",
    "DTYPE_O": lambda row: f"DType::{row.dtype_o}",
    "HEAD_DIM_QK": lambda row: row.head_dim_qk,
    "HEAD_DIM_V": lambda row: row.head_dim_v,
    "MASK_TYPE": lambda row: f"MaskType::{row.mask_type}",
    "TILE_Q": lambda row: row.tile_q,
    "TILE_KV": lambda row: row.tile_kv,
    "STAGES_K": lambda row: row.stages_k,
    "STAGES_V": lambda row: row.stages_v,
    "SCHEDULER": lambda row: f"Scheduler::{row.scheduler}",
    "BLOCKS_PER_SM": lambda row: row.blocks_per_sm,
    "FP16_SOFTMAX": lambda row: int(row.fp16_softmax),
    "USES_SPCOMPRESS": lambda row: int(row.uses_spcompress),
    "SKIPS_SOFTMAX": lambda row: int(row.skips_softmax),
    "USES_SAGE": lambda row: int(row.sage_blocks != SAGE_OFF),
    "E4M3_P": lambda row: int(row.e4m3_p),
}


class BuildError(RuntimeError):
    """A kernel does not compile or fails a check; the message starts with the row's name."""


_FAILURES = (BuildError, CubinRuntimeError)


class Built(NamedTuple):
    """A compiled and checked kernel."""

    row: Row
    data: bytes
    resources: Resources

    @property
    def sha256(self) -> str:
        """Digest of the cubin."""
        return hashlib.sha256(self.data).hexdigest()


# ---- one kernel ----


def flags(row: Row) -> list[str]:
    """nvcc's arguments for a row, without input and output."""
    target = str(row.architecture).removeprefix("sm_")
    macros: dict[str, object] = {"KERNEL_NAME": row.entry_name}
    if isinstance(row, KernelRow):
        macros |= {name: value(row) for name, value in MACROS.items()}
    return [
        *FLAGS,
        f"-gencode=arch=compute_{target},code=sm_{target}",
        *(f"-D{name}={value}" for name, value in macros.items() if value is not None),
    ]


def source(row: Row) -> str:
    """The row's source file relative to the repository: absolute paths would leak into the bytes."""
    return f"kernel_meta/{row.family}/{row.source}"


def input_digest(row: Row, toolchain: Toolchain, root: Path = ROOT) -> str:
    """Digest of all that the cubin depends on: sources, flags, compiler version."""
    folders = (root / "kernel_meta" / row.family, root / "kernel_meta" / "common")
    files = sorted(
        path for folder in folders for path in folder.rglob("*") if path.suffix in (".cu", ".cuh", ".h")
    )
    inputs = {
        "toolchain": toolchain.version,
        "flags": flags(row),
        "source": source(row),
        "files": {path.relative_to(root).as_posix(): _sha256(path) for path in files},
    }
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def build(row: Row, toolchain: Toolchain, folder: Path, root: Path = ROOT) -> Built:
    """Compiles and checks one row, or takes it from `folder` where the same inputs were built before.

    Leaves <name>.cubin, <name>.log (what ptxas said) and <name>.inputs in `folder`.
    """
    cubin, log, record = (folder / f"{row.name}.{ending}" for ending in ("cubin", "log", "inputs"))
    inputs = input_digest(row, toolchain, root)
    if not _is_current(cubin, record, inputs):
        started = time.monotonic()
        log.write_text(compile_cubin(row, toolchain, cubin, root))
        findings = [*ptxas_findings(log.read_text()), *_sass_findings(cubin, toolchain)]
        if findings:
            raise BuildError("\n    ".join([f"{row.name}: compiles, but", *findings]))
        record.write_text(f"{inputs} {_sha256(cubin)}")
        print(f"built {row.name} in {time.monotonic() - started:.1f} s", file=sys.stderr)
    data = cubin.read_bytes()
    return Built(row, data, read_resources(data, row))


def _is_current(cubin: Path, record: Path, inputs: str) -> bool:
    return cubin.is_file() and record.is_file() and record.read_text() == f"{inputs} {_sha256(cubin)}"


def compile_cubin(row: Row, toolchain: Toolchain, output: Path, root: Path = ROOT) -> str:
    """Runs nvcc and returns what it printed; raises BuildError with it when it fails."""
    command = [str(toolchain.nvcc), *flags(row), "-o", str(output), source(row)]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if run.returncode:
        raise BuildError(f"{row.name}: nvcc failed\n{run.stdout}{run.stderr}")
    return run.stdout + run.stderr


def ptxas_findings(log: str) -> list[str]:
    """ptxas's remarks on wgmma (C75xx: serialised and the like), each with the entry that it is about."""
    entry, findings = "", []
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '([^']+)'", line):
            entry = match[1]
        if re.search(r"\(C75\d\d\)", line):
            findings.append(f"{entry or 'before any entry'}: {line.strip()}")
    return findings


def _sass_findings(cubin: Path, toolchain: Toolchain) -> list[str]:
    return check(disassemble(cubin, toolchain.nvdisasm)) if toolchain.nvdisasm else []


def read_resources(data: bytes, row: Row) -> Resources:
    """The facts that the row has to state, from the cubin; raises BuildError if it is another kernel's."""
    cubin = inspect(data)
    if cubin.arch != row.architecture or list(cubin.kernels) != [row.entry_name]:
        raise BuildError(
            f"{row.name}: the cubin is {cubin.arch} with entries {', '.join(cubin.kernels) or 'none'}; "
            f"expected {row.arch} with the one entry {row.entry_name}"
        )
    kernel = cubin.kernels[row.entry_name]
    if kernel.threads is None:
        raise BuildError(f"{row.name}: the cubin states no block size; expected __launch_bounds__")
    if kernel.dynamic_shared_memory is None:
        raise BuildError(f"{row.name}: the cubin has no constant fmha_dynamic_shared_memory")
    return Resources(
        threads=kernel.threads,
        registers=kernel.registers,
        shared_memory=kernel.dynamic_shared_memory,
        static_shared_memory=kernel.static_shared_memory,
        parameter_bytes=kernel.parameter_bytes,
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- table, manifest, embedded store ----


def write_resources(path: Path, resources: dict[str, Resources]) -> None:
    """Puts `resources` (by row name) into the rows of a table; all other text stays as it stands."""
    text = path.read_text()
    edited = text
    for row, node in reversed(list(zip(_load(path), _row_nodes(text), strict=True))):
        if row.name in resources:
            start, end = node.start_mark.index, node.end_mark.index
            edited = edited[:start] + _with_resources(node, text, resources[row.name]) + edited[end:]
    if edited != text:
        path.write_text(edited)


def _load(path: Path) -> tuple[KernelRow, ...] | tuple[Step, ...]:
    return load_table(path) if path.name == "table.yaml" else load_steps(path)


def _row_nodes(text: str) -> list[yaml.MappingNode]:
    root = yaml.compose(text, Loader=yaml.CBaseLoader)
    assert isinstance(root, yaml.MappingNode)
    return next(value.value for key, value in root.value if key.value == "rows")


def _with_resources(node: yaml.MappingNode, text: str, resources: Resources) -> str:
    """The row's text with its `resources` replaced, or added as a second line."""
    columns = [(key, value) for key, value in node.value if key.value != "resources"]
    if not node.flow_style or not columns or columns != node.value[: len(columns)]:
        raise BuildError(f"{node.start_mark}: expected a row in braces with resources, if any, at its end")
    identity = text[node.start_mark.index : columns[-1][1].end_mark.index]
    facts = ", ".join(f"{name}: {value}" for name, value in msgspec.structs.asdict(resources).items())
    return f"{identity},\n     resources: {{{facts}}}}}"


def install(built: Iterable[Built], root: Path = ROOT) -> None:
    """Writes cubins, facts and manifest of the rows built, and removes cubins that no row names any more."""
    by_family: dict[str, list[Built]] = {}
    for kernel in built:
        by_family.setdefault(kernel.row.family, []).append(kernel)
    artifacts = dict(_manifest(root).artifacts)
    for family, kernels in by_family.items():
        folder = root / "kernel_meta" / family
        names = set()
        for path in _tables(folder):
            write_resources(path, {k.row.name: k.resources for k in kernels})
            names |= {row.name for row in _load(path)}
        artifacts = {n: a for n, a in artifacts.items() if a.set_name != family or n in names}
        artifacts |= {k.row.name: _artifact(k, root) for k in kernels}
        for kernel in kernels:
            _write(folder / "cubins" / artifacts[kernel.row.name].key, kernel.data)
        _prune(folder / "cubins", {a.key for a in artifacts.values() if a.set_name == family})
    (root / FILE_NAME).write_text(Manifest(artifacts=artifacts).to_yaml())


def _tables(folder: Path) -> list[Path]:
    """The files of a family that name kernels."""
    return [path for name in ("table.yaml", "steps.yaml") if (path := folder / name).exists()]


def _manifest(root: Path) -> Manifest:
    path = root / FILE_NAME
    return load_manifest(path) if path.exists() else Manifest(artifacts={})


def _artifact(kernel: Built, root: Path) -> Artifact:
    return Artifact(
        name=kernel.row.name,
        set_name=kernel.row.family,
        version=_project_version(root),
        sha256=kernel.sha256,
        size=len(kernel.data),
    )


def _project_version(root: Path) -> str:
    match = re.search(r'^version = "([^"]+)"', (root / "pyproject.toml").read_text(), re.MULTILINE)
    if match is None:
        raise BuildError("pyproject.toml states no version")
    return match[1]


def _write(path: Path, data: bytes) -> None:
    if not (path.is_file() and path.read_bytes() == data):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _prune(folder: Path, keep: set[str]) -> None:
    for path in folder.glob("*/*"):
        if path.relative_to(folder).as_posix() not in keep:
            path.unlink()
            print(f"removed {path}: no row names it", file=sys.stderr)
            if not any(path.parent.iterdir()):
                path.parent.rmdir()


def differences(built: Iterable[Built], manifest: Manifest) -> list[str]:
    """What a rebuild changed against the manifest and the table, one line each."""
    lines = []
    for kernel in built:
        artifact = manifest.artifacts.get(kernel.row.name)
        if artifact is None:
            lines.append(f"{kernel.row.name}: not in the manifest")
        elif artifact.sha256 != kernel.sha256:
            lines.append(f"{kernel.row.name}: manifest has {artifact.sha256}, rebuilt {kernel.sha256}")
        if kernel.row.resources != kernel.resources:
            lines.append(f"{kernel.row.name}: table has {kernel.row.resources}, rebuilt {kernel.resources}")
    return lines


# ---- command line ----


def source_rows(pattern: str = "*", root: Path = ROOT) -> list[Row]:
    """Rows that are built from source here and whose names match the glob."""
    return [
        row
        for folder in sorted((root / "kernel_meta").iterdir())
        for path in _tables(folder)
        for row in _load(path)
        if row.source and row.source.endswith(".cu") and fnmatch.fnmatchcase(row.name, pattern)
    ]


def build_all(
    rows: list[Row], toolchain: Toolchain, folder: Path, jobs: int, root: Path = ROOT
) -> list[Built]:
    """Builds rows in parallel; raises BuildError with every failure, after all have been tried."""
    folder.mkdir(parents=True, exist_ok=True)
    if toolchain.nvdisasm is None:
        print("no nvdisasm found: machine code is not checked", file=sys.stderr)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(build, row, toolchain, folder, root) for row in rows]
    failures = [str(f.exception()) for f in futures if isinstance(f.exception(), _FAILURES)]
    if failures:
        raise BuildError("\n".join([*failures, f"{len(failures)} of {len(rows)} kernels failed"]))
    return [future.result() for future in futures]


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = _parser().parse_args(arguments)
    rows = source_rows(options.rows)
    if not rows:
        print(f"no row with a source matches {options.rows!r}", file=sys.stderr)
        return 2
    if options.list_flags:
        for row in rows:
            print(row.name, source(row), *flags(row))
        return 0
    try:
        return _check(rows, options) if options.check else _build(rows, options)
    except (ToolchainError, *_FAILURES) as error:
        print(error, file=sys.stderr)
        return 1


def _build(rows: list[Row], options: argparse.Namespace) -> int:
    folder = options.keep or ROOT / "build" / "cubins"
    install(build_all(rows, find_toolchain(), folder, options.jobs))
    print(f"kernels up to date: {len(rows)}", file=sys.stderr)
    return 0


def _check(rows: list[Row], options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        for record in folder.glob("*.inputs"):
            record.unlink()  # a rebuild is meant, not an earlier one's result
        found = differences(build_all(rows, find_toolchain(), folder, options.jobs), _manifest(ROOT))
    print("\n".join(found) if found else f"kernels rebuilt: {len(rows)}, all equal to the manifest")
    return 1 if found else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="compilers at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--rows", default="*", metavar="GLOB", help="only rows whose names match (default: all)"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="folder for cubins and ptxas logs (default: build/cubins)"
    )
    parser.add_argument(
        "--check", action="store_true", help="rebuild, compare with the manifest, change nothing"
    )
    parser.add_argument("--list-flags", action="store_true", help="print each row's compiler flags and stop")
    return parser


if __name__ == "__main__":
    sys.exit(main())
