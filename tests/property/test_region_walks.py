"""Random walks of a home and a region whose copy comes in any order: what the region shows is what home has shown.

Each seed is one walk, always the same. Builds that are broken on purpose are caught.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from random import Random
from typing import Any

import pytest

from persist.core.errors import Conflict, Expired, Unavailable, UnknownShard
from persist.regions.replica_follower import BlobPresence, Follower
from tests.support.examples import thinned, walks
from tests.support.regions import Regions

NAMES = "abcd"
STEPS = 60
SEEDS_MAX = 60


class Walk:
    def __init__(self, seed: int) -> None:
        self.pick = Random(seed)
        self.regions = Regions(self.pick)
        self.regions.create("a")

    def run(self) -> None:
        for _ in range(STEPS):
            with suppress(Conflict, Unavailable, UnknownShard, Expired):
                self._act()
            self.regions.home.clock.advance_ms(self.pick.choice((0, 200, 2_000, 7_000)))
            self.regions.copier.step(self.pick.choice((0.0, 0.1, 0.5)))
            for name in self.pick.sample(NAMES, 2):
                self.regions.check(name)
        self.regions.check_caught_up()

    def _act(self) -> None:
        regions, home = self.regions, self.regions.home
        some = self.pick.choice(sorted(home.rows)) if home.rows else None
        free = [name for name in NAMES if name not in home.rows]
        acts: list[Callable[[], object]] = [regions.publish]
        if some is not None:
            acts += [
                *(lambda: regions.write(some),) * 5,
                lambda: regions.write_bundles(some),
                *(lambda: regions.publish_some(some),) * 2,
                lambda: regions.publish(some),
                lambda: home.merge(some),
                home.collect,
                home.collect,
            ]
        if free:
            acts += [lambda: regions.create(free[0])]
        if some is not None and free:
            acts += [lambda: regions.clone(some, free[0])]
        if some is not None and self.pick.random() < 0.2:
            acts += [lambda: home.drop(some)]
        if self.pick.random() < 0.1:
            acts += [self._restart]
        if self.pick.random() < 0.1:
            acts += [lambda: home.clock.advance_ms(400_000)]
        self.pick.choice(acts)()

    def _restart(self) -> None:
        """Another server of the region: it may be behind the one before."""
        self.regions.region = self.regions.server()
        self.regions.shown.clear()


@pytest.mark.parametrize("seeds", walks(range(6), 40, every=3))
def test_what_a_region_shows_is_what_home_has_shown(seeds: Iterable[int]) -> None:
    for seed in seeds:
        Walk(seed).run()


@pytest.mark.proof
def test_most_walks_read_something() -> None:
    some = [Walk(seed) for seed in range(3)]
    for walk in some:
        walk.run()
    assert sum(walk.regions.read for walk in some) > 30


# --- builds that are broken on purpose


def accepts_incomplete(patch: pytest.MonkeyPatch) -> None:
    """A version is shown before all of its blobs have come."""
    patch.setattr(BlobPresence, "missing", lambda self, state: [])


def trusts_bundles(patch: pytest.MonkeyPatch) -> None:
    """What bundles list is taken for there."""
    patch.setattr(BlobPresence, "_missing_inside", lambda self, part: set())


def looks_for_rollups_once(patch: pytest.MonkeyPatch) -> None:
    """Publications that came and went unseen are never made up for."""
    patch.setattr(Follower, "_is_to_be_listed", lambda self, shard: shard.state is None)


def never_reads_names(patch: pytest.MonkeyPatch) -> None:
    """Shards of which no journal tells any more are not known."""
    patch.setattr(Follower, "_read_names", lambda self: None)


def forgets_what_waits(patch: pytest.MonkeyPatch) -> None:
    """An entry that could not be followed when it came is not looked at again."""
    advance = Follower._advance

    def forgetful(self: Follower, shard: Any) -> None:
        advance(self, shard)
        shard.evidence.changes.clear()

    patch.setattr(Follower, "_advance", forgetful)


def waits_for_one_journal(patch: pytest.MonkeyPatch) -> None:
    """Journals are read in the order of their numbers, and one that is late is passed over for good."""
    take = Follower._take

    def ordered(self: Follower, shard: Any) -> None:
        last = max(shard.taken, default="")
        shard.taken |= {key for key in self._journals if key < last}
        take(self, shard)

    patch.setattr(Follower, "_take", ordered)


BROKEN = [accepts_incomplete, trusts_bundles, looks_for_rollups_once, never_reads_names, forgets_what_waits,
          waits_for_one_journal]  # fmt: skip


@pytest.mark.parametrize("breaks", thinned(BROKEN, len(BROKEN)))
def test_a_broken_build_is_caught(
    breaks: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    for seed in range(SEEDS_MAX):
        try:
            Walk(seed).run()
        except Exception:
            return
    raise AssertionError(f"{breaks.__name__} is not caught")
