"""Findings, thresholds, and the shard being checked; ages and sizes as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from persist.attributes.attribute_index import Marks
from persist.attributes.node_store import ChunkReader, StaleIndex
from persist.client.timestamps import period_ms
from persist.copies.shard_facts import ShardFacts
from persist.core.clock_index import Mark
from persist.core.errors import Corruption, InvalidUsage
from persist.core.frontier import Antichain
from persist.core.state import Leased
from persist.inspect.documents import JsonRecord, instant
from persist.inspect.readonly_location import ReadOnlyLocation

# Findings: every kind, with its id and severity.


PAGE = "docs/check.md"
# Critical: data is lost or unreadable, or soon nothing can be written. Warning: a promise is not kept, or space is not
# reclaimed. Note: it costs something, or will.
CRITICAL, WARNING, NOTE = "critical", "warning", "note"
SEVERITIES = (CRITICAL, WARNING, NOTE)

# Every finding by its id, in the order of reports, the worst first. An id never changes its meaning.
IDS: Mapping[str, str] = {
    "shard-unreadable": CRITICAL,
    "stores-mispaired": CRITICAL,
    "blob-missing": CRITICAL,
    "blob-damaged": CRITICAL,
    "log-damaged": CRITICAL,
    "state-damaged": CRITICAL,
    "loan-broken": CRITICAL,
    "disk-full": CRITICAL,
    "format-newer": CRITICAL,
    "marker-wrong": WARNING,
    "files-open": WARNING,
    "clock-off": WARNING,
    "backup-unreadable": WARNING,
    "backup-old": WARNING,
    "erasure-late": WARNING,
    "store-failing": WARNING,
    "maintenance-away": WARNING,
    "retention-behind": WARNING,
    "retention-held": WARNING,
    "token-expires": WARNING,
    "compaction-behind": WARNING,
    "claim-stuck": WARNING,
    "cursor-still": WARNING,
    "since-held": WARNING,
    "gc-held": WARNING,
    "rollup-old": WARNING,
    "log-long": WARNING,
    "orphans-many": NOTE,
    "loan-stuck": NOTE,
    "readers-many": NOTE,
    "writers-many": NOTE,
    "lease-lapses": NOTE,
    "races-lost": NOTE,
    "backup-lacks": NOTE,
}
_ORDER = {finding_id: number for number, finding_id in enumerate(IDS)}


class Diagnosis(JsonRecord, frozen=True):
    """A finding. `shard` null: it is about the location, or its backups, tokens or servers.

    `key` is the key of the blob; null: none, or several. `what`, `cause` and `remedy` are a sentence each. `command`
    helps, with the same location arguments as the check; null: no command does. `page` has more.
    """

    id: Annotated[str, Meta(extra_json_schema={"enum": list(IDS)})]
    severity: Annotated[str, Meta(extra_json_schema={"enum": list(SEVERITIES)})]
    shard: str | None
    key: str | None
    what: str
    cause: str
    remedy: str
    command: str | None
    page: str


def diagnosis(  # noqa: PLR0913 - each is a field
    finding_id: str,
    what: str,
    *,
    cause: str,
    remedy: str,
    command: str | None = None,
    key: str | None = None,
    shard: str | None = None,
) -> Diagnosis:
    """Make the finding with this id, one of `IDS`."""
    return Diagnosis(finding_id, IDS[finding_id], shard, key, what, cause, remedy, command, f"{PAGE}#{finding_id}")


def ranked(findings: Iterator[Diagnosis]) -> list[Diagnosis]:
    """Sort by severity, then by shard; findings without a shard come first."""
    return sorted(findings, key=lambda finding: (_ORDER.get(finding.id, len(IDS)), finding.shard or "", finding.what))


# Thresholds from which something is a finding.


HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
KEYS_SHOWN_MAX = 3  # blobs that one sentence lists


@dataclass(frozen=True, slots=True)
class CheckThresholds:
    """`held_ms`: longer holds of history or blobs are reported. `behind_ms`: tolerated delay of maintenance.

    `backup_ms`: tolerated age of the newest backup. `token_ms`: tokens that expire sooner are reported. `free_percent`:
    a disk with less free space is nearly full; 0: never.
    """

    held_ms: int = DAY_MS
    behind_ms: int = DAY_MS
    backup_ms: int = 2 * DAY_MS
    token_ms: int = 14 * DAY_MS
    free_percent: int = 10


# The names as options with two dashes, and as HTTP parameters, with the help of the options.
AGES = {
    "held": "report longer holds of history or blobs (1d)",
    "behind": "tolerated delay of maintenance (1d)",
    "backup_age": "tolerated age of the newest backup (2d)",
    "token_age": "report tokens that expire sooner (14d)",
}
FREE = "report disks with less free space, in percent (10)"


def read_limits(
    held: str = "", behind: str = "", backup_age: str = "", token_age: str = "", free: str = ""
) -> CheckThresholds:
    """Parse thresholds such as `12h` and `10`; "": the default. Raises InvalidUsage."""
    defaults = CheckThresholds()
    return CheckThresholds(
        _age("held", held, defaults.held_ms),
        _age("behind", behind, defaults.behind_ms),
        _age("backup-age", backup_age, defaults.backup_ms),
        _age("token-age", token_age, defaults.token_ms),
        _percent(free, defaults.free_percent),
    )


def _age(what: str, text: str, default: int) -> int:
    return period_ms(text, what, "1d") if text else default


def _percent(text: str, default: int) -> int:
    if not text:
        return default
    if not re.fullmatch("[0-9]{1,3}", text) or int(text) > 100:
        raise InvalidUsage(f"free is {text!r:.100}; it must be a percentage in [0, 100]")
    return int(text)


# Ages, sizes and counts as text.


def age(ms: int) -> str:
    """Such as `9 days`, `3 hours` or `1 minute`: in the largest unit that fits at least twice, or exactly once."""
    for unit_ms, name in ((DAY_MS, "day"), (HOUR_MS, "hour"), (60_000, "minute"), (1_000, "second")):
        count = ms // unit_ms
        if count >= 2 or (count == 1 and ms % unit_ms == 0):
            return many(count, name)
    return many(max(0, ms) // 1_000, "second")


def many(count: int, name: str) -> str:
    """`1 blob`, `2 blobs`, `3 entries`, `4,000 batches`."""
    if count != 1:
        name = f"{name[:-1]}ies" if name.endswith("ry") else f"{name}es" if name.endswith("ch") else f"{name}s"
    return f"{count:,} {name}"


def size(count: int) -> str:
    """`2.1 MiB`."""
    value, units = count / 1024, ["KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{count} bytes" if count < 1024 else f"{value:.1f} {units[0]}"


def at(ms: int | None) -> str:
    """The wall clock in RFC 3339, to the second."""
    text = instant(ms)
    return "an unknown time" if text is None else f"{text.partition('.')[0].rstrip('Z')}Z"


def some(keys: Sequence[str]) -> str:
    """The first keys, and the number of the others."""
    text, more = ", ".join(keys[:KEYS_SHOWN_MAX]), len(keys) - KEYS_SHOWN_MAX
    return f"{text} and {more} more" if more > 0 else text


def is_or_are(count: int) -> str:
    return "is" if count == 1 else "are"


# The shard being checked.


@dataclass
class CheckedShard(ShardFacts):
    """A shard, and the thresholds of the check. Ages are measured at `now_ms`."""

    location: ReadOnlyLocation
    now_ms: int = field(kw_only=True)
    limits: CheckThresholds = field(kw_only=True)

    @classmethod
    def of(cls, facts: ShardFacts, location: ReadOnlyLocation, now_ms: int, limits: CheckThresholds) -> CheckedShard:
        """Take over facts without reading them again."""
        checked = cls(location, facts.name, facts.head, facts.state, facts.faults, now_ms=now_ms, limits=limits)
        checked.log, checked.listed = facts.log, facts.listed
        return checked

    def finding(self, finding_id: str, what: str, *, cause: str, remedy: str, command: str | None = None) -> Diagnosis:
        """Make a finding about the shard."""
        return diagnosis(finding_id, what, cause=cause, remedy=remedy, command=command, shard=self.name)

    def silent_ms(self, lease: Leased) -> int:
        """The minimum time since a lease was last renewed.

        It is measured by the lease clock up to the last commit, and by wall clocks since then.
        """
        state = self.known()
        idle_ms = max(0, self.now_ms - state.walltime_ms)
        return max(0, state.lease_now_ms - lease.heartbeat_ms) + idle_ms

    def complete_ms(self, time: int) -> int | None:
        """When the shard was first complete beyond a time, by a mark, or else by the log. None: unknown."""
        mark = self._mark_beyond(time)
        if mark is not None and mark.at_ms:
            return mark.at_ms
        if self.log.uppers and (self.log.first_seqno == 1 or self.log.uppers[0][1] <= time):
            return next((at_ms for at_ms, upper in self.log.uppers if upper > time), None)
        return None

    def age_ms(self, time: int) -> int | None:
        """How long ago the shard was first complete beyond a time. None: unknown."""
        at_ms = self.complete_ms(time)
        return None if at_ms is None else max(0, self.now_ms - at_ms)

    def upper_by(self, at_ms: int) -> Antichain | None:
        """A lower bound of the upper by an instant, by marks and the log. None: unknown."""
        uppers = [Antichain(upper) for commit_ms, upper in self.log.uppers if commit_ms <= at_ms]
        recent = [mark for mark in self._recent_marks() if mark.at_ms <= at_ms]
        by_mark = recent[-1] if recent else self._search_index(lambda index: index.newest_at(at_ms))
        return max([*uppers[-1:], *([] if by_mark is None else [by_mark.upper])], default=None)

    def _recent_marks(self) -> list[Mark]:
        """The marks in the State, oldest first."""
        state = self.known()
        marks = [Mark(at_ms, upper) for at_ms, upper in sorted(state.marks.items())]
        return marks if state.seal.last is None else [*marks, state.seal.last]

    def _mark_beyond(self, time: int) -> Mark | None:
        marks = self._recent_marks()
        first_after = next((mark for mark in marks if not mark.upper.less_equal(time)), None)
        if first_after is None or first_after is not marks[0]:
            return first_after
        return self._search_index(lambda index: index.first_beyond(time)) or first_after

    def _search_index(self, search: Callable[[Marks], Mark | None]) -> Mark | None:
        """Search the marks in the attribute index. None also if the index is damaged, or has changed."""
        state = self.known()
        if not state.attribute_root.height:
            return None
        try:
            return search(Marks(state, ChunkReader(self.location.blob, state.attribute_chunks, self.location.nodes)))
        except (Corruption, StaleIndex):
            return None
