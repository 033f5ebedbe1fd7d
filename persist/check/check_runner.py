"""An examination: every shard whose name matches is looked at once, then the location, then what lies beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import ValidationError, convert

from blob import Blob
from persist.check import (
    integrity_checks,
    lease_checks,
    location_checks,
    maintenance_checks,
)
from persist.check.findings import CheckedShard, CheckThresholds, Diagnosis, ranked
from persist.check.lease_checks import ClocksSeen
from persist.check.location_checks import NOTHING_BESIDE, Beside
from persist.copies.blob_store_scan import lost_logs
from persist.copies.shard_facts import Faults
from persist.copies.verify import QUICK, Depth, check_shard
from persist.core.errors import Corruption, InvalidUsage, UnknownShard, UpgradeNeeded
from persist.inspect.documents import JsonRecord, instant
from persist.inspect.readonly_location import (
    LocationSummary,
    ReadOnlyLocation,
    check_named,
    location_summary,
    matching,
    prefix_of,
)
from persist.parts.prefetch import map_in_order

VERSION: Literal[1] = 1  # of what `--json` prints
READERS = 8  # shards that are examined at the same time
TOLD_MAX = 10_000  # findings that one answer tells; the others are counted
_NAME = re.compile(r"[A-Za-z0-9._/-]*")

Check = Callable[[CheckedShard], Iterator[Diagnosis]]

# What is asked of each shard at every depth, besides its integrity.
OF_SHARD: tuple[Check, ...] = (
    integrity_checks.shard_unreadable,
    maintenance_checks.history_behind,
    maintenance_checks.retention_behind,
    maintenance_checks.retention_held,
    maintenance_checks.erasure_late,
    maintenance_checks.compaction_behind,
    maintenance_checks.claim_stuck,
    maintenance_checks.rollup_old,
    maintenance_checks.log_long,
    maintenance_checks.orphans_many,
    lease_checks.since_held,
    lease_checks.gc_held,
    lease_checks.cursor_still,
    lease_checks.loan_stuck,
    lease_checks.many_holders,
    lease_checks.lease_lapses,
)


class Report(JsonRecord, frozen=True):
    """What an examination came to. `at` is the clock by which ages are counted. `pattern` null: all shards.

    `shards` is how many were looked at. `findings` has the worst first; `left_out` more were found than it tells.
    """

    persist: Literal["check"]
    version: Literal[1]
    at: str | None
    pattern: str | None
    location: LocationSummary
    shards: int
    findings: list[Diagnosis]
    left_out: int

    def text(self) -> str:
        """The report as JSON on one line, with its line feed."""
        return json.dumps(self.to_json()) + "\n"


@dataclass(frozen=True, slots=True)
class _Looked:
    """What is kept of a shard that was looked at. `first_ms`: when its log begins. `beyond`: faults beside `found`."""

    name: str
    found: list[Diagnosis]
    clocks: ClocksSeen
    committed_ms: int
    first_ms: int
    beyond: int


def examined(
    look: ReadOnlyLocation,
    pattern: str | None = None,
    limits: CheckThresholds | None = None,
    around: Beside = NOTHING_BESIDE,
    how: Depth = QUICK,
    blob: Blob | None = None,
) -> Report:
    """Examine the shards whose names match (None: all), and the location. Nothing is written.

    Parts are read from `blob` (None: from the location).

    Raises InvalidUsage (UnknownShard: no such shard, where one was named), Unavailable, Corruption (a store is damaged
    as a whole).
    """
    limits = limits or CheckThresholds()
    is_name = pattern is not None and _NAME.fullmatch(pattern) is not None
    if pattern is not None:
        prefix_of(pattern)
        if is_name:
            check_named(look, pattern)
    now_ms = look.clock.now_ms()
    wrong = Faults()
    told = location_summary(look, wrong)
    looked: list[_Looked] = []
    found: list[Diagnosis] = []
    names = matching(look, pattern, with_dropped=False)
    read = blob or look.blob
    readers = READERS if how.quick else 1
    for one in map_in_order(lambda name: _examined(look, name, now_ms, limits, how, read), names, readers):
        if one is not None:
            found += one.found
            looked.append(one)
    if pattern is None:
        found += map(integrity_checks.log_lost, lost_logs(look, set(look.names())))
    if is_name and not looked:
        raise UnknownShard(f"shard {pattern!r} was dropped; `persist shards` lists those that are there")
    found += location_checks.mispaired(wrong.listed())
    found += location_checks.disk_full(look, limits)
    found += location_checks.files_open(look)
    found += location_checks.maintenance_away(look, max((one.committed_ms for one in looked), default=0))
    found += lease_checks.clock_off(one.clocks for one in looked)
    found += _beside(around, told, looked, now_ms, limits)
    return report(pattern, told, len(looked), found, now_ms, sum(one.beyond for one in looked))


def report(
    pattern: str | None, told: LocationSummary, shards: int, found: list[Diagnosis], now_ms: int, left_out: int = 0
) -> Report:
    """The findings, ranked."""
    best = ranked(iter(found))
    more = max(0, len(best) - TOLD_MAX)
    return Report("check", VERSION, instant(now_ms), pattern, told, shards, best[:TOLD_MAX], left_out + more)


def _examined(
    look: ReadOnlyLocation, name: str, now_ms: int, limits: CheckThresholds, how: Depth, blob: Blob
) -> _Looked | None:
    """None: the shard was dropped meanwhile."""
    checked = check_shard(look, name, how, blob)
    if checked is None or (checked[0].state is not None and checked[0].state.tombstone):
        return None
    facts, faults = checked
    shard = CheckedShard.of(facts, look, now_ms, limits)
    found = list(integrity_checks.counted(faults) if how.quick else map(integrity_checks.of_fault, faults))
    found += [one for check in OF_SHARD for one in _found(check, shard)]
    committed_ms = 0 if facts.state is None else facts.state.walltime_ms
    clocks = lease_checks.clocks_of(shard, look.clock.now_ms())
    return _Looked(name, found, clocks, committed_ms, facts.log.first_ms, faults.beyond)


def _found(check: Check, shard: CheckedShard) -> list[Diagnosis]:
    """What a check finds. One that meets damage which another check tells of hides no other finding."""
    try:
        return list(check(shard))
    except (Corruption, UpgradeNeeded) as error:
        return list(integrity_checks.met(shard, error))


def _beside(
    around: Beside, told: LocationSummary, looked: list[_Looked], now_ms: int, limits: CheckThresholds
) -> Iterator[Diagnosis]:
    names = frozenset(one.name for one in looked)
    if around.backups is not None:
        location_checks.check_location(around.backups, told.id)
        yield from location_checks.backups(around.backups, now_ms, limits)
        yield from location_checks.lacking(around.backups, [(one.name, one.first_ms) for one in looked])
    if around.tokens is not None:
        yield from location_checks.tokens(around.tokens, now_ms, limits)
    if around.served is not None:
        yield from location_checks.races_lost(around.served, names)
        yield from location_checks.store_failing(around.served)
        yield from location_checks.server_clock(around.served)


# --- the report of a server, to which this process adds what it knows


def report_of(document: Any) -> Report:
    """Decode the report of a server. Raises InvalidUsage: it is none, or of a later version."""
    try:
        return convert(document, Report)
    except ValidationError as error:
        raise InvalidUsage(f"the answer is no report of this version of persist check: {error!s:.100}") from error
