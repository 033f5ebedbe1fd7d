"""Runs the check of a location: shards whose names match, the location itself, backups, tokens and servers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import ValidationError, convert

from blob import Blob
from persist.check import integrity_checks, lease_checks, location_checks, maintenance_checks
from persist.check.findings import CheckedShard, CheckThresholds, Diagnosis, ranked
from persist.check.location_checks import NO_EXTERNAL_STATE, ExternalState
from persist.copies.blob_store_scan import find_lost_logs
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

VERSION: Literal[1] = 1  # of the JSON report
READERS = 8  # shards that are checked concurrently
FINDINGS_MAX = 10_000  # findings in one report; more are only counted
_NAME = re.compile(r"[A-Za-z0-9._/-]*")

Check = Callable[[CheckedShard], Iterator[Diagnosis]]

# The checks of each shard at every depth, besides its integrity. All but the first one require a State.
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
    """The result of a check. `at` is the clock for ages. `pattern` null: all shards.

    `shards` is the number of checked shards. `findings` are ordered by severity; `left_out` more were found.
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
        """The report as JSON on one line."""
        return json.dumps(self.to_json()) + "\n"


@dataclass(frozen=True, slots=True)
class _ShardResult:
    """The result for one shard. `first_ms`: when its log begins. `beyond`: faults beyond those in `findings`."""

    name: str
    findings: list[Diagnosis]
    clocks: tuple[int, int, int]
    committed_ms: int
    first_ms: int
    beyond: int


def run_check(
    location: ReadOnlyLocation,
    pattern: str | None = None,
    limits: CheckThresholds | None = None,
    external: ExternalState = NO_EXTERNAL_STATE,
    depth: Depth = QUICK,
    blob: Blob | None = None,
) -> Report:
    """Check the shards whose names match (None: all), and the location. Writes nothing.

    Parts are read from `blob` (None: from the location).

    Raises InvalidUsage (UnknownShard: a named shard does not exist), Unavailable, Corruption (a store is damaged as a
    whole).
    """
    limits = limits or CheckThresholds()
    is_name = pattern is not None and _NAME.fullmatch(pattern) is not None
    if pattern is not None:
        prefix_of(pattern)
        if is_name:
            check_named(location, pattern)
    now_ms = location.clock.now_ms()
    problems = Faults()
    summary = location_summary(location, problems)
    results: list[_ShardResult] = []
    findings: list[Diagnosis] = []
    names = matching(location, pattern, with_dropped=False)
    source = blob or location.blob
    threads = READERS if depth.quick else 1
    for result in map_in_order(lambda name: _check_one(location, name, now_ms, limits, depth, source), names, threads):
        if result is not None:
            findings += result.findings
            results.append(result)
    if pattern is None:
        findings += map(integrity_checks.log_lost, find_lost_logs(location, set(location.names())))
    if is_name and not results:
        raise UnknownShard(f"shard {pattern!r} was dropped; `persist shards` lists the existing ones")
    findings += location_checks.mispaired(problems.listed())
    findings += location_checks.disk_full(location, limits)
    findings += location_checks.files_open(location)
    findings += location_checks.maintenance_away(location, max((result.committed_ms for result in results), default=0))
    findings += lease_checks.clock_off({result.name: result.clocks for result in results})
    findings += _external_findings(external, summary.id, results, now_ms, limits)
    return make_report(pattern, summary, len(results), findings, now_ms, sum(result.beyond for result in results))


def make_report(
    pattern: str | None, location: LocationSummary, shards: int, issues: list[Diagnosis], now_ms: int, left_out: int = 0
) -> Report:
    """Assemble a report, with its findings ranked."""
    findings, left_out = ranked(iter(issues)), left_out + max(0, len(issues) - FINDINGS_MAX)
    return Report("check", VERSION, instant(now_ms), pattern, location, shards, findings[:FINDINGS_MAX], left_out)


def _check_one(
    location: ReadOnlyLocation, name: str, now_ms: int, limits: CheckThresholds, depth: Depth, blob: Blob
) -> _ShardResult | None:
    """Check one shard. None: it was dropped meanwhile."""
    checked = check_shard(location, name, depth, blob)
    if checked is None or (checked[0].state is not None and checked[0].state.tombstone):
        return None
    facts, faults = checked
    shard = CheckedShard.of(facts, location, now_ms, limits)
    findings = list(integrity_checks.counted(faults) if depth.quick else map(integrity_checks.of_fault, faults))
    findings += [finding for check in OF_SHARD for finding in _run_check(check, shard)]
    committed_ms = 0 if facts.state is None else facts.state.walltime_ms
    clocks = lease_checks.clocks_of(shard, location.clock.now_ms())
    return _ShardResult(name, findings, clocks, committed_ms, facts.log.first_ms, faults.beyond)


def _run_check(check: Check, shard: CheckedShard) -> list[Diagnosis]:
    """Run a check. If it meets damage, that becomes a finding, and the other checks still run."""
    if shard.state is None and check is not integrity_checks.shard_unreadable:
        return []
    try:
        return list(check(shard))
    except (Corruption, UpgradeNeeded) as error:
        return [integrity_checks.unreadable(shard, error)]


def _external_findings(
    state: ExternalState, location_id: str | None, results: list[_ShardResult], now_ms: int, limits: CheckThresholds
) -> Iterator[Diagnosis]:
    names = frozenset(result.name for result in results)
    if state.backups is not None:
        location_checks.check_location(state.backups, location_id)
        yield from location_checks.backups(state.backups, now_ms, limits)
        yield from location_checks.lacking(state.backups, [(shard.name, shard.first_ms) for shard in results])
    if state.tokens is not None:
        yield from location_checks.tokens(state.tokens, now_ms, limits)
    if state.served is not None:
        yield from location_checks.races_lost(state.served, names)
        yield from location_checks.store_failing(state.served)
        yield from location_checks.server_clock(state.served)


# --- the report of a server


def decode_report(document: Any) -> Report:
    """Decode the report of a server. Raises InvalidUsage: it is not a report, or of a later version."""
    try:
        return convert(document, Report)
    except ValidationError as error:
        raise InvalidUsage(f"the answer is not a report of this version of persist check: {error!s:.100}") from error
