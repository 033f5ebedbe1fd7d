"""A worker or a collector that dies between any two I/O steps leaves a shard that reads the same and comes to rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from persist.core.blob_keys import is_rollup_key
from tests.support.crashing import Crash, Fuse
from tests.support.examples import thinned
from tests.support.maintained import NAME, World


def written() -> World:
    """A shard with a few batches, of which since has passed the older half."""
    world = World()
    world.append_many(5, 12)
    world.forget_before(2)
    return world


def merged() -> World:
    world = written()
    world.worker().run(NAME, idle=True)
    world.append_many(5, 3)
    world.worker().run(NAME, idle=True)
    return world


def dropped() -> World:
    world = merged()
    world.rows.clear()
    world.shard.drop(force=True)
    return world


def compaction(world: World, fuse: Fuse) -> None:
    world.worker(fuse).run(NAME, idle=True)


def collection(world: World, fuse: Fuse) -> None:
    collector = world.collector(fuse)
    while not collector.run(NAME).done:
        pass


STRIDE = 8  # steps between two at which one test dies
SCENES: dict[str, tuple[Callable[[], World], Callable[[World, Fuse], None]]] = {
    "compaction": (written, compaction),
    "collection": (merged, collection),
    "finalisation": (dropped, collection),
}


def steps_of(scene: str) -> int:
    make, act = SCENES[scene]
    fuse = Fuse()
    act(make(), fuse)
    return fuse.steps


@pytest.mark.parametrize("first", thinned(range(1, 1 + STRIDE), STRIDE))
@pytest.mark.parametrize("scene", list(SCENES))
def test_dying_at_any_step_loses_nothing(scene: str, first: int) -> None:
    """After any step, which is before the next one."""
    make, act = SCENES[scene]
    total = steps_of(scene)
    assert total > 10
    for at in range(first, total + 1, STRIDE):
        world = make()
        with pytest.raises(Crash):
            act(world, Fuse(at, after=True))
        world.check_stores()
        world.check_reads()
        world.settle()
        world.check_stores()
        world.check_reads()
        state = world.state()
        # At rest nothing but what the State names is left, and the rollup before the newest one.
        assert len({key for key in world.blobs() - set(state.blob_keys()) if not is_rollup_key(key)}) == 0
        assert len(world.blobs() - set(state.blob_keys())) <= 1
        assert state.tombstone == (scene == "finalisation")
        if state.tombstone:
            assert world.blobs() == {rollup.key for rollup in state.rollups.values()}
            assert len(state.rollups) == 1
