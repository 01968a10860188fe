"""`cubin-runtime verify`: hashes every cubin on this machine again and reads what it says about itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cubin_runtime.cli.output import Json, note, print_json, print_table

if TYPE_CHECKING:
    from cubin_runtime.cli.stores import Copy
    from kernel_meta.schema import KernelRow, Step

INTEGRITY = 4


def verify(
    pattern: Annotated[str, typer.Argument(help="Only names that match this glob.")] = "*",
    signature: Annotated[
        bool, typer.Option("--signature", help="Also check who signed the manifests in use.")
    ] = False,
    key: Annotated[
        list[Path] | None,
        typer.Option(help="PEM file of a trusted key (default: CUBIN_RUNTIME_TRUSTED_KEYS)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every local copy of every cubin against manifest and table. Exits with 4 if one is bad."""
    from fnmatch import fnmatchcase

    from cubin_runtime.cli.stores import Copy, copies
    from cubin_runtime.manifest import default_manifest
    from kernel_meta.tables import all_rows, all_steps

    rows: dict[str, KernelRow | Step] = {row.name: row for row in all_rows()}
    rows |= {step.name: step for step in all_steps()}
    families = {row.family for row in rows.values()}
    results: list[tuple[str, Copy]] = list(_signatures(key)) if signature or key else []
    for name, artifact in default_manifest().artifacts.items():
        if not fnmatchcase(name, pattern):
            continue
        if name not in rows and artifact.set_name in families:
            results.append((name, Copy("manifest", "", "bad", "the manifest lists it, but no table has it")))
            continue
        found = [copy._replace(data=b"") for copy in copies(artifact, rows.get(name))]
        results += [(name, copy) for copy in found if copy.state != "absent"]
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


def _signatures(keys: Sequence[Path] | None) -> Iterator[tuple[str, Copy]]:
    """Whether a trusted key has signed the package's manifest and each that was added."""
    from cubin_runtime.cli.stores import Copy
    from cubin_runtime.errors import SignatureError
    from cubin_runtime.manifest import package_manifest, read_manifest
    from cubin_runtime.settings import settings
    from cubin_runtime.signature import check_signature

    for path in (package_manifest(), *settings.manifests):
        try:
            signer = check_signature(read_manifest(path), path, keys or settings.trusted_keys)
        except SignatureError as error:  # noqa: PERF203  one of few
            yield path.name, Copy("manifest", str(path), "bad", str(error))
        else:
            yield path.name, Copy("manifest", f"{path}, signed by {signer}", "ok")
