"""`cubin-runtime list`: the kernels that exist."""

from __future__ import annotations

from typing import Annotated

import typer

from cubin_runtime.cli.output import Json, note, print_json, print_table


def list_kernels(
    pattern: Annotated[str, typer.Argument(help="Only names that match this glob.")] = "*",
    as_json: Json = False,
) -> None:
    """List the kernels in the tables, with their resources and digests."""
    from fnmatch import fnmatchcase

    from cubin_runtime.manifest import default_manifest
    from kernel_meta.tables import all_rows

    artifacts = default_manifest().artifacts
    rows = [row for row in all_rows() if fnmatchcase(row.name, pattern)]
    if as_json:
        print_json([{"name": row.name, "row": row, "artifact": artifacts.get(row.name)} for row in rows])
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
                artifact.sha256[:12] if artifact else "not built",
            )
        )
    print_table(("kernel", "threads", "shared bytes", "cubin bytes", "sha256"), lines)
    note(f"kernels: {len(rows)}")
