"""Random walks that end with another home: after a disaster, and as planned.

A copy that came in any order becomes home. What the new home shows is what the old one had shown; what it lacks is what
salvage tells; no time means two things; the old home becomes a copy. Each seed is one walk, always the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest

from blob import Blob
from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from consensus.metrics import ForwardingConsensus
from persist.commit.location import Location
from persist.commit.location_identity import ID_KEY, LOOK_EVERY_S, Identity
from persist.commit.state_loader import Versions
from persist.copies import recovery
from persist.copies.recovery import RecoveryRequest
from persist.core.errors import Conflict, Expired, PersistError, ReadOnly, Unavailable, UnknownShard
from persist.core.state import State
from persist.core.transitions import lifecycle
from persist.regions import divergence, failover, switchover
from persist.regions.divergence import salvage
from persist.regions.failover import KeptVersion, OldHome, Promotion, last_promotion, promote
from persist.regions.replica import ReplicaLocation
from persist.regions.replication import ReplicateSettings, Replicator
from persist.regions.switchover import Switch, demote
from tests.property.test_region_walks import Walk
from tests.support.clones import ClockedIds
from tests.support.examples import seeds, thinned
from tests.support.location import AscendingIds, client_of, memory_location
from tests.support.regions import HOME, POLICY, Row

STEPS = 30
SEEDS_MAX = 40
PROOF_SEEDS = seeds(30)


BEGIN = Versions.begin


class Ending(Walk):
    """A walk, after which there is another home."""

    def __init__(self, seed: int, path: Path) -> None:
        super().__init__(seed)
        self.path = path
        self.consensus = MemoryConsensus("mem:new")
        self.new_rows: dict[str, set[Row]] = {}

    def walk(self) -> None:
        for _ in range(STEPS):
            with suppress(Conflict, Unavailable, UnknownShard, Expired):
                self._act()
            self.regions.home.clock.advance_ms(self.pick.choice((0, 200, 2_000, 7_000)))
            self.regions.copier.step(self.pick.choice((0.0, 0.1, 0.5)))
            for name in self.pick.sample("abcd", 2):
                self.regions.check(name)
        for name in self.regions.home.names():
            self.regions.publish(name)
        self.regions.publish()
        if self.regions.copy.stat(ID_KEY) is None:
            self.regions.copy.put(ID_KEY, self.regions.home.blob.get(ID_KEY))

    def new_home(self) -> Location:
        """A process at the stores that become home."""
        clock = self.regions.home.clock
        ids = ClockedIds(clock, 700 + self.pick.randint(0, 10_000))
        return memory_location(
            blob=self.regions.copy, consensus=self.consensus, clock=clock, ids=ids, policy=POLICY, small_merges=False
        )

    # --- a disaster

    def disaster(self) -> None:
        self.walk()
        self.regions.copier.step(self.pick.choice((0.3, 0.9, 1.0)))
        is_fenced = self.pick.random() < 0.5
        home = OldHome(blob=self.regions.home.blob) if is_fenced else OldHome(is_lost=True)
        with suppress(SystemExit), patch.object(Versions, "begin", lambda *given: self._begin_or_die(*given)):
            promote(self.new_home(), "us", "eu", home, RecoveryRequest(accept_loss=True))
            self.consensus.head("x")
        promote_again = self.new_home()
        with suppress(PersistError):  # it has ended, or goes on where it was killed
            promote(promote_again, "us", "eu", home, RecoveryRequest(accept_loss=True))
        promotion = last_promotion(self.regions.copy)
        assert promotion is not None
        self._check_promoted(promotion)
        self._home_sleeps_through(is_fenced)
        self._new_home_goes_on(promotion)
        self._salvaged(promotion, promotion)
        if self.pick.random() < 0.4:
            self._salvaged(self._second_home(), promotion)
        self._demoted(promotion)

    def _begin_or_die(self, versions: Versions, state: State, key: str = "") -> bool:
        """As `Versions.begin`; afterwards the process may be killed."""
        begun = BEGIN(versions, state, key)
        if self.pick.random() < 0.2:
            raise SystemExit
        return begun

    def _check_promoted(self, promotion: Promotion) -> None:
        location = self.new_home()
        client = client_of(location)
        for name in location.all_names(with_dropped=False):
            kept, state = promotion.shards[name], location.machine(name).refresh()
            assert state.upper == kept.resumes
            upper, since = kept.upper.element, state.since.element
            assert upper is not None
            assert since is not None
            if since < upper:
                table = client.shard(name).snapshot(upper - 1).to_arrow()
                shown = frozenset(zip(table["k"].to_pylist(), table["v"].to_pylist(), strict=True))
                assert shown == self.regions.truth[state.shard_id, upper - 1], f"{name} is not what home has shown"
            else:
                shown = frozenset()
            self.new_rows[name] = set(shown)

    def _home_sleeps_through(self, is_fenced: bool) -> None:
        """Processes of the old home wake up, and acknowledge what they can."""
        home = self.regions.home
        home.clock.advance_ms(int(LOOK_EVERY_S * 1000))
        before = set(home.blob.list("s"))
        for name in sorted(home.rows):
            if not is_fenced:
                self.regions.write(name)
                continue
            with pytest.raises(ReadOnly):
                home.client.shard(name).insert([{"k": "late", "v": -1}])
            with suppress(ReadOnly):  # where something is due
                home.collect(name)
        if is_fenced:
            assert {stat.key for stat in before} <= {stat.key for stat in home.blob.list("s")}

    def _new_home_goes_on(self, promotion: Promotion) -> None:
        location = self.new_home()
        client = client_of(location)
        for name, kept in promotion.shards.items():
            if name not in self.new_rows:
                continue
            old = self.regions.home.state(name).upper.element
            resumes = kept.resumes.element
            given_out = (old or 0) > (kept.upper.element or 0)
            assert resumes is not None
            assert not given_out or (old or 0) <= resumes, f"{name} gives out a time twice"
            row = (f"new {name}", 1_000)
            client.shard(name).insert([{"k": row[0], "v": row[1]}])
            self.new_rows[name].add(row)

    def _second_home(self) -> Promotion:
        """Another copy becomes home after the first one."""
        home, copy = self.regions.home, self.regions.copy
        blob = MemoryBlob("mem:second", now_ms=home.clock.now_ms)
        replicator = Replicator(copy, blob, home.clock, ReplicateSettings())
        replicator.round(whole=True)
        ids = ClockedIds(home.clock, 20_000 + self.pick.randint(0, 10_000))
        second = memory_location(
            blob=blob,
            consensus=MemoryConsensus("mem:second"),
            clock=home.clock,
            ids=ids,
            policy=POLICY,
            small_merges=False,
        )
        promote(second, "ap", "eu", OldHome(is_lost=True), RecoveryRequest(accept_loss=True))
        promotion = last_promotion(blob)
        assert promotion is not None
        return promotion

    def _salvaged(self, promotion: Promotion, first: Promotion) -> None:
        """What the old home has is what the new one was given, and what salvage tells, however many came after it."""
        home = self.regions.home
        directory = self.path / f"salvaged-{promotion.epoch}"
        told = {found.name: found for found in salvage(home.process(), promotion, directory)}
        for name, rows in home.rows.items():
            kept, found = first.shards.get(name), told.get(name)
            if kept is not None and kept.shard_id != home.state(name).shard_id:
                kept = None  # of an earlier life of the name
            upper = 0 if kept is None else kept.upper.element or 0
            base = set(self.regions.truth[home.state(name).shard_id, upper - 1]) if upper else set()
            if found is None:
                assert base == rows, f"{name} has diverged, and nothing tells it"
                continue
            if found.why:
                continue
            if found.file:
                table = pq.read_table(found.file)
                assert all(time >= upper for time in table["__time"].to_pylist())
                columns = (table[column].to_pylist() for column in ("k", "v", "__diff"))
                for k, v, diff in zip(*columns, strict=True):
                    base.add((k, v)) if diff > 0 else base.discard((k, v))
            assert base == rows, f"{name}: salvage does not tell all"

    def _demoted(self, promotion: Promotion) -> None:
        """The old home becomes a copy, from which a region reads what the new home shows."""
        home, copy = self.regions.home, self.regions.copy
        demote(home.process(), copy, promotion, drop_diverged=True)
        demote(home.process(), copy, promotion)
        assert not self._region_of(home.blob).names(), "what it published alone can still be read"
        self.regions.home.consensus, self.regions.home.blob = self.consensus, copy  # what publishes
        for name in self.new_home().all_names():
            self.regions.publish(name)
        self.regions.publish()
        self._shows_all(copy)
        old = self.regions.copier._source
        replicator = Replicator(copy, old, home.clock, ReplicateSettings(keep_s=60.0))
        replicator.round(whole=True)
        self._shows_all(old)
        for _ in range(3):
            home.clock.advance_ms(61_000)
            replicator.round(whole=True)
        self._shows_all(old)
        assert {stat.key for stat in old.list("s")} == {stat.key for stat in copy.list("s")}

    def _shows_all(self, blob: Blob) -> None:
        """A region that reads this store shows what the new home has."""
        self.regions.home.clock.advance_ms(120_000)
        region = self._region_of(blob)
        for name, rows in self.new_rows.items():
            table = client_of(region).shard(name).snapshot().to_arrow()
            shown = set(zip(table["k"].to_pylist(), table["v"].to_pylist(), strict=True))
            assert shown == rows or not rows - shown, f"a region of the new home shows another {name}"

    def _region_of(self, blob: Blob) -> ReplicaLocation:
        """A server of a region that reads this store, and has looked for a while."""
        region = ReplicaLocation(blob, HOME, clock=self.regions.home.clock, ids=AscendingIds(900))
        for _ in range(len(self.new_rows) + 2):
            self.regions.home.clock.advance_ms(6_000)
            region.follower.poll(now=True)
        return region

    # --- as planned

    def switch(self) -> None:
        self.walk()
        home = self.regions.home
        rivals = _Rivals(home.consensus, self)
        ending = memory_location(
            blob=home.blob, consensus=rivals, clock=home.clock, ids=ClockedIds(home.clock, 650), policy=POLICY
        )
        switch = Switch(ending, self.new_home(), "us", "eu", _Adversary(self))  # type: ignore[arg-type]
        if self.pick.random() < 0.3:
            if not self._dies_and_is_undone(switch, rivals):
                return
            ending = memory_location(
                blob=home.blob, consensus=rivals, clock=home.clock, ids=ClockedIds(home.clock, 651), policy=POLICY
            )
            switch = Switch(ending, self.new_home(), "us", "eu", _Adversary(self))  # type: ignore[arg-type]
        switch.run(sleep=lambda seconds: home.clock.advance_ms(int(seconds * 1000)))
        rivals.on = False
        location = self.new_home()
        client = client_of(location)
        assert sorted(home.rows) == list(location.all_names(with_dropped=False))
        for name, rows in home.rows.items():
            table = client.shard(name).snapshot().to_arrow()
            assert set(zip(table["k"].to_pylist(), table["v"].to_pylist(), strict=True)) == rows, f"{name} lost rows"
            state = location.machine(name).refresh()
            assert state.upper == home.state(name).upper, "a planned switch leaves no time out"
            assert not state.handed_over
            with pytest.raises(ReadOnly):
                home.client.shard(name).insert([{"k": "late", "v": -1}])
            client.shard(name).insert([{"k": "new", "v": -1}])
        promotion = last_promotion(self.regions.copy)
        assert promotion is not None
        assert not list(divergence.find_diverged(home.process(), promotion))
        demote(home.process(), self.regions.copy, promotion)

    def _dies_and_is_undone(self, switch: Switch, rivals: _Rivals) -> bool:
        """It is killed while it hands over, and home goes on; whether there was time for that."""
        is_late = self.pick.random() < 0.5
        rivals.dies_after = 0 if is_late else self.pick.randint(1, 6)

        def told(step: str) -> None:
            if is_late and "are handed over" in step:
                raise SystemExit

        try:
            switch.run(told, sleep=lambda seconds: self.regions.home.clock.advance_ms(int(seconds * 1000)))
            return False
        except SystemExit:
            rivals.dies_after = 0
        rivals.on = False
        self.regions.copier.step(self.pick.choice((0.0, 0.9, 1.0)))  # which may show the first hand-over for long
        switch.undo()
        self.regions.home.clock.advance_ms(int(LOOK_EVERY_S * 1000))
        for name in sorted(self.regions.home.rows):
            self.regions.write(name)
        rivals.on = True
        return True


class _Adversary:
    """Brings the copy up to date in pieces, as a store does that replicates itself."""

    def __init__(self, ending: Ending) -> None:
        self._ending = ending
        self._rounds = 0

    def round(self, *, whole: bool, deletes: bool) -> None:
        self._rounds += 1
        copier = self._ending.regions.copier
        copier.step(0.4)
        if self._rounds > 5:
            copier.finish()


class _Rivals(ForwardingConsensus):
    """Before a commit of who switches, others commit as well, if they still can."""

    def __init__(self, inner: Any, ending: Ending) -> None:
        super().__init__(inner)
        self._ending = ending
        self.on = True
        self.dies_after = 0

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        home, pick = self._ending.regions.home, self._ending.pick
        if self.on and key in home.rows and pick.random() < 0.5:
            with suppress(ReadOnly):
                self._ending.regions.write(key if pick.random() < 0.7 else pick.choice(sorted(home.rows)))
        if self.dies_after:
            self.dies_after -= 1
            if not self.dies_after:
                raise SystemExit
        return super().compare_and_set(key, seqno, data, after)


def walked(seed: int, path: Path) -> None:
    """Even seeds end with a disaster, odd ones as planned."""
    ending = Ending(seed, path)
    ending.switch() if seed % 2 else ending.disaster()


@pytest.mark.parametrize("seed", thinned(range(0, SEEDS_MAX, 2), 10))
def test_after_a_disaster_nothing_is_wrong_and_all_is_told(seed: int, tmp_path: Path) -> None:
    walked(seed, tmp_path)


@pytest.mark.parametrize("seed", thinned(range(1, SEEDS_MAX, 2), 10))
def test_a_planned_switch_loses_nothing(seed: int, tmp_path: Path) -> None:
    walked(seed, tmp_path)


@pytest.mark.proof
def test_many_more_walks(tmp_path: Path) -> None:
    for seed in PROOF_SEEDS:
        walked(seed, tmp_path / str(seed))


# --- builds that are broken on purpose


def promotes_without_a_gap(patch: pytest.MonkeyPatch) -> None:
    """The new home goes on at the upper that it knows: the old one may have given that time out."""
    whole = recovery._resumed
    patch.setattr(recovery, "_resumed", lambda state, known, gap, pair: whole(state, known, 0, pair))


def hands_nothing_over(patch: pytest.MonkeyPatch) -> None:
    """A shard that is handed over takes commits all the same."""
    patch.setattr(lifecycle, "check_here", lambda state: None)


def never_looks_again(patch: pytest.MonkeyPatch) -> None:
    """A process that slept goes on by what it knew."""
    patch.setattr(Identity, "_look", lambda self, number: None)


def salvages_what_is_listed_first(patch: pytest.MonkeyPatch) -> None:
    """Only shards that the new home has are looked at."""
    whole = divergence.find_diverged

    def first(old: Location, promotion: Promotion) -> Any:
        return (found for found in whole(old, promotion) if found.kept is not None)

    patch.setattr(divergence, "find_diverged", first)


def notes_what_is_known(patch: pytest.MonkeyPatch) -> None:
    """The note tells where the shard resumed, not what it had."""
    whole = failover.kept_versions

    def resumed(found: recovery.Recovered) -> dict[str, KeptVersion]:
        return {name: KeptVersion(one.version, one.resumes, one.resumes) for name, one in whole(found).items()}

    patch.setattr(failover, "kept_versions", resumed)


def compares_with_the_last_home(patch: pytest.MonkeyPatch) -> None:
    """Salvage takes the last promotion for the one that came after the old home."""
    patch.setattr(divergence, "_find_fork_point", lambda old, epoch, promotion: divergence._ForkPoint(promotion, None))


def keeps_what_it_published(patch: pytest.MonkeyPatch) -> None:
    """An old home that becomes a copy keeps what it published alone."""
    patch.setattr(switchover, "JOURNALS", "none/")
    patch.setattr(switchover, "_is_own_rollup", lambda key: False)


BROKEN = (
    promotes_without_a_gap, hands_nothing_over, never_looks_again, salvages_what_is_listed_first,
    notes_what_is_known, compares_with_the_last_home, keeps_what_it_published,
)  # fmt: skip


@pytest.mark.parametrize("broken", thinned(BROKEN, len(BROKEN)), ids=lambda broken: broken.__name__)
def test_a_broken_build_is_caught(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken(monkeypatch)
    for seed in range(SEEDS_MAX):
        try:
            walked(seed, tmp_path / str(seed))
        except (AssertionError, KeyError, PersistError, pytest.fail.Exception):
            return
    pytest.fail(f"{broken.__name__} was not caught by {SEEDS_MAX} walks")
