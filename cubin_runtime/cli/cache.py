"""`cubin-runtime cache`: the folder that downloads are kept in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated

import typer

from cubin_runtime.cli.output import Json, note, print_json, print_table

if TYPE_CHECKING:
    from cubin_runtime.cache import CacheEntry, CacheStore

INTEGRITY = 4

cache = typer.Typer(
    help="Look after the folder that downloads are kept in. Safe while others use it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@cache.command()
def path() -> None:
    """Print the folder. It need not exist yet."""
    from cubin_runtime.settings import settings

    print(settings.cache_dir)


@cache.command()
def ls(as_json: Json = False) -> None:
    """List the files, the one not used for longest first."""
    entries, names = _store().entries(), _names()
    if as_json:
        print_json(
            [
                {
                    "sha256": e.sha256,
                    "names": names.get(e.sha256, []),
                    "size": e.size,
                    "used": e.used,
                    "path": str(e.path),
                }
                for e in entries
            ]
        )
    else:
        print_table(
            ("sha256", "bytes", "last used", "name"),
            [
                (e.sha256[:12], str(e.size), _date(e.used), ", ".join(names.get(e.sha256, ["unknown"])))
                for e in entries
            ],
        )
    note(f"files: {len(entries)}, bytes: {sum(entry.size for entry in entries)}")


@cache.command()
def prune(
    max_size: Annotated[
        str | None,
        typer.Option(help="Size to get below, such as 2G (default: CUBIN_RUNTIME_CACHE_MAX_SIZE)."),
    ] = None,
    unused_for: Annotated[
        float | None, typer.Option(min=0, help="Days without use after which a file goes.")
    ] = None,
    unknown: Annotated[
        bool, typer.Option("--unknown", help="Also remove files that the manifest does not list.")
    ] = False,
) -> None:
    """Remove what broken-off downloads left, and the files that the options say."""
    from cubin_runtime.settings import parse_size, settings

    store, names = _store(), _names()
    abandoned = store.remove_abandoned()
    removed = [e for e in store.entries() if unknown and e.sha256 not in names and store.remove(e)]
    removed += store.prune(
        max_size=settings.cache_max_size if max_size is None else parse_size("--max-size", max_size),
        unused_for=None if unused_for is None else unused_for * 86400,
    )
    _report(removed)
    note(f"broken-off downloads removed: {abandoned}")


@cache.command()
def rm(
    names: Annotated[
        list[str] | None, typer.Argument(help="Globs of names, or digests from 6 digits on.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every file.")] = False,
) -> None:
    """Remove files. Whoever is reading one keeps it until then."""
    if everything == bool(names):
        raise typer.BadParameter("expected either names or --all")
    store, known = _store(), _names()
    entries = [e for e in store.entries() if everything or _matches(e, known.get(e.sha256, []), names or [])]
    if not entries and not everything:
        raise typer.BadParameter("no file in the cache matches; `cubin-runtime cache ls` shows them")
    _report([entry for entry in entries if store.remove(entry)])
    if everything:
        store.remove_abandoned()


@cache.command()
def verify(
    remove: Annotated[bool, typer.Option("--remove", help="Remove the files that are wrong.")] = False,
    as_json: Json = False,
) -> None:
    """Hash every file again. Exits with 4 if one is not what its name says."""
    store = _store()
    entries = store.entries()
    bad = [entry for entry in entries if not store.is_sound(entry)]
    if as_json:
        print_json([{"sha256": e.sha256, "path": str(e.path), "sound": e not in bad} for e in entries])
    else:
        for entry in bad:
            print(entry.path)
    removed = sum(store.remove(entry) for entry in bad) if remove else 0
    note(f"files checked: {len(entries)}, bad: {len(bad)}, removed: {removed}")
    if len(bad) > removed:
        raise typer.Exit(INTEGRITY)


def _store() -> CacheStore:
    from cubin_runtime.cache import CacheStore
    from cubin_runtime.settings import settings

    return CacheStore(settings.cache_dir)


def _names() -> dict[str, list[str]]:
    """Names by sha256."""
    from cubin_runtime.manifest import default_manifest

    names: dict[str, list[str]] = {}
    for artifact in default_manifest().artifacts.values():
        names.setdefault(artifact.sha256, []).append(artifact.name)
    return names


def _matches(entry: CacheEntry, names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(
        (len(pattern) >= 6 and entry.sha256.startswith(pattern.lower()))
        or any(fnmatchcase(name, pattern) for name in names)
        for pattern in patterns
    )


def _report(removed: Sequence[CacheEntry]) -> None:
    for entry in removed:
        print(entry.path)
    note(f"files removed: {len(removed)}, bytes: {sum(entry.size for entry in removed)}")


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
