"""Cubins that must not run, by what they are rather than by what they are called.

A list has a line for each: its sha256, then the reason. Empty lines and those that begin with # say nothing.
CUBIN_RUNTIME_BLOCKLIST names a file of such lines, CUBIN_RUNTIME_BLOCKED holds some itself; both count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from cubin_runtime.errors import BlockedError, SettingError
from cubin_runtime.manifest import Artifact, Manifest, default_manifest
from cubin_runtime.settings import ALLOW_BLOCKED, BLOCKED, BLOCKLIST, Settings, settings, warn_once

_LINE = re.compile(r"([0-9a-fA-F]{64})\s+(\S.*)")


def read_blocklist(settings: Settings = settings) -> dict[str, str]:
    """Reasons by sha256. Raises SettingError for a list that cannot be read: a typo must not unblock."""
    found = dict(_entries(BLOCKED, settings.blocked))
    path = settings.blocklist
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(f"{BLOCKLIST}: cannot read {path}: {error}") from None
        found.update(_entries(str(path), lines))
    return found


def blocked_rows(settings: Settings = settings, manifest: Manifest | None = None) -> dict[str, str]:
    """Reasons by the name of each kernel that must not be chosen, overrides left out.

    manifest    says which bytes a name stands for; default: that of the package
    """
    listed = read_blocklist(settings)
    if not listed:
        return {}
    artifacts = (manifest or default_manifest()).artifacts.values()
    forbidden = listed.keys() - settings.allow_blocked
    return {a.name: _spell(a, listed[a.sha256]) for a in artifacts if a.sha256 in forbidden}


def refuse_blocked(artifact: Artifact, settings: Settings = settings) -> None:
    """Raises BlockedError for a cubin on the list; warns, once, if it is there but may run nevertheless."""
    reason = read_blocklist(settings).get(artifact.sha256)
    if reason is None:
        return
    if artifact.sha256 not in settings.allow_blocked:
        raise BlockedError(f"{artifact.name} must not run: {_spell(artifact, reason)}")
    warn_once(f"{artifact.name} runs although it is blocked ({reason}), because {ALLOW_BLOCKED} says so")


def _entries(source: str, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(map(str.strip, lines), start=1):
        if line and not line.startswith("#"):
            match = _LINE.fullmatch(line)
            if not match:
                raise SettingError(
                    f"{source}: entry {number} is {line[:80]!r}; expected a sha256 of 64 digits and a reason"
                )
            yield match[1].lower(), match[2]


def _spell(artifact: Artifact, reason: str) -> str:
    return f"{reason} (sha256 {artifact.sha256}; {ALLOW_BLOCKED} overrides)"
