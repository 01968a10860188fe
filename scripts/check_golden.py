"""Replays calls recorded from NVIDIA's host code, and compares what this package launches. Needs no GPU.

    python scripts/check_golden.py tests/golden/trtllm_gen_0_6_13.json.gz

Each call of a file runs through the package's own selection, workspace layout, packing, tensor maps and
launcher, down to the functions that would call the driver. Compared are the kernel and its digest, grid,
block, shared memory and the opt-in to it, stream, attributes in order, workspace, the arguments of every
tensor map, every byte of the parameter struct, the LSE step, and of calls that must fail the reason. Prints
each difference, then `N matched, M failed`; exits with 0 only if all match.

Where NVIDIA's host code is silently wrong the package must refuse the call, and still agree byte for byte
once it gets what that code makes of the arguments: strides of query and out ignored, those of key and value
and the window cut to 32 bits. Tensor maps that break a documented rule of the driver must be refused, too.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path
from typing import Any

from golden.compare import differences
from golden.driver import RecordingDriver, kernels_without_files


def read(path: Path) -> list[dict[str, Any]]:
    """The recorded calls of a file, compressed or not."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        configs: list[dict[str, Any]] = json.load(file)["configs"]
    return configs


def _differences(config: dict[str, Any], driver: RecordingDriver) -> list[str]:
    try:
        return differences(config, driver)
    except Exception as error:  # a record that is not understood is one that does not match
        return [f"{type(error).__name__}: {error}"]


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="recorded calls: .json, .json.gz")
    options = parser.parse_args(arguments)
    matched = failed = 0
    driver = RecordingDriver()
    with driver.installed(), kernels_without_files():
        for path in options.files:
            for config in read(path):
                found = _differences(config, driver)
                for difference in found:
                    print(f"{path}: call {config['id']} ({config['group']}): {difference}")
                matched, failed = matched + (not found), failed + bool(found)
    print(f"{matched} matched, {failed} failed")
    return 1 if failed or not matched else 0


if __name__ == "__main__":
    sys.exit(main())
