"""The orphan sweep: blobs that no live version of a shard names and that nobody can still be about to name.

Writers and workers put blobs before they commit; one that dies in between leaves orphans, which no state diff mentions,
so GC cannot find them. The sweep lists what a shard has, takes away what any live version names, and deletes the rest
once it is older than the longest write may take. A part whose writer is still registered is never an orphan.

The order makes it safe: list first, then read the State and the live log. What is named by then is kept; what is named
later was put either after the listing (not a candidate) or so long ago that no write takes as long.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from blob import BlobStat
from compactor.metering import Metrics
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.errors import InvalidUsage
from persist.core.ids import SeqNo, family_of, shard_id_of
from persist.core.keys import belongs_to, shard_of
from persist.core.state import Policy, State
from persist.core.transitions import expire_lapsed
from persist.formats.store_errors import translated

log = logging.getLogger("persist.orphans")

HOUR_MS = 3600 * 1000
AGE_MS_DEFAULT = 24 * HOUR_MS
AGE_MS_MIN = Policy().staged_ms_max + HOUR_MS  # what is older is refused when it comes to be named; clocks differ
SCAN_LIMIT = 1_000
LIST_PAGE = 10_000  # blobs listed before the State is read anew
NAMED_MAX = 100  # keys that a report shows
_WRITER = re.compile(r"s[0-9a-f]{32}/(w[0-9a-f]{32})/p")
_FIRST_ROLLUP = re.compile(r"s[0-9a-f]{32}/v0{19}1/r[0-9a-f]{32}\.rollup\Z")


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """`age_ms`: how long a blob may wait for its commit: longer than the longest write or job takes."""

    age_ms: int = AGE_MS_DEFAULT
    dry_run: bool = False
    delete_batch: int = 500

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


class Sweeper:
    """Sweeps shards of a location. Any number may work at once."""

    def __init__(
        self, location: Location, settings: SweepSettings | None = None, *, metrics: Metrics | None = None
    ) -> None:
        self._location = location
        self._settings = settings or SweepSettings()
        self._metrics = metrics or Metrics()

    def sweep(self, name: str) -> SweepReport:
        """Sweep one shard. Raises what the stores raise; repeating is safe."""
        family = family_of(shard_id_of(name))  # what earlier lives of the name have left is swept as well
        report = SweepReport()
        with translated():
            listing = self._location.blob.list(family)
            while listed := list(islice(listing, LIST_PAGE)):
                self._sweep_listed(name, listed, report)
        return report

    def _sweep_listed(self, name: str, listed: list[BlobStat], report: SweepReport) -> None:
        machine = self._location.machine(name)
        report.listed += len(listed)
        following = expire_lapsed(machine.refresh(), self._location.clock.now_ms())  # as ForgetLapsed will leave it
        found = self._unnamed(following, listed, SweepReport())
        if found and not self._settings.dry_run:
            # Commit once before anything is deleted. A writer that stepped before this and commits only now loses the
            # race, steps again, and finds that what it staged is too old.
            machine.apply(c.ForgetLapsed())
        self._delete(name, self._unnamed(machine.refresh(), listed, report), report)

    def _unnamed(self, state: State, listed: list[BlobStat], report: SweepReport) -> list[BlobStat]:
        """What of the listed blobs no live version names, and nobody can still be about to name."""
        live = self._live_keys(state)
        found = []
        for stat in listed:
            if stat.key in live:
                report.named_bytes += stat.size
            elif not belongs_to(stat.key, shard_of(stat.key)):
                continue  # not ours to judge
            elif self._is_young(stat) or _writer_of(stat.key) in state.writers:
                report.young += 1
            else:
                found.append(stat)
        return found

    def sweep_unborn(self) -> SweepReport:
        """Sweep what is left of shards that never came to be: a first rollup without a log.

        InvalidUsage: the two stores do not belong together. Another location's shards would look unborn.
        """
        report = SweepReport()
        with translated():
            suspects = [stat for stat in self._location.blob.list("s") if self._is_unborn(stat, report)]
        known = {family_of(shard_id_of(name)) for name in self._location.all_names()}
        self._delete("", [stat for stat in suspects if family_of(shard_of(stat.key)) not in known], report)
        return report

    def _is_unborn(self, stat: BlobStat, report: SweepReport) -> bool:
        """Whether a blob could be all that there is of a shard: a first rollup, and old."""
        report.listed += 1
        return _FIRST_ROLLUP.match(stat.key) is not None and not self._is_young(stat)

    def _live_keys(self, state: State) -> set[str]:
        """Every blob that a live version names: what the State names, and what left it in the live log."""
        live = set(state.blob_keys())
        following = SeqNo(1)
        while page := self._location.versions.diffs(state.name, following, SCAN_LIMIT):
            for change in page:
                live.update(change.gone)
            following = SeqNo(page[-1].seqno + 1)
        return live

    def _is_young(self, stat: BlobStat) -> bool:
        return stat.modified_ms > self._location.clock.now_ms() - self._settings.age_ms

    def _delete(self, name: str, found: Sequence[BlobStat], report: SweepReport) -> None:
        nbytes = sum(stat.size for stat in found)
        report.orphans += len(found)
        report.orphan_bytes += nbytes
        report.keys += [stat.key for stat in found[: NAMED_MAX - len(report.keys)]]
        self._metrics.add(orphans_found=len(found), orphan_bytes=nbytes)
        if self._settings.dry_run or not found:
            return
        size = self._settings.delete_batch
        for start in range(0, len(found), size):
            keys = [stat.key for stat in found[start : start + size]]
            self._location.identity.confirm()
            with translated():
                self._location.blob.delete(keys)
            report.deleted += len(keys)
            self._metrics.add(orphans_deleted=len(keys))
        log.info("orphans", extra={"shard": name, "deleted": report.deleted, "bytes": nbytes})


def _writer_of(key: str) -> str | None:
    found = _WRITER.match(key)
    return found.group(1) if found else None
