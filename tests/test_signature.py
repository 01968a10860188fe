from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cubin_runtime.errors import ManifestError, SettingError, SignatureError
from cubin_runtime.manifest import added_manifests, load_manifest
from cubin_runtime.settings import Settings
from cubin_runtime.signature import check_signature

ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519", reason="no cryptography")
serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")

CONTENT = b"format: 1\nsets: {}\n"


def public_pem(key: object) -> bytes:
    encoding = serialization.Encoding.PEM
    pem = key.public_bytes(encoding, serialization.PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined]  # any kind of key
    assert isinstance(pem, bytes)
    return pem


class Signer:
    def __init__(self, folder: Path, name: str) -> None:
        self._key = ed25519.Ed25519PrivateKey.generate()
        self.trusted = folder / f"{name}.pem"
        self.trusted.write_bytes(public_pem(self._key.public_key()))

    def sign(self, path: Path) -> None:
        path.with_name(path.name + ".sig").write_bytes(self._key.sign(path.read_bytes()))


@pytest.fixture
def signer(tmp_path: Path) -> Callable[[str], Signer]:
    return lambda name: Signer(tmp_path, name)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "m.yaml"
    path.write_bytes(CONTENT)
    return path


def test_a_trusted_key_has_signed_it(manifest: Path, signer: Callable[[str], Signer]) -> None:
    ours, other = signer("ours"), signer("other")
    ours.sign(manifest)
    assert check_signature(CONTENT, manifest, [other.trusted, ours.trusted]) == ours.trusted
    assert load_manifest(manifest, [ours.trusted]).artifacts == {}
    with pytest.raises(SignatureError, match=r"not the signature .*other\.pem"):
        check_signature(CONTENT, manifest, [other.trusted])
    with pytest.raises(SignatureError, match=r"none, as CUBIN_RUNTIME_TRUSTED_KEYS"):
        check_signature(CONTENT, manifest, [])


def test_any_change_breaks_it(manifest: Path, signer: Callable[[str], Signer]) -> None:
    ours = signer("ours")
    ours.sign(manifest)
    file = manifest.with_name("m.yaml.sig")
    signature = file.read_bytes()
    for wrong in (b"", signature[:-1], signature + b"\n", bytes(64), signature[:-1] + b"x"):
        file.write_bytes(wrong)
        with pytest.raises(SignatureError, match="not the signature"):
            check_signature(CONTENT, manifest, [ours.trusted])
    file.write_bytes(signature)
    with pytest.raises(SignatureError, match="not the signature"):
        check_signature(CONTENT + b"#", manifest, [ours.trusted])
    file.unlink()
    with pytest.raises(SignatureError, match=r"m\.yaml is not signed: No such file"):
        check_signature(CONTENT, manifest, [ours.trusted])


def test_one_file_may_hold_several_keys(
    manifest: Path, tmp_path: Path, signer: Callable[[str], Signer]
) -> None:
    ours, other = signer("ours"), signer("other")
    ours.sign(manifest)
    both = tmp_path / "both.pem"
    both.write_bytes(b"# keys\n" + other.trusted.read_bytes() + ours.trusted.read_bytes())
    assert check_signature(CONTENT, manifest, [both]) == both


def test_private_manifests_must_be_signed_once_keys_are_named(
    manifest: Path, signer: Callable[[str], Signer]
) -> None:
    ours = signer("ours")
    environ = {"CUBIN_RUNTIME_MANIFESTS": str(manifest)}
    assert len(added_manifests(Settings(environ))) == 1
    environ["CUBIN_RUNTIME_TRUSTED_KEYS"] = str(ours.trusted)
    with pytest.raises(SignatureError, match="is not signed") as caught:
        added_manifests(Settings(environ))
    assert isinstance(caught.value, ManifestError)
    assert caught.value.exit_code == 4
    ours.sign(manifest)
    assert len(added_manifests(Settings(environ))) == 1


def test_a_file_without_a_usable_key_is_a_setting_error(
    manifest: Path, tmp_path: Path, signer: Callable[[str], Signer]
) -> None:
    signer("ours").sign(manifest)
    ec = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ec")
    bad = {
        "absent.pem": None,
        "empty.pem": b"",
        "torn.pem": b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----",
        "other_kind.pem": public_pem(ec.generate_private_key(ec.SECP256R1()).public_key()),
    }
    for name, content in bad.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(SettingError, match=re.escape("CUBIN_RUNTIME_TRUSTED_KEYS: ")) as caught:
            check_signature(CONTENT, manifest, [path])
        assert name in str(caught.value)


def test_without_the_package_the_message_names_the_extra(
    manifest: Path, monkeypatch: pytest.MonkeyPatch, signer: Callable[[str], Signer]
) -> None:
    ours = signer("ours")
    ours.sign(manifest)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    with pytest.raises(SignatureError, match=r"cubin-runtime\[signing\]"):
        check_signature(CONTENT, manifest, [ours.trusted])


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl program")
def test_the_documented_openssl_commands_sign(manifest: Path, tmp_path: Path) -> None:
    from cubin_runtime import signature

    commands = re.findall(r"^    (openssl .*)$", signature.__doc__ or "", re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    trusted = tmp_path / "trusted.pem"
    assert check_signature(CONTENT, manifest, [trusted]) == trusted
