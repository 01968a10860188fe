"""The verbs that move cubins: fetch, bundle, cache, and verify --signature."""

from __future__ import annotations

import hashlib
import os
import pty
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from http_server import Reply, ScriptedServer, serving

from cubin_runtime import blocklist, manifest, transfer
from cubin_runtime.cache import CacheStore
from cubin_runtime.cli.doctor import examine
from cubin_runtime.manifest import Artifact, Manifest
from kernel_meta import tables
from tests.cli_support import Result
from tests.rows import make_row

ROOT = Path(__file__).parent.parent

ROWS = (make_row(), make_row(arch="sm_100f"), make_row(family="fmha_cute_dsl"))
CONTENTS = {row.name: row.name.encode() * 40 for row in ROWS} | {"private": b"p" * 5000}
NAMES = list(CONTENTS)

Cli = Callable[..., Result]


def artifact(name: str) -> Artifact:
    data = CONTENTS[name]
    family = next((row.family for row in ROWS if row.name == name), "ours")
    if family == "fmha_cute_dsl":
        family = "some_release"  # whose publisher has another name for it
    digest = hashlib.sha256(data).hexdigest()
    return Artifact(name=name, set_name=family, version="1", sha256=digest, size=len(data))


ARTIFACTS = {name: artifact(name) for name in NAMES}


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch, clean_environment: None) -> None:
    contents = Manifest(artifacts=ARTIFACTS)
    monkeypatch.setattr(manifest, "default_manifest", lambda: contents)
    monkeypatch.setattr(tables, "all_rows", lambda: ROWS)
    monkeypatch.setattr(transfer, "BACKOFF", (0.0, 0.0))


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as running:
        yield running


