"""Looks at every store of this machine, unlike a call, which stops at the first that has the file."""

from __future__ import annotations

from typing import NamedTuple

from cubin_runtime.cubin import check_row, inspect
from cubin_runtime.errors import CubinFormatError, IntegrityError
from cubin_runtime.manifest import Artifact
from cubin_runtime.settings import Settings, settings
from cubin_runtime.store import lookup_order
from kernel_meta.schema import KernelRow, Step


class Copy(NamedTuple):
    """What one store has for a kernel. state: ok, absent, bad (wrong bytes) or unreadable."""

    store: str
    path: str
    state: str
    problem: str = ""
    data: bytes = b""


def copies(artifact: Artifact, row: KernelRow | Step | None, settings: Settings = settings) -> list[Copy]:
    """The state of `artifact` in each store, in the order in which a call asks them.

    row    what the cubin has to say of itself; None = nothing is known, only its bytes are checked
    """
    found = []
    for store in lookup_order(settings, artifact):
        path = store.place(artifact)
        try:
            if row is None:  # there is nothing to read it for, and it may be large
                found.append(Copy(store.name, path, "ok" if store.holds(artifact) else "absent"))
                continue
            data = store.read(artifact)
            if data is not None:
                check_row(inspect(data), row)
        except (IntegrityError, CubinFormatError) as error:
            found.append(Copy(store.name, path, "bad", str(error)))
        except OSError as error:
            found.append(Copy(store.name, path, "unreadable", str(error)))
        else:
            found.append(Copy(store.name, path, "absent" if data is None else "ok", data=data or b""))
    return found
