from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import msgspec
import pytest

from cubin_runtime.errors import IntegrityError
from cubin_runtime.integrity import verify
from cubin_runtime.manifest import Artifact
from cubin_runtime.settings import Settings
from cubin_runtime.store import Attempt, FolderStore, LocalStores, Located, locate, lookup_order

DATA = b"\x7fELF" + bytes(range(256)) * 40
ARTIFACT = Artifact(
    name="k", set_name="fmha_sm90", version="1.0", sha256=hashlib.sha256(DATA).hexdigest(), size=len(DATA)
)
WRONG = {
    "shorter": DATA[:-1],
    "longer": DATA + b"x",
    "changed": DATA[:-1] + b"x",
    "empty": b"",
}


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def put(folder: Path, data: bytes = DATA) -> Path:
    path = folder / ARTIFACT.key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_verify_takes_nothing_but_the_right_bytes(wrong: bytes) -> None:
    verify(ARTIFACT, DATA, "here")
    with pytest.raises(IntegrityError, match=r"^here is not k: .*expected"):
        verify(ARTIFACT, wrong, "here")


def test_folder_has_the_file_or_not(tmp_path: Path) -> None:
    store = FolderStore("folder", tmp_path / "stored")
    assert store.read(ARTIFACT) is None
    assert not store.holds(ARTIFACT)
    put(tmp_path / "stored")
    assert store.read(ARTIFACT) == DATA
    assert store.holds(ARTIFACT)
    assert store.location == str(tmp_path / "stored")


def test_a_file_in_place_of_a_folder_is_an_empty_store(tmp_path: Path) -> None:
    (tmp_path / "stored").write_bytes(b"")
    assert FolderStore("folder", tmp_path / "stored").read(ARTIFACT) is None


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_folder_is_verified_on_every_read(tmp_path: Path, wrong: bytes) -> None:
    store = FolderStore("folder", tmp_path)
    path = put(tmp_path)
    assert store.read(ARTIFACT) == DATA
    path.write_bytes(wrong)
    for look in (store.read, store.holds):
        with pytest.raises(IntegrityError, match=re.escape(str(path))):
            look(ARTIFACT)


def test_a_huge_file_is_not_read_whole(tmp_path: Path) -> None:
    path = put(tmp_path)
    os.truncate(path, 2**40)  # sparse; reading it whole would not fit into memory
    store = FolderStore("folder", tmp_path)
    for look in (store.read, store.holds):
        with pytest.raises(IntegrityError, match=f"more than {len(DATA)} bytes"):
            look(ARTIFACT)


def test_order_of_the_local_stores() -> None:
    settings = Settings({"CUBIN_RUNTIME_ARTIFACT_DIR": "/e1:/e2", "CUBIN_RUNTIME_CACHE_DIR": "/c"})
    stores = [(store.name, store.location) for store in lookup_order(settings, ARTIFACT, "/f")]
    embedded = str(Path(__file__).parent.parent / "kernel_meta" / "fmha_sm90" / "cubins")
    assert stores == [
        ("folder", "/f"),
        ("environment", "/e1"),
        ("environment", "/e2"),
        ("embedded", embedded),
        ("cache", "/c"),
    ]
    assert [store.name for store in lookup_order(Settings({}), ARTIFACT)] == ["embedded", "cache"]


@pytest.mark.parametrize("holder", range(3))
def test_lookup_falls_through_to_the_store_that_has_it(tmp_path: Path, holder: int) -> None:
    stores = [FolderStore(name, tmp_path / name) for name in ("folder", "environment", "cache")]
    put(stores[holder].folder)
    attempts: list[Attempt] = []
    found = locate(ARTIFACT, stores, attempts)
    assert found == Located(DATA, stores[holder].name, str(stores[holder].path(ARTIFACT)), tuple(attempts))
    assert [attempt.store for attempt in attempts] == [store.name for store in stores[:holder]]
    assert all("no file" in attempt.answer and not attempt.corrupt for attempt in attempts)


