"""`cubin-runtime list`: the kernels that exist."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cubin_runtime.cli.output import Json, note, print_json, print_table

if TYPE_CHECKING:
    from cubin_runtime.manifest import Artifact


def list_kernels(
    pattern: Annotated[str, typer.Argument(help="Only names that match this glob.")] = "*",
    as_json: Json = False,
) -> None:
    """List the kernels in the tables, with their resources, digests, and whether they are blocked."""
    from fnmatch import fnmatchcase

    from cubin_runtime.blocklist import blocked_rows
    from cubin_runtime.manifest import default_manifest
    from kernel_meta.tables import all_rows

    manifest = default_manifest()
    artifacts, blocked = manifest.artifacts, blocked_rows(manifest=manifest)
    rows = [row for row in all_rows() if fnmatchcase(row.name, pattern)]
    if as_json:
        print_json(
            [
                {
                    "name": row.name,
                    "row": row,
                    "artifact": artifacts.get(row.name),
                    "blocked": blocked.get(row.name),
                }
                for row in rows
            ]
        )
        return
    lines = []
    for row in rows:
        artifact, facts = artifacts.get(row.name), row.resources
        lines.append(
            (
                row.name,
                f"{facts.threads}" if facts else "-",
                f"{facts.shared_memory + facts.static_shared_memory}" if facts else "-",
                f"{artifact.size}" if artifact else "-",
                _digest(artifact, row.name in blocked),
            )
        )
    print_table(("kernel", "threads", "shared bytes", "cubin bytes", "sha256"), lines)
    marked = sum(row.name in blocked for row in rows)
    note(f"kernels: {len(rows)}" + (f", blocked: {marked} (`show` has the reasons)" if marked else ""))


def _digest(artifact: Artifact | None, is_blocked: bool) -> str:
    if artifact is None:
        return "not built"
    return artifact.sha256[:12] + (" blocked" if is_blocked else "")
