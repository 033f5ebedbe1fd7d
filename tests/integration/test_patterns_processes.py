"""Ingesters, front ends, replicas and routed writers in processes of their own, killed at random while they work.

What they wrote is compared with naive models: the source by itself, and what each process was to write.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from persist.bindings import Bindings
from persist.patterns.partition_map import Routes
from persist.patterns.routed import read_routed
from tests.support.waiting import WAIT_S, wait_until

KILLS = 1
PROOF_KILLS = 6
AWAKE_S = 0.3  # at most, between something that was written and the next kill
LINES = pa.schema([("partition", pa.string()), ("position", pa.int64()), ("word", pa.string())])
ROWS = pa.schema([("who", pa.string()), ("number", pa.int64())])

INGEST = """
import os, sys
import pyarrow as pa
import persist
from persist.bindings import Bindings, BindingsSettings, Ingester, IngestSettings, Minter
url, there, stop, most = sys.argv[1:]
class Words:
    def watermarks(self):
        with open(there) as file:
            upto = int(file.read())
        return {"p0": upto, "p1": upto // 3}
    def read(self, partition, after, upto):
        positions = list(range(after + 1, upto + 1))
        columns = [[partition] * len(positions), positions, [f"{partition}.{at}" for at in positions]]
        yield pa.table(columns, schema=client.shard("words").schema.arrow)
with persist.connect(url) as client:
    bindings = Bindings.open(client, "times", settings=BindingsSettings(whole_every_rows=8))
    minter = Minter(bindings, Words().watermarks, positions_max=7)
    ingester = Ingester(bindings, Words(), client.shard("words"), IngestSettings(positions_max=int(most)))
    ended = False
    while not ended:
        ended = os.path.exists(stop)
        minter.tick()
        while ingester.step():
            pass
"""

FRONT_END = """
import os, sys
import persist
from persist.patterns.wal import FrontEnd
url, name, stop = sys.argv[1:]
with persist.connect(url) as client:
    front = FrontEnd(client.shard("log"), name)
    while not os.path.exists(stop):
        front.write([{"who": name, "number": front.acknowledged}])
"""

REPLICA = """
import os, sys
import persist
from persist.patterns.wal import Replica
url, _, stop = sys.argv[1:]
with persist.connect(url) as client:
    replica = Replica.open(client, "log", "table", history="forever")
    while not os.path.exists(stop):
        replica.step(0.1)
"""

ROUTED = """
import os, sys
import persist
from persist.patterns.routed import RoutedWriter
from persist.patterns.partition_map import Routes
url, name, stop = sys.argv[1:]
with persist.connect(url) as client:
    writer = RoutedWriter(Routes.open(client, "routes"), name)
    ended = False
    while not ended:
        ended = os.path.exists(stop)  # an append that was killed halfway is repeated before that
        writer.append([{"who": f"{name}.{key}", "number": writer.acknowledged} for key in range(5)])
"""


class Processes:
    """Processes by name, which begin again with the same arguments when they were killed."""

    def __init__(self, root: Path, seed: int) -> None:
        self.url = f"persist://{root / 'data'}"
        self.stop = root / "stop"
        self.chosen = random.Random(seed)
        self.commands: dict[str, list[str]] = {}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def add(self, name: str, script: str, *arguments: str) -> None:
        self.commands[name] = [sys.executable, "-c", script, self.url, *arguments]
        self.start(name)

    def start(self, name: str) -> None:
        self.running[name] = subprocess.Popen(self.commands[name])

    def strike(self, kills: int, went_on: Callable[[], int], between: Callable[[], None] = lambda: None) -> None:
        """Kill one after the other, each after something more was written; then let all come to their ends."""
        for _ in range(kills):
            between()
            self.wait_for_more(went_on)
            time.sleep(self.chosen.random() * AWAKE_S)
            name = self.chosen.choice(sorted(self.running))
            assert self.running[name].poll() is None, f"{name} has ended by itself"
            self.running[name].kill()
            self.running[name].wait(WAIT_S)
            self.start(name)
        between()
        self.wait_for_more(went_on)
        self.stop.touch()
        for name, process in self.running.items():
            assert process.wait(WAIT_S) == 0, name

    def wait_for_more(self, went_on: Callable[[], int]) -> None:
        before = went_on()
        wait_until(lambda: went_on() > before, "something more is written")

    def end(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait(WAIT_S)


def upper(shard: persist.Shard) -> int:
    return shard.upper().element or 0


def ingest(root: Path, seed: int, kills: int) -> None:
    processes, there, upto = Processes(root, seed), root / "there", 0

    erased: set[int] = set()

    def more() -> None:
        nonlocal upto
        if upto:  # an erasure waits for the next commit of an ingester, or takes a time, from which they go on
            there_now = words.snapshot().to_arrow(expand=True).to_pylist()
            gone = processes.chosen.choice([row["position"] for row in there_now if row["partition"] == "p0"])
            words.erase(keys=[("p0", gone)], reason="asked for", force=processes.chosen.random() < 0.5)
            erased.add(gone)
        upto += processes.chosen.randint(5, 40)
        (root / "new").write_text(str(upto))
        (root / "new").rename(there)

    with persist.connect(processes.url) as client:
        words = client.create_shard("words", LINES, ["partition", "position"], history="forever")
        more()
        try:
            for name, most in (("a", "5"), ("b", "50")):
                processes.add(name, INGEST, str(there), str(processes.stop), most)
            wait_until(lambda: upper(words), "the first words are written")
            processes.strike(kills, lambda: upper(words), more)
        finally:
            processes.end()
        assert "pending" not in {one.phase for one in words.erasures().values()}
        bindings = Bindings.open(client, "times")
        rows = words.snapshot().to_arrow(expand=True).to_pylist()
        last = {"p0": upto, "p1": upto // 3}
        assert bindings.heads == last
        positions = [(name, at) for name, end in last.items() for at in range(end + 1)]
        kept = [(name, at) for name, at in positions if name != "p0" or at not in erased]
        expected = [(name, at, f"{name}.{at}") for name, at in kept]
        assert sorted(tuple(row.values()) for row in rows) == expected


def replicate(root: Path, seed: int, kills: int) -> None:
    processes = Processes(root, seed)
    with persist.connect(processes.url) as client:
        log = client.create_shard("log", ROWS, ["who"], history="forever")
        table = client.create_shard("table", ROWS, ["who"], history="forever")
        try:
            for name in ("f0", "f1"):
                processes.add(name, FRONT_END, name, str(processes.stop))
            for name in ("r0", "r1"):
                processes.add(name, REPLICA, name, str(processes.stop))
            processes.strike(kills, lambda: upper(table))
        finally:
            processes.end()
        reached = upper(table)
        assert reached
        for time_asked in {reached - 1, processes.chosen.randrange(reached)}:
            assert table.snapshot(as_of=time_asked).to_arrow() == log.snapshot(as_of=time_asked).to_arrow()
        written = log.snapshot().to_arrow(expand=True).to_pylist()
    for name in ("f0", "f1"):
        numbers = sorted(row["number"] for row in written if row["who"] == name)
        assert numbers == list(range(len(numbers))), "each write is there once"


def route(root: Path, seed: int, kills: int) -> None:
    processes = Processes(root, seed)
    names = [f"s{number}" for number in range(4)]
    with persist.connect(processes.url) as client:
        for name in names:
            client.create_shard(name, ROWS, ["who"], history="forever")
        routes = Routes.open(client, "routes", names[:2], by=["who"])

        def went_on() -> int:
            return sum(upper(client.shard(name)) for name in names)

        def change() -> None:
            if processes.chosen.random() < 0.5:
                routes.change(processes.chosen.sample(names, processes.chosen.randint(1, 4)))

        try:
            for name in ("w0", "w1"):
                processes.add(name, ROUTED, name, str(processes.stop))
            processes.strike(kills, went_on, change)
        finally:
            processes.end()
        rows = read_routed(routes).to_pylist()
    keys = [f"{name}.{key}" for name in ("w0", "w1") for key in range(5)]
    numbers = {key: [row["number"] for row in rows if row["who"] == key] for key in keys}
    assert numbers == {key: list(range(len(found))) for key, found in numbers.items()}, "once, and in order"
    for name in ("w0", "w1"):
        assert len({len(numbers[f"{name}.{key}"]) for key in range(5)}) == 1, "and no part of an append is missing"


STORIES = [ingest, replicate, route]


@pytest.mark.smoke
@pytest.mark.proof
@pytest.mark.parametrize("story", STORIES)
def test_what_killed_processes_have_written_is_there_once(
    story: Callable[[Path, int, int], None], tmp_path: Path
) -> None:
    story(tmp_path, 5, KILLS)


@pytest.mark.proof
@pytest.mark.parametrize("story", STORIES)
def test_what_processes_that_are_killed_again_and_again_have_written_is_there_once(
    story: Callable[[Path, int, int], None], tmp_path: Path
) -> None:
    story(tmp_path, 6, PROOF_KILLS)
