"""Bugs that the simulation found, each as the shortest story that shows it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from blob import Blob
from compactor.orphans import Sweeper, SweepSettings
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import HandleSettings
from persist.client.snapshot import ReadSettings
from persist.commit.location import LocationSettings, open_stores
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.errors import Expired, Indeterminate, Unavailable
from persist.core.frontier import Antichain
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.state import Policy
from tests.support.clocks import HOUR_MS, World
from tests.support.location import client_of
from tests.support.waiting import wait_until

SCHEMA = pa.schema([pa.field("k", pa.string()), pa.field("v", pa.int64())])
NO_INLINE = Policy(inline_part_bytes_max=0)
SHORT_LEASE_S = 0.1


def row(key: str, time: int | None = None, diff: int = 1) -> dict[str, object]:
    found: dict[str, object] = {"k": key, "v": 1, "__diff": diff}
    return found if time is None else {**found, "__time": time}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"persist://{tmp_path}/location"


@pytest.fixture(params=[64 * 1024, 0], ids=["inline", "blob"])
def client(url: str, request: pytest.FixtureRequest) -> Iterator[Client]:
    settings = LocationSettings(policy=Policy(inline_part_bytes_max=request.param))
    with persist.connect(url, location=settings) as client:
        yield client


def test_rows_that_cancel_out_can_be_written_when_the_state_has_no_room(url: str) -> None:
    """Spilled to the blob store they left a part without rows, which the commit then refused."""
    settings = LocationSettings(policy=Policy(inline_shard_bytes_max=0))
    with persist.connect(url, location=settings) as client:
        shard = client.create_shard("orders", SCHEMA, ["k"])
        written = shard.compare_and_append([row("a"), row("a", diff=-1)], 0, 5)
        assert (written.lower.element, written.upper.element) == (0, 5)
        shard.insert([row("a"), row("a", diff=-1)])
        shard.insert([row("b")])
        assert shard.snapshot().to_arrow().column("k").to_pylist() == ["b"]


class OvertakenTransport(EmbeddedTransport):
    """After its first view of a shard, history up to a later write is forgotten."""

    overtaken = False

    def view(self, name: str, request: ViewRequest) -> ShardView:
        found = super().view(name, request)
        if not self.overtaken:
            self.overtaken = True
            other = client_of(self.location).shard(name)
            other.insert([row("b")])
            other.downgrade_since(1)
        return found


def test_the_latest_snapshot_is_never_too_early() -> None:
    """Since could pass the latest time between looking it up and taking a hold on it."""
    location = open_stores("mem:overtaken", "mem:overtaken")
    with client_of(location) as client:
        client.create_shard("orders", SCHEMA, ["k"]).insert([row("a")])
        transport = OvertakenTransport(location)
        transport.overtaken = True
        shard = Client(transport).shard("orders")
        transport.overtaken = False
        snapshot = shard.snapshot()
        assert snapshot.as_of == 1
        assert snapshot.to_arrow().column("k").to_pylist() == ["a", "b"]


class AsleepTransport(EmbeddedTransport):
    """Between its view of a shard and its first blob it sleeps through its lease, and others collect what that held."""

    @property
    def blob(self) -> Blob:
        shard = client_of(self.location).shard("orders")
        time.sleep(2 * SHORT_LEASE_S)
        shard.downgrade_since(1)
        self.location.blob.delete([stat.key for stat in self.location.blob.list("") if stat.key.endswith(".parquet")])
        return self.location.blob

    @blob.setter
    def blob(self, given: Blob) -> None:
        """It is asked for anew each time."""


def test_a_lease_that_lapsed_while_splits_were_planned_is_called_expired() -> None:
    """A blob that was collected meanwhile was told as corruption."""
    location = open_stores("mem:", "mem:", settings=LocationSettings(policy=NO_INLINE))
    shard = client_of(location).create_shard("orders", SCHEMA, ["k"])
    for _ in range(3):
        shard.insert([row("a"), row("b")])
    settings = HandleSettings(read=ReadSettings(lease_ms=int(SHORT_LEASE_S * 1000), retry_s=1.0))
    sleeper = Client(AsleepTransport(location), settings).shard("orders")
    with pytest.raises(Expired):
        sleeper.snapshot(2, num_splits=2)


def test_a_hold_that_may_have_moved_is_not_relied_on() -> None:
    """After a downgrade of unknown outcome a listener could ask for a version that was given up already."""

    class Lossy(EmbeddedTransport):
        def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
            result = super().apply(name, command, caller)
            if isinstance(command, c.DowngradeSince):
                raise Indeterminate("the answer was lost")
            return result

    transport = Lossy(open_stores("mem:lossy", "mem:lossy"))
    with Client(transport, HandleSettings(read=ReadSettings(retry_s=0.0))) as client:
        shard = client.create_shard("orders", SCHEMA, ["k"])
        lease = shard.open_reader()
        shard.insert([row("a")])
        seqno = shard.view().seqno
        with pytest.raises(Unavailable):
            lease.downgrade(Antichain(0), seqno)
        assert lease.seqno == seqno


def test_a_step_that_was_taken_before_the_sweep_cannot_be_committed_after_it(client: Client) -> None:
    """The sweep commits before it deletes: whoever sleeps between his step and his compare-and-set has lost."""
    shard = client.create_shard("orders", SCHEMA, ["k"])
    location = client.transport.location  # type: ignore[attr-defined]
    before = shard.view().seqno
    writer = shard.open_writer()
    writer.stage(pa.table({"k": ["a"], "v": [1]}), None)
    location.blob.put(f"{shard.view().shard_id}/w{0:032d}/p{0:032d}.parquet", b"an orphan")
    settings = SweepSettings(age_ms=0)
    wait_until(lambda: Sweeper(location, settings).sweep("orders").deleted, "the orphan is older than nothing")
    assert shard.view().seqno > before


def test_writers_whose_leases_lapsed_keep_no_orphans_alive() -> None:
    """On a shard where nobody commits any more, their registrations stayed, and their orphans with them."""
    world = World(policy=NO_INLINE)
    shard = world.machine().client.create_shard("orders", SCHEMA, ["k"])
    writer = shard.open_writer()
    writer.insert([row("a")])
    writer.stage([row("b")], 0)  # never committed
    for deleted in (0, 1):  # in the first night nobody has watched the writer
        world.pass_ms(48 * HOUR_MS)
        assert Sweeper(world.machine().location).sweep("orders").deleted == deleted
