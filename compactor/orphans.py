"""The orphan sweep: blobs that no live version of a shard names and that nobody can still be about to name.

Writers and workers put blobs before they commit; one that dies in between leaves orphans, which no state diff mentions,
so GC cannot find them. The sweep lists what a shard has, takes away what any live version names, and deletes the rest
once it is older than the longest write may take. A part whose writer is still registered is never an orphan.

The order makes it safe: list first, then commit that blobs of before some time are named no more, then read the State
and the live log, then delete what is of before that time. What is named by then is kept, and nothing of it is named
later. No clock is compared when a blob comes to be named. The time lies so far back by two clocks, which are set apart:
this machine's and the store's. What either calls young stays.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from blob import BlobNotFound, BlobStat, Unfinished
from compactor.metering import MaintenanceMetrics
from persist.commit.blob_tasks import keys_in
from persist.commit.location import Location
from persist.commit.system import StoreClock
from persist.core import commands as c
from persist.core.blob_keys import belongs_to, born_ms, is_bundle_key, shard_of
from persist.core.errors import Corruption, InvalidUsage, Unavailable
from persist.core.ids import SeqNo, family_of, shard_id_of
from persist.core.named_holds import is_foreign
from persist.core.state import State
from persist.core.transitions import expire_lapsed
from persist.formats.store_errors import translated, translated_but_missing
from persist.maintenance.clone_refs import LoanLists
from persist.maintenance.collector import DELETE_BATCH, STAGED_MS_MAX
from persist.maintenance.expiry import Silence

log = logging.getLogger("persist.orphans")

HOUR_MS = 3600 * 1000
AGE_MS_DEFAULT = 24 * HOUR_MS
AGE_MS_MIN = STAGED_MS_MAX + HOUR_MS  # a blob may wait so long for its commit, and clocks differ
SCAN_LIMIT = 1_000
LIST_PAGE = 10_000  # blobs listed before the State is read anew
LISTS_KEPT_MAX = 512  # bundles that are read once a sweep; more are read for each page
NAMED_MAX = 100  # keys that a report shows
_WRITER = re.compile(r"s[0-9a-f]{32}/(w[0-9a-f]{32})/p")
_FIRST_ROLLUP = re.compile(r"s[0-9a-f]{32}/v0{19}1/r[0-9a-f]{32}\.rollup\Z")


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """`age_ms`: how long a blob may wait for its commit: longer than the longest write or job takes."""

    age_ms: int = AGE_MS_DEFAULT
    dry_run: bool = False

    def check(self) -> None:
        """Raises InvalidUsage when `age_ms` is below what default leases make safe."""
        if self.age_ms < AGE_MS_MIN:
            asked, least = self.age_ms / HOUR_MS, AGE_MS_MIN / HOUR_MS
            raise InvalidUsage(
                f"a blob that is {asked:g} hours old may belong to a write under way; give at least {least:g} hours"
            )


@dataclass
class SweepReport:
    """What was found; with `dry_run` nothing of it was deleted. `keys` are the first few."""

    listed: int = 0
    named_bytes: int = 0
    orphans: int = 0
    orphan_bytes: int = 0
    young: int = 0  # not named either, but too young to tell
    deleted: int = 0
    keys: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Age:
    """What is old: its key was minted before `before_ms`, and the store says that it was written before `put_ms`.

    `before_ms` lies so far back by the clock of this machine and by that of the store: one that is wrong harms nobody.
    """

    before_ms: int
    put_ms: int

    def is_young(self, stat: BlobStat) -> bool:
        return stat.modified_ms >= self.put_ms or born_ms(stat.key) >= self.before_ms

    def is_past(self, at_ms: int) -> bool:
        """Whether the instant, by the store's clock, is as old by both."""
        return at_ms < min(self.put_ms, self.before_ms)


