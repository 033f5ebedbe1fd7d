"""Two data centres as processes: each is home to shards of its own, and reads a copy of the other one's."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa

import persist
from persist.regions.region_index import RegionEntry, RegionIndex, write_index
from tests.support.forked import Forked
from tests.support.server import Server
from tests.support.waiting import wait_until

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
PUBLISH = {"PERSIST_PUBLISH_EVERY": "1"}


class TwoCentres:
    """`dc1` is home to dc1/…, `dc2` to dc2/…; `copy` is a server in dc2 that reads what dc1 has published.

    The index of dc2 is that of the founding paper: dc2 is written and read at its home, dc1 is read from the copy.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.indexes = {name: root / f"{name}.json" for name in ("dc1", "dc2")}
        for path in self.indexes.values():
            write_index(path, RegionIndex({}))
        self.dc1, self.dc2 = (self._home(name) for name in ("dc1", "dc2"))
        with persist.connect(self.dc1.url) as client:
            client.create_shard("dc1/first", SCHEMA, ["id"]).insert([{"id": 0, "v": "first"}])
        self.replicating = self.replicate()
        wait_until(lambda: list((root / "copy").glob("cat/*")) != [], "the names have come")
        where = ("--blob", f"file://{root}/copy", "--region", "dc2", "--of", "dc1", "--home", self.dc1.url)
        self.copy = Server(root, "--read-only", *where, "--index", str(self.indexes["dc2"]))
        regions = {
            "dc1": RegionEntry((self.dc1.url,), (self.copy.url,)),
            "dc2": RegionEntry((self.dc2.url,), (self.dc2.url,)),
        }
        write_index(self.indexes["dc2"], RegionIndex(regions))
        write_index(self.indexes["dc1"], RegionIndex({"dc1": RegionEntry((self.dc1.url,), (self.dc1.url,))}))

    def _home(self, name: str) -> Server:
        named = ("--region", name, "--index", str(self.indexes[name]))
        return Server(self.root / name, *named, environment=PUBLISH, maintenance="beside")

    def replicate(self) -> Forked:
        command = ["region", "replicate", "--every", "100ms", "--keep", "10s", "--whole", "2s"]
        stores = ["--from", f"file://{self.root}/dc1/blob", "--to", f"file://{self.root}/copy"]
        return Forked([*command, *stores], os.environ, unread=True)

    def arrived(self, name: str, upper: int) -> None:
        """Wait until the copy shows every time of dc1's shard before `upper`."""

        def is_there() -> bool:
            with persist.connect(self.copy.url) as client:
                return name in client.shards() and (client.shard(name).upper().element or 0) >= upper

        wait_until(is_there, f"{name} has come up to {upper}")

    def close(self) -> None:
        self.replicating.end()
        for server in (self.dc1, self.dc2, self.copy):
            if server.process.poll() is None:
                server.stop()
