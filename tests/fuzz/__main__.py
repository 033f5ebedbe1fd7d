"""Fuzz a server of one's own, for so many seconds each, and go on where the last run ended.

    python -m tests.fuzz [--target ndjson,csv] [--seconds 300] [--corpus DIR] [--seed 1] [--samples]

`--samples` writes the samples anew to which the repository's corpus goes back, and ends.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.fuzz.fuzzing import CORPUS, Failed, Run, peak_bytes
from tests.fuzz.targets import TARGETS
from tests.support.server import Server


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default=",".join(TARGETS), help="with commas; all of them at once unless given")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--corpus", type=Path, default=Path(".cache/fuzz"), help="where a run keeps what it learned")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--samples", action="store_true", help="write the samples of the repository anew")
    given = parser.parse_args()
    if unknown := set(given.target.split(",")) - set(TARGETS):
        parser.error(f"there is no target {sorted(unknown)[0]!r}; they are {', '.join(TARGETS)}")
    if given.samples:
        write_samples()
        return 0
    with tempfile.TemporaryDirectory(prefix="persist-fuzz-") as directory, Server(Path(directory) / "data") as server:
        runs = [
            Run(name, server.port, server.process.pid, given.seed, given.corpus) for name in given.target.split(",")
        ]
        failures = together(runs, given.seconds)
        for run in runs:
            counts = ", ".join(f"{status}: {count}" for status, count in sorted(run.statuses.items()))
            print(f"{run.name}: {sum(run.statuses.values())} inputs, now at {run.number}; answers {counts}")
        print(f"the server took {peak_bytes(server.process.pid) / 2**20:.0f} MiB of memory at most")
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


def together(runs: list[Run], seconds: float, inputs_max: int | None = None) -> list[BaseException]:
    """Run them at once for so long, or until each has sent so many inputs; what failed."""
    failures: list[BaseException] = []

    def one(run: Run) -> None:
        try:
            run.until(time.monotonic() + seconds, inputs_max)
        except (Failed, OSError) as failure:
            failures.append(failure)

    threads = [threading.Thread(target=one, args=(run,), name=f"fuzz-{run.name}") for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def write_samples() -> None:
    for name, target in TARGETS.items():
        home = CORPUS / name
        home.mkdir(parents=True, exist_ok=True)
        for sample, data in target.samples().items():
            (home / f"{sample}.bin").write_bytes(data)


if __name__ == "__main__":
    sys.exit(main())
