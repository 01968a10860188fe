"""Importing a flashinfer-cubin release: a small made-up one, faults in it, and the real one where it is."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import struct
from pathlib import Path

import import_trtllm_gen
import pytest
from elftools.elf.elffile import ELFFile
from import_trtllm_gen import PACKAGE, ReleaseError, find_release, main, read_kernels, table_text

from cubin_runtime.cubin import check_row, inspect
from cubin_runtime.manifest import Manifest, default_manifest, load_manifest
from cubin_runtime.settings import Settings
from cubin_runtime.store import FolderStore, lookup_order
from kernel_meta.schema import KernelRow
from kernel_meta.tables import TABLES_DIR, load_table

CUBIN = (Path(__file__).parent / "driver" / "cubins" / "facts_12.9_sm_100f.cubin").read_bytes()
ENTRY = "by_value"  # of that cubin, which has 256 threads

FIELDS = (
    *("mDataTypeQ", "mDataTypeKv", "mDataTypeK", "mDataTypeV", "mDataTypeO", "mTileSizeQ", "mTileSizeKv"),
    *("mStepQ", "mStepKv", "mHeadDimPerCtaV", "mHeadDimQk", "mHeadDimV", "mSM", "mCubin", "mCubinSize"),
    *("mFuncName", "mSharedMemBytes", "mThreadsPerCTA", "mQkvLayout", "mMaskType", "mKernelType"),
    *("mTileScheduler", *(f"mNumEltsPerSageAttnBlk{operand}" for operand in "QKPV"), "m2CtaMma"),
    *("mSkipsSoftmaxWhenPossible", "mReserved1", "mReserved2", "sha256"),
)
VALUES = dict.fromkeys(FIELDS, "0") | {
    **dict.fromkeys(
        ("mDataTypeQ", "mDataTypeKv", "mDataTypeK", "mDataTypeV", "mDataTypeO"), "DATA_TYPE_BF16"
    ),
    **dict.fromkeys(("mTileSizeQ", "mTileSizeKv", "mStepKv", "mHeadDimPerCtaV", "mHeadDimV"), "128"),
    **dict.fromkeys(("m2CtaMma", "mSkipsSoftmaxWhenPossible", "mReserved1", "mReserved2"), "false"),
    "mStepQ": "256",
    "mHeadDimQk": "192",
    "mSM": "kSM_100f",
    "mCubin": "nullptr",
    "mFuncName": f'"{ENTRY}"',
    "mSharedMemBytes": "164288",
    "mThreadsPerCTA": "256",
    "mMaskType": "1",
    "mTileScheduler": "1",
    "sha256": f'"{hashlib.sha256(CUBIN).hexdigest()}"',
}


def make_release(
    folder: Path, fields: tuple[str, ...] = FIELDS, checksum: str | None = None, **values: str
) -> Path:
    """A package of version 9.9.9 with one ragged and one paged kernel."""
    package = folder / PACKAGE
    kernels = package / "cubins" / "0a1b" / "fmha" / "trtllm-gen"
    (kernels / "include").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "_build_meta.py").write_text('__version__ = "9.9.9"\n')
    ragged = VALUES | values
    paged = VALUES | {"mQkvLayout": "2", "mFuncName": '"paged"'}
    members = "".join(f"    int {field};\n" for field in fields)
    entries = "".join(f"{{ {', '.join(e.get(f, 'false') for f in fields)}}},\n" for e in (ragged, paged))
    (kernels / "include" / "flashInferMetaInfo.h").write_text(
        f"struct TllmGenFmhaKernelMetaInfo\n{{\n{members}}};\n\n"
        f"static const TllmGenFmhaKernelMetaInfo sTllmGenFmhaKernelMetaInfos[] = {{\n{entries}}};\n"
    )
    digest = checksum or hashlib.sha256(CUBIN).hexdigest()
    (kernels / "checksums.txt").write_text(f"{digest}  {ENTRY}.cubin\n")
    (kernels / f"{ENTRY}.cubin").write_bytes(CUBIN)
    return package


def test_a_release_becomes_rows_and_artifacts(tmp_path: Path) -> None:
    make_release(tmp_path)
    release = find_release(tmp_path)
    (kernel,) = read_kernels(release, "fmha_trtllm_gen/9.9.9")
    assert kernel.row.name == "fmha_trtllm_gen_sm100f_bf16_bf16_bf16_bf16_h192x128_causal_t128x128_persistent"
    assert (kernel.row.entry, kernel.row.step_q, kernel.row.source) == (ENTRY, 256, None)
    assert kernel.row.resources is not None
    assert kernel.row.resources.shared_memory == 164288
    assert (kernel.artifact.version, kernel.artifact.set_name) == ("9.9.9", PACKAGE)
    assert FolderStore("package", tmp_path / PACKAGE / "cubins").read(kernel.artifact) == CUBIN
    table = tmp_path / "table.yaml"
    table.write_text(table_text([kernel], release))
    assert load_table(table) == (kernel.row,)


def test_the_installed_package_is_found_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_release(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert find_release(None).version == "9.9.9"


def test_a_wheel_is_read_as_it_is(tmp_path: Path) -> None:
    make_release(tmp_path / "unpacked")
    wheel = shutil.make_archive(str(tmp_path / "flashinfer_cubin-9.9.9"), "zip", tmp_path / "unpacked")
    from_wheel = list(read_kernels(find_release(Path(wheel)), "a/1"))
    assert from_wheel == list(read_kernels(find_release(tmp_path / "unpacked"), "a/1"))


def test_later_fields_are_understood_or_have_to_be_off(tmp_path: Path) -> None:
    renamed = {"mReserved1": "mFp16Softmax", "mReserved2": "mUsesSpcompress"}
    fields = (*(renamed.get(field, field) for field in FIELDS), "mBrandNew")
    make_release(tmp_path / "known", fields, mFp16Softmax="true", mUsesSpcompress="false")
    (kernel,) = read_kernels(find_release(tmp_path / "known"), "a/1")
    assert (kernel.row.fp16_softmax, kernel.row.uses_spcompress) == (True, False)
    make_release(tmp_path / "new", fields, mBrandNew="true")
    with pytest.raises(ReleaseError, match=r"by_value: mBrandNew is true; .* only as off"):
        list(read_kernels(find_release(tmp_path / "new"), "a/1"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mSM": "kSM_107"}, "by_value: sm_107a with 256 threads in the header, sm_100f with 256 in its ELF"),
        ({"mSM": "kSM_200"}, "by_value: mSM is kSM_200; this script knows kSM_100, "),
        ({"mThreadsPerCTA": "512"}, "512 threads in the header, sm_100f with 256"),
        ({"mDataTypeO": "DATA_TYPE_FP32"}, "mDataTypeO is DATA_TYPE_FP32; this script knows DATA_TYPE_BF16"),
        ({"mMaskType": "3"}, "mMaskType is 3"),
        ({"mKernelType": "1"}, "mKernelType is 1; this script knows it only as off"),
        ({"m2CtaMma": "true"}, "m2CtaMma is true"),
        ({"mReserved1": "true"}, "mReserved1 is true"),
        ({"sha256": f'"{"0" * 64}"'}, "in the header 0000"),
        ({"checksum": "0" * 64}, "in checksums.txt 0000"),
        ({"mFuncName": '"several"'}, "several.cubin"),
        ({"fields": FIELDS[:-2]}, "has no field sha256; its format is new"),
        ({"mMaskType": "1, 2"}, "entry 1: 32 values for 31 fields"),
    ],
)
def test_what_is_new_or_does_not_agree_is_told(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    make_release(tmp_path, **changes)  # type: ignore[arg-type]  # each case has the types of its arguments
    with pytest.raises((ReleaseError, FileNotFoundError), match=re.escape(message).replace(r"\ ", " ")):
        list(read_kernels(find_release(tmp_path), "a/1"))


def test_a_folder_without_a_release(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="expected a flashinfer-cubin release"):
        find_release(tmp_path)
    (tmp_path / "cubins").mkdir()
    with pytest.raises(ReleaseError, match=r"0 folders .* expected 1"):
        find_release(tmp_path)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what the import writes to."""
    root = tmp_path / "checkout"
    (root / "kernel_meta" / "fmha_trtllm_gen").mkdir(parents=True)
    (root / "cubins_manifest.yaml").write_text(default_manifest().to_yaml())
    monkeypatch.setattr(import_trtllm_gen, "ROOT", root)
    monkeypatch.setattr(import_trtllm_gen.install, "__defaults__", (root,))
    return root


