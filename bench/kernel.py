"""What a read and a write cost the log of a shard, and how long reads take.

    python -m bench.kernel [--before CHECKOUT] [--rounds 5]

Commits are counted while a program's clock passes ten minutes in a moment. Latencies are those of the median round;
with `--before`, another checkout is measured in turns with this one, and the bars are ratios to it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa

import persist
from bench.bars import bar, interleaved, median
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from tests.support.clocks import World
from tests.support.server import Server

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.float64())])
ROWS, INSERTED, SAMPLES = 1_000, 100, 200
EVERY_S, READS = 10, 60
EARLIER = 3  # a time so many writes ago
READ_COMMITS_MAX, FIRST_COMMITS_MAX, EVENTS_MAX = 8, 1, 1_300
EARLIER_MAX, SAME_MAX = 0.6, 1.1
BOUNDS = {"earlier": EARLIER_MAX, "latest": SAME_MAX, "listen": SAME_MAX}


def rows(first: int, count: int) -> pa.Table:
    return pa.table({"id": range(first, first + count), "v": [0.5] * count}, schema=SCHEMA)


def read_commits() -> int:
    """Commits of a process that reads every ten seconds for ten minutes: the latest time, an earlier one, a tag."""
    from tests.support.location import UntendedPool  # another checkout may not have it

    world = World()
    reader, writer = world.machine(), world.machine()
    shard = writer.client.create_shard("orders", SCHEMA, ["id"])
    for number in range(EARLIER + 1):
        shard.insert(rows(number, 1))
    shard.tag("first", at=0)
    transport = reader.client.transport
    assert isinstance(transport, EmbeddedTransport)
    pool = transport.leases = UntendedPool(reader.clock)
    mine, machine = reader.shard("orders"), writer.location.machine("orders")
    before, written = machine.refresh().seqno, 0
    for number in range(READS):
        written -= machine.refresh().seqno
        upper = shard.insert(rows(100 + number, 1)).upper.element
        written += machine.refresh().seqno
        assert upper is not None
        choices: list[Callable[[], object]] = [
            lambda: mine.snapshot().to_arrow(),
            partial(_read_at, mine, upper - 1 - EARLIER),
            lambda: mine.snapshot(tag="first").to_arrow(),
        ]
        choices[number % len(choices)]()
        world.pass_ms(EVERY_S * 1000)
        pool.tend()
    return machine.refresh().seqno - before - written


def _read_at(shard: Shard, time: int) -> None:
    shard.snapshot(time).to_arrow()


def first_commits() -> int:
    """Commits of the first insert of a writer."""
    world = World()
    machine = world.machine()
    shard = machine.client.create_shard("orders", SCHEMA, ["id"])
    before = machine.location.machine("orders").refresh().seqno
    shard.insert(rows(0, 1))
    return machine.location.machine("orders").refresh().seqno - before


def insert_events() -> int:
    """Events `call` and `c_call` of the thread that inserts 100 rows, once everything is warm."""
    counts: list[int] = []
    with tempfile.TemporaryDirectory() as folder, persist.connect(f"persist://{folder}/location") as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        for number in range(20):
            table, seen = rows(number * INSERTED, INSERTED), [0]

            def saw(_frame: object, event: str, _argument: object, seen: list[int] = seen) -> None:
                seen[0] += event in ("call", "c_call")

            sys.setprofile(saw)
            try:
                shard.insert(table)
            finally:
                sys.setprofile(None)
            counts.append(seen[0])
    return int(median(counts))


def latencies() -> dict[str, float]:
    """Median milliseconds of a read of 1,000 rows, embedded and through a server, and of a listener's event."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "location")
        with persist.connect(f"persist://{directory}") as client:
            found |= _of("embedded", client)
        with Server(directory) as server, persist.connect(server.url) as client:
            found |= _of("http", client)
    return found


def _of(how: str, client: Client) -> dict[str, float]:
    read, heard = (client.create_shard(f"{how}-{name}", SCHEMA, ["id"]) for name in ("read", "heard"))
    for part in range(2):
        read.insert(rows(part * ROWS // 2, ROWS // 2))
    at = (read.upper().element or 0) - 2
    numbers = iter(range(10**9))
    heard.insert(rows(next(numbers), 1))
    with heard.listen(0) as listener:

        def event() -> None:
            heard.insert(rows(next(numbers), 1))
            while not listener.next_events(1):
                pass

        works = {
            "earlier": lambda: read.snapshot(at).to_arrow(),
            "latest": lambda: read.snapshot().to_arrow(),
            "listen": event,
        }
        samples = interleaved(SAMPLES, *works.values())
    return {f"{how} {name}": 1000 * median(times) for name, times in zip(works, samples, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--once", action="store_true", help="print the latencies of one round as JSON")
    options = parser.parse_args()
    if options.once:
        print(json.dumps(latencies()))
        return
    bar("commits of 60 reads in 10 minutes", read_commits(), f"<= {READ_COMMITS_MAX}")
    bar("commits of a first insert", first_commits(), f"<= {FIRST_COMMITS_MAX}")
    bar("calls of an insert of 100 rows", insert_events(), f"<= {EVENTS_MAX}")
    from bench.bars import elsewhere  # another checkout, which runs the above alone, may not have it

    checkouts = [ROOT] + ([options.before.resolve()] if options.before else [])
    measured: list[list[dict[str, float]]] = [[] for _ in checkouts]
    for _ in range(options.rounds):
        for mine, checkout in zip(measured, checkouts, strict=True):
            mine.append(elsewhere(checkout, __file__))
    for name in measured[0][0]:
        now, *before = [median([one[name] for one in mine]) for mine in measured]
        print(f"{name}: {now:.2f} ms" + "".join(f", before {one:.2f} ms" for one in before))
        for one in before:
            bar(f"{name}, to before", now / one, f"<= {BOUNDS[name.split()[1]]}")


if __name__ == "__main__":
    main()
