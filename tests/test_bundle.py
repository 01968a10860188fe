from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubin_runtime.batch import fetch_all
from cubin_runtime.bundle import Bundle, export, stale_sets, write_manifest
from cubin_runtime.cache import WritableStore
from cubin_runtime.errors import ArtifactNotFoundError, IntegrityError, StoreWriteError
from cubin_runtime.manifest import FILE_NAME, Artifact, Manifest, load_manifest
from cubin_runtime.settings import Settings
from cubin_runtime.transfer import Transfers

CONTENTS = {f"k{n}": bytes([n]) * (700 * n) for n in range(1, 4)}


def artifact(name: str, data: bytes, version: str = "1.0") -> Artifact:
    digest = hashlib.sha256(data).hexdigest()
    return Artifact(name=name, set_name="s", version=version, sha256=digest, size=len(data))


ARTIFACTS = [artifact(name, data) for name, data in CONTENTS.items()]
KEYS = frozenset(a.key for a in ARTIFACTS)


@pytest.fixture
def source(tmp_path: Path) -> Settings:
    """Settings of a machine that has the files."""
    store = WritableStore("folder", tmp_path / "source")
    for each in ARTIFACTS:
        store.write(each, CONTENTS[each.name])
    return Settings(
        {
            "CUBIN_RUNTIME_ARTIFACT_DIR": str(tmp_path / "source"),
            "CUBIN_RUNTIME_CACHE_DIR": str(tmp_path / "none"),
        }
    )


@pytest.fixture
def archive(tmp_path: Path, source: Settings) -> Path:
    path = tmp_path / "b.tar"
    export(path, ARTIFACTS, source)
    return path


def unpack(path: Path, target: Path) -> list[object]:
    """Imports everything, and returns what failed."""
    empty = Settings({"CUBIN_RUNTIME_CACHE_DIR": str(target.parent / "none")})
    store = WritableStore("destination", target)
    outcomes = fetch_all(ARTIFACTS, Transfers([Bundle(path)], 5), target=store, settings=empty)
    return [outcome.error for outcome in outcomes if outcome.error]


def test_round_trip(archive: Path, tmp_path: Path) -> None:
    bundle = Bundle(archive)
    assert bundle.keys == KEYS
    assert bundle.manifest().artifacts == {a.name: a for a in ARTIFACTS}
    assert unpack(archive, tmp_path / "out") == []
    for each in ARTIFACTS:
        assert (tmp_path / "out" / each.key).read_bytes() == CONTENTS[each.name]


def test_the_same_contents_give_the_same_bytes(archive: Path, tmp_path: Path, source: Settings) -> None:
    again = tmp_path / "again.tar"
    os.utime(tmp_path / "source" / ARTIFACTS[0].key, (0, 0))
    export(again, reversed(ARTIFACTS), source)
    assert again.read_bytes() == archive.read_bytes()


def test_tar_unpacks_it_into_a_store_and_may_pack_it_again(archive: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    subprocess.run(["tar", "xf", archive, "-C", tree], check=True)
    settings = Settings({"CUBIN_RUNTIME_ARTIFACT_DIR": str(tree), "CUBIN_RUNTIME_CACHE_DIR": "/nowhere"})
    export(tmp_path / "again.tar", ARTIFACTS, settings)
    assert (tmp_path / "again.tar").read_bytes() == archive.read_bytes()
    subprocess.run(["tar", "cf", tmp_path / "packed.tar", "-C", tree, "."], check=True)
    assert Bundle(tmp_path / "packed.tar").keys == KEYS
    assert unpack(tmp_path / "packed.tar", tmp_path / "out") == []


def test_what_is_missing_is_named_and_nothing_is_written(tmp_path: Path, source: Settings) -> None:
    with pytest.raises(ArtifactNotFoundError, match=r"1 of 2 files .*\(other\).*cubin-runtime fetch"):
        export(tmp_path / "b.tar", [ARTIFACTS[0], artifact("other", b"x")], source)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_failed_export_leaves_the_old_archive(
    archive: Path, source: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = archive.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreWriteError, match=r"b\.tar: No space left"):
        export(archive, ARTIFACTS[:1], source)
    assert archive.read_bytes() == before
    assert sorted(path.name for path in archive.parent.iterdir()) == ["b.tar", "source"]


def member(name: str, data: bytes = b"", **changes: object) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in changes.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512)


