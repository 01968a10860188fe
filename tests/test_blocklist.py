"""What a block list says, and that selection and loading both obey it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cubin_runtime import blocklist, module
from cubin_runtime.blocklist import blocked_rows, read_blocklist, refuse_blocked
from cubin_runtime.errors import BlockedError, NoKernelError, SettingError
from cubin_runtime.manifest import Artifact, Manifest
from cubin_runtime.selection import select
from cubin_runtime.settings import Settings
from kernel_meta import tables
from tests.rows import make_request, make_row

BAD, GOOD = "ab" * 32, "cd" * 32
ROWS = (make_row(), make_row(tile_kv=64))
NAMES = [row.name for row in ROWS]
REASON = "wrong rows for empty sequences"


def artifact(name: str, sha256: str) -> Artifact:
    return Artifact(name=name, set_name="fmha_sm90", version="1", sha256=sha256, size=9)


MANIFEST = Manifest(artifacts={n: artifact(n, s) for n, s in zip(NAMES, (BAD, GOOD), strict=True)})


def make(**variables: str) -> Settings:
    return Settings({f"CUBIN_RUNTIME_{name}": value for name, value in variables.items()})


def test_file_and_variable_both_count(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text(f"# recalled\n\n{BAD.upper()}   {REASON} \n")
    found = read_blocklist(make(BLOCKLIST=str(path), BLOCKED=f"{GOOD} slow; {'0' * 64} old;"))
    assert found == {BAD: REASON, GOOD: "slow", "0" * 64: "old"}
    assert read_blocklist(make()) == {}


@pytest.mark.parametrize("line", ["abc why", BAD, BAD[:-1] + " why", f"{BAD}0 why", f"{BAD}: why", "\0"])
def test_a_malformed_list_is_an_error_and_not_an_empty_one(tmp_path: Path, line: str) -> None:
    path = tmp_path / "list"
    path.write_text(f"{GOOD} fine\n{line}\n")
    with pytest.raises(SettingError, match=r"list: entry 2 is .*expected a sha256"):
        read_blocklist(make(BLOCKLIST=str(path)))
    with pytest.raises(SettingError, match=r"CUBIN_RUNTIME_BLOCKED: entry 2"):
        read_blocklist(make(BLOCKED=f"{GOOD} fine;{line}"))


def test_an_unreadable_list_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"CUBIN_RUNTIME_BLOCKLIST: cannot read .*absent"):
        read_blocklist(make(BLOCKLIST=str(tmp_path / "absent")))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingError, match="binary"):
        read_blocklist(make(BLOCKLIST=str(tmp_path / "binary")))


def test_rows_are_blocked_by_their_bytes() -> None:
    found = blocked_rows(make(BLOCKED=f"{BAD} {REASON}"), MANIFEST)
    assert list(found) == [NAMES[0]]
    for text in (REASON, BAD, "CUBIN_RUNTIME_ALLOW_BLOCKED"):
        assert text in found[NAMES[0]]
    assert blocked_rows(make(BLOCKED=f"{BAD} {REASON}", ALLOW_BLOCKED=BAD), MANIFEST) == {}


def test_selection_passes_over_a_blocked_row_and_says_why() -> None:
    request = make_request()
    assert select(request, ROWS).require() == ROWS[0]
    selection = select(request, ROWS, {NAMES[0]: REASON})
    assert selection.row == ROWS[1]
    (mismatch,) = selection.decisions[-1].mismatches
    assert (selection.decisions[-1].row, mismatch.field) == (ROWS[0], "blocked")
    assert f"- blocked: {REASON}" in selection.explain()


def test_a_miss_names_the_blocked_row_first() -> None:
    other = make_row(head_dim_qk=128)
    selection = select(make_request(), (other, ROWS[0]), {NAMES[0]: REASON})
    assert selection.reason == f"{NAMES[0]} would fit, but blocked: {REASON}"
    assert selection.decisions[0].row == ROWS[0]
    with pytest.raises(NoKernelError, match=REASON):
        selection.require()


def test_the_packages_rows_obey_the_list_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "all_rows", lambda: ROWS)
    monkeypatch.setattr(blocklist, "default_manifest", lambda: MANIFEST)
    monkeypatch.setenv("CUBIN_RUNTIME_BLOCKED", f"{BAD} {REASON}")
    assert select(make_request()).row == ROWS[1]
    assert select(make_request(), blocked={}).row == ROWS[0]
    monkeypatch.setenv("CUBIN_RUNTIME_ALLOW_BLOCKED", BAD)
    assert select(make_request()).row == ROWS[0]


def test_loading_refuses_what_selection_was_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    def obtain(*args: object, **kwargs: object) -> None:
        pytest.fail("the bytes of a blocked cubin were asked for")

    monkeypatch.setattr(module, "obtain", obtain)
    monkeypatch.setenv("CUBIN_RUNTIME_BLOCKED", f"{BAD} {REASON}")
    with pytest.raises(BlockedError, match=REASON) as caught:
        module._load_library(ROWS[0], MANIFEST.find(NAMES[0]), None)
    assert caught.value.exit_code == 3


def test_the_override_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    settings = make(BLOCKED=f"{BAD} {REASON}", ALLOW_BLOCKED=BAD.upper())
    for _ in range(2):
        refuse_blocked(MANIFEST.find(NAMES[0]), settings)
        refuse_blocked(MANIFEST.find(NAMES[1]), settings)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert NAMES[0] in caplog.text
    assert REASON in caplog.text


def test_without_a_list_the_manifest_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocklist, "default_manifest", lambda: pytest.fail("read"))
    assert blocked_rows(make()) == {}
