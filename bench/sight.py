"""What it costs to look: many shards, and a State of very many parts.

    python -m bench.sight [--shards 10000] [--parts 100000]

`usage`: seconds of `persist inspect usage --json` over a directory, by a process of its own.
`parts`: peak memory of the processes that run `state --json`, `parts --json` and `usage --json` of a shard of which the
State itself names that many parts. Their blobs are links to one file, since no rows are read.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa

from bench.bars import bar
from bench.parts import many
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.location import LocationSettings, open_location
from persist.core import commands as c
from persist.core.ids import Token, WriterId, mint
from persist.core.state import Policy
from rpc.cli.program import main as persist
from tests.support.location import InlineBackground

SCHEMA = pa.schema([("id", pa.int64())])
PLAIN = LocationSettings(policy=Policy(inline_part_bytes_max=0, plain_parts_max=10**6))  # no bundles
SECONDS, MIB = 60, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--parts", type=int, default=100_000)
    parser.add_argument("--child", nargs="*")
    args = parser.parse_args()
    if args.child is not None:
        child(args.child)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_shards(folder, args.shards)
        seconds = looked(folder, "usage")[0]
        print(f"usage {seconds:.1f} s, of {args.shards} shards")
        bar(f"inspect of {args.shards:,} shards", seconds, f"<= {SECONDS}")
    with tempfile.TemporaryDirectory() as folder:
        make_parts(folder, args.parts)
        peaks = {}
        for what in ("state", "parts", "usage"):
            took, peaks[what] = looked(folder, what, "big")
            print(f"{what} of {args.parts} parts: {peaks[what]:.0f} MiB, {took:.1f} s")
        bar(f"inspect of a State of {args.parts:,} parts", max(peaks.values()), f"<= {MIB}")


def make_shards(folder: str, count: int) -> None:
    location = open_location(f"persist://{folder}/data", background=InlineBackground())
    with Client(EmbeddedTransport(location)) as client:
        for number in range(count):
            client.create_shard(f"s{number:06}", SCHEMA, ["id"]).insert([{"id": number}])


def make_parts(folder: str, count: int) -> None:
    """A shard with so many parts in its State, and a rollup of that."""
    location = open_location(f"persist://{folder}/data", settings=PLAIN, background=InlineBackground())
    shard = Client(EmbeddedTransport(location)).create_shard("big", SCHEMA, ["id"])
    [run] = shard.open_writer().stage(pa.table({"id": range(1_000)}), None)
    machine, writer = location.machine("big"), mint(WriterId, location.ids)
    shard_id = machine.state().shard_id
    runs = many(run.parts[0], shard_id, writer, location.ids, count)
    blobs = Path(folder) / "data" / "blob"
    (blobs / shard_id / writer).mkdir(parents=True)
    source = str(blobs / str(run.parts[0].key))
    for number, one in enumerate(part for run in runs for part in run.parts):
        if number % 10_000 == 9_999:  # a file has so many links at most
            fresh = Path(f"{folder}/{number}")
            fresh.write_bytes(Path(source).read_bytes())
            source = str(fresh)
        os.link(source, blobs / str(one.key))
    machine.apply(c.Insert(writer, mint(Token, location.ids), location.versions.receipts.sign(shard_id, runs)))
    state = machine.refresh()
    assert sum(batch.part_count for batch in state.trace.batches) == count
    machine.apply(c.AddRollup(state.seqno, *location.versions.write_rollup(state)))
    location.close()


def looked(folder: str, what: str, *more: str) -> tuple[float, float]:
    """Seconds and peak MiB of one command in a fresh process."""
    asked = [what, *more, "--json", "--dir", f"{folder}/data"]
    command = [sys.executable, "-m", "bench.sight", "--child", json.dumps(asked)]
    start = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return time.perf_counter() - start, float(done.stdout.splitlines()[-1])


def child(words: list[str]) -> None:
    """Run the command, its output thrown away, and print the peak memory of the process."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        code = persist(["inspect", *json.loads(words[0])])
    assert code == 0
    # Not ru_maxrss: that one remembers what the process was before it became this program.
    status = Path("/proc/self/status").read_text().split()
    print(int(status[status.index("VmHWM:") + 1]) / 1024)


if __name__ == "__main__":
    main()