KEY = ARTIFACTS[0].key
HOSTILE = {
    "absolute": member("/etc/passwd", b"x"),
    "outside": member("../../etc/passwd", b"x"),
    "inside and out": member(KEY[:3] + "../../x", b"x"),
    "nul": member("a\0b", b"x"),
    "other name": member("README", b"x"),
    "digest in a wrong folder": member("zz/" + KEY[3:], b"x"),
    "symbolic link": member(KEY, type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "hard link": member(KEY, type=tarfile.LNKTYPE, linkname="/etc/passwd"),
    "device": member(KEY, type=tarfile.CHRTYPE),
    "fifo": member(KEY, type=tarfile.FIFOTYPE),
    "pax header": member("pax", b"30 path=/etc/passwd\n", type=tarfile.XHDTYPE),
    "long name": member("././@LongLink", b"x", type=tarfile.GNUTYPE_LONGNAME),
    "folder with contents": member("ab", b"x", type=tarfile.DIRTYPE),
    "huge": member(KEY, size=2**33 - 1),
    "negative": member(KEY).replace(b"00000000000\0", b"\xff" * 8 + b"\xfe\0\0\0", 1),
    "no tar": b"x" * 4096,
    "page": b"<html>" + bytes(1000),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_archive_is_refused_before_anything_is_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "b.tar"
    path.write_bytes(content + bytes(1024))
    with pytest.raises(IntegrityError, match="is no bundle"):
        Bundle(path)


@pytest.mark.parametrize("content", [b"", member(KEY, CONTENTS["k1"]), bytes(100)])
def test_a_torn_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "b.tar"
    path.write_bytes(content)
    with pytest.raises(IntegrityError, match="is no bundle"):
        Bundle(path)


def test_an_archive_without_manifest_is_no_bundle(tmp_path: Path) -> None:
    path = tmp_path / "b.tar"
    path.write_bytes(member(KEY, CONTENTS["k1"]) + bytes(1024))
    with pytest.raises(IntegrityError, match="it is no bundle"):
        Bundle(path).manifest()


@pytest.mark.parametrize("data", [b"short", b"x" * 700], ids=["size", "bytes"])
def test_wrong_contents_are_not_imported(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "b.tar"
    path.write_bytes(member(KEY, data) + bytes(1024))
    errors = unpack(path, tmp_path / "out")
    assert isinstance(errors[0], IntegrityError)
    assert not any(path.is_file() for path in (tmp_path / "out").rglob("*"))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=8))
def test_any_damage_is_refused_or_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, position: int, damage: bytes
) -> None:
    folder = tmp_path_factory.mktemp("damage")
    buffer = io.BytesIO()
    for each in ARTIFACTS:
        buffer.write(member(each.key, CONTENTS[each.name]))
    content = buffer.getvalue() + bytes(1024)
    position %= len(content)
    (folder / "b.tar").write_bytes(content[:position] + damage + content[position + len(damage) :])
    try:
        unpack(folder / "b.tar", folder / "out")
    except IntegrityError:
        return
    for path in (folder / "out").rglob("*"):
        if path.is_file():
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name


def ours(version: str, *names: str, change: Callable[[bytes], bytes] = lambda data: data) -> Manifest:
    return Manifest(artifacts={n: artifact(n, change(CONTENTS[n]), version) for n in names})


def test_files_of_another_release_are_named_with_both_versions() -> None:
    bundle = ours("0.9", "k1", "k2")
    assert list(stale_sets(bundle, ours("1.0", "k1", "k2"))) == [], "the digest decides, not the version"
    (reason,) = stale_sets(bundle, ours("1.0", "k1", "k2", change=lambda data: data + b"x"))
    assert "2 files of s 0.9" in reason
    assert "version 1.0; export a bundle from that one" in reason
    (reason,) = stale_sets(ours("1.0+cu130", "k1"), ours("1.0", "k1", change=lambda data: data + b"x"))
    assert "with other bytes" in reason
    (reason,) = stale_sets(bundle, Manifest(artifacts={}))
    assert "CUBIN_RUNTIME_MANIFESTS" in reason


def test_a_tree_has_a_manifest_for_others(tmp_path: Path) -> None:
    path = write_manifest(tmp_path / "tree", ARTIFACTS)
    assert path == tmp_path / "tree" / FILE_NAME
    assert load_manifest(path).artifacts == {a.name: a for a in ARTIFACTS}
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreWriteError, match="cannot write"):
        write_manifest(tmp_path / "file" / "tree", ARTIFACTS)
