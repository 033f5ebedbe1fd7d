"""Processes killed with SIGKILL, at named points and at random, over real stores: nothing acknowledged is lost."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from persist.client import Client
from persist.embedded import EmbeddedTransport
from tests.crash.actor import HANDLES, POINTS, SHARD, Fuse, location_of

ROUNDS = 8 if os.environ.get("CI") == "true" else 2
ROUND_S = 3.0
ROLES = ("writer", "writer", "writer", "reader", "compactor", "compactor", "collector")
SERVED = 1  # how many of the writers go through the server


class Arena:
    """The processes of one location, killed and started again."""

    def __init__(self, directory: Path, blob: str, consensus: str, seed: int) -> None:
        self.pick = random.Random(seed)
        self.journal = directory / "journal"
        self.kills: Counter[str] = Counter()
        self._stores = [blob, consensus]
        self._numbers = iter(range(1, 1_000_000))
        self._log = (directory / "log").open("ab")
        self._server: subprocess.Popen[bytes] | None = None
        self._url = ""
        self._actors: list[tuple[str, bool, subprocess.Popen[bytes]]] = []

    def start(self) -> None:
        self._serve()
        for number, role in enumerate(ROLES):
            self._start(role, served=number < SERVED)

    def torment(self, seconds: float) -> None:
        """Kill somebody every so often; whoever is dead starts again."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(self.pick.uniform(0.05, 0.4))
            victim = self.pick.randrange(len(self._actors) + 1)
            if victim == len(self._actors):
                assert self._server is not None
                self._end(self._server)
                self.kills["server"] += 1
                self._serve()
            elif self.pick.random() < 0.5:
                self._end(self._actors[victim][2])
                self.kills[self._actors[victim][0]] += 1
            for role, served, process in list(self._actors):
                if process.poll() is not None:
                    self.kills["at a named point" if process.returncode == -9 else "by itself"] += 1
                    self._actors.remove((role, served, process))
                    self._start(role, served)

    def stop(self) -> None:
        for _, _, process in self._actors:
            self._end(process)
        self._actors.clear()
        if self._server is not None:
            self._end(self._server)
        self._log.close()

    def _serve(self) -> None:
        stores = ["--blob", self._stores[0], "--consensus", self._stores[1]]
        self._server = subprocess.Popen(
            [sys.executable, "-m", "persist.cli", "serve", *stores, "--port", "0", "--no-maintenance"],
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        assert self._server.stdout is not None
        self._url = self._server.stdout.readline().decode().strip()

    def _start(self, role: str, served: bool) -> None:
        point = f"{self.pick.choice(POINTS)}:{self.pick.randrange(5, 60)}" if not served else "none:0"
        connection = [self._url] if served else self._stores
        seed = str(next(self._numbers))
        command = [sys.executable, "-m", "tests.crash.actor", role, str(self.journal), seed, point, *connection]
        self._actors.append((role, served, subprocess.Popen(command, stderr=self._log)))

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def check(arena: Arena, blob: str, consensus: str) -> Counter[str]:
    """The journal against what the shard holds in the end; how much was looked at."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in arena.journal.read_text().splitlines()]
    assert [line["broken"] for line in lines if "broken" in line] == []
    location = location_of(blob, consensus, Fuse("none", 0))
    with Client(EmbeddedTransport(location), HANDLES) as client:
        shard = client.shard(SHARD)
        table = shard.snapshot().to_arrow()
        held = Counter(table.column("who").to_pylist())
        assert set(table.column("__diff").to_pylist()) <= {1}
        sizes = {line["write"]: line["rows"] for line in lines if "write" in line}
        acknowledged = [line["ok"] for line in lines if "ok" in line]
        lost = [name for name in acknowledged if held[name] != sizes[name]]
        assert lost == [], f"acknowledged and lost: {lost}"
        refused = [line["refused"] for line in lines if "refused" in line]
        assert [name for name in refused if held[name]] == []
        assert [name for name, count in held.items() if count != sizes[name]] == [], "a write is there by halves"
        reads = _check_reads(shard, [line for line in lines if "read" in line])
    return Counter(acknowledged=len(acknowledged), refused=len(refused), tried=len(sizes), reads=reads)


def _check_reads(shard: Any, reads: list[dict[str, Any]]) -> int:
    """Every read of a time showed the same rows, and those that can still be read are still the same."""
    seen: dict[int, Any] = {}
    for line in reads:
        assert seen.setdefault(line["read"], line["rows"]) == line["rows"], f"as of {line['read']} reads differ"
    since = shard.since().element or 0
    for as_of in [seen_at for seen_at in sorted(seen) if seen_at >= since][-5:]:
        table = shard.snapshot(as_of).to_arrow()
        assert sorted(map(list, zip(*table.to_pydict().values(), strict=True))) == seen[as_of]
    return len(reads)


def rounds(directory: Path, blob: str, consensus: str) -> None:
    totals: Counter[str] = Counter()
    arena = Arena(directory, blob, consensus, seed=len(blob))
    try:
        arena.start()
        while not arena.journal.exists() or "ok" not in arena.journal.read_text():
            time.sleep(0.1)
        for _ in range(ROUNDS):
            arena.torment(ROUND_S)
    finally:
        arena.stop()
    totals += check(arena, blob, consensus)
    print(f"{ROUNDS} rounds: {dict(totals)}, killed: {dict(arena.kills)}")
    assert totals["acknowledged"]
    assert totals["reads"]
    assert arena.kills["at a named point"]


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_over_sqlite_and_files(tmp_path: Path) -> None:
    rounds(tmp_path, f"file://{tmp_path}/blob", f"sqlite:///{tmp_path}/consensus.db")


@pytest.mark.slow
@pytest.mark.services
def test_nothing_acknowledged_is_lost_over_postgresql_and_s3(tmp_path: Path, postgres_url: str, s3_url: str) -> None:
    rounds(tmp_path, s3_url, postgres_url)


@pytest.mark.slow
@pytest.mark.services
def test_nothing_acknowledged_is_lost_over_etcd_and_s3(tmp_path: Path, etcd_url: str, s3_url: str) -> None:
    rounds(tmp_path, s3_url, etcd_url)
