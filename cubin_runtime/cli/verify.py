"""`cubin-runtime verify`: hashes every cubin on this machine again and reads what it says about itself."""

from __future__ import annotations

from typing import Annotated

import typer

from cubin_runtime.cli.output import Json, note, print_json, print_table

INTEGRITY = 4


def verify(
    pattern: Annotated[str, typer.Argument(help="Only names that match this glob.")] = "*",
    as_json: Json = False,
) -> None:
    """Check every local copy of every cubin against manifest and table. Exits with 4 if one is bad."""
    from fnmatch import fnmatchcase

    from cubin_runtime.cli.stores import Copy, copies
    from cubin_runtime.manifest import default_manifest
    from kernel_meta.tables import all_rows

    rows = {row.name: row for row in all_rows()}
    results: list[tuple[str, Copy]] = []
    for name, artifact in default_manifest().artifacts.items():
        if not fnmatchcase(name, pattern):
            continue
        if name in rows:
            results += [(name, copy) for copy in copies(artifact, rows[name]) if copy.state != "absent"]
        else:
            results.append((name, Copy("manifest", "", "bad", "the manifest lists it, but no table has it")))
    if as_json:
        print_json(
            [
                {"kernel": name, "store": c.store, "state": c.state, "path": c.path, "problem": c.problem}
                for name, c in results
            ]
        )
    else:
        print_table(
            ("kernel", "store", "state", "path or problem"),
            [(name, c.store, c.state, c.problem or c.path) for name, c in results],
        )
    bad = sum(copy.state != "ok" for _, copy in results)
    note(f"files checked: {len(results)}, bad: {bad}" + (" (remove or replace them)" if bad else ""))
    if bad:
        raise typer.Exit(INTEGRITY)
