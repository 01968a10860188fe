"""Every exception that this package raises, as one tree.

CubinRuntimeError
  InvalidArgumentError (ValueError)      an argument of a call is wrong
  UnsupportedError (NotImplementedError) a combination that the contract excludes
  NoKernelError (LookupError)            no row of the kernel tables fits the request
  SettingError (ValueError)              a CUBIN_RUNTIME_* variable holds a bad value
  TableError (ValueError)                a kernel table is malformed
  ManifestError (ValueError)             a cubin manifest is malformed
    SignatureError                       no trusted key has signed it
  CubinFormatError (ValueError)          a file is no cubin, or not the one its row describes
  ArtifactError (OSError)                a cubin cannot be had
    ArtifactNotFoundError                no store has it
    DownloadError                        no mirror delivered it
    OfflineError                         it would need the network, and offline mode is on
    IntegrityError                       the bytes are not those that the manifest names
    StoreWriteError                      the cache directory cannot take it
    BlockedError                         the block list forbids it
  DriverError (RuntimeError)             a CUDA driver call failed
    DriverNotFoundError                  there is no CUDA driver, or no usable device

Each also derives from the builtin that callers tend to catch. `exit_code` is what the command line
exits with when the exception ends it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from cubin_runtime.selection import Selection


class CubinRuntimeError(Exception):
    """Base of all errors raised by this package."""

    exit_code = 1


class InvalidArgumentError(CubinRuntimeError, ValueError):
    """An argument is wrong; the message names it, what was given and what was expected."""

    exit_code = 2


def refuse(argument: str, given: str, expected: str) -> NoReturn:
    """Raises InvalidArgumentError, such as "query is on cpu; expected a CUDA device"."""
    raise InvalidArgumentError(f"{argument} {given}; expected {expected}")


class UnsupportedError(CubinRuntimeError, NotImplementedError):
    """The arguments are well formed, but the contract excludes their combination."""

    exit_code = 2


class NoKernelError(CubinRuntimeError, LookupError):
    """No row of the kernel tables fits. `selection` holds the reasons for every row."""

    exit_code = 3

    def __init__(self, message: str, selection: Selection) -> None:
        super().__init__(message)
        self.selection = selection


class SettingError(CubinRuntimeError, ValueError):
    """An environment variable of this package holds a value that cannot be used."""

    exit_code = 2


class TableError(CubinRuntimeError, ValueError):
    """A kernel table (table.yaml) is malformed."""


class ManifestError(CubinRuntimeError, ValueError):
    """A cubin manifest is malformed."""


class SignatureError(ManifestError):
    """A manifest bears no valid signature of a trusted key."""

    exit_code = 4


class CubinFormatError(CubinRuntimeError, ValueError):
    """The bytes are no cubin, or a cubin other than its table row describes."""

    exit_code = 4


class ArtifactError(CubinRuntimeError, OSError):
    """A cubin cannot be had."""


class ArtifactNotFoundError(ArtifactError):
    """No configured store holds the cubin."""


class DownloadError(ArtifactError):
    """Every mirror failed; the message lists each URL with its reason."""


class OfflineError(ArtifactError):
    """The cubin is in no local store and offline mode forbids a download."""

    exit_code = 5


class IntegrityError(ArtifactError):
    """Size or sha256 differ from the manifest."""

    exit_code = 4


class StoreWriteError(ArtifactError):
    """The cache directory cannot take the file (read-only, full, not ours)."""


class BlockedError(ArtifactError):
    """The block list names the cubin; the message has the reason."""

    exit_code = 3


class DriverError(CubinRuntimeError, RuntimeError):
    """A CUDA driver call failed. `code` is the CUresult's number, `name` its name."""

    def __init__(self, message: str, code: int = 0, name: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.name = name


class DriverNotFoundError(DriverError):
    """No CUDA driver library, or no device that it can use."""
