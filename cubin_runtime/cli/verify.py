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

_UNSIGNED = (
    "this release is not signed: its manifest is as trustworthy as the package that it came in. To vouch for "
    "it yourself, sign it with an ed25519 key of yours into {} (cubin_runtime/signature.py has the commands) "
    "and give the public key with --key"
)


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
    """Check every local copy of every cubin against manifest and table. Exits with 4 if one is bad.

    With --signature, also if a manifest is not signed by a trusted key; that of the package comes unsigned.
    """
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
    unsigned = sum(copy.state == "unsigned" for _, copy in results)
    bad = sum(copy.state != "ok" for _, copy in results) - unsigned
    note(
        f"files checked: {len(results)}, bad: {bad}"
        + (" (remove or replace them)" if bad else "")
        + (f", unsigned: {unsigned}" if unsigned else "")
    )
    if bad or unsigned:
        raise typer.Exit(INTEGRITY)


def _signatures(keys: Sequence[Path] | None) -> Iterator[tuple[str, Copy]]:
    """Whether a trusted key has signed the package's manifest and each that was added."""
    from cubin_runtime.cli.stores import Copy
    from cubin_runtime.errors import SignatureError
    from cubin_runtime.manifest import package_manifest, read_manifest
    from cubin_runtime.settings import settings
    from cubin_runtime.signature import check_signature, signature_file

    for path in (package_manifest(), *settings.manifests):
        if path == package_manifest() and not signature_file(path).exists():
            yield path.name, Copy("manifest", str(path), "unsigned", _UNSIGNED.format(signature_file(path)))
            continue
        try:
            signer = check_signature(read_manifest(path), path, keys or settings.trusted_keys)
        except SignatureError as error:
            yield path.name, Copy("manifest", str(path), "bad", str(error))
        else:
            yield path.name, Copy("manifest", f"{path}, signed by {signer}", "ok")
