"""Runs the commands that README.md shows and puts what they print in place of what stood there.

    python scripts/update_readme.py

As on a machine without a GPU, whether there is one or not; the checkout is shown as /home/me/cubin-runtime.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"

_BLOCK = re.compile(r"^```console\n\$ (?P<command>.*)\n(?P<output>(?:.*\n)*?)```$", re.MULTILINE)


def sessions(text: str) -> Iterator[tuple[str, str]]:
    """Every command of a console block, one in each, with the output below it."""
    return ((block["command"], block["output"]) for block in _BLOCK.finditer(text))


def output_of(command: str) -> str:
    """What a line of shell prints: stdout, then stderr. `cubin-runtime` is this checkout's."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUBIN_RUNTIME_")}
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment |= {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80", "TERM": "dumb", "PYTHONPATH": paths}
    function = f'cubin-runtime() {{ "{sys.executable}" -m cubin_runtime.cli "$@"; }}\n'
    with tempfile.TemporaryDirectory() as cache:
        process = subprocess.run(
            ["bash", "-c", function + command],
            cwd=ROOT,
            env=environment | {"CUBIN_RUNTIME_CACHE_DIR": cache},
            capture_output=True,
            text=True,
        )
    return (process.stdout + process.stderr).replace(str(ROOT), "/home/me/cubin-runtime")


def main() -> None:
    """Rewrites README.md."""

    def rerun(block: re.Match[str]) -> str:
        return f"```console\n$ {block['command']}\n{output_of(block['command'])}```"

    README.write_text(_BLOCK.sub(rerun, README.read_text()))


if __name__ == "__main__":
    main()
