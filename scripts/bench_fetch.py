"""Measures `cubin-runtime fetch` against curl, with nginx on this machine as the mirror, and both verifies.

    python scripts/bench_fetch.py --folder /dev/shm/bench --files 192 --output benchmarks/fetch.json

Both transfer the same files, as many at a time, from the same server to the same folder; curl neither hashes
nor locks nor syncs. The time of fetch includes the start of Python and of the command line, that of the
transfer alone does not. Needs nginx and curl; the folder is removed at the end.
"""

from __future__ import annotations

import argparse
import compileall
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

from cubin_runtime import http_mirror  # noqa: E402, F401  so that its import is not measured; the path comes first
from cubin_runtime.batch import fetch_all  # noqa: E402
from cubin_runtime.manifest import Artifact, Manifest  # noqa: E402
from cubin_runtime.mirrors import open_mirrors  # noqa: E402
from cubin_runtime.settings import CACHE_DIR, MIRRORS, Settings, parse_size  # noqa: E402
from cubin_runtime.transfer import Transfers  # noqa: E402
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
    for package in ("cubin_runtime", "kernel_meta"):  # as pip leaves them; a checkout may be told not to
        compileall.compile_dir(ROOT / package, quiet=1)
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
    curl, fetch, inside = [], [], []
    with nginx(folder / "nginx", folder / "tree", "access_log off;") as url:
        command = curl_command(folder, artifacts, url, jobs)
        bring = ("fetch", "--row", "bench*", "--mirror", url, "--jobs", str(jobs))
        for _ in range(rounds):
            transfer_seconds(folder, artifacts, url, jobs)  # whoever is first after a pause pays for memory
            shutil.rmtree(folder / "cache")
            curl.append(seconds(command))
            shutil.rmtree(folder / "curl")
            inside.append(transfer_seconds(folder, artifacts, url, jobs))
            shutil.rmtree(folder / "cache")
            fetch.append(cli_seconds(folder, *bring))
            shutil.rmtree(folder / "cache")
        cli_seconds(folder, *bring)
    start = [cli_seconds(folder, "cache", "path") for _ in range(rounds)]
    cache_verify = [cli_seconds(folder, "cache", "verify", one_core=True) for _ in range(rounds)]
    verify = [cli_seconds(folder, "verify", "bench*", one_core=True) for _ in range(rounds)]
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
        "fetch_over_curl": ratio(curl, fetch),
        "transfer_alone_bytes_per_second": [round(total / each) for each in inside],
        "transfer_alone_over_curl": ratio(curl, inside),
        "start_of_a_command_seconds": round(statistics.median(start), 3),
        "cache_verify_bytes_per_second_on_one_core": [round(total / each) for each in cache_verify],
        "verify_bytes_per_second_on_one_core": [round(total / each) for each in verify],
        "sha256_bytes_per_second_in_memory": round(sha256_rate()),
    }


def ratio(curl: Sequence[float], other: Sequence[float]) -> float:
    """How many times as fast as curl, in the median of the rounds."""
    return round(statistics.median(c / o for c, o in zip(curl, other, strict=True)), 3)


def transfer_seconds(folder: Path, artifacts: Sequence[Artifact], url: str, jobs: int) -> float:
    """Seconds that a process takes for the files which has everything imported."""
    settings = Settings({CACHE_DIR: str(folder / "cache"), MIRRORS: url})
    start = time.perf_counter()
    with open_mirrors(settings, connections=jobs) as mirrors:
        outcomes = fetch_all(
            artifacts, Transfers(mirrors, settings.http_timeout), settings=settings, jobs=jobs
        )
    took = time.perf_counter() - start
    assert all(outcome.fetched and outcome.fetched.is_new for outcome in outcomes)
    return took


def sha256_rate() -> float:
    """Bytes per second of hashlib on one core, without a file: what no verify can pass."""
    block, count = bytes(2**20), 512
    digest = hashlib.sha256()
    start = time.perf_counter()
    for _ in range(count):
        digest.update(block)
    return count * len(block) / (time.perf_counter() - start)


def make_tree(folder: Path, files: int, size: int) -> list[Artifact]:
    """Files of random bytes, laid out as a mirror."""
    artifacts = []
    for number in range(files):
        data = os.urandom(size)
        digest = hashlib.sha256(data).hexdigest()
        artifact = Artifact(name=f"bench{number}", set_name="bench", version="1", sha256=digest, size=size)
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
