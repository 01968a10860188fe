"""`cubin-runtime bundle`: cubins for machines without a network, and for mirrors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cubin_runtime.cli import chosen
from cubin_runtime.cli.fetch import Dest, Jobs, Mirrors, bring, report, settings_for
from cubin_runtime.cli.output import Json, note

if TYPE_CHECKING:
    from cubin_runtime.bundle import Bundle
    from cubin_runtime.manifest import Artifact

bundle = typer.Typer(
    help="Carry cubins to machines without a network, and lay out mirrors.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bundle.command("export")
def export_bundle(
    file: Annotated[Path, typer.Argument(help="Archive to write, a tar.")],
    arch: chosen.Arch = None,
    family: chosen.Family = None,
    row: chosen.Row = None,
    everything: chosen.All = False,
) -> None:
    """Pack cubins that are on this machine into one archive."""
    from cubin_runtime.bundle import export

    artifacts = chosen.choose(arch, family, row, everything)
    export(file, artifacts)
    note(f"cubins: {len(artifacts)}, in {file}: {file.stat().st_size} bytes")


@bundle.command("import")
def import_bundle(
    file: Annotated[Path, typer.Argument(help="Archive that `bundle export` wrote.")],
    dest: Dest = None,
    as_json: Json = False,
) -> None:
    """Verify the cubins of an archive against this package's manifest, and keep them."""
    from cubin_runtime.batch import fetch_all
    from cubin_runtime.cache import WritableStore
    from cubin_runtime.transfer import Transfers

    archive = _open(file)
    outcomes = fetch_all(
        _known(archive),
        Transfers([archive], timeout=3600.0),  # a slow disk is no reason to give up
        target=WritableStore("destination", dest) if dest else None,
        jobs=2,
    )
    report(outcomes, as_json)


@bundle.command("serve-layout")
def serve_layout(
    folder: Annotated[Path, typer.Argument(help="Folder that a web server or bucket will serve.")],
    arch: chosen.Arch = None,
    family: chosen.Family = None,
    row: chosen.Row = None,
    everything: chosen.All = False,
    mirror: Mirrors = None,
    jobs: Jobs = 8,
    as_json: Json = False,
) -> None:
    """Lay out cubins as a mirror: any web server or bucket can host the folder as it is."""
    from cubin_runtime.bundle import write_manifest

    artifacts = chosen.choose(arch, family, row, everything)
    report(bring(artifacts, folder, settings_for(mirror), jobs), as_json)
    note(f"manifest: {write_manifest(folder, artifacts)}")


def _open(file: Path) -> Bundle:
    from cubin_runtime.bundle import Bundle
    from cubin_runtime.errors import ArtifactNotFoundError

    try:
        return Bundle(file)
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise ArtifactNotFoundError(f"cannot read the bundle {file}: {error.strerror}") from None


def _known(archive: Bundle) -> list[Artifact]:
    """The files that the manifest vouches for; says which others the archive has."""
    from cubin_runtime.bundle import stale_sets
    from cubin_runtime.errors import ArtifactNotFoundError
    from cubin_runtime.manifest import default_manifest

    ours = default_manifest()
    known = {a.sha256: a for a in ours.artifacts.values() if a.key in archive.keys}
    for reason in stale_sets(archive.manifest(), ours):
        note(f"warning: {reason}")
    if not known:
        raise ArtifactNotFoundError(f"{archive.location} has no file that {ours.source} lists")
    return list(known.values())
