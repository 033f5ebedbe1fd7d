"""What it costs to know that a location is whole.

    python -m bench.copies [--shards 10] [--parts 1000] [--rounds 5]

`verify`: shards x parts blobs in files and SQLite, beside listing and stat'ing the same blobs by hand, alternating.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable

import pyarrow as pa

from bench.bars import bar, median
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.location import Location, LocationSettings, open_location
from persist.copies.verify import How, verified
from persist.core.state import Policy

SCHEMA = pa.schema([("id", pa.int64())])
STAGED = LocationSettings(policy=Policy(inline_part_bytes_max=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=10)
    parser.add_argument("--parts", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        location = open_location(f"persist://{directory}/data", settings=STAGED)
        fill(location, args.shards, args.parts)
        ratios = []
        for _ in range(args.rounds):
            ours, blobs = timed(lambda: verify(location))
            by_hand, listed = timed(lambda: looked_at(location))
            assert listed >= blobs >= args.shards * args.parts
            ratios.append(by_hand / ours)
            print(f"verify {ours:.3f} s, by hand {by_hand:.3f} s, {blobs} blobs")
        bar(f"verify-{args.shards * args.parts}-blobs", median(ratios), ">= 0.8")
        location.close()


def fill(location: Location, shards: int, parts: int) -> None:
    client = Client(EmbeddedTransport(location))
    for number in range(shards):
        writer = client.create_shard(f"s{number:03}", SCHEMA, ["id"]).open_writer()
        staged = [writer.stage([{"id": row}], None) for row in range(parts)]
        writer.commit_insert(tuple(run for runs in staged for run in runs))


def verify(location: Location) -> int:
    found = list(verified(location, location.all_names("", with_dropped=False), How()))
    assert all(shard.is_sound for shard in found)
    return sum(shard.blobs for shard in found)


def looked_at(location: Location) -> int:
    """How many blobs there are: each is listed, and looked at."""
    found = [location.blob.stat(stat.key) for stat in location.blob.list("")]
    assert None not in found
    return len(found)


def timed(run: Callable[[], int]) -> tuple[float, int]:
    start = time.perf_counter()
    found = run()
    return time.perf_counter() - start, found


if __name__ == "__main__":
    main()
