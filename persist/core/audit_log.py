"""The commit history of a shard: an entry for each command that changed it, who gave it, and what they said.

The State holds the recent entries; older ones lie in files (`persist.core.spill`). An entry comes with the very commit
that it tells of, so it is there exactly if that one landed.
"""

from __future__ import annotations

from persist.core.frontier import Antichain
from persist.core.ids import SeqNo, ShardId
from persist.core.record import Record

INFO_BYTES_MAX = 4_096  # of what a caller says of one command, as JSON without blanks
PURPOSE_CHARS_MAX = 256
PAGE_MAX = 1_000  # entries that one answer holds

CLONE = "clone"
POINTS = {"restore": "restore to", "truncate": "truncate before", "drop_before": "drop before"}
"""Operations that go by a time, which the purpose of their entry tells, and its words before the time."""
MERGE, BUNDLE, COLLECT, AGE = "merge", "bundle", "collect", "age"
MAINTENANCE = frozenset({MERGE, BUNDLE, COLLECT, AGE})  # operations that change nothing of the contents


class Caller(Record, frozen=True):
    """Who gives a command: the id of the token over HTTP, the purpose of the writer, and what is said (JSON).

    Empty where that is not known. It is no part of the command: whoever repeats one may say something else.
    """

    who: str = ""
    purpose: str = ""
    info: bytes = b""


NOBODY = Caller()


class CommandEntry(Record, frozen=True):
    """What one command did. `[lower, upper)` are the times that it added, or of which it tells (docs/history.md).

    `rows` and `size` (bytes) are what it added, as `event_count` and `byte_count` count. `retractions` are those of the
    rows whose multiplicity is negative; None: the parts do not tell. `caller` None: nobody said anything.
    """

    operation: str
    lower: Antichain
    upper: Antichain
    rows: int = 0
    size: int = 0
    retractions: int | None = 0
    caller: Caller | None = None


def purpose_of(operation: str, point: int, said: str) -> str:
    """The purpose in the entry of an operation that goes by a time: what its caller said, and at the end that time."""
    words = f"{POINTS[operation]} {point}"
    return said if said == words else ", ".join(filter(None, (said, words)))


def point_of(entry: CommandEntry) -> int | None:
    """The time to which a restore went back, or before which a truncation took rows away; None: it is not recorded."""
    words, caller = POINTS.get(entry.operation), entry.caller
    if words is None or caller is None:
        return None
    first, _, point = caller.purpose.rpartition(" ")
    return int(point) if first.endswith(words) and point.isascii() and point.isdecimal() else None


class Committed(Record, frozen=True):
    """The entries of one commit, in the order of its commands, and when it was made, by its committer's clock."""

    at_ms: int
    entries: tuple[CommandEntry, ...]

    @property
    def info_bytes(self) -> int:
        return sum(len(entry.caller.info) for entry in self.entries if entry.caller is not None)


class EntryPlace(Record, frozen=True):
    """Where an entry stands: the `number` of its command among those of its commit, from 0 on."""

    seqno: SeqNo
    number: int


class PlacedEntry(Record, frozen=True):
    """An entry, where it stands and when it was committed (milliseconds since 1970, by the committer's clock)."""

    place: EntryPlace
    at_ms: int
    entry: CommandEntry


class HistoryPage(Record, frozen=True):
    """Some entries of a shard, newest first. More follow before the place `following`; None: there are no more."""

    shard: ShardId
    told: tuple[PlacedEntry, ...]
    following: EntryPlace | None = None
