"""`cubin-runtime show`: everything that is known about one kernel."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cubin_runtime.cli.output import Json, print_json


def show(
    name: Annotated[str, typer.Argument(help="A kernel's name, as `list` prints it.")],
    as_json: Json = False,
) -> None:
    """Show a kernel: its table row, manifest entry, the stores that hold it, and what its cubin says.

    A kernel that the block list forbids is marked, with the reason.
    """
    facts = _collect(name)
    if as_json:
        print_json(facts)
        return
    for section, values in facts.items():
        if values is None:
            continue
        print(f"{section}: {values}" if isinstance(values, str) else section)
        if isinstance(values, dict):
            for key, value in values.items():
                print(f"  {key:<22}{_spell(value)}")
        elif isinstance(values, list):
            for copy in values:
                print(f"  {copy['store']:<12}{copy['state']:<12}{copy['problem'] or copy['path']}")


def _collect(name: str) -> dict[str, Any]:
    import msgspec

    from cubin_runtime.blocklist import blocked_rows
    from cubin_runtime.cli.stores import copies
    from cubin_runtime.cubin import inspect
    from cubin_runtime.manifest import default_manifest
    from kernel_meta.tables import find_row

    row = find_row(name)
    manifest = default_manifest()
    artifact = manifest.artifacts.get(name)
    found = copies(artifact, row) if artifact else []
    data = next((copy.data for copy in found if copy.state == "ok"), None)
    cubin = inspect(data) if data else None
    return {
        "kernel": name,
        "blocked": blocked_rows(manifest=manifest).get(name),
        "row": msgspec.to_builtins(row),
        "artifact": msgspec.to_builtins(artifact) if artifact else "not in the manifest",
        "stores": [{"store": c.store, "state": c.state, "path": c.path, "problem": c.problem} for c in found],
        "cubin": {
            "arch": str(cubin.arch),
            "compiler": cubin.compiler,
            **msgspec.to_builtins(cubin.kernels[row.entry_name]),
        }
        if cubin
        else "in no store of this machine",
    }


def _spell(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_spell(item) for item in value)
    return str(value)
