"""`cubin-runtime doctor`: what stands between this machine and a running kernel, with remedies."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from cubin_runtime.cli.output import Json, note, print_json, print_table

if TYPE_CHECKING:
    from cubin_runtime.settings import Settings

FAILED = 1

PREFIX = "CUBIN_RUNTIME_"


class Finding(NamedTuple):
    """One thing that was looked at. state: ok; warn = something will not work; fail = something is broken."""

    state: str
    subject: str
    detail: str
    remedy: str = ""


def doctor(as_json: Json = False) -> None:
    """Check driver, devices, versions, tables, stores and settings. Exits with 1 if something is broken."""
    findings = list(examine(os.environ))
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        print_table(
            ("", "subject", "finding"),
            [(f.state, f.subject, f"{f.detail}{'; ' if f.remedy else ''}{f.remedy}") for f in findings],
        )
    counts = {state: sum(f.state == state for f in findings) for state in ("ok", "warn", "fail")}
    note(", ".join(f"{count} {state}" for state, count in counts.items()))
    if counts["fail"]:
        raise typer.Exit(FAILED)


def examine(environ: Mapping[str, str]) -> Iterator[Finding]:
    """All findings, in the order in which a call would come across them."""
    from cubin_runtime.settings import Settings

    settings = Settings(environ)
    yield from _versions()
    yield from _devices()
    yield from _environment(environ)
    yield from _settings(settings)
    yield from _kernels(settings)
    yield from _blocked(settings)
    yield from _cache(settings)


def _versions() -> Iterator[Finding]:
    import platform

    yield Finding("ok", "python", platform.python_version())
    yield _package("cubin-runtime", "this is a checkout", "pip install -e .")
    yield _package("torch", "calls take torch tensors", "pip install torch")
    yield _package("cuda-bindings", "launches go through it", "pip install cuda-python")


def _package(name: str, purpose: str, remedy: str) -> Finding:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return _version_finding(name, version(name))
    except PackageNotFoundError:
        return Finding("warn", name, f"not installed ({purpose})", remedy)


def _version_finding(package: str, version: str) -> Finding:
    if package == "torch" and version.endswith("+cpu"):
        remedy = "install a CUDA build of torch (https://pytorch.org/get-started/locally)"
        return Finding("warn", package, f"{version}, which cannot hold tensors on a GPU", remedy)
    return Finding("ok", package, version)


def _devices() -> Iterator[Finding]:
    from cubin_runtime.errors import DriverError

    try:
        from cubin_runtime import _driver

        major, minor = _driver.driver_version()
        count = _driver.device_count()
    except (DriverError, ImportError) as error:
        remedy = "kernels can be listed, explained and verified here, but not launched"
        yield Finding("warn", "driver", str(error), remedy)
        return
    yield Finding("ok", "driver", f"supports CUDA {major}.{minor}")
    if not count:
        yield Finding("warn", "devices", "the driver sees none", "check nvidia-smi and CUDA_VISIBLE_DEVICES")
    for ordinal in range(count):
        yield _device(ordinal)


def _device(ordinal: int) -> Finding:
    from cubin_runtime.errors import DriverError
    from cubin_runtime.module import device_info
    from kernel_meta.tables import all_rows

    subject = f"device {ordinal}"
    try:
        info = device_info(ordinal)
    except DriverError as error:
        return Finding("fail", subject, str(error), "check nvidia-smi")
    detail = f"{info.name}, compute capability {info.capability}, {info.sm_count} SMs"
    built = [row for row in all_rows() if row.resources]
    fitting = sum(row.architecture.runs_on(info.capability) for row in built)
    if fitting:
        return Finding("ok", subject, f"{detail}; kernels for it: {fitting}")
    archs = ", ".join(sorted({row.arch for row in built})) or "no target yet"
    return Finding(
        "warn", subject, f"{detail}; no kernel runs on it (there are: {archs})", 'backend="reference"'
    )


def _environment(environ: Mapping[str, str]) -> Iterator[Finding]:
    import difflib

    from cubin_runtime import settings

    known = {
        value for value in vars(settings).values() if isinstance(value, str) and value.startswith(PREFIX)
    }
    for name in sorted(environ):
        if name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER") or name in known:
            secret = name == settings.TOKENS
            yield Finding("ok", name, "set, not shown" if secret else _without_password(environ[name]))
        elif name.startswith(PREFIX):
            close = difflib.get_close_matches(name, known, n=1) or sorted(known)
            yield Finding("warn", name, "no such setting", f"meant {' or '.join(close)}?")


def _without_password(urls: str) -> str:
    return re.sub(r"//[^/@\s,]*@", "//***@", urls)


def _settings(settings: Settings) -> Iterator[Finding]:
    """Reads every setting, because a bad value is only noticed when it is read."""
    for name, value in vars(type(settings)).items():
        if isinstance(value, property):
            yield from _setting_problem(settings, name)


def _setting_problem(settings: Settings, name: str) -> Iterator[Finding]:
    from cubin_runtime.errors import SettingError

    try:
        getattr(settings, name)
    except SettingError as error:
        yield Finding("fail", f"setting {name}", str(error), "correct the variable, or unset it")


def _kernels(settings: Settings) -> Iterator[Finding]:
    from cubin_runtime.errors import CubinRuntimeError
    from cubin_runtime.manifest import default_manifest
    from kernel_meta.tables import all_rows

    try:
        rows, manifest = all_rows(), default_manifest()
        absent, bad = _local_state(settings)
    except CubinRuntimeError as error:
        yield Finding("fail", "kernels", str(error), "reinstall cubin-runtime, or correct what it names")
        return
    yield Finding(
        "ok", "tables", f"{len(rows)} kernels, {sum(row.resources is not None for row in rows)} built"
    )
    yield Finding("ok", "manifest", f"{len(manifest.artifacts)} cubins, from {manifest.source}")
    stale = [row.name for row in rows if row.resources and row.name not in manifest.artifacts]
    if stale:
        yield Finding(
            "fail", "manifest", f"lacks {', '.join(stale)}", "reinstall, or run scripts/build_cubins.py"
        )
    for problem in bad:
        yield Finding("fail", "stores", problem, "remove or replace that file")
    yield from _availability(absent, len(manifest.artifacts), settings)


def _local_state(settings: Settings) -> tuple[list[str], list[str]]:
    """Names of cubins that no store of this machine has, and problems of those that some store has."""
    from cubin_runtime.cli.stores import copies
    from cubin_runtime.manifest import default_manifest
    from kernel_meta.tables import all_rows

    artifacts = default_manifest().artifacts
    absent, bad = [], []
    for row in all_rows():
        if row.name in artifacts:
            found = copies(artifacts[row.name], row, settings)
            bad += [copy.problem for copy in found if copy.problem]
            if not any(copy.state == "ok" for copy in found):
                absent.append(row.name)
    return absent, bad


def _availability(absent: list[str], total: int, settings: Settings) -> Iterator[Finding]:
    from cubin_runtime.settings import MIRRORS, OFFLINE

    mirrors = _without_password(", ".join(settings.mirrors))
    if not absent:
        yield Finding("ok", "stores", f"all {total} cubins are on this machine")
    elif settings.mirrors and not settings.offline:
        yield Finding("ok", "stores", f"{len(absent)} of {total} cubins come from {mirrors}")
    else:
        remedy = f"unset {OFFLINE}" if settings.mirrors else f"set {MIRRORS}"
        yield Finding("warn", "stores", f"{len(absent)} of {total} cubins are not on this machine", remedy)


def _blocked(settings: Settings) -> Iterator[Finding]:
    from cubin_runtime.blocklist import blocked_rows
    from cubin_runtime.errors import CubinRuntimeError

    try:
        names = blocked_rows(settings)
    except CubinRuntimeError as error:
        yield Finding("fail", "block list", str(error), "no kernel is chosen until it can be read")
        return
    for name, reason in names.items():
        yield Finding("warn", "block list", f"{name}: {reason}")


def _cache(settings: Settings) -> Iterator[Finding]:
    from cubin_runtime.errors import SettingError
    from cubin_runtime.settings import CACHE_DIR

    try:
        folder = settings.cache_dir
    except SettingError:
        return  # already a finding
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        detail = f"{folder} cannot be written ({existing}: {_owner(existing)})"
        yield Finding(
            "warn", "cache", detail, f"downloads are not kept; set {CACHE_DIR} to a folder of yours"
        )
    elif existing.stat().st_mode & 0o002 and existing == folder:
        yield Finding("warn", "cache", f"{folder} can be written by everyone", f"chmod o-w {folder}")
    else:
        yield Finding(
            "ok", "cache", f"{folder}" if existing == folder else f"{folder} (made when first needed)"
        )


def _owner(path: Path) -> str:
    status = path.stat()
    return f"owner {status.st_uid}, mode {status.st_mode & 0o7777:o}, we are {os.geteuid()}"