def test_first_store_wins_and_later_ones_are_not_asked(tmp_path: Path) -> None:
    put(tmp_path / "a")
    put(tmp_path / "b", b"rotten")
    attempts: list[Attempt] = []
    found = locate(ARTIFACT, (FolderStore(name, tmp_path / name) for name in "ab"), attempts)
    assert found is not None
    assert (found.store, attempts) == ("a", [])


def test_a_wrong_file_is_passed_over_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = put(tmp_path / "a", b"rotten")
    right = put(tmp_path / "b")
    stores = [FolderStore(name, tmp_path / name) for name in "ab"]
    for _ in range(2):
        found = locate(ARTIFACT, stores, [])
        assert found is not None
        assert (found.store, found.path) == ("b", str(right))
        assert [attempt.corrupt for attempt in found.attempts] == [True]
    assert len(caplog.records) == 1
    assert str(wrong) in caplog.text
    assert "remove or replace" in caplog.text


def test_an_unreadable_store_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a" / ARTIFACT.key).mkdir(parents=True)  # opening a folder fails, also for root
    put(tmp_path / "b")
    found = locate(ARTIFACT, [FolderStore(name, tmp_path / name) for name in "ab"], [])
    assert found is not None
    assert found.store == "b"
    assert "Is a directory" in found.attempts[0].answer
    assert not found.attempts[0].corrupt


def test_nothing_found_is_none_with_all_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path / "a", b"rotten")
    attempts: list[Attempt] = []
    assert locate(ARTIFACT, [FolderStore(name, tmp_path / name) for name in "ab"], attempts) is None
    assert [(attempt.store, attempt.corrupt) for attempt in attempts] == [("a", True), ("b", False)]
    assert not caplog.records


PUBLISHED = msgspec.structs.replace(ARTIFACT, set_name="some_release", published="0a1b/fmha/k.cubin")


def publish(folder: Path, data: bytes = DATA) -> Path:
    path = folder / "0a1b/fmha/k.cubin"
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    return path


def test_a_folder_may_have_the_publishers_layout(tmp_path: Path) -> None:
    path = publish(tmp_path)
    store = FolderStore("folder", tmp_path)
    assert store.read(PUBLISHED) == DATA
    assert store.place(PUBLISHED) == str(path)
    assert store.read(ARTIFACT) is None
    path.write_bytes(DATA[:-1])
    with pytest.raises(IntegrityError, match=r"k\.cubin is not k"):
        store.read(PUBLISHED)


def test_an_installed_package_is_a_store_and_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_release"
    path = publish(package / "cubins")
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    settings = Settings({"CUBIN_RUNTIME_CACHE_DIR": str(tmp_path / "cache")})
    found = locate(PUBLISHED, lookup_order(settings, PUBLISHED), [])
    assert found is not None
    assert (found.store, found.path) == ("package", str(path))
    names = [store.name for store in lookup_order(settings, PUBLISHED)]
    assert names == ["embedded", "package", "cache"]


def test_files_share_their_stores_if_they_are_of_one_set_and_as_public(tmp_path: Path) -> None:
    settings = Settings({"CUBIN_RUNTIME_CACHE_DIR": str(tmp_path)})
    stores = LocalStores(settings)
    renamed, other = (
        msgspec.structs.replace(ARTIFACT, **change) for change in ({"name": "l"}, {"set_name": "ours"})
    )
    assert stores.of(renamed) is stores.of(ARTIFACT)
    for each in (ARTIFACT, other, PUBLISHED):
        expected = [(store.name, store.location) for store in lookup_order(settings, each)]
        assert [(store.name, store.location) for store in stores.of(each)] == expected


@pytest.mark.parametrize("name", ["no_such_release_anywhere", "not.a.package", "os"])
def test_without_the_package_there_is_no_such_store(tmp_path: Path, name: str) -> None:
    artifact = msgspec.structs.replace(PUBLISHED, set_name=name)
    settings = Settings({"CUBIN_RUNTIME_CACHE_DIR": str(tmp_path)})
    assert [store.name for store in lookup_order(settings, artifact)] == ["embedded", "cache"]
