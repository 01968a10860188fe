"""`cubin-runtime fetch`: brings cubins to this machine before anything needs them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cubin_runtime.cli import chosen
from cubin_runtime.cli.output import Json, note, print_json

if TYPE_CHECKING:
    from cubin_runtime.batch import Outcome
    from cubin_runtime.errors import ArtifactError
    from cubin_runtime.manifest import Artifact
    from cubin_runtime.settings import Settings

INTEGRITY = 4

Dest = Annotated[
    Path | None, typer.Option(help="Folder to bring them to (default: the cache, unless they are here).")
]
Mirrors = Annotated[
    list[str] | None,
    typer.Option("--mirror", help="Base URL, asked in the order given (default: CUBIN_RUNTIME_MIRRORS)."),
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, max=64, help="Files at a time.")]


def fetch(
    arch: chosen.Arch = None,
    family: chosen.Family = None,
    row: chosen.Row = None,
    everything: chosen.All = False,
    dest: Dest = None,
    mirror: Mirrors = None,
    jobs: Jobs = 8,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what is missing.")] = False,
    as_json: Json = False,
) -> None:
    """Download the cubins that are missing, several at a time. Exits with 4 for wrong bytes, 5 offline."""
    artifacts = chosen.choose(arch, family, row, everything)
    if dry_run:
        _report_missing(artifacts, dest, as_json)
    else:
        outcomes = bring(artifacts, dest, settings_for(mirror), jobs)
        report(outcomes, as_json)


def settings_for(mirrors: Sequence[str] | None) -> Settings:
    """The settings of the environment, with these mirrors if there are any."""
    from cubin_runtime.settings import MIRRORS, Settings

    return Settings({**os.environ, MIRRORS: " ".join(mirrors)} if mirrors else None)


def bring(artifacts: Sequence[Artifact], dest: Path | None, settings: Settings, jobs: int) -> list[Outcome]:
    """Brings all of them, and shows on stderr how it goes."""
    import gc

    from cubin_runtime.batch import fetch_all
    from cubin_runtime.cache import WritableStore
    from cubin_runtime.cli.progress import display
    from cubin_runtime.mirrors import open_mirrors
    from cubin_runtime.transfer import Transfers

    target = WritableStore("destination", dest) if dest else None
    with open_mirrors(settings, connections=jobs) as mirrors, display(artifacts) as shown:
        gc.freeze()  # else a thousand small files make the collector go through all modules several times
        return fetch_all(
            artifacts,
            Transfers(mirrors, settings.http_timeout),
            target=target,
            settings=settings,
            jobs=jobs,
            progress=shown.progress,
            done=shown.done,
        )


def report(outcomes: Sequence[Outcome], as_json: bool) -> None:
    """Prints the outcomes, and raises typer.Exit if one is a failure."""
    if as_json:
        print_json([_plain(outcome) for outcome in outcomes])
    new = [o.artifact.size for o in outcomes if o.fetched and o.fetched.is_new]
    errors = {o.artifact.name: o.error for o in outcomes if o.error}
    for line in _spell_errors(errors):
        note(line)
    note(
        f"cubins: {len(outcomes)}, fetched: {len(new)} ({sum(new)} bytes), "
        f"already there: {len(outcomes) - len(new) - len(errors)}, failed: {len(errors)}"
    )
    if errors:
        codes = {error.exit_code for error in errors.values()}
        raise typer.Exit(INTEGRITY if INTEGRITY in codes else max(codes))


def _spell_errors(errors: Mapping[str, ArtifactError]) -> Iterator[str]:
    """One error of each kind in full, since a thousand files mostly fail for one reason."""
    kinds: dict[type[ArtifactError], list[str]] = {}
    for name, error in errors.items():
        kinds.setdefault(type(error), []).append(name)
    for first, *others in kinds.values():
        yield f"error: {errors[first]}"
        if others:
            shown = ", ".join(others[:3]) + (" ..." if len(others) > 3 else "")
            yield f"{len(others)} more failed with the same kind of error (--json has each): {shown}"


def _plain(outcome: Outcome) -> dict[str, object]:
    artifact, fetched, error = outcome
    common = {"name": artifact.name, "sha256": artifact.sha256, "size": artifact.size}
    if fetched is None:
        return {**common, "state": "failed", "error": str(error)}
    return {
        **common,
        "state": "fetched" if fetched.is_new else "present",
        "store": fetched.store,
        "path": fetched.path,
        "source": fetched.source or None,
        "failures": [attempt.answer for attempt in fetched.attempts if attempt.store == "mirror"],
    }


def _report_missing(artifacts: Sequence[Artifact], dest: Path | None, as_json: bool) -> None:
    from cubin_runtime.download import holder
    from cubin_runtime.settings import settings
    from cubin_runtime.store import FolderStore, LocalStores

    local = LocalStores(settings)
    missing = [
        artifact
        for artifact in artifacts
        if not holder(artifact, [FolderStore("destination", dest)] if dest else local.of(artifact), [])
    ]
    if as_json:
        print_json([{"name": a.name, "sha256": a.sha256, "size": a.size} for a in missing])
    else:
        for artifact in missing:
            print(artifact.name)
    note(f"cubins: {len(artifacts)}, missing: {len(missing)} ({sum(a.size for a in missing)} bytes)")
