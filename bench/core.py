"""Does the cost of a commit and of opening follow live state, not history?

Appends small batches to one shard, with maintenance running as it does in service (a compactor and a collector as
processes of their own), and compares the first commits with those around number 20,000:

    python -m bench.core [--commits 20000] [--rows 10]

`append` is one insert of `--rows` rows, embedded; `open` is `persist.connect(url).shard(name)` with a new client, as a
program that starts does it; `load` is only the reading of the State (newest rollup and the state diffs after it).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial

import pyarrow as pa

import persist
from bench.bars import bar, median, timed
from persist.client.shard import Shard
from persist.commit.location import open_location
from persist.core.shard_view import ViewRequest
from tests.support.location import InlineBackground

EARLY = 10
SAMPLES = 41
STRIDE = 7  # commits between two samples, so that they fall at all distances from a rollup


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=20_000)
    parser.add_argument("--rows", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = f"persist://{folder}/location"
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "rpc.cli", "maintain", *name, "--dir", f"{folder}/location"],
                stdout=subprocess.DEVNULL,
            )
            for name in (("run", "--no-gc"), ("gc",))
        ]
        try:
            measure(url, args.commits, args.rows)
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.wait(30)


def measure(url: str, commits: int, rows: int) -> None:
    """Print the figures and the bars. Young and old are measured in turns, so that both see the same machine."""
    table = pa.table({"id": [f"{n:016d}" for n in range(rows)], "n": list(range(rows))})
    schema = pa.schema([("id", pa.string()), ("n", pa.int64())])
    with persist.connect(url) as client:
        old = client.create_shard("old", schema, ["id"], history="none")
        old_writer = old.open_writer()
        for number in range(commits):
            old_writer.insert(table)
            if number % 2_000 == 1_999:
                print(f"{number + 1} commits, {describe(old)}", flush=True)
        opens: list[list[float]] = [[], []]
        loads: list[list[float]] = [[], []]
        appends: list[list[float]] = [[], []]
        for number in range(SAMPLES):
            young = client.create_shard(f"young-{number}", schema, ["id"], history="none")
            young_writer = young.open_writer()
            for _ in range(EARLY):
                young_writer.insert(table)
            pairs = [(0, young, young_writer), (1, old, old_writer)]
            for index, shard, writer in pairs if number % 2 else reversed(pairs):  # neither always goes first
                opens[index].append(timed(opening(url, shard.name)))
                loads[index].append(timed(loading(url, shard.name)))
                for _ in range(STRIDE):
                    appends[index].append(timed(partial(writer.insert, table)))
        for name, (early, late) in (("append", appends), ("open", opens), ("load", loads)):
            print(f"{name} p50 ms: {median(early) * 1e3:.2f} at 10 commits, {median(late) * 1e3:.2f} at {commits}")
        bar(f"append, {commits} commits to 10", median(appends[1]) / median(appends[0]), "<= 1.3")
        bar(f"open, {commits} commits to 10", median(opens[1]) / median(opens[0]), "<= 1.3")


def opening(url: str, name: str) -> Callable[[], None]:
    def work() -> None:
        with persist.connect(url) as client:
            client.shard(name)

    return work


def loading(url: str, name: str) -> Callable[[], object]:
    location = open_location(url, background=InlineBackground())
    location.consensus.head(name)  # the connection is there
    return lambda: location.versions.load(name)


def describe(shard: Shard) -> str:
    view = shard._transport.view(shard.name, ViewRequest())
    return f"{len(view.batches)} batches in the State"


if __name__ == "__main__":
    main()
