"""A home looks whether another one has taken over, and stops once it has, or once it could not look for long."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from blob.errors import BlobUnavailable
from blob.forwarding import ForwardingBlob
from blob.memory import MemoryBlob
from consensus.forwarding import ForwardingConsensus
from consensus.memory import MemoryConsensus
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.identity import LOOK_EVERY_S, epoch_key
from persist.commit.location import Location
from persist.core.binding import Binding
from persist.core.errors import InvalidUsage, ReadOnly, Unavailable
from persist.formats.state_frames import encode_binding
from persist.regions.fencing import HomeWatch, check_fence
from persist.regions.index import Entry, Index, IndexFile, write_index
from tests.support.location import TestClock, memory_location

SCHEMA = pa.schema([("id", pa.int64())])
SELF_FENCE_S = 30.0
NEW_HOME = "http://us:8787"


class Stores(ForwardingBlob):
    """A blob store that can be down."""

    down = False

    def get(self, key: str) -> bytes:
        if self.down:
            raise BlobUnavailable("it is down")
        return super().get(key)


class Home:
    def __init__(self, path: Path, fence_s: float = 0.0) -> None:
        self.clock = TestClock()
        self.blob = Stores(MemoryBlob("mem:"))
        self.consensus = MemoryConsensus("mem:")
        self.index = path / "regions.json"
        self.say(0)
        self.location = self.open()
        self.watch = HomeWatch(self.location.identity, "eu", IndexFile(str(self.index)), fence_s)
        self.shard = Client(EmbeddedTransport(self.location)).create_shard("eu/orders", SCHEMA, ["id"])

    def open(self) -> Location:
        return memory_location(blob=self.blob, consensus=self.consensus, clock=self.clock)

    def say(self, epoch: int) -> None:
        """The administrator sets the index."""
        write_index(self.index, Index({"eu": Entry((NEW_HOME,), (), epoch=epoch)}))

    def taken_over(self) -> None:
        """Another consensus store goes on with these blobs."""
        self.blob.put(epoch_key(2), encode_binding(Binding(self.location.identity.check().location_id, 2, "other")))

    def insert(self) -> None:
        self.shard.insert([{"id": 1}])

    def wait(self, seconds: float) -> None:
        self.clock.advance_ms(int(seconds * 1000))


def test_the_index_ends_a_home_of_an_earlier_epoch(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.insert()
    home.say(2)
    home.wait(LOOK_EVERY_S)
    with pytest.raises(ReadOnly, match="at home elsewhere since epoch 2, at http://us:8787") as told:
        home.insert()
    assert told.value.details["home"] == [NEW_HOME]
    with pytest.raises(ReadOnly):
        home.location.identity.confirm()  # and nothing is deleted
    assert home.shard.snapshot().to_arrow().num_rows == 1


def test_the_index_may_take_it_back(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.say(2)
    home.wait(LOOK_EVERY_S)
    with pytest.raises(ReadOnly):
        home.insert()
    home.say(1)
    home.wait(LOOK_EVERY_S)
    home.insert()


def test_a_home_of_that_epoch_goes_on(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.say(1)
    home.wait(LOOK_EVERY_S)
    home.insert()


def test_a_process_that_slept_looks_before_it_writes(tmp_path: Path) -> None:
    """Nobody looks in the background here, as nobody does while a process is stopped."""
    home = Home(tmp_path)
    home.insert()
    home.taken_over()
    home.wait(LOOK_EVERY_S)
    with pytest.raises(ReadOnly, match="only reads"):
        home.insert()


def test_stores_that_do_not_tell_stop_nobody(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.blob.down = True
    home.wait(10 * SELF_FENCE_S)
    home.insert()


def test_unless_the_home_is_to_stop_by_itself(tmp_path: Path) -> None:
    home = Home(tmp_path, SELF_FENCE_S)
    home.insert()
    home.blob.down = True
    home.wait(SELF_FENCE_S / 2)
    home.insert()
    home.wait(SELF_FENCE_S / 2)
    with pytest.raises(Unavailable, match="could not look whether another home"):
        home.insert()
    home.blob.down = False
    home.wait(LOOK_EVERY_S)
    home.insert()


def test_an_index_that_does_not_tell_stops_it_as_well(tmp_path: Path) -> None:
    home = Home(tmp_path, SELF_FENCE_S)
    home.insert()
    home.index.write_text("{}")
    home.wait(SELF_FENCE_S)
    with pytest.raises(Unavailable, match="could not look"):
        home.insert()


def test_who_begins_looks_first(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.index.unlink()
    fresh = home.open()
    HomeWatch(fresh.identity, "eu", home.watch._index, SELF_FENCE_S)
    with pytest.raises(Unavailable, match="could not look"):
        Client(EmbeddedTransport(fresh)).shard("eu/orders").insert([{"id": 2}])


def test_a_shard_that_is_made_meanwhile_is_not_acknowledged(tmp_path: Path) -> None:
    """Who takes over lists the shards after the epoch is there: a shard that begins later would be nowhere."""
    home = Home(tmp_path)

    class Slow(ForwardingConsensus):
        def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
            home.taken_over()
            return super().compare_and_set(key, seqno, data, after)

    slow = memory_location(blob=home.blob, consensus=Slow(home.consensus), clock=home.clock)
    with pytest.raises(ReadOnly, match="only reads"):
        Client(EmbeddedTransport(slow)).create_shard("eu/late", SCHEMA, ["id"])


@pytest.mark.parametrize("fence_s", [-1.0, 1.0, 19.9, 86_401.0, float("nan")])
def test_a_fence_that_makes_no_sense_is_refused(fence_s: float) -> None:
    with pytest.raises(InvalidUsage, match="self_fence"):
        check_fence(fence_s)
