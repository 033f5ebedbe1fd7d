"""Bugs that the simulation found, each as the shortest story that shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from persist import commands as c
from persist.antichain import Antichain
from persist.client import Client
from persist.embedded import EmbeddedTransport
from persist.errors import Indeterminate
from persist.handles import HandleSettings
from persist.location import LocationSettings, open_stores
from persist.reading import ReadSettings
from persist.state import Policy
from persist.transport import ShardView, ViewRequest

SCHEMA = pa.schema([pa.field("k", pa.string()), pa.field("v", pa.int64())])


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


def test_rows_that_another_replica_has_written_are_hidden(client: Client) -> None:
    """An append over the shard's upper showed the overlapping rows a second time."""
    shard = client.create_shard("copies", SCHEMA, ["k"])
    shard.append([row("a", 0)], 0, 1)
    shard.append([row("a", 0), row("b", 1), row("c", 2)], 0, 3)
    assert shard.snapshot(2).to_arrow().to_pydict() == {"k": ["a", "b", "c"], "v": [1, 1, 1], "__diff": [1, 1, 1]}
    shard.append([row("b", 1), row("c", 2), row("d", 3)], 1, 4)
    assert shard.snapshot(3, num_splits=2).to_arrow().column("k").to_pylist() == ["a", "b", "c", "d"]


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
            other = Client(EmbeddedTransport(self.location)).shard(name)
            other.insert([row("b")])
            other.downgrade_since(1)
        return found


def test_the_latest_snapshot_is_never_too_early() -> None:
    """Since could pass the latest time between looking it up and taking a hold on it."""
    location = open_stores("mem:overtaken", "mem:overtaken")
    with Client(EmbeddedTransport(location)) as client:
        client.create_shard("orders", SCHEMA, ["k"]).insert([row("a")])
        transport = OvertakenTransport(location)
        transport.overtaken = True
        shard = Client(transport).shard("orders")
        transport.overtaken = False
        snapshot = shard.snapshot()
        assert snapshot.as_of == 1
        assert snapshot.to_arrow().column("k").to_pylist() == ["a", "b"]


def test_a_hold_that_may_have_moved_is_not_relied_on() -> None:
    """After a downgrade of unknown outcome a listener could ask for a version that was given up already."""

    class Lossy(EmbeddedTransport):
        def apply(self, name: str, command: c.Command) -> c.Result:
            result = super().apply(name, command)
            if isinstance(command, c.DowngradeSince):
                raise Indeterminate("the answer was lost")
            return result

    transport = Lossy(open_stores("mem:lossy", "mem:lossy"))
    with Client(transport, HandleSettings(read=ReadSettings(retry_s=0.0))) as client:
        shard = client.create_shard("orders", SCHEMA, ["k"])
        lease = shard.open_reader()
        shard.insert([row("a")])
        seqno = shard.view().seqno
        with pytest.raises(Indeterminate):
            lease.downgrade(Antichain(0), seqno)
        assert lease.seqno == seqno
