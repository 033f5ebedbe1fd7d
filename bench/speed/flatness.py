"""Does anything cost more because there is more, or because much has happened?

    python -m bench.speed.flatness [--rounds 5] [--only writers,parts,...] [--most 1000000]

A shard, or its location, is grown to doubling sizes (`bench.speed.flat_shards`: stores in memory, so only our own work
counts). At each size these costs are taken in turns, round after round, and the least of the rounds is kept:

- commit: CPU of one insert of ten rows, from the command on until its caller goes on (median of some)
- upkeep: CPU of 64 inserts with all that they ask to be done in the background, by insert, and an insert's share of the
  rollup that is due after many of them
- bytes: what both stores take of these, by insert
- open: CPU of reading the State of a shard that this process has not cached
- wake-up: CPU of another process that follows the shard, from the news of a commit to the view of what is new
- idle: CPU of a second in which nothing happens: the polls of a server, and for `shards` the rounds of maintenance

CPU is that of the thread, so neighbours on the machine change it little. The exponent is the slope of a line through
log(cost) over log(size), by least squares; 0 is flat, 1 is a cost that grows with the size.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.bars import bar, median
from bench.speed.flat_shards import (
    NAME,
    Grown,
    with_attributes,
    with_batches,
    with_cursors,
    with_parts,
    with_readers,
    with_schemas,
    with_writers,
)
from compactor.loop import RESCAN_PER_S, RESCAN_S, in_turn
from compactor.tasks import gc_task, history_task, merge_task
from compactor.worker import Worker
from persist.commit.background_duties import ROLLUP_BYTES
from persist.commit.state_loader import rolled_up
from persist.core.shard_view import ViewRequest, view_of
from persist.core.state import Policy
from persist.maintenance.collector import Collector
from rpc.shard_watcher import POLLS_PER_S_WITH_PUSH

COSTS = ("commit", "upkeep", "bytes", "open", "wake-up", "idle")
UNITS = {"bytes": "B"}  # all others: microseconds of CPU
BOUND = "<= 0.1"
CYCLE = 64  # inserts between which each kind of upkeep has its turn, but for rollups
COMMITS, OPENS, WAKES, POLLS, LOOKS = 15, 3, 9, 9, 15  # of which one figure of a round is the median
POLICY = Policy()
SHARDS_FIRST, SHARDS_MOST = 1_024, 1_000_000
ROUNDS = 5


@dataclass(frozen=True)
class Axis:
    """A way to grow. `make(size)` gives the shard of that size."""

    name: str
    sizes: Sequence[int]
    make: Callable[[int], Grown]


def doubling(first: int, most: int) -> list[int]:
    """`first`, twice that, and so on; the last one is `most`."""
    return [*(first << n for n in range(math.ceil(math.log2(most / first)))), most]


AXES = (
    Axis("commits", doubling(512, 16_384), lambda n: Grown(commits=n)),
    Axis("history", doubling(512, 16_384), lambda n: Grown(commits=n, history="forever")),
    Axis("batches", doubling(64, 8_192), partial(Grown, with_batches)),
    Axis("parts", doubling(8_192, 1_000_000), partial(Grown, with_parts)),
    Axis("writers", doubling(512, 65_536), partial(Grown, with_writers)),
    Axis("readers", doubling(64, 8_192), partial(Grown, with_readers)),
    Axis("cursors", doubling(15, 960), partial(Grown, with_cursors)),
    Axis("attributes", doubling(4_096, 131_072), with_attributes),
    Axis("schemas", doubling(4, 256), partial(Grown, with_schemas)),
)


# --- the costs, in microseconds or bytes


def cpu_us(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return (time.thread_time() - start) * 1e6


def some(count: int, work: Callable[[], object]) -> float:
    """The median CPU of so many calls."""
    return median([cpu_us(work) for _ in range(count)])


def costs(grown: Grown) -> dict[str, float]:
    """One round of every cost at this shard."""
    found: dict[str, float] = {}
    commits: list[float] = []
    before, machine = grown.bytes, grown.location.machine(NAME)
    # Made now, so that none is due among the inserts of this round.
    rollup_us = cpu_us(lambda: rolled_up(grown.location.versions, machine.state(), machine.apply))
    grown.background.drain()
    rollup_bytes = grown.bytes - before
    before, upkeep_us = grown.bytes, 0.0
    for _ in range(CYCLE):
        commits.append(grown.insert() * 1e6)
        upkeep_us += cpu_us(grown.background.drain)
    found["commit"] = median(commits)
    logged = (grown.bytes - before) / CYCLE
    inserts = min(POLICY.rollup_every, max(ROLLUP_BYTES, rollup_bytes) / logged)  # between two rollups
    found["upkeep"] = (sum(commits) + upkeep_us) / CYCLE + rollup_us / inserts
    found["bytes"] = logged + rollup_bytes / inserts
    found["open"] = some(OPENS, lambda: grown.location.versions.load(NAME))
    wakes = []
    for _ in range(WAKES):
        seen = grown.follower.refresh().upper
        grown.insert()
        wakes.append(cpu_us(lambda seen=seen: view_of(grown.follower.refresh(), ViewRequest(lower=seen))))  # type: ignore[misc]
        grown.background.drain()
    found["wake-up"] = median(wakes)
    grown.follower.refresh()
    found["idle"] = POLLS_PER_S_WITH_PUSH * some(POLLS, grown.follower.refresh)
    return found


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The slope of the line through log(cost) over log(size), by least squares."""
    logs = [(math.log(size), math.log(cost)) for size, cost in points]
    x, y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    slope: float = sum((a - x) * (b - y) for a, b in logs) / sum((a - x) ** 2 for a, _ in logs)
    return slope