def test_an_unknown_parameter_struct_is_refused(
    tmp_path: Path, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_release(tmp_path)
    assert main([str(tmp_path)]) == 1
    assert "params_9_9_9.yaml does not exist: nothing here describes the parameter struct of 9.9.9" in (
        capsys.readouterr().err
    )


def test_the_set_takes_the_place_of_an_earlier_one(tmp_path: Path, checkout: Path) -> None:
    make_release(tmp_path)
    folder = checkout / "kernel_meta" / "fmha_trtllm_gen"
    (folder / "params_0_6_13.yaml").write_text("")
    assert main([str(tmp_path), "--layout", "0.6.13"]) == 0
    (row,) = load_table(folder / "table.yaml")
    assert row.abi == "fmha_trtllm_gen/0.6.13"
    manifest = load_manifest(checkout / "cubins_manifest.yaml")
    assert [name for name, a in manifest.artifacts.items() if a.set_name == PACKAGE] == [row.name]
    before = {n: a for n, a in default_manifest().artifacts.items() if a.set_name != PACKAGE}
    assert {n: a for n, a in manifest.artifacts.items() if a.set_name != PACKAGE} == before


# ---- the release that the table was imported from, where it is


def published_store() -> FolderStore | None:
    """The installed package, or an unpacked release that CUBIN_RUNTIME_TEST_RELEASE names."""
    unpacked = os.environ.get("CUBIN_RUNTIME_TEST_RELEASE")
    if unpacked:
        return FolderStore("folder", Path(unpacked) / "cubins")
    artifact = default_manifest().find(ROWS[0].name)
    stores = lookup_order(Settings({}), artifact)
    return next(
        (store for store in stores if isinstance(store, FolderStore) and store.name == "package"), None
    )


ROWS = load_table(TABLES_DIR / "fmha_trtllm_gen" / "table.yaml")
STORE = published_store()
needs_release = pytest.mark.skipif(STORE is None, reason="flashinfer-cubin is not installed")


@needs_release
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_published_cubin_is_what_the_table_says(row: KernelRow) -> None:
    assert STORE is not None
    artifact = default_manifest().find(row.name)
    data = STORE.read(artifact)  # verified against the manifest
    assert data is not None, f"{STORE.location} has no {artifact.published}"
    cubin = inspect(data)
    check_row(cubin, row)
    facts = cubin.kernels[row.entry_name]
    assert [(p.offset, p.size) for p in facts.parameters] == [(0, 1280)]
    assert row.resources is not None
    # The cubin's other entry stores its dynamic shared memory: an instruction with that number in it.
    with STORE.path(artifact).open("rb") as file:
        code = ELFFile(file).get_section_by_name(f".text.{row.entry_name}GetSmemSize").data()
    assert struct.pack("<I", row.resources.shared_memory) in code


@needs_release
def test_importing_the_release_again_changes_nothing() -> None:
    assert STORE is not None
    release = find_release(STORE.folder.parent)
    kernels = list(read_kernels(release, "fmha_trtllm_gen/0.6.13"))
    assert table_text(kernels, release) == (TABLES_DIR / "fmha_trtllm_gen" / "table.yaml").read_text()
    artifacts = {kernel.row.name: kernel.artifact for kernel in kernels}
    assert Manifest(artifacts=artifacts).artifacts == {
        name: a for name, a in default_manifest().artifacts.items() if a.set_name == PACKAGE
    }