@pytest.fixture
def mirror(tmp_path: Path) -> str:
    """The base URL of a folder that has everything."""
    fill(tmp_path / "mirror")
    return f"file://{tmp_path}/mirror"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The cache, with everything in it."""
    fill(tmp_path / "cache")
    return tmp_path / "cache"


def fill(folder: Path) -> None:
    for name, each in ARTIFACTS.items():
        CacheStore(folder).write(each, CONTENTS[name])


def held(folder: Path) -> set[str]:
    """Names of the files that a store has."""
    return {name for name, each in ARTIFACTS.items() if (folder / each.key).exists()}


# ---- fetch


def test_fetch_all_then_nothing(cli: Cli, mirror: str, tmp_path: Path) -> None:
    first = cli("fetch", "--all", "--mirror", mirror)
    assert (first.code, first.out) == (0, "")
    assert "cubins: 4, fetched: 4" in first.err
    assert first.err.count("fetched fmha_") == 3
    assert held(tmp_path / "cache") == set(NAMES)
    assert (
        "fetched: 0 (0 bytes), already there: 4, failed: 0" in cli("fetch", "--all", "--mirror", mirror).err
    )


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--arch", "sm_90a"], [0, 2]),
        (["--arch", "10.3"], [1]),
        (["--arch", "sm_90a", "--arch", "sm_100f"], [0, 1, 2]),
        (["--family", "fmha_sm90"], [0, 1]),
        (["--family", "ours", "--family", "fmha_cute_dsl"], [2, 3]),
        (["--family", "some_release"], [2]),
        (["--row", "priv*"], [3]),
        (["--row", NAMES[0], "--row", "private"], [0, 3]),
        (["--arch", "sm_90a", "--family", "fmha_sm90"], [0]),
    ],
)
def test_fetch_of_some(cli: Cli, mirror: str, tmp_path: Path, options: list[str], names: list[int]) -> None:
    assert cli("fetch", *options, "--mirror", mirror).code == 0
    assert held(tmp_path / "cache") == {NAMES[number] for number in names}


@pytest.mark.parametrize(
    "options",
    [[], ["--all", "--row", "x"], ["--row", "absent"], ["--arch", "sm_ten"], ["--all", "--jobs", "0"]],
)
def test_fetch_of_nothing_is_a_usage_error(cli: Cli, options: list[str]) -> None:
    result = cli("fetch", *options)
    assert (result.code, result.out) == (2, "")


def test_fetch_goes_on_where_it_was_broken_off(cli: Cli, server: ScriptedServer, tmp_path: Path) -> None:
    CacheStore(tmp_path / "cache").write(ARTIFACTS["private"], CONTENTS["private"])
    url = server.script("m", Reply(status=404))
    result = cli("fetch", "--all", "--mirror", url, "--json")
    assert result.code == 1
    states = {each["name"]: each["state"] for each in result.json}
    assert states == {name: "present" if name == "private" else "failed" for name in NAMES}
    assert "2 more failed with the same kind of error" in result.err
    assert result.err.count("HTTP 404") == 1, "a thousand files fail with one message"
    server.paths.clear()
    server.script("m", Reply(CONTENTS[NAMES[0]]))
    assert cli("fetch", "--row", NAMES[0], "--mirror", url).code == 0
    assert server.paths == [f"/m/{ARTIFACTS[NAMES[0]].key}"]


def test_fetch_reports_each_mirror_that_failed(cli: Cli, server: ScriptedServer, mirror: str) -> None:
    bad = server.script("bad", Reply(status=503))
    result = cli("fetch", "--row", "private", "--mirror", bad, "--mirror", mirror, "--json")
    (plain,) = result.json
    assert result.code == 0
    assert plain["state"] == "fetched"
    assert plain["source"].endswith(f"mirror/{ARTIFACTS['private'].key}")
    assert [f"{bad}/" in answer and "HTTP 503" in answer for answer in plain["failures"]] == [True]
    assert f"passed over {bad}" in result.err


def test_fetch_to_a_destination_needs_no_cache(cli: Cli, mirror: str, tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    result = cli("fetch", "--all", "--mirror", mirror, "--dest", str(dest))
    assert result.code == 0
    assert "passed over" not in result.err, "that this machine lacks a file is no failure"
    assert held(dest) == set(NAMES)
    assert {len(path.name) for path in dest.iterdir()} == {2}, "nothing but cubins"
    assert not (tmp_path / "cache").exists()


def test_fetch_dry_run_writes_nothing(cli: Cli, mirror: str, tmp_path: Path) -> None:
    CacheStore(tmp_path / "cache").write(ARTIFACTS["private"], CONTENTS["private"])
    result = cli("fetch", "--all", "--mirror", mirror, "--dry-run")
    assert (result.code, result.out.split()) == (0, NAMES[:3])
    assert "missing: 3" in result.err
    assert [each["name"] for each in cli("fetch", "--all", "--dry-run", "--json").json] == NAMES[:3]
    dest = str(tmp_path / "dest")
    assert cli("fetch", "--all", "--dry-run", "--dest", dest).out.split() == NAMES
    assert held(tmp_path / "cache") == {"private"}
    assert not Path(dest).exists()


def test_fetch_of_wrong_bytes_exits_with_4(cli: Cli, server: ScriptedServer, tmp_path: Path) -> None:
    url = server.script("m", Reply(b"x" * 5000))
    result = cli("fetch", "--row", "private", "--mirror", url)
    assert result.code == 4
    assert "sha256" in result.err
    assert held(tmp_path / "cache") == set()


def test_fetch_offline_opens_no_socket(cli: Cli, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", lambda *args: pytest.fail("a socket was opened"))
    monkeypatch.setenv("CUBIN_RUNTIME_OFFLINE", "1")
    url = "https://mirror.invalid"
    assert cli("fetch", "--all", "--mirror", url).code == 0
    (cache / ARTIFACTS["private"].key).unlink()
    result = cli("fetch", "--all", "--mirror", url)
    assert result.code == 5
    assert "cubin-runtime fetch --row private --dest DIR" in result.err


def test_plain_http_has_to_be_permitted_by_name(cli: Cli) -> None:
    result = cli("fetch", "--all", "--mirror", "http://mirror.invalid/x")
    assert result.code == 2
    assert "CUBIN_RUNTIME_INSECURE_HOSTS" in result.err


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    """In a process of its own, with a terminal as stderr."""
    mirror = tmp_path / "mirror"
    code = f"""