# --- tables


def of_axis(axis: Axis, rounds: int) -> dict[str, list[tuple[int, float]]]:
    """Of each cost the least of the rounds at each size: neighbours on the machine only add to it."""
    subjects = {size: axis.make(size) for size in axis.sizes}
    gc.collect()
    gc.freeze()  # what was grown for the other sizes is no work of the shard that is measured
    rounds_of: dict[int, list[dict[str, float]]] = {size: [] for size in subjects}
    for number in range(rounds):
        for size in subjects if number % 2 else reversed(subjects):
            rounds_of[size].append(costs(subjects[size]))
    for grown in subjects.values():
        grown.check()
    gc.unfreeze()
    return {cost: [(size, min(found[cost] for found in rounds_of[size])) for size in axis.sizes] for cost in COSTS}


def of_shards(rounds: int, most: int) -> dict[str, list[tuple[int, float]]]:
    """As `of_axis`, of one location that gets more shards between the sizes. All of its shards are alike."""
    grown = Grown()
    found: dict[str, list[tuple[int, float]]] = {cost: [] for cost in COSTS}
    have = 1
    for size in doubling(SHARDS_FIRST, most):
        grown.logs.crowd([f"crowd/{n:07d}" for n in range(have, size)], NAME)
        have = size
        gc.collect()
        gc.freeze()
        of_size = [{**costs(grown), "idle": maintenance_us(grown, size)} for _ in range(rounds)]
        gc.unfreeze()
        for cost in COSTS:
            found[cost].append((size, min(one[cost] for one in of_size)))
    grown.check()
    return found


def maintenance_us(grown: Grown, size: int) -> float:
    """CPU of a second of maintenance while nothing happens: it lists the shards and looks at each in turn.

    The whole listing is done, of the looks some: each shard is looked at as the one that is there.
    """
    location = grown.location
    merge, history = merge_task(location, lambda: Worker(location)), history_task(location, location.machine)
    look = in_turn([merge, history, gc_task(location, Collector(location), every_s=0.0)])
    look(NAME)
    listing = cpu_us(lambda: sum(1 for _ in location.all_names()))
    looks_per_s = min(size / RESCAN_S, RESCAN_PER_S)
    return looks_per_s * (listing / size + some(LOOKS, lambda: look(NAME)))


def show(axis: str, found: dict[str, list[tuple[int, float]]]) -> None:
    """The table of one axis, and its bars."""
    sizes = [size for size, _ in found["commit"]]
    print(f"\n{axis}: microseconds of CPU, or bytes, at so many", flush=True)
    print(f"{'':10}" + "".join(f"{size:>10,}" for size in sizes) + "  exponent")
    for cost in COSTS:
        slope = exponent(found[cost])
        print(f"{cost:10}" + "".join(f"{value:>10,.0f}" for _, value in found[cost]) + f"{slope:>10.2f}")
    for cost in COSTS:
        bar(f"exponent of {cost} in {axis}", exponent(found[cost]), BOUND)


def tables(rounds: int, most: int, only: Sequence[str] = ()) -> Iterator[str]:
    """Measure and print axis by axis; the name of each that is done."""
    for axis in AXES:
        if not only or axis.name in only:
            show(axis.name, of_axis(axis, rounds))
            yield axis.name
    if not only or "shards" in only:
        show("shards", of_shards(rounds, most))
        yield "shards"


def measure(root: Path, rounds: int) -> None:
    """All tables and bars. Nothing is written below `root`: the stores are in memory."""
    del root
    for _ in tables(max(3, rounds), SHARDS_MOST):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    known = [*(axis.name for axis in AXES), "shards"]
    parser.add_argument("--only", default="", help="axes, by commas: " + ",".join(known))
    parser.add_argument(
        "--most",
        type=int,
        default=SHARDS_MOST,
        help=f"shards in the location, at least {2 * SHARDS_FIRST:,}; the sizes of other axes are fixed",
    )
    arguments = parser.parse_args()
    only = [name for name in arguments.only.split(",") if name]
    if unknown := [name for name in only if name not in known]:
        parser.error(f"there is no axis {unknown[0]}; there are {','.join(known)}")
    if arguments.rounds < 1 or arguments.most < 2 * SHARDS_FIRST:
        parser.error(f"--rounds is at least 1, --most at least {2 * SHARDS_FIRST:,}")
    for _ in tables(arguments.rounds, arguments.most, only):
        pass


if __name__ == "__main__":
    main()
