"""scripts/build_cubins.py: flags, incremental builds, what is installed; that committed cubins rebuild."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import build_cubins
import msgspec
import pytest
import toolchain
from build_cubins import ROOT, BuildError, Built
from toolchain import Toolchain, ToolchainError

from cubin_runtime.manifest import Artifact, Manifest, load_manifest
from cubin_runtime.request import SAGE_ANY, DType, MaskType
from kernel_meta.schema import KernelRow, Step
from kernel_meta.tables import all_rows, all_steps, load_table
from tests.rows import RESOURCES, make_row

TABLE = """\
# Étude: a comment with an accent, because marks count characters.
family: fmha_test
defaults: {arch: sm_90a, dtype_q: bf16, dtype_k: bf16, dtype_v: bf16, dtype_o: bf16, head_dim_qk: 128,
           head_dim_v: 128, tile_q: 128, tile_kv: 128, scheduler: persistent, abi: fmha_test/1,
           source: add.cu}
rows:
  # the common one
  - {mask_type: causal}
  - {mask_type: dense, resources: {threads: 1, registers: 1, shared_memory: 1, static_shared_memory: 1,
     parameter_bytes: 1}}
"""

SOURCE = """\
#include "common/add.cuh"
extern "C" __device__ const unsigned int fmha_dynamic_shared_memory = 1024;
extern "C" __global__ void __launch_bounds__(128) KERNEL_NAME(const int* in, int* out) {
  out[threadIdx.x] = add(in[threadIdx.x], HEAD_DIM_QK);
}
"""

HEADER = "__device__ int add(int a, int b) { return a + b; }\n"


@pytest.fixture(scope="session")
def compiler() -> Toolchain:
    try:
        return toolchain.find_toolchain()
    except ToolchainError as error:
        pytest.skip(str(error))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path / "checkout")


def make_root(root: Path) -> Path:
    """A checkout with one family of two trivial kernels."""
    for path, text in {
        "kernel_meta/fmha_test/table.yaml": TABLE,
        "kernel_meta/fmha_test/add.cu": SOURCE,
        "kernel_meta/common/add.cuh": HEADER,
        "pyproject.toml": '[project]\nversion = "1.2.3"\n',
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def table(root: Path) -> Path:
    return root / "kernel_meta" / "fmha_test" / "table.yaml"


# ---- flags ----


def test_flags_of_a_row() -> None:
    row = make_row(stages_k=2, stages_v=3, dtype_o=DType.FP16, mask_type=MaskType.SLIDING)
    assert build_cubins.flags(row) == [
        *("-cubin", "-std=c++20", "-O3", "-Xptxas=-v,-warn-spills", "-I", "kernel_meta"),
        "-gencode=arch=compute_90a,code=sm_90a",
        f"-DKERNEL_NAME={row.name}",
        *("-DDTYPE_Q=DType::bf16", "-DDTYPE_K=DType::bf16", "-DDTYPE_V=DType::bf16", "-DDTYPE_O=DType::fp16"),
        *("-DHEAD_DIM_QK=192", "-DHEAD_DIM_V=128", "-DMASK_TYPE=MaskType::sliding"),
        *("-DTILE_Q=128", "-DTILE_KV=128", "-DSTAGES_K=2", "-DSTAGES_V=3"),
        *("-DSCHEDULER=Scheduler::persistent", "-DBLOCKS_PER_SM=1"),
        *("-DFP16_SOFTMAX=0", "-DUSES_SPCOMPRESS=0", "-DSKIPS_SOFTMAX=0", "-DUSES_SAGE=0"),
        "-DE4M3_P=0",
    ]


def test_variants_are_flags() -> None:
    plain = set(build_cubins.flags(make_row(entry="k")))
    variant = make_row(entry="k", fp16_softmax=True, uses_spcompress=True, skips_softmax=True, e4m3_p=True)
    assert set(build_cubins.flags(variant)) - plain == {
        "-DFP16_SOFTMAX=1",
        "-DUSES_SPCOMPRESS=1",
        "-DSKIPS_SOFTMAX=1",
        "-DE4M3_P=1",
    }
    for blocks in ((1, 16, 0, 1), SAGE_ANY):
        sage = make_row(entry="k", sage_blocks=blocks)
        assert set(build_cubins.flags(sage)) - plain == {"-DUSES_SAGE=1"}


def test_rows_of_one_table_have_distinct_flags() -> None:
    flags = [tuple(build_cubins.flags(row)) for row in build_cubins.source_rows()]
    assert flags
    assert len(set(flags)) == len(flags)


# ---- toolchain ----


def test_the_pinned_version_is_the_one_in_pyproject() -> None:
    pins = re.findall(r'"(nvidia-[a-z-]+)==([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    compilers = {"nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt"}
    assert {name: version for name, version in pins if name in compilers} == dict.fromkeys(
        compilers, toolchain.VERSION
    )


@pytest.mark.parametrize(
    ("script", "said"),
    [("echo 'Build, V12.8.93'", "version 12.8.93"), ("exit 3", "version unknown"), (None, "no nvcc in")],
)
def test_another_compiler_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, said: str
) -> None:
    if script:
        nvcc = tmp_path / "nvcc"
        nvcc.write_text(f"#!/bin/sh\n{script}\n")
        nvcc.chmod(0o755)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=rf"takes nvcc 13\.0\.88; .*{said}.*pip install"):
        toolchain.find_toolchain()


# ---- building ----


def test_build_gives_a_checked_cubin_and_its_facts(compiler: Toolchain, root: Path, tmp_path: Path) -> None:
    row = load_table(table(root))[0]
    (built,) = build_cubins.build_all([row], compiler, tmp_path / "out", jobs=1, root=root)
    facts = built.resources
    assert (facts.threads, facts.shared_memory, facts.static_shared_memory) == (128, 1024, 0)
    assert facts.parameter_bytes == 16
    assert (tmp_path / "out" / f"{row.name}.cubin").read_bytes() == built.data
    assert "Compiling entry function" in (tmp_path / "out" / f"{row.name}.log").read_text()


def test_bytes_do_not_depend_on_the_folder(compiler: Toolchain, tmp_path: Path) -> None:
    roots = [make_root(tmp_path / "a"), make_root(tmp_path / "b" / "much" / "deeper")]
    (row, _) = load_table(table(roots[0]))
    built = [build_cubins.build_all([row], compiler, root / "out", jobs=1, root=root) for root in roots]
    assert built[0] == built[1]


def test_only_changed_inputs_are_built_again(compiler: Toolchain, root: Path, tmp_path: Path) -> None:
    row = load_table(table(root))[0]
    cubin = tmp_path / f"{row.name}.cubin"

    def rebuilt() -> bool:
        os.utime(cubin, (0, 0))
        build_cubins.build(row, compiler, tmp_path, root)
        return cubin.stat().st_mtime != 0

    build_cubins.build(row, compiler, tmp_path, root)
    assert not rebuilt()
    (root / "kernel_meta/common/add.cuh").write_text(HEADER + "// changed\n")
    assert rebuilt()
    assert not rebuilt()
    cubin.write_bytes(b"damaged")
    assert rebuilt()
    assert not rebuilt()


def test_inputs_are_sources_flags_and_compiler(root: Path) -> None:
    row, other = load_table(table(root))
    here = Toolchain(Path("nvcc"), None)
    before = build_cubins.input_digest(row, here, root)
    assert build_cubins.input_digest(row, Toolchain(Path("/elsewhere/nvcc"), None), root) == before
    assert build_cubins.input_digest(other, here, root) != before
    assert build_cubins.input_digest(row, here._replace(version="13.0.89"), root) != before
    (root / "kernel_meta/fmha_test/notes.md").write_text("no input")
    assert build_cubins.input_digest(row, here, root) == before
    (root / "kernel_meta/fmha_test/new.h").write_text("")
    assert build_cubins.input_digest(row, here, root) != before


@pytest.mark.parametrize(
    ("pattern", "replacement", "message"),
    [
        ("return", "retrun", r"nvcc failed\n.*add\.cuh"),
        (".*fmha_dynamic_shared_memory.*", "", "no constant fmha_dynamic_shared_memory"),
        (r"__launch_bounds__\(128\)", "", "states no block size"),
        ("KERNEL_NAME", "other", r"with entries other; expected sm_90a with the one entry fmha_test_sm90a"),
    ],
)
def test_a_failed_row_is_named(
    compiler: Toolchain, root: Path, tmp_path: Path, pattern: str, replacement: str, message: str
) -> None:
    for path in (root / "kernel_meta/fmha_test/add.cu", root / "kernel_meta/common/add.cuh"):
        path.write_text(re.sub(pattern, replacement, path.read_text()))
    rows = list(load_table(table(root)))
    with pytest.raises(BuildError, match=rf"(?s){rows[0].name}: .*{message}.*2 of 2 kernels failed"):
        build_cubins.build_all(rows, compiler, tmp_path, jobs=2, root=root)


def test_ptxas_remarks_on_wgmma_are_failures() -> None:
    log = (
        "ptxas info    : Compiling entry function 'one' for 'sm_90a'\n"
        "ptxas info    : Used 168 registers\n"
        "ptxas info    : Compiling entry function 'two' for 'sm_90a'\n"
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
    )
    (finding,) = build_cubins.ptxas_findings(log)
    assert finding.startswith("two: ptxas info    : (C7510)")
    assert build_cubins.ptxas_findings(log.replace("C7510", "C6510")) == []


# ---- table, manifest, store ----


def test_facts_are_written_and_the_rest_of_the_table_stays(root: Path) -> None:
    path = table(root)
    names = [row.name for row in load_table(path)]
    build_cubins.write_resources(path, dict.fromkeys(names, RESOURCES))
    facts = (
        "threads: 384, registers: 168, shared_memory: 213760, static_shared_memory: 0, parameter_bytes: 512"
    )
    head = TABLE[: TABLE.index("  - ")]
    assert path.read_text() == (
        head
        + f"  - {{mask_type: causal,\n     resources: {{{facts}}}}}\n"
        + f"  - {{mask_type: dense,\n     resources: {{{facts}}}}}\n"
    )
    assert {row.resources for row in load_table(path)} == {RESOURCES}


def test_writing_the_same_facts_again_changes_nothing(root: Path) -> None:
    path = table(root)
    (first, _) = load_table(path)
    build_cubins.write_resources(path, {first.name: RESOURCES})
    once = path.read_text()
    build_cubins.write_resources(path, {first.name: RESOURCES})
    assert path.read_text() == once
    assert "threads: 1," in once  # the row that was not built keeps its own


@pytest.mark.parametrize("row", ["  - mask_type: causal\n", "  - {resources: null, mask_type: causal}\n"])
def test_a_row_that_cannot_be_edited_is_refused(root: Path, row: str) -> None:
    path = table(root)
    path.write_text(TABLE[: TABLE.index("  - ")] + row)
    with pytest.raises(BuildError, match="expected a row in braces"):
        build_cubins.write_resources(path, {load_table(path)[0].name: RESOURCES})


def fake_build(row: KernelRow, data: bytes) -> Built:
    return Built(row, data, RESOURCES)


def test_install_writes_cubins_and_manifest_and_prunes(root: Path) -> None:
    causal, dense = load_table(table(root))
    build_cubins.install([fake_build(causal, b"one"), fake_build(dense, b"two")], root)
    build_cubins.install([fake_build(causal, b"three")], root)

    manifest = load_manifest(root / "cubins_manifest.yaml")
    assert manifest.artifacts == {
        row.name: Artifact(
            name=row.name,
            set_name="fmha_test",
            version="1.2.3",
            sha256=hashlib.sha256(data).hexdigest(),
            size=len(data),
        )
        for row, data in ((causal, b"three"), (dense, b"two"))
    }
    store = root / "kernel_meta" / "fmha_test" / "cubins"
    files = {p.relative_to(store).as_posix(): p.read_bytes() for p in store.rglob("*") if p.is_file()}
    assert files == {
        manifest.artifacts[causal.name].key: b"three",
        manifest.artifacts[dense.name].key: b"two",
    }
    assert not any(not any(folder.iterdir()) for folder in store.iterdir())


def test_install_drops_rows_that_left_the_table_and_keeps_other_sets(root: Path) -> None:
    causal, dense = load_table(table(root))
    other = Artifact(name="other", set_name="fmha_other", version="9", sha256="0" * 64, size=1)
    (root / "cubins_manifest.yaml").write_text(Manifest(artifacts={"other": other}).to_yaml())
    build_cubins.install([fake_build(causal, b"one"), fake_build(dense, b"two")], root)
    table(root).write_text(TABLE[: TABLE.index("  - {mask_type: dense")])
    build_cubins.install([fake_build(causal, b"one")], root)
    assert set(load_manifest(root / "cubins_manifest.yaml").artifacts) == {"other", causal.name}


def test_differences_are_listed() -> None:
    row = make_row()
    built = fake_build(row, b"new")
    artifact = Artifact(
        name=row.name, set_name="s", version="1", sha256=hashlib.sha256(b"old").hexdigest(), size=3
    )
    (missing,) = build_cubins.differences([built], Manifest(artifacts={}))
    assert missing == f"{row.name}: not in the manifest"
    (changed,) = build_cubins.differences([built], Manifest(artifacts={row.name: artifact}))
    assert changed == f"{row.name}: manifest has {artifact.sha256}, rebuilt {built.sha256}"
    current = msgspec.structs.replace(artifact, sha256=built.sha256)
    assert build_cubins.differences([built], Manifest(artifacts={row.name: current})) == []
    (facts,) = build_cubins.differences(
        [built._replace(row=make_row(resources=None))], Manifest(artifacts={row.name: current})
    )
    assert "table has None, rebuilt Resources(threads=384" in facts


# ---- command line ----


def test_list_flags(capsys: pytest.CaptureFixture[str]) -> None:
    rows = "*bf16_bf16_bf16_bf16_h256x256_causal*persistent"
    assert build_cubins.main(["--list-flags", "--rows", rows]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "fmha_sm90_sm90a_bf16_bf16_bf16_bf16_h256x256_causal_t128x80_persistent kernel_meta/"
    )
    assert "-DTILE_KV=80" in line


def test_a_glob_that_matches_nothing_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert build_cubins.main(["--rows", "nothing"]) == 2
    assert "no row with a source matches 'nothing'" in capsys.readouterr().err


# ---- what is committed ----


def committed() -> list[tuple[KernelRow | Step, Path, Artifact]]:
    """Every row and step that claims to be built, with its file in the embedded store."""
    manifest = load_manifest(ROOT / "cubins_manifest.yaml")
    rows = [row for row in (*all_rows(), *all_steps()) if row.source and row.resources]
    artifacts = [manifest.find(row.name) for row in rows]
    return [
        (row, ROOT / "kernel_meta" / row.family / "cubins" / artifact.key, artifact)
        for row, artifact in zip(rows, artifacts, strict=True)
    ]


def test_every_built_row_states_the_facts_of_its_cubin() -> None:
    for row, path, artifact in committed():
        data = path.read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (artifact.size, artifact.sha256), row.name
        assert build_cubins.read_resources(data, row) == row.resources


def test_the_embedded_store_holds_nothing_else() -> None:
    files = set(ROOT.glob("kernel_meta/*/cubins/*/*"))
    assert files == {path for _, path, _ in committed()}


def test_a_committed_cubin_rebuilds_to_the_same_bytes(compiler: Toolchain, tmp_path: Path) -> None:
    row, path, _ = min(committed(), key=lambda entry: entry[2].size)
    built = build_cubins.build(row, compiler, tmp_path)
    assert built.data == path.read_bytes(), f"{row.name}: run scripts/build_cubins.py and commit the result"
