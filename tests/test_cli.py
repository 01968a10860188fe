"""The command line: what goes to stdout and stderr, exit codes, and that it agrees with the API."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime import manifest, module
from cubin_runtime.cli.doctor import examine
from cubin_runtime.cubin import inspect
from cubin_runtime.errors import DriverNotFoundError
from cubin_runtime.manifest import Artifact, Manifest
from cubin_runtime.module import DeviceInfo
from cubin_runtime.request import Capability, DType, KernelRequest, MaskType
from cubin_runtime.selection import select
from kernel_meta import tables
from kernel_meta.schema import KernelRow, Resources
from tests.cli_support import Result
from tests.rows import make_row

ROOT = Path(__file__).parents[1]
CUBIN = ROOT / "tests" / "driver" / "cubins" / "facts_13.0_sm_90a.cubin"
ENTRY = "by_value"

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> KernelRow:
    """A built row with a cubin, as the only kernel there is (in no store yet)."""
    data = CUBIN.read_bytes()
    facts = inspect(data).kernels[ENTRY]
    row = make_row(
        entry=ENTRY,
        resources=Resources(
            threads=facts.threads or 0,
            registers=facts.registers,
            shared_memory=facts.dynamic_shared_memory or 0,
            static_shared_memory=facts.static_shared_memory,
            parameter_bytes=facts.parameter_bytes,
        ),
    )
    publish(monkeypatch, row, artifact(row, data))
    return row


def artifact(row: KernelRow, data: bytes) -> Artifact:
    digest = hashlib.sha256(data).hexdigest()
    return Artifact(name=row.name, set_name=row.family, version="1", sha256=digest, size=len(data))


def publish(monkeypatch: pytest.MonkeyPatch, row: KernelRow, *artifacts: Artifact) -> None:
    monkeypatch.setattr(tables, "all_rows", lambda: (row,))
    contents = Manifest(artifacts={a.name: a for a in artifacts})
    monkeypatch.setattr(manifest, "default_manifest", lambda: contents)


def put(monkeypatch: pytest.MonkeyPatch, folder: Path, data: bytes, key: str) -> Path:
    """Puts bytes under a digest into a folder that every call looks into."""
    path = folder / key
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    monkeypatch.setenv("CUBIN_RUNTIME_ARTIFACT_DIR", str(folder))
    return path


def key_of(row: KernelRow) -> str:
    return manifest.default_manifest().artifacts[row.name].key


# ---- the process ----


def process(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    start = f"{code}\nfrom cubin_runtime.cli import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", start, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_help_is_fast_and_names_the_verbs() -> None:
    start = time.perf_counter()
    result = process("--help")
    seconds = time.perf_counter() - start
    assert result.returncode == 0
    assert result.stderr == ""
    for verb in ("run", "list", "show", "explain", "verify", "doctor"):
        assert f"\n  {verb} " in result.stdout
    assert seconds < 2  # 0.15 s here; torch alone would take longer than the bound


@pytest.mark.parametrize("verb", [["list"], ["verify"], ["doctor"], ["explain", "--arch", "sm_90a"]])
def test_verbs_need_neither_torch_nor_bindings_nor_requests(verb: list[str]) -> None:
    block = "import sys; sys.modules.update(dict.fromkeys(('torch', 'cuda', 'requests'), None))"
    result = process(*verb, code=block)
    assert "Traceback" not in result.stderr
    assert result.returncode in (0, 3)
    assert result.stdout


def test_finding_out_what_is_missing_reads_no_tables_and_needs_no_network_stack() -> None:
    absent = ("torch", "cuda", "requests", "urllib3", "rich", "cryptography", "kernel_meta.tables")
    result = process(
        "fetch",
        "--all",
        "--dry-run",
        "--json",
        code=f"import sys; sys.modules.update(dict.fromkeys({absent}))",
    )
    assert (result.returncode, "Traceback" in result.stderr) == (0, False)
    assert result.stdout


@pytest.mark.parametrize(
    "arguments", [["frob"], ["explain", "--mask", "diagonal"], ["show"], ["list", "--no"]]
)
def test_usage_errors_exit_with_2(cli: Callable[..., Result], arguments: list[str]) -> None:
    result = cli(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err


def test_our_errors_are_one_line(cli: Callable[..., Result]) -> None:
    result = cli("show", "nothing")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: no kernel is called 'nothing'")
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize(("level", "expected"), [("", "30"), ("debug", "10")])
def test_log_lines_are_warnings_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, level: str, expected: str
) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_LOG_LEVEL", level)
    code = (
        "import atexit, logging\nlogger = logging.getLogger('cubin_runtime')\n"
        "atexit.register(lambda: print(logger.getEffectiveLevel()))"
    )
    assert process("list", code=code).stdout.splitlines()[-1] == expected


# ---- list and show ----


def test_list(cli: Callable[..., Result], kernel: KernelRow) -> None:
    result = cli("list")
    header, line = result.out.splitlines()
    assert header.split() == ["kernel", "threads", "shared", "bytes", "cubin", "bytes", "sha256"]
    assert line.split()[0] == kernel.name
    assert line.split()[-1] == key_of(kernel)[3:15]
    assert result.err == "kernels: 1\n"
    assert cli("list", "nothing*").err == "kernels: 0\n"


def test_list_json(cli: Callable[..., Result], kernel: KernelRow) -> None:
    (entry,) = cli("list", "--json").json
    assert entry["name"] == kernel.name
    assert entry["row"]["head_dim_qk"] == 192
    assert entry["artifact"]["sha256"] == key_of(kernel)[3:]


def test_list_says_what_is_not_built(cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, make_row(resources=None))
    assert cli("list").out.splitlines()[1].endswith("not built")
    assert cli("list", "--json").json[0]["artifact"] is None


def test_list_and_show_mark_what_is_blocked(
    cli: Callable[..., Result], kernel: KernelRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("list", "--json").json[0]["blocked"] is None
    assert "blocked" not in cli("show", kernel.name).out
    digest = key_of(kernel)[3:]
    monkeypatch.setenv("CUBIN_RUNTIME_BLOCKED", f"{digest} wrong rows")
    result = cli("list")
    assert result.out.splitlines()[1].endswith(f"{digest[:12]} blocked")
    assert result.err.startswith("kernels: 1, blocked: 1 ")
    assert f"\nblocked: wrong rows (sha256 {digest};" in cli("show", kernel.name).out
    for verb in (["list"], ["show", kernel.name]):
        found = cli(*verb, "--json").json
        entry = found[0] if isinstance(found, list) else found
        assert entry["blocked"].startswith("wrong rows ")
    # What may run all the same is not marked, as `explain` does not mark it either.
    monkeypatch.setenv("CUBIN_RUNTIME_ALLOW_BLOCKED", digest)
    assert "blocked" not in cli("list").out
    assert cli("show", kernel.name, "--json").json["blocked"] is None


def test_show_names_the_store_and_what_the_cubin_says(
    cli: Callable[..., Result], kernel: KernelRow, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = put(monkeypatch, tmp_path / "mine", CUBIN.read_bytes(), key_of(kernel))
    shown = cli("show", kernel.name, "--json").json
    assert [(s["store"], s["state"]) for s in shown["stores"]] == [
        ("environment", "ok"),
        ("embedded", "absent"),
        ("cache", "absent"),
    ]
    assert shown["stores"][0]["path"] == str(path)
    assert (shown["cubin"]["arch"], shown["cubin"]["name"]) == ("sm_90a", ENTRY)
    assert shown["artifact"]["size"] == CUBIN.stat().st_size
    text = cli("show", kernel.name).out
    assert f"kernel: {kernel.name}\n" in text
    assert "parameters            ordinal 0, offset 0, size 320\n" in text
    assert f"  environment ok          {path}\n" in text


def test_show_without_a_local_copy(cli: Callable[..., Result], kernel: KernelRow) -> None:
    assert cli("show", kernel.name).out.endswith("cubin: in no store of this machine\n")


# ---- explain ----


def test_explain_says_the_same_as_the_api(cli: Callable[..., Result]) -> None:
    request = KernelRequest(
        capability=Capability(9, 0),
        dtype_o=DType.E4M3,
        num_heads_q=16,
        num_heads_kv=4,
        mask_type=MaskType.SLIDING,
    )
    result = cli(
        *("explain", "--arch", "sm_90a", "--dtype-o", "float8_e4m3fn"),
        *("--heads", "16", "--kv-heads", "4", "--mask", "sliding"),
    )
    assert result.out == select(request).explain() + "\n"
    assert (result.code, result.err) == (3, "")


def test_explain_hit(cli: Callable[..., Result], kernel: KernelRow) -> None:
    result = cli("explain", "--arch", "9.0")
    assert result.code == 0
    assert f"chosen:  {kernel.name}\nwhy:     the only kernel that fits\n" in result.out


def test_explain_json(cli: Callable[..., Result], kernel: KernelRow) -> None:
    result = cli("explain", "--arch", "sm_90", "--head-dims", "96,96", "--json")
    assert result.code == 3
    assert result.json["kernel"] is None
    assert result.json["request"]["capability"] == "9.0"
    (decision,) = result.json["decisions"]
    (mismatch,) = decision["mismatches"]
    assert decision["kernel"] == kernel.name
    assert (mismatch["field"], mismatch["requested"], mismatch["available"]) == (
        "head_dims",
        "(96, 96)",
        "(192, 128)",
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], {"dtype_q": "bf16", "dtype_o": "bf16", "mask_type": "causal", "num_heads_kv": 128}),
        (["--dtype", "torch.float16"], {"dtype_q": "fp16", "dtype_v": "fp16", "dtype_o": "fp16"}),
        (["--dtype", "e4m3"], {"dtype_q": "e4m3", "dtype_v": "e4m3", "dtype_o": "bf16"}),
        (["--dtype", "int8", "--sage-blocks", "1,16,0,1"], {"dtype_k": "int8", "dtype_v": "e4m3"}),
        (["--sage-blocks", "1,16,0,1"], {"sage_blocks": [1, 16, 0, 1]}),
        (["--dtype-v", "e4m3"], {"dtype_q": "bf16", "dtype_v": "e4m3", "dtype_o": "bf16"}),
        (
            ["--dtype-q", "e4m3", "--dtype-k", "int8"],
            {"dtype_q": "e4m3", "dtype_k": "int8", "dtype_v": "bf16"},
        ),
        (["--use-fp16-softmax", "--uses-spcompress"], {"use_fp16_softmax": True, "uses_spcompress": True}),
        (["--skips-softmax", "--backend", "trtllm-native"], {"skips_softmax": True, "backend": "trtllm-gen"}),
        (["--arch", "sm_103"], {"capability": "10.3"}),
        (["--heads", "8", "--kv-heads", "2"], {"num_heads_q": 8, "num_heads_kv": 2}),
    ],
)
def test_explain_flags(cli: Callable[..., Result], flags: list[str], expected: dict[str, Any]) -> None:
    arch = [] if "--arch" in flags else ["--arch", "sm_90a"]
    request = cli("explain", *arch, *flags, "--json").json["request"]
    assert {name: request[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--arch", "hopper"], "unknown architecture 'hopper'"),
        (["--dtype", "float32"], "unknown dtype 'float32'; expected one of"),
        (["--head-dims", "192"], "--head-dims is '192'; expected 2 numbers"),
        (["--sage-blocks", "1,x,0,1"], "--sage-blocks is '1,x,0,1'; expected 4 numbers"),
        (["--heads", "5", "--kv-heads", "2"], "num_heads_q is 5 and num_heads_kv 2"),
        (["--backend", "cutlass"], "expected one of 'trtllm-gen', 'cute-dsl'"),
        (["--device", "0"], "arch and device are both given"),
    ],
)
def test_explain_refuses_bad_values(cli: Callable[..., Result], flags: list[str], message: str) -> None:
    arch = [] if "--arch" in flags else ["--arch", "sm_90a"]
    result = cli("explain", *arch, *flags)
    assert (result.code, result.out) == (2, "")
    assert message in " ".join(result.err.split())


def test_explain_asks_the_device_that_is_named(
    cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [
        DeviceInfo(0, "H200", Capability(9, 0), 132, 232_448),
        DeviceInfo(1, "B200", Capability(10, 0), 148, 232_000),
    ]
    monkeypatch.setattr(module, "device_info", devices.__getitem__)
    assert cli("explain", "--json").json["request"]["capability"] == "9.0"
    second = cli("explain", "--device", "1", "--json").json["request"]
    assert (second["capability"], second["max_shared_memory"]) == ("10.0", 232_000)


def test_explain_without_a_device(cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(ordinal: int) -> DeviceInfo:
        raise DriverNotFoundError("no driver")

    monkeypatch.setattr(module, "device_info", no_driver)
    assumed = cli("explain")
    assert "compute capability 9.0" in assumed.out
    assert assumed.err == "no device here (see `cubin-runtime doctor`); assuming compute capability 9.0\n"
    named = cli("explain", "--device", "0")
    assert (named.code, named.out, named.err) == (1, "", "error: no driver\n")


# ---- verify ----


def test_verify_accepts_good_copies(
    cli: Callable[..., Result], kernel: KernelRow, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = put(monkeypatch, tmp_path / "mine", CUBIN.read_bytes(), key_of(kernel))
    result = cli("verify", "--json")
    assert (result.code, result.err) == (0, "files checked: 1, bad: 0\n")
    assert result.json == [
        {"kernel": kernel.name, "store": "environment", "state": "ok", "path": str(path), "problem": ""}
    ]
    assert str(path) in cli("verify").out
    assert cli("verify", "other*").err == "files checked: 0, bad: 0\n"


@pytest.mark.parametrize("damage", [lambda d: d[:-1] + b"?", lambda d: d[:100], lambda d: d + b"x"])
def test_verify_finds_changed_bytes(
    cli: Callable[..., Result],
    kernel: KernelRow,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    damage: Callable[[bytes], bytes],
) -> None:
    path = put(monkeypatch, tmp_path / "mine", damage(CUBIN.read_bytes()), key_of(kernel))
    result = cli("verify")
    assert result.code == 4
    assert f"{path} is not {kernel.name}" in result.out
    assert result.err == "files checked: 1, bad: 1 (remove or replace them)\n"


def test_verify_finds_a_cubin_that_is_not_its_rows(
    cli: Callable[..., Result], kernel: KernelRow, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = make_row(entry=ENTRY)  # states other resources than the cubin
    publish(monkeypatch, other, artifact(other, CUBIN.read_bytes()))
    put(monkeypatch, tmp_path / "mine", CUBIN.read_bytes(), key_of(other))
    result = cli("verify")
    assert result.code == 4
    assert kernel.resources is not None
    assert "213760" in result.out  # shared memory as the row states it
    assert str(kernel.resources.shared_memory) in result.out


def test_verify_finds_entries_without_a_row(
    cli: Callable[..., Result], kernel: KernelRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(monkeypatch, make_row(mask_type=MaskType.DENSE), artifact(kernel, b"x"))
    result = cli("verify")
    assert result.code == 4
    assert "the manifest lists it, but no table has it" in result.out


def test_the_checkout_verifies(cli: Callable[..., Result]) -> None:
    result = cli("verify")
    assert result.code == 0, result.out


# ---- doctor ----


def findings(environ: dict[str, str], cache: Path) -> dict[str, tuple[str, str]]:
    """State and text of each finding by subject."""
    environ = {"CUBIN_RUNTIME_CACHE_DIR": str(cache), **environ}
    return {f.subject: (f.state, f"{f.detail}; {f.remedy}") for f in examine(environ)}


def test_doctor(cli: Callable[..., Result]) -> None:
    result = cli("doctor", "--json")
    assert result.code == 0
    subjects = {finding["subject"] for finding in result.json}
    assert {"python", "cubin-runtime", "torch", "cuda-bindings", "driver", "tables", "cache"} <= subjects
    assert all(finding["remedy"] for finding in result.json if finding["state"] != "ok")
    assert cli("doctor").out.splitlines()[0].split() == ["subject", "finding"]


def test_doctor_names_bad_and_unknown_settings(tmp_path: Path) -> None:
    found = findings(
        {
            "CUBIN_RUNTIME_OFFLINE": "perhaps",
            "CUBIN_RUNTIME_MIRROR": "https://example.com",
            "CUDA_VISIBLE_DEVICES": "1,0",
        },
        tmp_path,
    )
    assert found["setting offline"][0] == "fail"
    assert "CUBIN_RUNTIME_OFFLINE is 'perhaps'" in found["setting offline"][1]
    assert found["CUBIN_RUNTIME_MIRROR"] == ("warn", "no such setting; meant CUBIN_RUNTIME_MIRRORS?")
    assert found["CUDA_VISIBLE_DEVICES"][0] == "ok"


def test_doctor_exits_with_1_when_something_is_broken(
    cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_HTTP_TIMEOUT", "soon")
    result = cli("doctor")
    assert result.code == 1
    assert "CUBIN_RUNTIME_HTTP_TIMEOUT" in result.out


def test_doctor_never_prints_a_password(tmp_path: Path, kernel: KernelRow) -> None:
    found = findings({"CUBIN_RUNTIME_MIRRORS": "https://me:secret@example.com/cubins"}, tmp_path)
    assert found["stores"] == ("ok", "1 of 1 cubins come from https://***@example.com/cubins; ")
    assert "secret" not in str(found)


def test_doctor_knows_which_cubins_are_missing(tmp_path: Path, kernel: KernelRow) -> None:
    assert findings({}, tmp_path)["stores"] == (
        "warn",
        "1 of 1 cubins are not on this machine; set CUBIN_RUNTIME_MIRRORS",
    )
    offline = {"CUBIN_RUNTIME_MIRRORS": "https://example.com", "CUBIN_RUNTIME_OFFLINE": "1"}
    assert findings(offline, tmp_path)["stores"][1].endswith("unset CUBIN_RUNTIME_OFFLINE")


def test_doctor_finds_a_corrupt_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: KernelRow
) -> None:
    path = put(monkeypatch, tmp_path / "mine", b"junk", key_of(kernel))
    environ = {"CUBIN_RUNTIME_ARTIFACT_DIR": str(tmp_path / "mine")}
    states = [f for f in examine(environ) if f.subject == "stores" and f.state == "fail"]
    assert [str(path) in f.detail for f in states] == [True]


def test_doctor_finds_a_row_without_a_manifest_entry(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: KernelRow
) -> None:
    publish(monkeypatch, kernel)
    assert findings({}, tmp_path)["manifest"][0] == "fail"
    assert kernel.name in findings({}, tmp_path)["manifest"][1]


def test_doctor_looks_at_the_cache_folder(tmp_path: Path) -> None:
    fresh = tmp_path / "a" / "b"
    assert findings({}, fresh)["cache"] == ("ok", f"{fresh} (made when first needed); ")
    assert not fresh.exists()
    tmp_path.chmod(0o777)
    assert findings({}, tmp_path)["cache"] == (
        "warn",
        f"{tmp_path} can be written by everyone; chmod o-w {tmp_path}",
    )
    file = tmp_path / "file"
    file.write_text("")
    state, text = findings({}, file / "cache")["cache"]
    assert state == "warn"
    assert "cannot be written" in text


def test_doctor_lists_devices_and_the_kernels_they_can_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: KernelRow
) -> None:
    from cubin_runtime import _driver

    devices = [
        DeviceInfo(0, "NVIDIA H200", Capability(9, 0), 132, 232_448),
        DeviceInfo(1, "NVIDIA RTX", Capability(12, 0), 84, 101_376),
    ]
    monkeypatch.setattr(_driver, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(_driver, "device_count", lambda: 2)
    monkeypatch.setattr(module, "device_info", devices.__getitem__)
    found = findings({}, tmp_path)
    assert found["driver"] == ("ok", "supports CUDA 13.0; ")
    assert found["device 0"] == ("ok", "NVIDIA H200, compute capability 9.0, 132 SMs; kernels for it: 1; ")
    assert found["device 1"][0] == "warn"
    assert "no kernel runs on it (there are: sm_90a)" in found["device 1"][1]
