from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubin_runtime import manifest as manifest_module
from cubin_runtime.errors import ArtifactNotFoundError, ManifestError
from cubin_runtime.manifest import (
    MAX_SIZE,
    Artifact,
    Manifest,
    combined,
    default_manifest,
    load_manifest,
)

SHA = "0123456789abcdef" * 4

DIGEST = st.text("0123456789abcdef", min_size=64, max_size=64)
NAME = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,30}", fullmatch=True)


def artifact(
    name: str = "k", set_name: str = "s", version: str = "1.0", sha256: str = SHA, size: int = 9
) -> Artifact:
    return Artifact(name=name, set_name=set_name, version=version, sha256=sha256, size=size)


def document(
    name: str = "k", sha256: str = SHA, size: object = 9, set_name: str = "s", version: str = "1.0"
) -> str:
    return (
        f"format: 1\nsets:\n  {set_name}:\n    version: {version}\n    files:\n"
        f"      {name}: {{sha256: {sha256}, size: {size}}}\n"
    )


def test_reads_what_is_documented() -> None:
    manifest = Manifest.from_yaml(document(), source="m.yaml")
    assert manifest.find("k") == artifact()
    assert manifest.find("k").key == f"01/{SHA}"
    assert manifest.source == "m.yaml"


def test_digits_stay_text() -> None:
    digits = "1" * 64
    found = Manifest.from_yaml(document(name="007", sha256=digits, version="1.10")).find("007")
    assert (found.sha256, found.version) == (digits, "1.10")


def test_unknown_name_says_what_to_do() -> None:
    with pytest.raises(ArtifactNotFoundError, match=r"m\.yaml lists no cubin 'other' among its 1.*reinstall"):
        Manifest.from_yaml(document(), source="m.yaml").find("other")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("just text", "expected a mapping"),
        ("- 1", "expected a mapping"),
        ("sets: {}", "expected format and sets"),
        ("format: 2\nfuture: 1", "format is '2'.*upgrade"),
        ("format: 1\nsets:", "sets is None; expected a mapping"),
        ("format: 1\nsets: {}\nextra: 1", "extra"),
        ("format: 1\nsets: {}\n---\nformat: 1", "more than one"),
        ("format: 1\nsets: {s: {files: {}}}", r"sets\.s has .*expected version and files"),
        ("format: 1\nformat: 1\nsets: {}", "line 2 repeats the key 'format'"),
        (document() + f"      k: {{sha256: {SHA}, size: 9}}\n", "line 7 repeats the key 'k'"),
        (document() + document()[16:].replace(" s:", " t:"), "in two sets, s and t"),
        ("format: &a 1\nsets: {}", "anchor"),
        ("format: 1\nsets: *a", "alias"),
        ("format: !!int 1\nsets: {}", "tag"),
        ("format: 1\nsets: !!python/object/apply:os.system [true]", "tag"),
        ("{a: " * 100_000, "too deep"),
        ("[" * 100_000, "not YAML|too deep"),
        ("a: b: c", "not YAML"),
        ("? {a: b}\n: c", "key that is no plain scalar"),
        (document(name="../../etc/passwd"), r"\$\.name.*etc/passwd"),
        (document(name="/abs"), r"\$\.name"),
        (document(name=".."), r"\$\.name"),
        (document(name='"a\\0b"'), r"\$\.name"),
        (document(name='"a\\n"'), r"\$\.name"),
        (document(set_name=".."), r"\$\.set_name"),
        (document(version='"1/2"'), r"\$\.version"),
        (document(sha256=SHA.upper()), r"\$\.sha256"),
        (document(sha256=SHA[1:]), r"\$\.sha256"),
        (document(sha256=f'"{SHA}\\n"'), r"\$\.sha256"),
        (document(sha256="../" + SHA[3:]), r"\$\.sha256"),
        (document(size=0), r"\$\.size"),
        (document(size=-1), r"\$\.size"),
        (document(size=MAX_SIZE + 1), r"\$\.size"),
        (document(size="9" * 5000), r"\$\.size"),
        (document(size=1.5), r"\$\.size"),
        (document(size="1, mode: 7"), "mode"),
    ],
)
def test_hostile_or_malformed_content_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ManifestError, match=reason) as caught:
        Manifest.from_yaml(text, source="m.yaml")
    assert str(caught.value).startswith("m.yaml: ")
    assert len(str(caught.value)) < 1000


@given(st.one_of(st.text(), st.binary(), st.text("{}[]:-,&*!|>'\"#?%@ \n\tabc1")))
def test_any_text_is_a_manifest_or_a_manifest_error(text: str | bytes) -> None:
    with contextlib.suppress(ManifestError):
        Manifest.from_yaml(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["version", "files", "sha256", "size"]), inner)
    ),
    max_leaves=12,
)


@given(
    st.fixed_dictionaries({"format": st.sampled_from([1, "1", 2, None]), "sets": st.dictionaries(NAME, JSON)})
)
def test_any_structure_is_a_manifest_or_a_manifest_error(value: object) -> None:
    with contextlib.suppress(ManifestError):  # JSON is YAML
        Manifest.from_yaml(msgspec.json.encode(value))


@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=3))
def test_any_damage_is_a_manifest_or_a_manifest_error(position: int, damage: bytes) -> None:
    content = document().encode()
    position %= len(content)
    with contextlib.suppress(ManifestError):
        for item in Manifest.from_yaml(
            content[:position] + damage + content[position + 1 :]
        ).artifacts.values():
            assert 0 < item.size <= MAX_SIZE
            assert set(item.sha256) <= set("0123456789abcdef")
            assert len(item.sha256) == 64


