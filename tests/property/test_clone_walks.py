"""Random walks over several shards that clone each other: nothing that is named is ever deleted, nothing is left over.

A step is done by a process of its own. It may be killed at any I/O step, or another one runs to its end between two of
them. Each seed is one walk, always the same. Builds that are broken on purpose are caught.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from random import Random

import pytest

from compactor.embedded import maintain
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.core.errors import Conflict, Expired, PersistError, Unavailable, UnknownShard
from persist.core.ids import SeqNo
from persist.core.named_holds import is_foreign
from tests.simulation import cloning
from tests.simulation.breaking import Broken
from tests.support.clones import AGE_MS, Shards
from tests.support.crashing import Crash, Fuse
from tests.support.examples import thinned

NAMES = "abcdef"
STEPS = 30


class Interrupted(Fuse):
    """Runs something else at one I/O step."""

    def __init__(self, at: int, other: Callable[[], None]) -> None:
        super().__init__()
        self._begins, self._other = at, other

    def step(self, work: Callable[[], object]) -> object:  # type: ignore[override]
        self.steps += 1
        if self.steps == self._begins:
            self._other()
        return work()


class Walk:
    def __init__(self, seed: int) -> None:
        self.pick = Random(seed)
        self.shards = Shards()
        self.shards.create("a", 2)

    def run(self) -> None:
        for _ in range(STEPS):
            self._step()
            self._check()
        self.shards.settle()
        self.shards.check_at_rest()
        for name in list(self.shards.rows):
            self.shards.drop(name)
            self.shards.settle()
            self.shards.check_at_rest()
        assert len(self.shards.blobs()) == len(self.shards.names()), "one rollup of each tombstone"

    def _step(self) -> None:
        chance, at = self.pick.random(), self.pick.randint(1, 40)
        if chance < 0.25:
            self._act(Fuse(at, after=self.pick.random() < 0.5))
        elif chance < 0.65:
            self._act(Interrupted(self.pick.randint(1, 20), lambda: self._act(None)))
        else:
            self._act(None)

    def _act(self, fuse: Fuse | None) -> None:
        acts = [self._clone, self._clone, self._collect, self._collect, self._write, self._merge, self._drop, self._age]
        with suppress(Crash, Unavailable):  # a clock that moves on during a commit ends its patience
            self.pick.choice(acts)(fuse)

    def _some(self) -> str | None:
        return self.pick.choice(sorted(self.shards.rows)) if self.shards.rows else None

    def _clone(self, fuse: Fuse | None) -> None:
        source, free = self._some(), [name for name in NAMES if name not in self.shards.rows]
        if source is None or not free:
            return
        name, before = self.pick.choice(free), self.shards.rows[source]
        try:
            with suppress(Conflict, Expired, UnknownShard):  # the name is taken, or too much went on meanwhile
                Client(EmbeddedTransport(self.shards.process(fuse), maintain)).clone(source, name)
        finally:
            if name not in self.shards.rows and name in self.shards.here.names():
                self.shards.rows[name] = self.shards.contents(name)
                assert before <= self.shards.rows[name] <= self.shards.rows.get(source, before)

    def _collect(self, fuse: Fuse | None) -> None:
        self.shards.collect(fuse=fuse)

    def _write(self, fuse: Fuse | None) -> None:
        if (name := self._some()) is not None:
            self.shards.write(name)

    def _merge(self, fuse: Fuse | None) -> None:
        if (name := self._some()) is not None:
            self.shards.merge(name)
            self.shards.collect()

    def _drop(self, fuse: Fuse | None) -> None:
        if len(self.shards.rows) > 1 and (name := self._some()) is not None:
            self.shards.drop(name)

    def _age(self, fuse: Fuse | None) -> None:
        self.shards.clock.advance_ms(AGE_MS + 1)
        self.shards.collect()
        self.shards.sweep()

    def _check(self) -> None:
        """What is named is there, and what was borrowed also where an earlier version names it."""
        self.shards.check()
        there = self.shards.blobs()
        for name in self.shards.names():
            state = self.shards.state(name)
            changes = self.shards.here.versions.diffs(name, SeqNo(1), 10_000)
            gone = (key for change in changes[1:] for key in change.gone)
            assert {key for key in gone if is_foreign(key, state.shard_id)} <= there


@pytest.mark.parametrize("seed", thinned(range(1, 5), 4))
def test_nothing_is_lost_and_nothing_is_left(seed: int) -> None:
    Walk(seed).run()


# --- builds that are broken on purpose


def _merged_between() -> None:
    """The source is merged and collected between any two steps of a clone."""
    for step in range(1, 40):
        shards = Shards()
        shards.create("a", 2)

        def other(shards: Shards = shards) -> None:
            shards.write("a")
            shards.merge("a")
            shards.collect("a")
            shards.collect("a")

        fuse = Interrupted(step, other)
        Client(EmbeddedTransport(shards.process(fuse), maintain)).clone("a", "b")
        shards.rows["b"] = shards.contents("b")
        shards.settle()
        shards.check_at_rest()
        if fuse.steps < step:
            return


def _slept_between() -> None:
    """Maintenance ends the loan between any two steps of a clone; the name was used before."""
    for step in range(1, 60):
        shards = Shards()
        for name in "ab":
            shards.create(name, 2)
        shards.drop("b")
        shards.settle()

        def other(shards: Shards = shards) -> None:
            shards.clock.advance_ms(AGE_MS + 1)
            for _ in range(3):
                shards.collect()

        fuse = Interrupted(step, other)
        with suppress(Conflict, Expired, Unavailable):
            Client(EmbeddedTransport(shards.process(fuse), maintain)).clone("a", "b")
        shards.drop("a")
        shards.settle()
        if not shards.state("b").is_closed:
            shards.rows["b"] = shards.contents("b")
        shards.check_at_rest()
        if fuse.steps < step:
            return


def _read_while_merged() -> None:
    """A reader of the clone holds a version that names what the newest one does not."""
    shards = Shards()
    shards.create("a", 2)
    shards.clone("a", "b")
    shards.write("b")
    with Client(EmbeddedTransport(shards.process(), maintain)).shard("b").snapshot() as held:
        shards.merge("b")
        shards.collect()
        shards.drop("a")
        for _ in range(6):
            shards.collect()
        assert held.to_arrow().num_rows == len(shards.rows["b"])


def _walked() -> None:
    Walk(0).run()


SCENES = {
    cloning.borrower_deletes: _walked,
    cloning.owner_forgets_loans: _walked,
    cloning.lend_below_rollup: _merged_between,
    cloning.returned_while_versions_need_it: _read_while_merged,
    cloning.untaken_ended_without_fence: _slept_between,
}


@pytest.mark.parametrize("scene", thinned(dict.fromkeys(SCENES.values()), 2))
def test_nothing_is_lost_in_a_scene(scene: Callable[[], None]) -> None:
    scene()


@pytest.mark.parametrize("broken", thinned(SCENES, len(SCENES)))
def test_a_broken_build_is_caught(broken: Callable[[], Broken]) -> None:
    with broken(), pytest.raises((AssertionError, PersistError)):
        SCENES[broken]()
