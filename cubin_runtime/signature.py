"""Who vouches for a manifest: detached ed25519 signatures, checked with the cryptography package.

The signature of `m.yaml` is the 64 bytes in `m.yaml.sig`, so that openssl is all that signing takes:

    openssl genpkey -algorithm ed25519 -out key.pem
    openssl pkey -in key.pem -pubout -out trusted.pem
    openssl pkeyutl -sign -rawin -inkey key.pem -in m.yaml -out m.yaml.sig

The package's own manifest comes unsigned: it can be trusted as far as the package that it is a part of, since
whoever could change the one could change the code that would check it. An operator who has looked at a
release signs its manifest in the same way, and `verify --signature` then tells whether it is still that one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cubin_runtime.errors import SettingError, SignatureError
from cubin_runtime.settings import TRUSTED_KEYS

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

SUFFIX = ".sig"

_PEM = re.compile(rb"-----BEGIN PUBLIC KEY-----.+?-----END PUBLIC KEY-----", re.DOTALL)


def signature_file(path: Path) -> Path:
    """Where the signature of a manifest is, or would be."""
    return path.with_name(path.name + SUFFIX)


def check_signature(content: bytes, path: Path, keys: Sequence[Path]) -> Path:
    """The file of `keys` that holds the key which signed `content`, which was read from `path`.

    keys    PEM files with one or more public keys each

    Raises SignatureError when no key did, SettingError for a file that holds no ed25519 key.
    """
    file = signature_file(path)
    try:
        with file.open("rb") as stream:
            signature = stream.read(65)
    except OSError as error:
        raise SignatureError(f"{path} is not signed: {error.strerror or error} ({file})") from None
    for key_file in keys:
        if any(_signed(key, signature, content) for key in _read_keys(key_file)):
            return key_file
    names = ", ".join(map(str, keys)) or f"none, as {TRUSTED_KEYS} is not set"
    raise SignatureError(f"{file} is not the signature of {path} by a trusted key ({names})")


def _signed(key: Ed25519PublicKey, signature: bytes, content: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, content)
    except InvalidSignature:
        return False
    return True


def _read_keys(path: Path) -> Iterator[Ed25519PublicKey]:
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError:
        raise SignatureError(
            "checking a signature takes the cryptography package: pip install 'cubin-runtime[signing]'"
        ) from None
    try:
        found = _PEM.findall(path.read_bytes())
        keys = [load_pem_public_key(pem) for pem in found]
    except (OSError, ValueError) as error:
        raise SettingError(f"{TRUSTED_KEYS}: cannot read a public key from {path}: {error}") from None
    for key in keys:
        if not isinstance(key, Ed25519PublicKey):
            raise SettingError(f"{TRUSTED_KEYS}: {path} holds a key that is not ed25519")
        yield key
    if not keys:
        raise SettingError(f"{TRUSTED_KEYS}: {path} holds no PEM public key")
