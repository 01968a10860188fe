"""Options that several verbs share: which cubins they are about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cubin_runtime.manifest import Artifact
    from kernel_meta.schema import KernelRow, Step

Arch = Annotated[
    list[str] | None, typer.Option("--arch", help="Cubins that run on this device, such as sm_90a or 10.3.")
]
Family = Annotated[
    list[str] | None,
    typer.Option("--family", help="Cubins of this family, such as fmha_sm90, or set of the manifest."),
]
Row = Annotated[list[str] | None, typer.Option("--row", help="Cubins whose name matches this glob.")]
All = Annotated[bool, typer.Option("--all", help="Every cubin of the manifest.")]


def choose(
    arch: list[str] | None, family: list[str] | None, row: list[str] | None, everything: bool
) -> list[Artifact]:
    """The cubins that match one value of each option given, each digest once, in the manifest's order."""
    from fnmatch import fnmatchcase

    from cubin_runtime.manifest import default_manifest

    if everything == bool(arch or family or row):
        raise typer.BadParameter("expected either --all or some of --arch, --family and --row")
    # Reading the tables takes longer than all the rest.
    names, families = _names_for(arch) if arch else set(), _families() if family else {}
    found = {
        artifact.sha256: artifact
        for artifact in default_manifest().artifacts.values()
        if (not arch or artifact.name in names)
        and (not family or artifact.set_name in family or families.get(artifact.name) in family)
        and (not row or any(fnmatchcase(artifact.name, pattern) for pattern in row))
    }
    if not found:
        raise typer.BadParameter("no cubin matches; `cubin-runtime list` shows those that there are")
    return list(found.values())


def _families() -> dict[str, str]:
    """Family by the name of a kernel; a set that others publish is called otherwise."""
    from kernel_meta.tables import all_rows

    return {row.name: row.family for row in all_rows()}


def _names_for(archs: list[str]) -> set[str]:
    """Names of the kernels that run on one of these devices. A cubin without a row has no known target."""
    from cubin_runtime.request import Architecture
    from kernel_meta.tables import all_rows, all_steps

    capabilities = [Architecture.parse(text).capability for text in archs]
    kernels: list[KernelRow | Step] = [*all_rows(), *all_steps()]
    return {kernel.name for kernel in kernels if any(map(kernel.architecture.runs_on, capabilities))}