@given(st.dictionaries(NAME, st.tuples(DIGEST, st.integers(1, MAX_SIZE), st.sampled_from(["a", "b"]))))
def test_round_trip(files: dict[str, tuple[str, int, str]]) -> None:
    artifacts = {
        name: artifact(name, set_name, version=f"1.{set_name}", sha256=sha256, size=size)
        for name, (sha256, size, set_name) in files.items()
    }
    text = Manifest(artifacts=artifacts).to_yaml()
    assert Manifest.from_yaml(text).artifacts == artifacts
    assert Manifest(artifacts=dict(reversed(artifacts.items()))).to_yaml() == text


def test_layout_of_the_file() -> None:
    manifest = Manifest(artifacts={"k2": artifact("k2"), "k1": artifact("k1", size=3)})
    assert manifest.to_yaml() == (
        'format: 1\nsets:\n  s:\n    version: "1.0"\n    files:\n'
        f"      k1: {{sha256: {SHA}, size: 3}}\n      k2: {{sha256: {SHA}, size: 9}}\n"
    )


@pytest.mark.parametrize(
    "artifacts",
    [
        {"k": artifact(), "l": artifact("l", version="2.0")},
        {"../k": artifact("../k")},
        {"k": artifact(size=0)},
        {"other": artifact("k")},
    ],
)
def test_what_could_not_be_read_back_is_not_written(artifacts: dict[str, Artifact]) -> None:
    with pytest.raises(ManifestError, match="to be written"):
        Manifest(artifacts=artifacts).to_yaml()


def test_load(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(document())
    assert load_manifest(path).find("k") == load_manifest(str(path)).find("k") == artifact()
    with pytest.raises(ManifestError, match=r"cannot read .*absent\.yaml"):
        load_manifest(tmp_path / "absent.yaml")
    with pytest.raises(ManifestError, match="null byte"):
        load_manifest("a\0b")


def test_a_huge_file_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.touch()
    os.truncate(path, 2**40)
    with pytest.raises(ManifestError, match="too many for a manifest"):
        load_manifest(path)


@pytest.fixture
def fresh() -> Iterator[None]:
    default_manifest.cache_clear()
    yield
    default_manifest.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_private_manifests_add_to_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = set(default_manifest().artifacts)
    for name in ("private", "other"):
        (tmp_path / f"{name}.yaml").write_text(document(name=name))
    paths = [str(tmp_path / "private.yaml"), str(tmp_path / "other.yaml")]
    monkeypatch.setenv("CUBIN_RUNTIME_MANIFESTS", ":".join(paths))
    default_manifest.cache_clear()
    assert set(default_manifest().artifacts) == own | {"private", "other"}
    assert all(path in default_manifest().source for path in paths)


def test_a_private_manifest_cannot_give_a_name_other_contents() -> None:
    first = Manifest.from_yaml(document())
    same = Manifest.from_yaml(document(set_name="t", version="1.0+local"), source="same.yaml")
    assert combined(first, same).find("k") == first.find("k")
    other = Manifest.from_yaml(document(sha256="f" * 64, set_name="t"), source="other.yaml")
    with pytest.raises(ManifestError, match=r"other\.yaml: k has other contents in s 1\.0"):
        combined(first, other)


def test_the_packaged_manifest_wins_over_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cubin_runtime").mkdir()
    (tmp_path / "kernel_meta").mkdir()
    monkeypatch.setattr(manifest_module, "__file__", str(tmp_path / "cubin_runtime" / "manifest.py"))
    default_manifest.cache_clear()
    try:
        (tmp_path / "cubins_manifest.yaml").write_text(document(name="checkout"))
        assert load_manifest().find("checkout")
        (tmp_path / "kernel_meta" / "cubins_manifest.yaml").write_text(document(name="wheel"))
        assert default_manifest().find("wheel")
        assert default_manifest() is default_manifest()
    finally:
        default_manifest.cache_clear()


def published(path: str = "0a1b/fmha", file: str = "K.cubin") -> str:
    return (
        f"format: 1\nsets:\n  release:\n    version: 0.6.13\n    path: {path}\n    files:\n"
        f"      k: {{sha256: {SHA}, size: 9, file: {file}}}\n"
    )


def test_a_published_set_says_where_its_files_lie() -> None:
    manifest = Manifest.from_yaml(published())
    found = manifest.find("k")
    assert found.published == "0a1b/fmha/K.cubin"
    assert found.paths == (f"01/{SHA}", "0a1b/fmha/K.cubin")
    assert Manifest.from_yaml(manifest.to_yaml()).artifacts == manifest.artifacts


@pytest.mark.parametrize(
    ("path", "file"),
    [
        ("..", "K"),
        ("a/../b", "K"),
        ("/a", "K"),
        ("a//b", "K"),
        ("a", "../K"),
        ("a", "b/../../K"),
        ("a", ".K"),
        ("a", ""),
        ("", "K"),
        ("a", "[K]"),
        ("a\\b", "K"),
    ],
)
def test_a_published_path_stays_below_its_folder(path: str, file: str) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_yaml(published(path, file))


@pytest.mark.parametrize("missing", ["    path: 0a1b/fmha\n", ", file: K.cubin"])
def test_path_and_file_come_together(missing: str) -> None:
    with pytest.raises(ManifestError, match="expected"):
        Manifest.from_yaml(published().replace(missing, ""))
