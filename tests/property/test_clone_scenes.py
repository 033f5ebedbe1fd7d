"""Clones beside merges, collections and drops between any two of their steps: nothing that is named is deleted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from persist.core.errors import Conflict, Expired, PersistError, Unavailable
from tests.simulation import cloning
from tests.simulation.breaking import Broken
from tests.support.clones import AGE_MS, Shards
from tests.support.crashing import Fuse
from tests.support.examples import size, thinned
from tests.support.location import client_of

STRIDE = size(2, 1)  # steps from one at which something else comes between to the next


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


def _merged_between() -> None:
    """The source is merged and collected between any two steps of a clone."""
    for step in range(1, 40, STRIDE):
        shards = Shards()
        shards.create("a", 2)

        def other(shards: Shards = shards) -> None:
            shards.write("a")
            shards.merge("a")
            shards.collect("a")
            shards.collect("a")

        fuse = Interrupted(step, other)
        client_of(shards.process(fuse)).clone("a", "b")
        shards.rows["b"] = shards.contents("b")
        shards.settle()
        shards.check_at_rest()
        if fuse.steps < step:
            return


def _slept_between() -> None:
    """Maintenance ends the loan between any two steps of a clone; the name was used before."""
    for step in range(1, 60, STRIDE):
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
            client_of(shards.process(fuse)).clone("a", "b")
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
    with client_of(shards.process()).shard("b").snapshot() as held:
        shards.merge("b")
        shards.collect()
        shards.drop("a")
        for _ in range(6):
            shards.collect()
        assert held.to_arrow().num_rows == len(shards.rows["b"])


SCENES = {
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
