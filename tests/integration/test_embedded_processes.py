"""Processes share a directory and take turns. The one that has its turn is killed, or stopped, and all go on.

What was acknowledged is there exactly once, and of each process at most one row that was not. The model is naive: a
set of rows for each process, as it says itself in a file what it begins and what was acknowledged.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import struct
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from tests.support.examples import size
from tests.support.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="it asks the system who has a lock, as Linux tells it"
)

PROCESSES = 4
STRIKES = size(2, 4)  # a kill, then a stop, and so on
STEP = 2  # rows that the others write after each
LOOKS_MAX = 2_000  # for who has the turn; then any process will do
WRITE_LOCKS = 120, 3  # bytes of the index of SQLite's log: who has one writes, or makes the index
FLOCK = struct.Struct("hh4xqqi4x")
WRITER = """
import os, sys
import persist
url, name, journal, stop = sys.argv[1:]
file = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
with persist.connect(url) as client:
    writer = client.shard("orders").open_writer()
    number = 0
    while not os.path.exists(stop):
        os.write(file, b"?%d\\n" % number)
        if number % 5 == 4:
            token = f"{name}/{number}"
            client.shard("orders").insert([{"name": name, "number": number}], token=token)
        else:
            writer.insert([{"name": name, "number": number}])
        os.write(file, b"!%d\\n" % number)
        number += 1
"""


class Processes:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = f"persist://{root / 'data'}"
        self.stop = root / "stop"
        self.names: list[str] = []
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        name = f"p{len(self.names)}"
        self.names.append(name)
        self.running[name] = subprocess.Popen(
            [sys.executable, "-c", WRITER, self.url, name, str(self.root / name), str(self.stop)]
        )

    def said(self, name: str, mark: str) -> list[int]:
        """The numbers that a process has begun (`?`), or that were acknowledged to it (`!`)."""
        path = self.root / name
        lines = path.read_text().splitlines() if path.exists() else []
        return [int(line[1:]) for line in lines if line[0] == mark]

    def go_on(self, names: list[str]) -> None:
        """Wait until each of these has written some more rows."""
        wanted = {name: len(self.said(name, "!")) + STEP for name in names}
        for name, count in wanted.items():
            wait_until(lambda name=name, count=count: len(self.said(name, "!")) >= count, f"{name} goes on")

    def holder(self, file: str, start: int, length: int = 1) -> int | None:
        """The process that has a lock on one of these bytes of a file of the directory."""
        opened = os.open(self.root / "data" / file, os.O_RDWR)
        try:
            asked = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
            kind, _, _, _, pid = FLOCK.unpack(fcntl.fcntl(opened, fcntl.F_GETLK, asked))
            return pid if kind != fcntl.F_UNLCK else None
        finally:
            os.close(opened)

    def leader(self) -> str | None:
        """Whoever has the turn now."""
        names = {process.pid: name for name, process in self.running.items()}
        for _ in range(LOOKS_MAX):
            if (pid := self.holder("consensus.db-turns", zlib.crc32(b"orders"))) in names:
                return names[pid]
        return None

    def stopped(self, pid: int) -> bool:
        """Stop that process, unless it is writing to the database: SQLite lets nobody else write meanwhile."""
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] == "T", "it is stopped")
        if self.holder("consensus.db-shm", *WRITE_LOCKS) != pid:
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    def strike(self, chosen: random.Random, kills: bool) -> None:
        name = self.leader() or chosen.choice(sorted(self.running))
        others = [other for other in self.running if other != name]
        process = self.running[name]
        if kills:
            process.kill()
        else:
            wait_until(lambda: self.stopped(process.pid), "it is not writing")
        self.go_on(others)
        if kills:
            process.wait(WAIT_S)
            del self.running[name]
            self.start()
        else:
            os.kill(process.pid, signal.SIGCONT)
        self.go_on(list(self.running))


@pytest.mark.smoke
@pytest.mark.proof
def test_all_go_on_and_what_was_acknowledged_is_there_exactly_once(tmp_path: Path) -> None:
    processes, chosen = Processes(tmp_path), random.Random(21)
    with persist.connect(processes.url) as client:
        client.create_shard("orders", pa.schema([("name", pa.string()), ("number", pa.int64())]), ["name"])
    try:
        for _ in range(PROCESSES):
            processes.start()
        processes.go_on(list(processes.running))
        for number in range(STRIKES):
            processes.strike(chosen, kills=number % 2 == 0)
        processes.stop.touch()
        for process in processes.running.values():
            assert process.wait(WAIT_S) == 0
    finally:
        for process in processes.running.values():
            process.kill()
            process.wait(WAIT_S)
    with persist.connect(processes.url) as client:
        rows = client.shard("orders").snapshot().to_arrow(expand=True).to_pylist()
    found = Counter((row["name"], row["number"]) for row in rows)
    assert set(found.values()) == {1}, "nothing is there twice"
    for name in processes.names:
        begun, acknowledged = (set(processes.said(name, mark)) for mark in "?!")
        landed = {number for who, number in found if who == name}
        assert acknowledged <= landed <= begun, name
        assert len(begun - acknowledged) <= 1
