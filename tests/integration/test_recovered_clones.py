"""Recovery of clones: whatever of a loan was published, nothing that a clone names is deleted afterwards."""

from __future__ import annotations

import pytest

from compactor.embedded import maintain
from consensus.memory_logs import MemoryConsensus
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.publication_keeper import Published
from persist.commit.publication_writer import Publisher, PublishSettings
from persist.copies.recovery import recover
from tests.support.clones import Shards

SETTINGS = PublishSettings(every_s=5.0)


@pytest.fixture
def shards() -> Shards:
    made = Shards()
    made.create("a")
    return made


def publish(shards: Shards) -> None:
    """What maintenance does until all is published."""
    location = shards.process()
    published = Published(location, SETTINGS, at_once=True)
    names = dict.fromkeys(shards.names(), False)
    for name in names:
        published.look(name, location.machine(name).refresh())
    published.round(names)
    published.close()


def publish_alone(shards: Shards, name: str) -> None:
    """One process has published, and the one that committed to the other shards was killed before."""
    location = shards.process()
    publisher = Publisher(location.blob, location.identity, shards.clock, location.ids, SETTINGS)
    for entry in shards.consensus.scan(name, 1, 1_000):
        publisher.add(name, entry.data)
    publisher.publish(now=True)


def recovered(shards: Shards, *, accept_loss: bool = False) -> None:
    """The consensus store is lost, and made anew."""
    shards.consensus = MemoryConsensus("mem:new")
    recover(shards.process(), gap=100, accept_loss=accept_loss)
    shards.here = shards.process()
    shards.client = Client(EmbeddedTransport(shards.here, maintain))


def lived(shards: Shards) -> None:
    """The owner merges all that it has lent, and maintenance comes to rest; then the clone does so."""
    shards.check()
    if "a" in shards.rows:
        shards.merge("a")
    shards.settle()
    shards.check()
    shards.clock.advance_ms(1_000)
    shards.write("b")
    shards.merge("b")
    shards.settle()
    shards.check_at_rest()
    assert not shards.state("b").borrowed


def test_what_was_published_whole(shards: Shards) -> None:
    shards.clone("a", "b")
    publish(shards)
    recovered(shards)
    lived(shards)


def test_the_commit_that_lent_is_lost(shards: Shards) -> None:
    publish(shards)
    shards.clone("a", "b")
    publish_alone(shards, "b")
    assert shards.state("a").loans
    recovered(shards)
    assert list(shards.state("a").loans) == list(shards.state("b").borrowed)
    lived(shards)


def test_the_owner_is_lost_altogether(shards: Shards) -> None:
    """Its name is that of a dropped shard then: the next shard of that name takes nothing of the clone's."""
    shards.clone("a", "b")
    publish_alone(shards, "b")
    family = shards.state("a").shard_id[:20]
    shards.blob.delete([key for key in shards.blobs() if key.startswith(family) and key.endswith(".rollup")])
    del shards.rows["a"]
    recovered(shards, accept_loss=True)
    assert shards.client.shards() == ["b"]
    shards.create("a", inserts=2)
    lived(shards)


def test_the_commits_by_which_a_clone_gave_back_are_known_and_its_merge_is_not(shards: Shards) -> None:
    shards.clone("a", "b")
    publish(shards)
    shards.merge("b")
    shards.collect("b")
    shards.clock.advance_ms(60_000)
    for _ in range(3):
        shards.collect("b")
    publish_alone(shards, "a")
    shards.blob.delete([key for key in shards.blobs() if key.startswith(shards.state("b").shard_id) and "/w" in key])
    recovered(shards, accept_loss=True)
    lived(shards)
