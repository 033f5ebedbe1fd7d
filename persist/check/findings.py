"""Findings and the shard under examination: causes and remedies, thresholds, ages and sizes as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from persist.attributes.attribute_index import Marks
from persist.attributes.node_store import ChunkReader, StaleIndex
from persist.copies.shard_facts import ShardFacts
from persist.core.clock_index import Mark
from persist.core.errors import Corruption, InvalidUsage
from persist.core.frontier import Antichain
from persist.core.shard_settings import history_ms
from persist.core.state import Leased, State
from persist.inspect.documents import JsonRecord, instant
from persist.inspect.readonly_location import ReadOnlyLocation

# Diagnoses: what is told of one finding, and every finding that there is, with its id and how bad it is.


PAGE = "docs/check.md"
# How bad a finding is. Critical: data is lost or cannot be read, or soon nothing can be written. Warning: what was
# promised is not kept, or room is not given back. Note: it costs something, or will one day.
CRITICAL, WARNING, NOTE = "critical", "warning", "note"
SEVERITIES = (CRITICAL, WARNING, NOTE)

# Every finding by its id, the worst first: in this order they are told. An id never changes its meaning.
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
_ORDER = {found: number for number, found in enumerate(IDS)}


class Diagnosis(JsonRecord, frozen=True):
    """A finding. `shard` is the one it is of; null: it is of the location, or of what is beside it.

    `key` is that of the blob; null: it is of none, or of several. `what`, `cause` and `remedy` are a sentence each.
    `command` is one that helps; null: no command does. It takes the same location as the check. `page` says more.
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
    found: str,
    shard: str | None,
    what: str,
    *,
    cause: str,
    remedy: str,
    command: str | None = None,
    key: str | None = None,
) -> Diagnosis:
    """The finding of this id, which is one of `IDS`."""
    return Diagnosis(found, IDS[found], shard, key, what, cause, remedy, command, f"{PAGE}#{found}")


def ranked(found: Iterator[Diagnosis]) -> list[Diagnosis]:
    """The worst first; those of one id by the names of their shards, what is of no shard before."""
    return sorted(found, key=lambda one: (_ORDER.get(one.id, len(IDS)), one.shard or "", one.what))


# From when on something is a finding: every number by its name, and those that the caller may choose.


HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS

OFFSET_MS_MAX = 10_000  # by so much two clocks that agree may differ
LOG_ENTRIES_LONG = 2_000  # entries of a log that nobody holds, which a collection would take away
LOG_ENTRIES_READ_MAX = 100_000  # that are read of one log
ROLLUP_ENTRIES_MAX = 4_096  # state diffs after the newest rollup, all of which are read when a shard is opened
BATCHES_MANY = 256  # with so many batches a merge that is due is late
CLAIM_SILENT_LEASES = 10  # after so many leases without a word the worker is gone
CLAIM_SILENT_MS = HOUR_MS
HELD_ENTRIES_MANY = 1_000  # log entries that a reader keeps, where it keeps no part
LAPSES_MANY = 5  # leases of one shard that lapsed within a day
READERS_MANY = 1_000
WRITERS_MANY = 1_000
ORPHANS_MANY = 100  # blobs that nothing names, older than a day
ORPHAN_BYTES_MANY = 1024**3
RACES_MANY = 20  # commits that lost a race
RACES_PERCENT_MAX = 10  # of all that were tried
FAILURES_MANY = 5  # calls to a store that failed
FAILURES_PERCENT_MAX = 1  # of all of that kind
KEYS_TOLD_MAX = 3  # blobs that one sentence names
_PERCENT = re.compile(r"[0-9]{1,3}")


@dataclass(frozen=True, slots=True)
class CheckThresholds:
    """What the caller may choose.

    `held_ms`: who holds history or blobs for longer is told. `behind_ms`: so late may maintenance be. `backup_ms`: so
    old may the newest backup be. `token_ms`: a token that ends sooner is told. `free_percent`: with less room than that
    a disk is nearly full; 0: no disk is.
    """

    held_ms: int = DAY_MS
    behind_ms: int = DAY_MS
    backup_ms: int = 2 * DAY_MS
    token_ms: int = 14 * DAY_MS
    free_percent: int = 10


# What each is called: as an option with two dashes, and as a parameter over HTTP. What it says is in `--help`.
AGES = {
    "held": "tell who holds history, or blobs, for longer (1d)",
    "behind": "so late may maintenance be (1d)",
    "backup_age": "so old may the newest backup be (2d)",
    "token_age": "tell tokens that end sooner (14d)",
}
FREE = "with less of a disk free it is nearly full (10)"


def read_limits(
    held: str = "", behind: str = "", backup_age: str = "", token_age: str = "", free: str = ""
) -> CheckThresholds:
    """The limits that texts such as `12h` and `10` tell; "": the default. Raises InvalidUsage."""
    known = CheckThresholds()
    return CheckThresholds(
        _age("held", held, known.held_ms),
        _age("behind", behind, known.behind_ms),
        _age("backup-age", backup_age, known.backup_ms),
        _age("token-age", token_age, known.token_ms),
        _percent(free, known.free_percent),
    )


