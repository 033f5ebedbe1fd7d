"""A dropped shard says so at once, everywhere; its name may be used again, and nothing of the old life reaches the new.

Each test names what once happened instead.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import HandleSettings
from persist.client.snapshot import ReadSettings
from persist.client.write import WriteSettings
from persist.commit.location import Location, LocationSettings
from persist.core.errors import Expired, UnknownShard
from persist.maintenance.collector import Collector
from tests.support.server import url_of

SCHEMA = pa.schema([pa.field("k", pa.string())])
OTHER = pa.schema([pa.field("id", pa.int64()), pa.field("amount", pa.int64())])
GONE = (UnknownShard, Expired)
REFUSALS = re.compile("dropped|gone|not registered")
IMPATIENT = HandleSettings(WriteSettings(retry_s=2.0), ReadSettings(retry_s=2.0))


def location_of(client: persist.Client) -> Location:
    assert isinstance(client.transport, EmbeddedTransport)
    return client.transport.location


def collect(client: persist.Client) -> None:
    collector = Collector(location_of(client))
    while not collector.run("orders").done:
        pass


@pytest.fixture
def client(tmp_path: Path) -> Iterator[persist.Client]:
    """It collects when a test says so. Nothing is merged meanwhile, so nothing is left that only the sweep takes."""
    alone = LocationSettings(small_merges=False)
    with persist.connect(f"persist://{tmp_path}/data", handles=IMPATIENT, location=alone, collect=False) as opened:
        yield opened


BY_BOTH = pytest.mark.parametrize("clients", ["directory", "server"], indirect=True)


@pytest.fixture
def clients(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[persist.Client, persist.Client]]:
    """Two clients of the same shards."""
    with (
        url_of(getattr(request, "param", "directory"), tmp_path) as url,
        persist.connect(url, handles=IMPATIENT) as one,
        persist.connect(url, handles=IMPATIENT) as other,
    ):
        yield one, other


class Held:
    """Everything that somebody may hold of a shard."""

    def __init__(self, shard: persist.Shard) -> None:
        shard.insert([{"k": "old"}])
        self.shard = shard
        self.writer = shard.open_writer()
        self.token = "i" + "0" * 31 + "1"
        self.writer.insert([{"k": "old"}])
        self.staged = self.writer.stage([{"k": "zombie"}], None)
        self.listen = shard.listen(None)
        self.critical = shard.critical_reader("job", "t1")
        self.pipelined = shard.pipelined_writer("pipe")
        self.pipelined.append([{"k": "old"}])
        self.pipelined.flush()

    def uses(self) -> dict[str, Callable[[], Any]]:
        shard = self.shard
        return {
            "insert": lambda: shard.insert([{"k": "zombie"}]),
            "insert with a token": lambda: shard.insert([{"k": "zombie"}], token=self.token),  # type: ignore[arg-type]
            "compare_and_append": lambda: shard.compare_and_append([{"k": "zombie"}], 0, 1),
            "append of covered times": lambda: shard.append([{"k": "zombie"}], 0, 1),
            "advance_upper": lambda: shard.advance_upper(9),
            "writer": lambda: self.writer.insert([{"k": "zombie"}]),
            "staged rows": lambda: self.writer.commit_insert(self.staged),
            "pipelined writer": self.pipe,
            "attributes": lambda: shard.attributes.get(bytes(16)),
            "upper": shard.upper,
            "snapshot": shard.snapshot,
            "snapshot as of": lambda: shard.snapshot(0, wait_s=0.1),
            "listen": lambda: list(self.listen.next_events(0.1)),
            "new listen": lambda: shard.listen(None),
            "critical reader": lambda: self.critical.downgrade_since(1),
            "evolve": lambda: shard.evolve_schema(pa.schema([*SCHEMA, ("more", pa.int64())])),
        }

    def pipe(self) -> None:
        self.pipelined.append([{"k": "zombie"}])
        self.pipelined.flush()


@BY_BOTH
def test_the_name_of_a_dropped_shard_is_used_again_at_once(clients: tuple[persist.Client, persist.Client]) -> None:
    """It was never used again: the first write said so, after `create_shard` had given a handle."""
    one, other = clients
    held = Held(one.create_shard("orders", SCHEMA, ["k"]))
    held.shard.drop(force=True)
    again = other.create_shard("orders", OTHER, ["id"])
    assert (again.upper().element, again.since().element) == (0, 0)
    again.insert([{"id": 1, "amount": 2}])
    for use in held.uses().values():
        with pytest.raises(GONE, match=REFUSALS):
            use()
    with suppress(*GONE):
        held.critical.expire()
    assert again.snapshot().to_arrow().to_pylist() == [{"id": 1, "amount": 2, "__diff": 1}]
    assert again.upper().element == 1
    assert one.create_shard("orders", OTHER, ["id"]).upper().element == 1, "it is there now"
    held.shard.close()


def test_a_dropped_shard_is_not_listed(clients: tuple[persist.Client, persist.Client]) -> None:
    """Its name was listed for ever, as if it were there."""
    one, other = clients
    for name in ("a", "b", "c", "d"):
        one.create_shard(name, SCHEMA, ["k"]).insert([{"k": "old"}])
    one.shard("a").drop()
    other.shard("c").drop()
    for client in clients:
        assert client.shards() == ["b", "d"]
        assert client.transport.names("", "", 1) == ["b"], "a page is full while there are more"
        assert client.transport.names("", "b", 1) == ["d"]
    other.create_shard("c", OTHER, ["id"])
    for client in clients:
        assert client.shards() == ["b", "c", "d"]


def test_a_listing_reads_no_shard_and_a_tombstone_stays_unlisted(
    client: persist.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("orders", "refunds"):
        client.create_shard(name, SCHEMA, ["k"]).insert([{"k": "old"}])
    client.shard("orders").drop()
    location = location_of(client)
    for _ in range(3):  # emptied, cut, at rest: each leaves another entry at the end of the log
        with monkeypatch.context() as patched:
            patched.setattr(location.versions, "decode", lambda data: pytest.fail("a log was read"))
            assert client.shards() == ["refunds"]
        assert list(location.all_names()) == ["orders", "refunds"], "maintenance sees it"
        collect(client)


def test_a_shard_that_is_closed_by_its_frontiers_is_dropped_and_not_listed(client: persist.Client) -> None:
    shard = client.create_shard("orders", SCHEMA, ["k"])
    shard.advance_upper(None)
    assert client.shards() == ["orders"], "it can be read"
    shard.drop()
    assert client.shards() == []


@pytest.mark.parametrize("recreated", [False, True], ids=["dropped", "name used again"])
def test_what_was_held_of_a_dropped_shard_is_given_back_alike(client: persist.Client, recreated: bool) -> None:
    """Once the name belonged to another shard, `close` raised UnknownShard, though it raises nothing."""
    shard = client.create_shard("orders", SCHEMA, ["k"])
    shard.insert([{"k": "a"}])
    holds = [shard.open_reader(), shard.snapshot(), shard.listen(as_of=0)]
    writer, cursor = shard.open_writer(), shard.critical_reader("billing")
    writer.insert([{"k": "b"}])
    split = pickle.dumps(shard.snapshot().splits[0])
    shard.drop(force=True)
    if recreated:
        client.create_shard("orders", SCHEMA, ["k"]).insert([{"k": "c"}])
    for _ in range(2):
        for hold in holds:
            hold.close()
        writer.close()
        cursor.expire()
        shard.close()
    with pytest.raises(UnknownShard):
        list(pickle.loads(split).read(client.transport))
