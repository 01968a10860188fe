"""The wheel has everything that a machine without a checkout needs."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from cubin_runtime.manifest import load_manifest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's files."""
    folder = tmp_path_factory.mktemp("wheel")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_tables_sources_manifest_and_cubins_are_inside(installed: Path) -> None:
    def files(root: Path) -> set[str]:
        found = {path for path in (root / "kernel_meta").rglob("*") if path.is_file()}
        return {path.relative_to(root).as_posix() for path in found if "__pycache__" not in path.parts}

    assert files(installed) == files(ROOT) | {"kernel_meta/cubins_manifest.yaml"}
    manifest = load_manifest(installed / "kernel_meta" / "cubins_manifest.yaml")
    ours = [artifact for artifact in manifest.artifacts.values() if artifact.set_name == "fmha_sm90"]
    assert ours
    for artifact in ours:
        path = installed / "kernel_meta" / artifact.set_name / "cubins" / artifact.key
        assert path.stat().st_size == artifact.size
    assert {path.name.partition("-")[0] for path in installed.iterdir()} == {"cubin_runtime", "kernel_meta"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["list"], "_h192x128_causal_"),
        (["verify", "*bf16_h192x128_causal*"], "embedded  ok"),
        (["explain", "--arch", "sm_90a"], "chosen:  fmha_sm90"),
        (["run", "--q-lens", "5,1"], "from the embedded store"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands_work_from_it(installed: Path, tmp_path: Path, arguments: list[str], expected: str) -> None:
    paths = os.pathsep.join(filter(None, (str(installed), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": paths, "CUBIN_RUNTIME_CACHE_DIR": str(tmp_path)}
    process = subprocess.run(
        [sys.executable, "-m", "cubin_runtime.cli", *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert expected in process.stdout
    if arguments[0] in ("verify", "run"):
        assert str(installed) in process.stdout
