"""Measures `cubin-runtime fetch` against curl, with nginx on this machine as the mirror, and `cache verify`.

    python scripts/bench_fetch.py --folder /dev/shm/bench --files 192 --output benchmarks/fetch.json

Both transfer the same files, as many at a time, from the same server to the same folder. The time of fetch
includes the start of Python and hashing. Needs nginx and curl; the folder is removed at the end.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cubin_runtime.manifest import Artifact, Manifest  # noqa: E402  the path comes first
from cubin_runtime.settings import parse_size  # noqa: E402
from tests.real_servers import nginx  # noqa: E402

CLI = [sys.executable, "-m", "cubin_runtime.cli"]


def main() -> None:
    """Prints the results, and writes them where --output says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True, help="new folder for everything")
    parser.add_argument("--files", type=int, default=64)
    parser.add_argument("--size", default="16M", help="of each file")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file that the results are added to")
    options = parser.parse_args()
    size = parse_size("--size", options.size)
    options.folder.mkdir(parents=True)
    try:
        result = measure(options.folder, options.files, size, options.jobs, options.rounds)
    finally:
        shutil.rmtree(options.folder)
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.parent.mkdir(exist_ok=True)
        known = json.loads(options.output.read_text()) if options.output.exists() else []
        options.output.write_text(json.dumps([*known, result], indent=2) + "\n")


def measure(folder: Path, files: int, size: int, jobs: int, rounds: int) -> dict[str, object]:
    """Bytes per second of both in each round, and of verify on one core."""
    artifacts = make_tree(folder / "tree", files, size)
    (folder / "m.yaml").write_text(Manifest(artifacts={a.name: a for a in artifacts}).to_yaml())
    curl, fetch = [], []
    with nginx(folder / "nginx", folder / "tree", "access_log off;") as url:
        command = curl_command(folder, artifacts, url, jobs)
        for _ in range(rounds):
            curl.append(seconds(command))
            shutil.rmtree(folder / "curl")
            shutil.rmtree(folder / "cache", ignore_errors=True)
            fetch.append(
                cli_seconds(folder, "fetch", "--family", "bench", "--mirror", url, "--jobs", str(jobs))
            )
    verify = [cli_seconds(folder, "cache", "verify", one_core=True) for _ in range(rounds)]
    total = files * size
    return {
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "command": " ".join(["python", "scripts/bench_fetch.py", *sys.argv[1:]]),
        "cores": os.cpu_count(),
        "files": files,
        "size": size,
        "jobs": jobs,
        "curl_bytes_per_second": [round(total / each) for each in curl],
        "fetch_bytes_per_second": [round(total / each) for each in fetch],
        "fetch_over_curl": round(statistics.median(c / f for c, f in zip(curl, fetch, strict=True)), 3),
        "verify_bytes_per_second_on_one_core": [round(total / each) for each in verify],
    }


def make_tree(folder: Path, files: int, size: int) -> list[Artifact]:
    """Files of random bytes, laid out as a mirror."""
    artifacts = []
    for number in range(files):
        data = os.urandom(size)
        digest = hashlib.sha256(data).hexdigest()
        artifact = Artifact(name=f"k{number}", set_name="bench", version="1", sha256=digest, size=size)
        path = folder / artifact.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        artifacts.append(artifact)
    return artifacts


def curl_command(folder: Path, artifacts: Sequence[Artifact], url: str, jobs: int) -> list[str]:
    """One curl that transfers all files in parallel."""
    lines = [f'url = "{url}/{a.key}"\noutput = "{folder}/curl/{a.key}"' for a in artifacts]
    (folder / "curl.conf").write_text("\n".join(lines))
    options = ["--parallel", "--parallel-immediate", "--parallel-max", str(jobs), "--create-dirs", "-sS"]
    return ["curl", *options, "-K", str(folder / "curl.conf")]


def cli_seconds(folder: Path, *arguments: str, one_core: bool = False) -> float:
    """Seconds that a command of ours takes, from start to end."""
    environ = {
        **os.environ,
        "CUBIN_RUNTIME_MANIFESTS": str(folder / "m.yaml"),
        "CUBIN_RUNTIME_CACHE_DIR": str(folder / "cache"),
    }
    pin: Callable[[], None] | None = (lambda: os.sched_setaffinity(0, {0})) if one_core else None
    start = time.perf_counter()
    subprocess.run([*CLI, *arguments], cwd=ROOT, env=environ, check=True, capture_output=True, preexec_fn=pin)
    return time.perf_counter() - start


def seconds(command: Sequence[str]) -> float:
    """Seconds that a command takes."""
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