class Sweeper:
    """Sweeps shards of a location. Any number may work at once."""

    def __init__(
        self, location: Location, settings: SweepSettings | None = None, *, metrics: MaintenanceMetrics | None = None
    ) -> None:
        self._location = location
        self._settings = settings or SweepSettings()
        self._metrics = metrics or MaintenanceMetrics()
        self._store_clock = StoreClock(location.blob, location.clock, location.ids)
        self._silence = Silence(location, self._store_clock)
        self._loans = LoanLists(location.blob)
        self._lists: dict[str, list[str]] = {}  # what bundles list, during the sweep of one shard

    def sweep(self, name: str) -> SweepReport:
        """Sweep one shard. Raises what the stores raise; repeating is safe."""
        family = family_of(shard_id_of(name))  # what earlier lives of the name have left is swept as well
        age = self._age()
        report = SweepReport()
        self._lists = {}
        if not self._settings.dry_run:
            machine = self._location.machine(name)
            self._silence.forget(machine, machine.refresh())
        with translated():
            listing = self._location.blob.list(family)
            while listed := list(islice(listing, LIST_PAGE)):
                self._sweep_listed(name, listed, age, report)
        self._abandon(name, [one for one in self._unfinished(family) if age.is_past(one.begun_ms)], report)
        return report

    def _unfinished(self, family: str) -> list[Unfinished]:
        """None where the store does not permit to ask. A receipt of an erasure does not do without."""
        try:
            with translated():
                return list(self._location.blob.unfinished(family))
        except InvalidUsage as error:
            log.warning("what puts left unfinished cannot be listed", extra={"why": error.message})
            return []

    def _abandon(self, name: str, found: list[Unfinished], report: SweepReport) -> None:
        """Delete what puts have written that were begun so long ago that whoever did was killed."""
        report.orphans += len(found)
        report.orphan_bytes += sum(max(0, one.size) for one in found)
        report.keys += [one.where for one in found[: NAMED_MAX - len(report.keys)]]
        self._metrics.add(orphans_found=len(found))
        if found and not self._settings.dry_run:
            self._location.identity.confirm()
            with translated():
                self._location.blob.abandon(found)
            report.deleted += len(found)
            self._metrics.add(orphans_deleted=len(found))
            log.info("unfinished", extra={"shard": name, "deleted": len(found)})

    def _sweep_listed(self, name: str, listed: list[BlobStat], age: _Age, report: SweepReport) -> None:
        machine = self._location.machine(name)
        report.listed += len(listed)
        state = machine.refresh()
        following = expire_lapsed(state, machine.lease_now_ms(state))  # as the commit below will leave it
        found = self._unnamed(following, listed, age, SweepReport())
        if found and not self._settings.dry_run:
            # Commit before anything is deleted. A writer that stepped before this and commits only now loses the race,
            # steps again, and is told that what it staged may be gone.
            refused = machine.apply(c.ForgetLapsed(staged_before_ms=age.before_ms))
            assert isinstance(refused, c.SweptBefore)
            age = replace(age, before_ms=min(age.before_ms, refused.before_ms))
        self._delete(name, self._unnamed(machine.refresh(), listed, age, report), report)

    def _unnamed(self, state: State, listed: list[BlobStat], age: _Age, report: SweepReport) -> list[BlobStat]:
        """What of the listed blobs no live version names, and nobody can still be about to name."""
        live = self._live_keys(state)
        lent = self._lent(state, [stat.key for stat in listed if stat.key not in live])
        found = []
        for stat in listed:
            if stat.key in live or stat.key in lent:
                report.named_bytes += stat.size
            elif not belongs_to(stat.key, shard_of(stat.key)):
                continue  # not ours to judge
            elif age.is_young(stat) or _writer_of(stat.key) in state.writers:
                report.young += 1
            else:
                found.append(stat)
        return found

    def _lent(self, state: State, keys: list[str]) -> set[str]:
        """Which of these keys are lent."""
        if not state.loans:
            return set()
        known = [key for key in keys if belongs_to(key, shard_of(key))]
        return set(known).difference(self._loans.not_held(self._location.machine(state.name), state, known))

    def sweep_unborn(self) -> SweepReport:
        """Sweep what is left of shards that never came to be: a first rollup without a log.

        InvalidUsage: the two stores do not belong together. Another location's shards would look unborn.
        """
        report, age = SweepReport(), self._age()
        with translated():
            suspects = [stat for stat in self._location.blob.list("s") if _is_unborn(stat, age, report)]
        known = {family_of(shard_id_of(name)) for name in self._location.all_names()}
        self._delete("", [stat for stat in suspects if family_of(shard_of(stat.key)) not in known], report)
        return report

    def _live_keys(self, state: State) -> set[str]:
        """Every blob that a live version names: what the State names, and what left it in the live log.

        What the bundles among these list is named as well.
        """
        live = set(state.blob_keys())
        following = SeqNo(1)
        while page := self._location.versions.diffs(state.name, following, SCAN_LIMIT):
            for change in page:
                live.update(self._location.versions.whole(state.name, change).gone)
            following = SeqNo(page[-1].seqno + 1)
        for bundle in sorted(key for key in live if is_bundle_key(key) and not is_foreign(key, state.shard_id)):
            live.update(self._listed(state, bundle))
        return live

    def _listed(self, state: State, bundle: str) -> list[str]:
        """The parts that a bundle lists. One that left the State may be gone: it was collected, after its parts.

        Unavailable: the State has moved on, look again. Corruption: the sweep cannot know what the bundle lists.
        """
        if bundle in self._lists:
            return self._lists[bundle]
        try:
            with translated_but_missing():
                listed = keys_in(self._location.blob, bundle)
            if len(self._lists) < LISTS_KEPT_MAX:
                self._lists[bundle] = listed
            return listed
        except BlobNotFound as error:
            if not state.trace.names(bundle):
                return []
            if self._location.machine(state.name).refresh().trace.names(bundle):
                raise Corruption(f"bundle {bundle} of shard {state.name!r} is missing: nothing is swept") from error
            raise Unavailable(f"shard {state.name!r} has moved on while it was swept; sweep it again") from error

    def _age(self) -> _Age:
        store_ms, age_ms = self._store_clock.now_ms(), self._settings.age_ms
        return _Age(max(0, min(self._location.clock.now_ms(), store_ms) - age_ms), store_ms - age_ms)

    def _delete(self, name: str, found: Sequence[BlobStat], report: SweepReport) -> None:
        nbytes = sum(stat.size for stat in found)
        report.orphans += len(found)
        report.orphan_bytes += nbytes
        report.keys += [stat.key for stat in found[: NAMED_MAX - len(report.keys)]]
        self._metrics.add(orphans_found=len(found), orphan_bytes=nbytes)
        if self._settings.dry_run or not found:
            return
        for start in range(0, len(found), DELETE_BATCH):
            keys = [stat.key for stat in found[start : start + DELETE_BATCH]]
            self._location.identity.confirm()
            with translated():
                self._location.blob.delete(keys)
            report.deleted += len(keys)
            self._metrics.add(orphans_deleted=len(keys))
        log.info("orphans", extra={"shard": name, "deleted": report.deleted, "bytes": nbytes})


def _is_unborn(stat: BlobStat, age: _Age, report: SweepReport) -> bool:
    """Whether a blob could be all that there is of a shard: a first rollup, and old."""
    report.listed += 1
    return _FIRST_ROLLUP.match(stat.key) is not None and not age.is_young(stat)


def _writer_of(key: str) -> str | None:
    found = _WRITER.match(key)
    return found.group(1) if found else None
