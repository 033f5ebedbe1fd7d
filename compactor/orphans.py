"""The orphan sweep: deletes blobs that no live version of a shard names and that no writer can still commit.

Writers and workers put blobs before they commit; one that dies in between leaves orphans, which no state diff mentions,
so GC cannot find them. The sweep lists the blobs of a shard, excludes those that any live version names, and deletes
the rest once they are older than the longest write may take. A part whose writer is still registered is no orphan.

The order makes it safe: list first, then commit that blobs older than some time can no longer be named, then read the
State and the live log, then delete the unnamed blobs that are older. A blob that is named by then is kept, and none of
the others can be named later. Naming a blob does not compare clocks. A blob is old only if two independent clocks agree
(that of this machine and that of the store).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from blob import BlobNotFound, BlobStat
from compactor.metering import MaintenanceMetrics
from persist.commit.blob_tasks import keys_in
from persist.commit.clocks_and_ids import StoreClock
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.blob_keys import belongs_to, born_ms, is_bundle_key, shard_of
from persist.core.errors import Corruption, InvalidUsage, Unavailable
from persist.core.ids import SeqNo, family_of, shard_id_of
from persist.core.named_holds import is_foreign
from persist.core.state import State
from persist.core.transitions import expire_lapsed
from persist.formats.store_errors import translated
from persist.maintenance.clones_and_loans import LoanLists
from persist.maintenance.collector import DELETE_BATCH, STAGED_MS_MAX
from persist.maintenance.expiry import Silence

log = logging.getLogger("persist.orphans")

HOUR_MS = 3600 * 1000
AGE_MS_DEFAULT = 24 * HOUR_MS
AGE_MS_MIN = STAGED_MS_MAX + HOUR_MS  # how long a blob may wait for its commit, and a margin for clock skew
LIST_PAGE = 10_000  # blobs listed before the State is read again
BUNDLES_CACHED_MAX = 512  # bundles that are read once per sweep; further ones are read for each page
REPORT_KEYS_MAX = 100  # keys in a report
_WRITER = re.compile(r"s[0-9a-f]{32}/(w[0-9a-f]{32})/p")
_FIRST_ROLLUP = re.compile(r"s[0-9a-f]{32}/v0{19}1/r[0-9a-f]{32}\.rollup\Z")


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """`age_ms`: the least age of an orphan; it must exceed the duration of the longest write or job."""

    age_ms: int = AGE_MS_DEFAULT
    dry_run: bool = False

    def check(self) -> None:
        """Raises InvalidUsage if `age_ms` is not safe with default leases."""
        if self.age_ms < AGE_MS_MIN:
            hours, hours_min = self.age_ms / HOUR_MS, AGE_MS_MIN / HOUR_MS
            raise InvalidUsage(
                f"a blob that is {hours:g} hours old may belong to an active write; set at least {hours_min:g} hours"
            )


@dataclass
class SweepReport:
    """The result of a sweep. `keys` are the first orphans. With `dry_run` nothing was deleted."""

    listed: int = 0
    named_bytes: int = 0
    orphans: int = 0
    orphan_bytes: int = 0
    young: int = 0  # unnamed, but too young to decide
    deleted: int = 0
    keys: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Age:
    """A blob is old if its key was minted before `before_ms` and the store wrote it before `put_ms`.

    `before_ms` is far enough back by the clocks of both this machine and the store, so one wrong clock does no harm.
    """

    before_ms: int
    put_ms: int

    def is_young(self, stat: BlobStat) -> bool:
        return stat.modified_ms >= self.put_ms or born_ms(stat.key) >= self.before_ms

    def is_past(self, at_ms: int) -> bool:
        """Whether an instant of the store's clock is old by both clocks."""
        return at_ms < min(self.put_ms, self.before_ms)