from pathlib import Path
from tests.test_cli_artifacts import ARTIFACTS, fill
from cubin_runtime import manifest
manifest.default_manifest = lambda: manifest.Manifest(artifacts=ARTIFACTS)
fill(Path({str(mirror)!r}))
from cubin_runtime.cli.app import run
run(["fetch", "--all", "--mirror", "file://{mirror}"])
"""
    environ = {**os.environ, "CUBIN_RUNTIME_CACHE_DIR": str(tmp_path / "cache"), "TERM": "xterm"}
    environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environ, stderr=theirs)
    os.close(theirs)
    shown = bytearray()
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # how a terminal ends
        pass
    os.close(ours)
    assert process.wait() == 0
    assert b"cubins" in shown
    assert "━".encode() in shown
    assert b"cubins: 4, fetched: 4" in shown


# ---- bundle


def test_bundle_there_and_back(cli: Cli, cache: Path, tmp_path: Path) -> None:
    archive = str(tmp_path / "b.tar")
    assert cli("bundle", "export", archive, "--all").code == 0
    assert cli("cache", "rm", "--all").code == 0
    result = cli("bundle", "import", archive)
    assert (result.code, held(cache)) == (0, set(NAMES))
    assert "fetched: 4" in result.err
    dest = tmp_path / "dest"
    assert cli("bundle", "import", archive, "--dest", str(dest), "--json").json[0]["state"] == "fetched"
    assert held(dest) == set(NAMES)


def test_bundle_export_of_some(cli: Cli, cache: Path, tmp_path: Path) -> None:
    archive = str(tmp_path / "b.tar")
    assert cli("bundle", "export", archive, "--row", "private").code == 0
    cli("cache", "rm", "--all")
    assert cli("bundle", "import", archive).code == 0
    assert held(cache) == {"private"}


def test_bundle_of_another_release(
    cli: Cli, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = str(tmp_path / "b.tar")
    cli("bundle", "export", archive, "--all")
    cli("cache", "rm", "--all")
    newer = {
        name: Artifact(name=name, set_name=a.set_name, version="2", sha256="0" * 64, size=1)
        for name, a in ARTIFACTS.items()
    }
    contents = Manifest(artifacts={**newer, "private": ARTIFACTS["private"]})
    monkeypatch.setattr(manifest, "default_manifest", lambda: contents)
    result = cli("bundle", "import", archive)
    assert (result.code, held(cache)) == (0, {"private"})
    assert "warning: 2 files of fmha_sm90 1 are passed over: this package has version 2" in result.err
    monkeypatch.setattr(manifest, "default_manifest", lambda: Manifest(artifacts=newer))
    result = cli("bundle", "import", archive)
    assert result.code == 1
    assert "has no file that" in result.err


def test_bundle_import_of_what_is_none(cli: Cli, tmp_path: Path) -> None:
    assert cli("bundle", "import", str(tmp_path / "absent")).code == 1
    assert cli("bundle", "import", str(tmp_path)).code == 1
    (tmp_path / "page").write_text("<html>" * 1000)
    assert cli("bundle", "import", str(tmp_path / "page")).code == 4


def test_bundle_serve_layout_is_a_mirror(cli: Cli, cache: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    assert cli("bundle", "serve-layout", str(tree), "--all").code == 0
    assert {path.name for path in tree.iterdir() if len(path.name) != 2} == {"cubins_manifest.yaml"}
    cli("cache", "rm", "--all")
    assert cli("fetch", "--all", "--mirror", f"file://{tree}").code == 0
    assert held(cache) == set(NAMES)


# ---- cache


def test_cache_path(cli: Cli, tmp_path: Path) -> None:
    assert cli("cache", "path").out == f"{tmp_path / 'cache'}\n"
    assert not (tmp_path / "cache").exists()


def test_cache_ls(cli: Cli, cache: Path) -> None:
    (cache / "ab").mkdir()
    (cache / "ab" / ("ab" * 32)).write_bytes(b"old")
    result = cli("cache", "ls")
    assert result.out.count("\n") == 6
    assert "private" in result.out
    assert "unknown" in result.out
    listed = cli("cache", "ls", "--json").json
    assert {name for each in listed for name in each["names"]} == set(NAMES)
    assert sum(each["size"] for each in listed) == sum(map(len, CONTENTS.values())) + 3


def test_cache_rm(cli: Cli, cache: Path) -> None:
    assert cli("cache", "rm").code == cli("cache", "rm", "x", "--all").code == 2
    assert cli("cache", "rm", "absent").code == 2
    assert held(cache) == set(NAMES)
    assert cli("cache", "rm", "fmha_*").code == 0
    assert held(cache) == {"private"}
    digest = ARTIFACTS["private"].sha256
    assert cli("cache", "rm", digest[:5]).code == 2, "too short to be meant"
    assert cli("cache", "rm", digest[:6]).out == f"{cache / ARTIFACTS['private'].key}\n"
    assert held(cache) == set()


def test_cache_prune(cli: Cli, cache: Path) -> None:
    for age, name in enumerate(NAMES):
        os.utime(cache / ARTIFACTS[name].key, (1e9 - age, 1e9 - age))
    (cache / "ab").mkdir()
    (cache / "ab" / ("ab" * 32)).write_bytes(b"old")
    part = cache / "ab" / f".{'ab' * 32}.0123.tmp"
    part.write_bytes(b"part")
    assert "broken-off downloads removed: 1" in cli("cache", "prune").err
    assert not part.exists()
    assert held(cache) == set(NAMES)
    assert "files removed: 1, bytes: 3" in cli("cache", "prune", "--unknown").err
    cli("cache", "prune", "--max-size", str(len(CONTENTS[NAMES[0]]) + len(CONTENTS[NAMES[1]])))
    assert held(cache) == set(NAMES[:2])
    os.utime(cache / ARTIFACTS[NAMES[1]].key)
    cli("cache", "prune", "--unused-for", "1")
    assert held(cache) == {NAMES[1]}
    assert cli("cache", "prune", "--max-size", "much").code == 2


def test_cache_prune_knows_the_limit_of_the_environment(
    cli: Cli, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_CACHE_MAX_SIZE", "0")
    cli("cache", "prune")
    assert held(cache) == set()


def test_cache_verify(cli: Cli, cache: Path) -> None:
    assert cli("cache", "verify").code == 0
    bad = cache / ARTIFACTS["private"].key
    bad.write_bytes(b"rotten")
    result = cli("cache", "verify")
    assert (result.code, result.out) == (4, f"{bad}\n")
    assert [each["sound"] for each in cli("cache", "verify", "--json").json].count(False) == 1
    assert cli("cache", "verify", "--remove").code == 0
    assert held(cache) == set(NAMES[:3])


def test_cache_verbs_on_no_cache(cli: Cli, tmp_path: Path) -> None:
    for verb in (["ls"], ["prune"], ["verify"], ["rm", "--all"]):
        assert cli("cache", *verb).code == 0
    assert not (tmp_path / "cache").exists()


# ---- verify, doctor


def test_verify_checks_the_bytes_of_private_cubins(cli: Cli, tmp_path: Path) -> None:
    CacheStore(tmp_path / "cache").write(ARTIFACTS["private"], CONTENTS["private"])
    assert cli("verify", "private").code == 0
    (tmp_path / "cache" / ARTIFACTS["private"].key).write_bytes(b"rotten")
    assert cli("verify", "private").code == 4


def test_an_unsigned_release_is_called_that(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "package.yaml"
    path.write_text("format: 1\nsets: {}\n")
    monkeypatch.setattr(manifest, "package_manifest", lambda: path)
    result = cli("verify", "x", "--signature", "--json")
    assert (result.code, [each["state"] for each in result.json]) == (4, ["unsigned"])
    for text in ("this release is not signed", f"{path}.sig", "--key"):
        assert text in result.json[0]["problem"]
    assert result.err == "files checked: 1, bad: 0, unsigned: 1\n"
    # A signature of no trusted key is worse than none.
    path.with_name("package.yaml.sig").write_bytes(bytes(64))
    assert [each["state"] for each in cli("verify", "x", "--signature", "--json").json] == ["bad"]


def test_verify_signature(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    key = ed25519.Ed25519PrivateKey.generate()
    pem = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    (tmp_path / "key.pem").write_bytes(pem)
    paths = [tmp_path / "package.yaml", tmp_path / "private.yaml"]
    for path in paths:
        path.write_text("format: 1\nsets: {}\n")
        path.with_name(path.name + ".sig").write_bytes(key.sign(path.read_bytes()))
    monkeypatch.setattr(manifest, "package_manifest", lambda: paths[0])
    monkeypatch.setenv("CUBIN_RUNTIME_MANIFESTS", str(paths[1]))
    assert "none, as CUBIN_RUNTIME_TRUSTED_KEYS is not set" in cli("verify", "x", "--signature").out
    result = cli("verify", "x", "--key", str(tmp_path / "key.pem"))
    assert result.code == 0
    assert result.out.count("signed by") == 2
    monkeypatch.setenv("CUBIN_RUNTIME_TRUSTED_KEYS", str(tmp_path / "key.pem"))
    assert cli("verify", "x", "--signature").code == 0
    paths[1].write_text("format: 1\nsets:  {}\n")
    result = cli("verify", "x", "--signature", "--json")
    assert (result.code, [each["state"] for each in result.json]) == (4, ["ok", "bad"])
    assert cli("verify", "x").code == 0


def test_doctor_reads_the_block_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(blocklist, "default_manifest", manifest.default_manifest)
    lines = f"{ARTIFACTS['private'].sha256} wrong rows"
    (finding,) = (f for f in examine({"CUBIN_RUNTIME_BLOCKED": lines}) if f.subject == "block list")
    assert finding.state == "warn"
    assert finding.detail.startswith("private: wrong rows")
    absent = {"CUBIN_RUNTIME_BLOCKLIST": str(tmp_path / "absent")}
    (finding,) = (f for f in examine(absent) if f.subject == "block list")
    assert finding.state == "fail"


def test_doctor_shows_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(examine({"CUBIN_RUNTIME_TOKENS": "host=secret", "CUBIN_RUNTIME_MIRRORS": "https://a:b@c"}))
    assert not any("secret" in str(finding) or "a:b" in str(finding) for finding in found)
    assert any(finding.subject == "CUBIN_RUNTIME_TOKENS" for finding in found)
