"""For whom and for what the receipt of an erasure waits, and what must not come meanwhile."""

from __future__ import annotations

import hashlib
import json

import pytest

from persist.client.shard import Shard
from persist.commit.publication_writer import Publisher, PublishSettings
from persist.core.errors import NotReadable
from persist.core.frontier import Antichain
from persist.core.state import Policy
from tests.integration.test_erasure import NAME, SCHEMA, Maintenance, found, rows
from tests.support.clocks import Machine, World
from tests.support.markers import marker, uncompressed


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    uncompressed(monkeypatch)


@pytest.fixture
def world() -> World:
    return World(policy=Policy())


@pytest.fixture
def shard(machine: Machine) -> Shard:
    return machine.client.create_shard(NAME, SCHEMA, ["id"], history="7d")


def test_while_only_the_sweep_can_help_nothing_is_committed(world: World, machine: Machine, shard: Shard) -> None:
    """A rollup that nothing names, as its maker was killed. Each look made four more, which brought the next one."""
    secret = marker()
    shard.insert([{"id": secret, "v": "1"}])
    machine.location.versions.write_rollup(machine.location.machine(NAME).refresh())
    told = shard.erase(keys=[secret])
    Maintenance(machine).run(most_h=2)
    rested = machine.location.machine(NAME).refresh().seqno, len(list(world.blob.list("s")))
    assert shard.erased(told.id).phase == "rewritten"
    Maintenance(machine).run(most_h=12)
    assert (machine.location.machine(NAME).refresh().seqno, len(list(world.blob.list("s")))) == rested
    Maintenance(machine).run(most_h=30)
    assert shard.erased(told.id).done
    assert found(world, secret) == []


def test_published_log_entries_have_it_no_more(world: World, machine: Machine, shard: Shard) -> None:
    """Rows of small commits lie in the log, and in what was published of it."""
    secret = marker()
    location = machine.location
    publisher = Publisher(location.blob, location.identity, location.clock, location.ids, PublishSettings())
    published: list[int] = []

    def publish() -> None:
        for entry in world.consensus.scan(NAME, (published or [0])[-1] + 1, 100):
            publisher.add(NAME, entry.data)
            published.append(entry.seqno)
        publisher.publish(now=True)

    shard.insert([{"id": secret, "v": "1"}])
    publish()
    shard.insert([{"id": "b", "v": "1"}])
    assert found(world, secret)
    told = shard.erase(keys=[secret])
    publish()
    Maintenance(machine).run()
    assert shard.erased(told.id).done
    assert found(world, secret) == []


def test_behind_an_old_reader_no_new_one_comes(world: World, machine: Machine, shard: Shard) -> None:
    """One after the other they would put the receipt off for ever, and show the rows."""
    secret = marker()
    shard.insert([{"id": "a", "v": "1"}])
    shard.insert([{"id": secret, "v": "1"}])
    shard.tag("eom", 0)
    old = shard.snapshot(1)
    told = shard.erase(keys=[secret])
    assert shard.since() == Antichain(1), "it is held there"
    with pytest.raises(NotReadable, match="since rows were erased: only who held that time already reads on"):
        shard.snapshot(1)
    with pytest.raises(NotReadable, match="since rows were erased"):
        shard.changes(1).to_arrow()
    with pytest.raises(NotReadable, match="can no longer be tagged"):
        shard.tag("late", 1)
    assert shard.critical_reader("new").since == Antichain(told.at)
    assert rows(shard) == ["a"]
    assert shard.snapshot(tag="eom").to_arrow().num_rows == 1
    assert shard.snapshot(0).to_arrow().num_rows == 1, "the time of a tag"
    assert old.to_arrow().num_rows == 2
    old.close()
    shard.untag("eom")
    Maintenance(machine).run()
    assert shard.erased(told.id).done
    assert found(world, secret) == []


def test_the_digest_is_the_one_that_the_page_tells(shard: Shard) -> None:
    shard.insert([{"id": "ann", "v": "1"}])
    told = shard.erase(keys=["ann"], reason="dsr-7")
    said = json.dumps([told.id, "dsr-7", None, [[repr("ann")]]])
    assert told.question == hashlib.sha256(said.encode()).hexdigest()