class Sweeper:
    """Sweeps shards of a location. Any number of sweepers may run at the same time."""

    def __init__(
        self, location: Location, settings: SweepSettings | None = None, *, metrics: MaintenanceMetrics | None = None
    ) -> None:
        self._location = location
        self._settings = settings or SweepSettings()
        self._metrics = metrics or MaintenanceMetrics()
        self._store_clock = StoreClock(location.blob, location.clock, location.ids)
        self._silence = Silence(location, self._store_clock)
        self._loans = LoanLists(location.blob)
        self._bundles: dict[str, list[str]] = {}  # the parts of bundles, during the sweep of one shard

    def sweep(self, name: str) -> SweepReport:
        """Sweep one shard, including earlier incarnations of its name. Raises the errors of the stores; retry-safe."""
        family = family_of(shard_id_of(name))
        age = self._age()
        report = SweepReport()
        self._bundles = {}
        if not self._settings.dry_run:
            machine = self._location.machine(name)
            self._silence.forget(machine, machine.refresh())
        with translated():
            listing = self._location.blob.list(family)
            while page := list(islice(listing, LIST_PAGE)):
                self._sweep_page(name, page, age, report)
        self._sweep_unfinished(name, family, age, report)
        return report

    def _sweep_unfinished(self, name: str, family: str, age: _Age, report: SweepReport) -> None:
        """Delete the bytes of puts that started so long ago that their processes must have died."""
        try:
            with translated():
                unfinished = list(self._location.blob.unfinished(family))
        except InvalidUsage as error:  # the store denies the listing
            log.warning("unfinished puts cannot be listed", extra={"why": error.message})
            return
        old = [put for put in unfinished if age.is_past(put.begun_ms)]
        self._count_orphans(report, [put.where for put in old], sum(max(0, put.size) for put in old))
        if old and not self._settings.dry_run:
            self._location.identity.confirm()
            with translated():
                self._location.blob.abandon(old)
            report.deleted += len(old)
            self._metrics.add(orphans_deleted=len(old))
            log.info("unfinished", extra={"shard": name, "deleted": len(old)})

    def _sweep_page(self, name: str, page: list[BlobStat], age: _Age, report: SweepReport) -> None:
        machine = self._location.machine(name)
        report.listed += len(page)
        state = machine.refresh()
        next_state = expire_lapsed(state, machine.lease_now_ms(state))  # as the commit below will leave it
        orphans = self._find_orphans(next_state, page, age, SweepReport())
        if orphans and not self._settings.dry_run:
            # Commit before anything is deleted. A writer that stepped before this commit and commits after it loses the
            # race, steps again, and is rejected because its staged blobs may be deleted.
            swept = machine.apply(c.ForgetLapsed(staged_before_ms=age.before_ms))
            assert isinstance(swept, c.SweptBefore)
            age = replace(age, before_ms=min(age.before_ms, swept.before_ms))
        self._delete(name, self._find_orphans(machine.refresh(), page, age, report), report)

    def _find_orphans(self, state: State, page: list[BlobStat], age: _Age, report: SweepReport) -> list[BlobStat]:
        """The listed blobs that no live version names, and that no writer can still commit."""
        live = self._live_keys(state)
        own = [stat.key for stat in page if stat.key not in live and belongs_to(stat.key, shard_of(stat.key))]
        not_lent = set(self._loans.not_held(self._location.machine(state.name), state, own))
        live.update(key for key in own if key not in not_lent)
        orphans = []
        for stat in page:
            if stat.key in live:
                report.named_bytes += stat.size
            elif stat.key not in not_lent:
                continue  # not a blob of a shard
            elif age.is_young(stat) or ((writer := _WRITER.match(stat.key)) and writer[1] in state.writers):
                report.young += 1
            else:
                orphans.append(stat)
        return orphans

    def sweep_unborn(self) -> SweepReport:
        """Sweep first rollups without a log: of shards whose creation did not complete.

        InvalidUsage: the two stores do not belong together, so shards of another location would look like these.
        """
        report, age, suspects = SweepReport(), self._age(), list[BlobStat]()
        with translated():
            for stat in self._location.blob.list("s"):
                report.listed += 1
                if _FIRST_ROLLUP.match(stat.key) and not age.is_young(stat):
                    suspects.append(stat)
        families = {family_of(shard_id_of(name)) for name in self._location.all_names()}
        self._delete("", [stat for stat in suspects if family_of(shard_of(stat.key)) not in families], report)
        return report

    def _live_keys(self, state: State) -> set[str]:
        """Every blob that a live version names: in the State, removed by the live log, or listed by such a bundle."""
        live = set(state.blob_keys())
        for change in self._location.versions.whole_diffs(state.name, SeqNo(0)):
            live.update(change.gone)
        for bundle in sorted(key for key in live if is_bundle_key(key) and not is_foreign(key, state.shard_id)):
            live.update(self._parts_of(state, bundle))
        return live

    def _parts_of(self, state: State, bundle: str) -> list[str]:
        """The keys of a bundle's parts; none if the bundle left the State and was collected, after its parts.

        Unavailable: the State has changed, retry. Corruption: the bundle is missing, so its parts are unknown.
        """
        if bundle in self._bundles:
            return self._bundles[bundle]
        try:
            parts = keys_in(self._location.blob, bundle)
            if len(self._bundles) < BUNDLES_CACHED_MAX:
                self._bundles[bundle] = parts
            return parts
        except BlobNotFound as error:
            if not state.trace.names(bundle):
                return []
            if self._location.machine(state.name).refresh().trace.names(bundle):
                raise Corruption(f"bundle {bundle} of shard {state.name!r} is missing: nothing is swept") from error
            raise Unavailable(f"shard {state.name!r} changed during the sweep; sweep it again") from error

    def _age(self) -> _Age:
        store_ms, age_ms = self._store_clock.now_ms(), self._settings.age_ms
        return _Age(max(0, min(self._location.clock.now_ms(), store_ms) - age_ms), store_ms - age_ms)

    def _delete(self, name: str, orphans: Sequence[BlobStat], report: SweepReport) -> None:
        nbytes = sum(stat.size for stat in orphans)
        self._count_orphans(report, [stat.key for stat in orphans], nbytes)
        if self._settings.dry_run or not orphans:
            return
        for start in range(0, len(orphans), DELETE_BATCH):
            keys = [stat.key for stat in orphans[start : start + DELETE_BATCH]]
            self._location.identity.confirm()
            with translated():
                self._location.blob.delete(keys)
            report.deleted += len(keys)
            self._metrics.add(orphans_deleted=len(keys))
        log.info("orphans", extra={"shard": name, "deleted": report.deleted, "bytes": nbytes})

    def _count_orphans(self, report: SweepReport, keys: list[str], nbytes: int) -> None:
        report.orphans += len(keys)
        report.orphan_bytes += nbytes
        report.keys += keys[: REPORT_KEYS_MAX - len(report.keys)]
        self._metrics.add(orphans_found=len(keys), orphan_bytes=nbytes)
