"""A home, a region that reads it, the loss of the home and its return, as processes. What was acknowledged is noted."""

from __future__ import annotations

import json
import os
import socket
import threading
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import persist
from blob import Blob, open_blob
from persist.regions.region_index import RegionEntry, RegionIndex, write_index
from tests.support.forked import Forked, ran
from tests.support.regions import Copier
from tests.support.server import Server
from tests.support.waiting import wait_until

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
NAMES = ("eu/orders", "eu/clicks")
PUBLISH = {"PERSIST_PUBLISH_EVERY": "1"}
PAUSE_S = 0.05


@dataclass(frozen=True)
class Stores:
    """URLs: the stores of the home, the blob store of the copy, and the consensus store with which that goes on."""

    blob: str
    consensus: str
    copy: str
    fresh: str


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _has(blob: Blob, prefix: str) -> bool:
    return next(iter(blob.list(prefix)), None) is not None


class Filling:
    """Fills the copy in any order, late, and deletes early, until it is stopped."""

    def __init__(self, source: str, target: str) -> None:
        self._blobs: list[Blob] = [open_blob(source), open_blob(target)]
        self._copier = Copier(*self._blobs, Random(7))
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.wait(PAUSE_S):
            with suppress(Exception):  # what home has deleted since it was listed
                self._copier.step(0.5)

    def stop(self) -> None:
        self._ends.set()
        self._thread.join()
        for blob in self._blobs:
            blob.close()


class Disaster:
    """`acknowledged`: the ids of each shard of which a home has said that they are there."""

    def __init__(self, root: Path, stores: Stores, *, adversary: bool = False) -> None:
        self.root, self.stores = root, stores
        self.index = root / "regions.json"  # both regions have the same
        self.acknowledged: dict[str, set[int]] = {name: set() for name in NAMES}
        self._next = 0
        self.running: list[Server] = []
        write_index(self.index, RegionIndex({"eu": RegionEntry(), "us": RegionEntry()}))
        self.home = self.serve(stores.blob, stores.consensus)
        with persist.connect(self.home.url) as client:
            for name in NAMES:
                client.create_shard(name, SCHEMA, ["id"])
        self.write(self.home.url, 5)
        self.filling = Filling(stores.blob, stores.copy) if adversary else None
        self.replicating = None if adversary else self.replicate(stores.blob, stores.copy)
        with closing(open_blob(stores.copy)) as copy:
            for prefix in ("location-id", "epoch/", "cat/"):
                wait_until(partial(_has, copy, prefix), f"{prefix} has come")
        self.region = self.read_only(stores.copy)
        entry = RegionEntry((self.home.url,), (self.region.url,), stores.blob, stores.copy)
        write_index(self.index, RegionIndex({"eu": entry}))

    # --- processes

    def serve(self, blob: str, consensus: str, port: int = 0) -> Server:
        where = ("--blob", blob, "--consensus", consensus, "--region", "eu", "--index", str(self.index))
        started = Server(self.root, *where, "--port", str(port), environment=PUBLISH, maintenance="beside")
        self.running.append(started)
        return started

    def read_only(self, blob: str) -> Server:
        where = ("--blob", blob, "--region", "us", "--of", "eu", "--index", str(self.index))
        started = Server(self.root, "--read-only", *where)
        self.running.append(started)
        return started

    def replicate(self, source: str, target: str, *, once: bool = False) -> Forked:
        command = ["region", "replicate", "--every", "100ms", "--keep", "2s", "--whole", "2s"]
        command += ["--from", source, "--to", target, *(["--once"] if once else [])]
        return Forked(command, os.environ, unread=True)

    def cut(self) -> None:
        """Nothing comes to the copy any more."""
        if self.filling is not None:
            self.filling.stop()
        if self.replicating is not None:
            self.replicating.end()
        self.filling = self.replicating = None

    def command(self, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
        """Run a command of persist: its exit code, its lines of JSON, and what it says of errors."""
        done = ran(*arguments)
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr

    def close(self) -> None:
        self.cut()
        for server in self.running:
            if server.process.poll() is None:
                server.stop()

    # --- rows

    def write(self, url: str, rows: int) -> None:
        """Insert rows one by one; each is noted once it is acknowledged."""
        with persist.connect(url) as client:
            for name in NAMES:
                shard = client.shard(name)
                for _ in range(rows):
                    self._next += 1
                    shard.insert([{"id": self._next, "v": name}])
                    self.acknowledged[name].add(self._next)

    def ids(self, url: str, name: str) -> set[int]:
        """What a server shows of the shard."""
        with persist.connect(url) as client:
            return set(client.shard(name).snapshot().to_arrow().column("id").to_pylist())

    def arrived(self) -> None:
        """Wait until the region shows all that was acknowledged."""
        for name in NAMES:
            wanted = self.acknowledged[name]

            def shows(name: str = name, wanted: set[int] = wanted) -> bool:
                with suppress(persist.PersistError):
                    return self.ids(self.region.url, name) >= wanted
                return False

            wait_until(shows, f"{name} has come")

    def in_files(self, directory: Path) -> dict[str, set[int]]:
        """The ids that were salvaged, by shard."""
        found: dict[str, set[int]] = {name: set() for name in NAMES}
        for path in directory.glob("*.parquet"):
            table = pq.read_table(path)
            assert table.column("__diff").to_pylist() == [1] * len(table)
            found[path.stem.replace("%2F", "/")] = set(table.column("id").to_pylist())
        return found