def _age(what: str, text: str, default: int) -> int:
    if not text:
        return default
    found = history_ms(text, what, takes_none=False)
    if found is None:
        raise InvalidUsage(f"{what} is {text!r:.100}; it must be an age such as '1d' (ms, s, m, h, d or w)")
    return found


def _percent(text: str, default: int) -> int:
    if not text:
        return default
    if not _PERCENT.fullmatch(text) or int(text) > 100:
        raise InvalidUsage(f"free is {text!r:.100}; it must be a number of percent in [0, 100]")
    return int(text)


# Ages, sizes and counts in words.


_UNITS = ((86_400_000, "day"), (3_600_000, "hour"), (60_000, "minute"), (1_000, "second"))
_SIZES = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def age(ms: int) -> str:
    """Such as `9 days`, `3 hours` or `1 minute`: in whole units of the largest that fits twice, or once exactly."""
    for unit_ms, name in _UNITS:
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
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_SIZES) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} bytes" if not unit else f"{value:.1f} {_SIZES[unit]}"


def at(ms: int | None) -> str:
    """The wall clock in RFC 3339, to the second."""
    told = instant(ms)
    return "a time that is not known" if told is None else f"{told.partition('.')[0].rstrip('Z')}Z"


def some(keys: Sequence[str]) -> str:
    """The first of these, and how many more there are."""
    told, more = ", ".join(keys[:KEYS_TOLD_MAX]), len(keys) - KEYS_TOLD_MAX
    return f"{told} and {more} more" if more > 0 else told


def is_or_are(count: int) -> str:
    return "is" if count == 1 else "are"


# A shard under examination: what was read of it, and how old what it holds is.


@dataclass
class CheckedShard(ShardFacts):
    """A shard, the location that it was read from, and the limits of the check. Ages are counted by `now_ms`."""

    look: ReadOnlyLocation = field(kw_only=True)
    now_ms: int = field(kw_only=True)
    limits: CheckThresholds = field(kw_only=True)

    @classmethod
    def of(cls, facts: ShardFacts, look: ReadOnlyLocation, now_ms: int, limits: CheckThresholds) -> CheckedShard:
        """The facts, which are not read again."""
        made = cls(look, facts.name, facts.head, facts.state, facts.faults, look=look, now_ms=now_ms, limits=limits)
        made.log, made.listed = facts.log, facts.listed
        return made

    def silent_ms(self, held: Leased) -> int:
        """For how long at least nobody has renewed a lease.

        The lease clock goes on by what committers watch. What has passed since the last commit counts by wall clocks.
        """
        if self.state is None:
            return 0
        idle_ms = max(0, self.now_ms - self.state.walltime_ms)
        return max(0, self.state.lease_now_ms - held.heartbeat_ms) + idle_ms

    def complete_ms(self, time: int) -> int | None:
        """When the shard first was complete beyond a time, by a mark, or else by the log. None: nobody knows."""
        assert self.state is not None
        found = _mark_beyond(self.look, self.state, time)
        if found is not None and found.at_ms:
            return found.at_ms
        if self.log.uppers and (self.log.first_seqno == 1 or self.log.uppers[0][1] <= time):
            return next((at_ms for at_ms, upper in self.log.uppers if upper > time), None)
        return None

    def age_ms(self, time: int) -> int | None:
        """How long ago that was."""
        at_ms = self.complete_ms(time)
        return None if at_ms is None else max(0, self.now_ms - at_ms)

    def upper_by(self, at_ms: int) -> Antichain | None:
        """The upper that the shard had by an instant, at least, as marks and the log tell it. None: nobody knows."""
        assert self.state is not None
        by_log = [Antichain(upper) for known_ms, upper in self.log.uppers if known_ms <= at_ms]
        by_mark = _mark_by(self.look, self.state, at_ms)
        return max([*by_log[-1:], *([] if by_mark is None else [by_mark.upper])], default=None)


def _mark_beyond(look: ReadOnlyLocation, state: State, time: int) -> Mark | None:
    last = state.seal.last
    marks = [Mark(at_ms, upper) for at_ms, upper in sorted(state.marks.items())]
    marks += [last] if last is not None else []
    shown = next((mark for mark in marks if not mark.upper.less_equal(time)), None)
    if shown is None or shown is not marks[0]:
        return shown
    return _indexed(look, state, lambda indexed: indexed.first_beyond(time)) or shown


def _mark_by(look: ReadOnlyLocation, state: State, at_ms: int) -> Mark | None:
    last = state.seal.last
    if last is not None and last.at_ms <= at_ms:
        return last
    recent = max((known for known in state.marks if known <= at_ms), default=None)
    if recent is not None:
        return Mark(recent, state.marks[recent])
    return _indexed(look, state, lambda marks: marks.newest_at(at_ms))


def _indexed(look: ReadOnlyLocation, state: State, ask: Callable[[Marks], Mark | None]) -> Mark | None:
    """What the index of attributes tells of marks. One that is damaged, or has moved on, tells nothing."""
    if not state.attribute_root.height:
        return None
    try:
        return ask(Marks(state, ChunkReader(look.blob, state.attribute_chunks, look.nodes)))
    except (Corruption, StaleIndex):
        return None
