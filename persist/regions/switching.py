"""A planned switch: a copy becomes home, and nothing is lost.

The order makes it safe to be killed anywhere, and to be repeated: the mark in the new consensus store, which names the
epoch; the epoch in home's blob store, which ends the making of shards there; a last commit of every shard, which hands
it over, so that nothing comes after it in its log; what was committed until then, and that commit, in home's blob
store; all of it in the copy; then the logs begin anew there. Until the new stores are bound it can be undone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from persist.commit.identity import LOG_KEY, Identity, epoch_key
from persist.commit.location import Location
from persist.commit.publishing import Publisher, PublishSettings
from persist.commit.versions import Versions
from persist.copies.recovering import MARK_KEY, How, Recovered, begin_anew, fence, marked, plan
from persist.core import commands as c
from persist.core.binding import Binding
from persist.core.errors import Conflict, InvalidUsage, Unavailable
from persist.core.transitions.context import HANDOVERS_LEVEL
from persist.formats.state_frames import decode_binding, encode_binding
from persist.formats.store_errors import translated
from persist.regions.promoting import Note, check_copy
from persist.regions.replicating import Replicator

AT_ONCE = 8  # shards that are handed over at a time
PUBLISHED_AT_ONCE = 1_000  # of which one publication tells
NAMED_MAX = 5  # shards that one message names
ARRIVES_S = 600.0  # for so long the copy may take to have all
LOOK_S = 1.0

Told = Callable[[str], object]  # a sentence for each step


@dataclass(frozen=True, slots=True)
class Switch:
    """From `home` to `copy`, whose consensus store is empty; `region` becomes home of region `of`.

    `replicator` brings the copy up to date. None: the store does that itself. `least`: the new epoch is above it.
    """

    home: Location
    copy: Location
    region: str
    of: str
    replicator: Replicator | None
    least: int = 0

    def run(self, told: Told = lambda step: None, sleep: Callable[[float], object] = time.sleep) -> Recovered:
        """Switch; what went on. Repeating it after an error goes on.

        Raises InvalidUsage (the stores do not fit; nothing was changed), Conflict (another one takes over), Corruption
        (something of a shard is missing), Unavailable (a store does not answer, or the copy did not get all in time).
        Where it fails, and is not to be repeated, `undo` lets home go on.
        """
        self._check()
        before = plan(self.copy, fenced=(self.home.blob,), least=self.least)  # the new consensus store can be used
        told("the copy is brought up to date, while home goes on")
        self._replicate()
        binding = marked(self.copy, before.epoch)
        fence(self.home.blob, binding)
        told(f"home ends: no shard is made there any more, and each is handed over to epoch {binding.epoch}")
        ending = _as_owner(self.home, binding)
        names = list(ending.all_names())
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="persist-switch") as pool:
            list(pool.map(lambda name: _hand_over(ending, name, binding.epoch), names))
        _publish(ending, names)
        told(f"{len(names)} shards are handed over; the copy gets what was written last")
        self._arrived(frozenset(names), binding.epoch, sleep)
        how = How(handed_over=True, note=Note(self.copy, self.region, self.of))
        return begin_anew(self.copy, how)

    def undo(self, told: Told = lambda step: None) -> int:
        """Let home go on, where the copy has not become home; the shards that were taken back. Repeating it is safe.

        Raises InvalidUsage: the stores do not fit. Conflict: the copy has become home. Unavailable.
        """
        self._check()
        with translated():
            mark = self.copy.consensus.head(MARK_KEY)
            if mark is None:
                raise InvalidUsage(f"no switch to {self.copy.consensus.url} was begun: there is nothing to undo")
            binding = decode_binding(mark.data, self.copy.settings.build)
            if self.copy.consensus.head(LOG_KEY) is not None or self.copy.consensus.keys("", "", 1):
                raise Conflict(f"{self.copy.consensus.url} has begun as home: repeat the switch; it cannot be undone")
        told("the copy is no home any more; home takes its shards back")
        key = epoch_key(binding.epoch)
        ending = _as_owner(self.home, binding)
        names = list(ending.all_names())
        for name in names:
            ending.machine(name).apply(c.TakeBack(binding.epoch))
        for blob in (self.copy.blob, self.home.blob):
            with translated():
                blob.delete([key])
        return len(names)

    def _check(self) -> None:
        """That the copy is one of this home, and home can hand over."""
        bound = self.home.identity.check()
        if check_copy(self.copy).decode("ascii", "replace") != bound.location_id:
            raise InvalidUsage(f"{self.copy.blob.url} is no copy of {self.home.blob.url}")
        if self.home.blob.url == self.copy.blob.url:
            raise InvalidUsage("a switch needs two blob stores: home's, and the copy")
        if self.home.versions.level < HANDOVERS_LEVEL:
            raise InvalidUsage(
                f"home has level {self.home.versions.level}, and hand-overs need level {HANDOVERS_LEVEL}: run `persist "
                "upgrade` there once every process is of this build"
            )

    def _replicate(self) -> None:
        if self.replicator is not None:
            self.replicator.round(whole=True)

    def _arrived(self, names: frozenset[str], epoch: int, sleep: Callable[[float], object]) -> None:
        """Wait until the copy has every shard as it was handed over."""
        lacking = names
        for _ in range(int(ARRIVES_S / LOOK_S)):
            self._replicate()
            found = plan(self.copy)
            lacking = names - {one.name for one in found.shards if one.is_whole and one.handed_over == epoch}
            if not lacking:
                return
            sleep(LOOK_S)
        raise Unavailable(
            f"in {ARRIVES_S:.0f} s the copy did not get all that home has handed over "
            f"({', '.join(sorted(lacking)[:NAMED_MAX])}): repeat the switch, or take it back by --undo"
        )


class _Owner(Identity):
    """That of who hands over: the one process that still commits at home, under the binding that takes over."""

    def __init__(self, location: Location, binding: Binding) -> None:
        build = location.settings.build
        super().__init__(location.blob, location.consensus, location.ids, location.clock, build)
        self._taker = binding

    def check_writable(self) -> None:
        self.check()
        key = epoch_key(self._taker.epoch)
        with translated():
            if self._blob.get(key) != encode_binding(self._taker):
                raise Conflict(f"another consensus store has taken over {self._blob.url}")

    def confirm(self) -> None:
        self.check_writable()


def _as_owner(home: Location, binding: Binding) -> Location:
    """Home as who hands it over sees it. It is the same location, and is closed as that."""
    identity = _Owner(home, binding)
    home.identity = identity
    home.versions = Versions(home.blob, home.consensus, home.ids, home.settings.build, identity)
    return home


def _hand_over(home: Location, name: str, epoch: int) -> None:
    """The last commit of the shard at home, and its State as a rollup, so that the copy needs no more than that."""
    machine = home.machine(name)
    machine.apply(c.HandOver(epoch))
    home.versions.write_rollup(machine.refresh())


def _publish(home: Location, names: list[str]) -> None:
    """Publish the last commit of each shard: it tells that the rollup of it counts."""
    publisher = Publisher(home.blob, home.identity, home.clock, home.ids, PublishSettings())
    for start in range(0, len(names), PUBLISHED_AT_ONCE):
        for name in names[start : start + PUBLISHED_AT_ONCE]:
            with translated():
                head = home.consensus.head(name)
            if head is not None:
                publisher.add(name, head.data)
        with translated():
            publisher.publish(now=True)
