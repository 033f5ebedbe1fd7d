"""From any part of a blob store, copied in any order while it changes, each version that is accepted is home's."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from blob.memory_blobs import MemoryBlob
from persist.commit.publication_keeper import Published
from persist.commit.publication_writer import Publisher, PublishSettings
from persist.copies.blob_store_scan import Bucket
from persist.core import commands as c
from persist.core import state_diff
from persist.core.ids import SeqNo
from persist.core.state import State
from tests.support.examples import examples
from tests.support.maintained import NAME, World

SETTINGS = PublishSettings(every_s=1.0, beat_s=2.0, keep_s=2.0)
STEPS = st.lists(
    st.sampled_from(["append", "append", "append", "publish", "publish", "roll", "merge", "collect", "look", "copy"]),
    min_size=5,
    max_size=40,
)


class Home:
    """A location whose States are all remembered, and what was copied of its blobs so far."""

    def __init__(self, chance: random.Random) -> None:
        self.world = World()
        self.states: dict[int, State] = {}
        self.chance = chance
        self.copy = MemoryBlob("mem:copy")
        user = self.world.user
        self.publisher = Publisher(self.world.blob, user.identity, self.world.clock, user.ids, SETTINGS)
        self.maintenance = self.world.process()
        self.published = Published(self.maintenance, SETTINGS)
        self.upto = 0
        self.note()

    def note(self) -> None:
        """Remember every State that the log leads to, and have this process publish it, but for what it loses."""
        versions = self.world.user.versions
        state = self.world.state()
        for change in versions.diffs(NAME, SeqNo(self.upto + 1), 1000):
            made = self.states.get(change.seqno - 1)
            if made is not None:
                self.states[change.seqno] = state_diff.apply(versions.whole(NAME, change), made)
            data = self.world.consensus.scan(NAME, int(change.seqno), 1)[0].data
            if self.chance.random() < 0.8:
                self.publisher.add(NAME, data)
            self.upto = int(change.seqno)
        self.states.setdefault(int(state.seqno), state)
        assert self.states[int(state.seqno)] == state

    def step(self, what: str) -> None:
        self.world.clock.advance_ms(700)
        if what == "append":
            upper = self.world.state().upper.element
            assert upper is not None
            self.world.append([(f"k{upper % 7}", upper, upper, 1)], upper + 1)
        elif what == "publish":
            self.publisher.publish()
        elif what == "roll":
            machine = self.world.user.machine(NAME)
            state = machine.refresh()
            if state.seqno > max(state.rollups):
                machine.apply(c.AddRollup(state.seqno, *self.world.user.versions.write_rollup(state)))
        elif what == "merge":
            self.world.worker().run(NAME, idle=True)
        elif what == "collect":
            upper = self.world.state().upper.element
            assert upper is not None
            self.world.forget_before(max(0, upper - 1))
            self.note()
            self.world.collector().run(NAME)
        elif what == "look":
            self.published.look(NAME, self.maintenance.machine(NAME).refresh())
            self.published.round({NAME: False})
        else:
            self.copy_some(0.5)
        self.note()

    def copy_some(self, part: float) -> None:
        """Copy some of what is there now, as a replication does that is under way."""
        keys = [stat.key for stat in self.world.blob.list("") if self.chance.random() < part]
        self.chance.shuffle(keys)
        for key in keys:
            self.copy.put(key, self.world.blob.get(key))


@examples(0.5)
@given(steps=STEPS, seed=st.integers(0, 2**32), part=st.sampled_from([0.3, 0.7, 0.95, 1.0]))
def test_every_accepted_version_is_that_of_home(steps: list[str], seed: int, part: float) -> None:
    home = Home(random.Random(seed))
    for what in steps:
        home.step(what)
    home.copy_some(part)
    for found in Bucket(home.copy).found():
        assert found.name in (NAME, "")
        if found.state is not None:
            assert found.state == home.states[int(found.state.seqno)]
            assert found.state.seqno <= found.known <= home.world.state().seqno
        else:
            assert found.why


@examples(0.3)
@given(steps=STEPS, seed=st.integers(0, 2**32))
def test_once_maintenance_has_looked_a_whole_copy_tells_the_newest_version(steps: list[str], seed: int) -> None:
    home = Home(random.Random(seed))
    for what in steps:
        home.step(what)
    home.copy = MemoryBlob("mem:copy")
    for _ in range(4):  # two intervals, by looks that come twice an interval
        home.published.look(NAME, home.maintenance.machine(NAME).refresh())
        home.world.clock.advance_ms(500)
    home.published.look(NAME, home.maintenance.machine(NAME).refresh())
    home.copy_some(1.1)
    (found,) = Bucket(home.copy).found()
    assert found.state == home.world.state(), found.why
    assert found.is_newest
