"""A region in memory stores: a copy that an adversary fills from a home, and what the home has shown at every time."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from random import Random

from blob import Blob
from blob.memory_blobs import MemoryBlob
from persist.commit.blob_tasks import keys_in
from persist.commit.location import Location
from persist.copies.shard_facts import needed_blobs
from persist.core.errors import Expired, NotReadable, Unavailable, UnknownShard
from persist.core.ids import ShardId
from persist.core.state import Policy, State
from persist.maintenance.journal_keeper import Published
from persist.maintenance.journal_writer import Publisher, PublishSettings
from persist.regions.replica import Home, ReplicaLocation
from persist.regions.replica_follower import RECHECK_S
from tests.support.clones import Shards
from tests.support.location import AscendingIds, client_of

PUBLISH = PublishSettings(every_s=5.0)
POLICY = Policy(inline_part_bytes_max=0, rollup_every=6, plain_parts_max=0)
HOME = Home("eu", ("http://eu:8787",))
HELD_MAX = 12  # steps for which the adversary keeps a blob back

Row = tuple[str, int]


def publish(location: Location, settings: PublishSettings, names: Iterable[str] = ()) -> None:
    """What maintenance does until all of these shards is published. Without names: everything, and a heartbeat."""
    published = Published(location, settings, at_once=True)
    found = tuple(names)
    states = {name: location.machine(name).refresh() for name in found or location.all_names(with_dropped=True)}
    for name, state in states.items():
        published.visit(name, state)
    if not found:
        published.round({name: state.is_closed for name, state in states.items()})
    published.close()


class Copier:
    """Copies blobs of one store to another in any order, late, twice; and deletes what was deleted, also early."""

    def __init__(self, source: Blob, target: Blob, pick: Random) -> None:
        self._source, self._target, self._pick = source, target, pick
        self._held: dict[str, int] = {}  # steps for which a key is kept back yet
        self.came: set[str] = set()  # whatever has been there at some time

    def step(self, share: float) -> None:
        """Carry over about this share of what differs."""
        here = {stat.key for stat in self._source.list("")}
        there = {stat.key for stat in self._target.list("")}
        differing = sorted(here ^ there)
        self._pick.shuffle(differing)
        for key in differing:
            left = self._held.get(key, 0)
            if left:
                self._held[key] = left - 1
            elif self._pick.random() < share:
                self._carry(key, is_new=key in here)
            elif self._pick.random() < 0.2:
                self._held[key] = self._pick.randint(1, HELD_MAX)

    def finish(self) -> None:
        """Until both are equal."""
        here = {stat.key for stat in self._source.list("")}
        for key in sorted(here ^ {stat.key for stat in self._target.list("")}):
            self._carry(key, is_new=key in here)

    def _carry(self, key: str, *, is_new: bool) -> None:
        if is_new:
            self._target.put(key, self._source.get(key))
            self.came.add(key)
        else:
            self._target.delete([key])


class Regions:
    """A home with several shards, and a region that reads a copy of its blob store.

    `truth`: what each life of each shard shows as of every time that was written.
    """

    def __init__(self, pick: Random) -> None:
        self.pick = pick
        self.home = Shards(policy=POLICY)
        self.copy = MemoryBlob("copy", now_ms=self.home.clock.now_ms)
        self.copier = Copier(self.home.blob, self.copy, pick)
        self.truth: dict[tuple[ShardId, int], frozenset[Row]] = {}
        self.shown: dict[str, State] = {}
        self.read = self.refused = 0
        self.region = self.server()

    def server(self) -> ReplicaLocation:
        """A server of the region that starts now."""
        return ReplicaLocation(self.copy, HOME, clock=self.home.clock, ids=AscendingIds(900))

    # --- at home

    def noted(self, name: str) -> None:
        """The shard shows its rows as of its latest time."""
        state, rows = self.home.state(name), frozenset(self.home.rows[name])
        upper = state.upper.element or 0
        for time in range(upper - 1, -1, -1):
            if (state.shard_id, time) in self.truth:
                break
            known = frozenset(row for row in rows if row[1] <= time) if time < upper - 1 else rows
            self.truth[state.shard_id, time] = known

    def create(self, name: str) -> None:
        self.home.create(name, 0)
        for _ in range(3):
            self.write(name)

    def write(self, name: str) -> None:
        self.home.write(name)
        self.noted(name)

    def write_bundles(self, name: str) -> None:
        """One insert of so many parts that they go to bundles."""
        rows = self.home.rows[name]
        fresh = {(f"{name}{len(rows)}.{number}", len(rows)) for number in range(8)}
        with closing(self.home.client.shard(name).open_writer()) as writer:
            staged = [writer.stage([{"k": k, "v": v}], None) for k, v in sorted(fresh)]
            writer.commit_insert(tuple(run for runs in staged for run in runs))
        self.home.rows[name] = rows | fresh
        self.noted(name)

    def clone(self, source: str, name: str) -> None:
        self.home.clone(source, name)
        own, of = self.home.state(name), self.home.state(source)
        for (shard, time), rows in list(self.truth.items()):
            if shard == of.shard_id and time < (own.upper.element or 0):
                self.truth[own.shard_id, time] = rows

    def publish(self, *names: str) -> None:
        """What maintenance does until all of these shards is published."""
        publish(self.home.process(), PUBLISH, names)

    def publish_some(self, name: str) -> None:
        """A process publishes what is in the log of one shard; others are left to maintenance."""
        location = self.home.process()
        publisher = Publisher(location.blob, location.identity, self.home.clock, location.ids, PUBLISH)
        entries = self.home.consensus.scan(name, 1, 1_000)
        for entry in entries[-self.pick.randint(1, 4) :]:
            publisher.add(name, entry.data)
        publisher.publish(now=True)

    # --- in the region

    def check(self, name: str) -> None:
        """A read in the region shows what home showed as of that time, or is refused. What is shown never goes back."""
        client = client_of(self.region)
        try:
            state = self.region.machine(name).refresh()
            before = self.shown.get(name)
            if before is not None:
                assert before.seqno <= state.seqno, "what is shown goes back"
                assert before.shard_id != state.shard_id or before.upper <= state.upper
                before = before if before.seqno == state.seqno else None
            if before is None:
                self._check_has_come(state)
            self.shown[name] = state
            if state.is_closed:
                return
            since, upper = state.since.element, state.upper.element
            if since is None or not upper or since >= upper:
                return
            as_of = self.pick.randint(since, upper - 1)
            table = client.shard(name).snapshot(as_of, wait_s=0.0).to_arrow()
        except (Unavailable, UnknownShard, Expired, NotReadable):
            self.refused += 1
            return
        self.read += 1
        rows = frozenset(zip(table["k"].to_pylist(), table["v"].to_pylist(), strict=True))
        assert rows == self.truth[state.shard_id, as_of], f"{name} as of {as_of} is not what home has shown"

    def _check_has_come(self, state: State) -> None:
        """What is shown from now on has come, also what bundles list; it may have been deleted since."""
        parts = list(state.trace.parts())
        keys = {part.key for part in parts if part.key is not None} | set(needed_blobs(state))
        for part in parts:
            if part.bundle is not None and part.key is not None and self.copy.stat(part.key) is not None:
                keys.update(keys_in(self.copy, part.key))
        assert keys <= self.copier.came, f"{state.name} v{state.seqno} is shown before it has come"

    def check_caught_up(self) -> None:
        """All has come: the region shows the newest version of every shard."""
        self.home.clock.advance_ms(120_000)
        for name in self.home.names():
            self.publish(name)
        self.publish()
        self.copier.finish()
        self.check_shows_all()
        self.region = self.server()
        self.check_shows_all()

    def check_shows_all(self) -> None:
        """This server of the region shows the newest version of every shard, once it has looked for a while."""
        self.home.clock.advance_ms(int(RECHECK_S * 1000) + 1)
        for _ in range(len(self.home.names()) + 2):
            self.home.clock.advance_ms(6_000)
            self.region.follower.poll(now=True)
        assert self.region.names() == [name for name in self.home.names() if name in self.home.rows]
        for name, rows in self.home.rows.items():
            state = self.region.machine(name).refresh()
            assert state.seqno == self.home.state(name).seqno, f"{name} stays behind"
            table = client_of(self.region).shard(name).snapshot().to_arrow()
            assert set(zip(table["k"].to_pylist(), table["v"].to_pylist(), strict=True)) == rows
