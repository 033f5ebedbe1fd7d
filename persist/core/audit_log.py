"""The commit history of a shard: an entry for each command that changed it, with its caller and the caller's text.

The State holds the recent entries; older ones are in files (`persist.core.spill`). An entry is part of the commit that
it describes, so it exists exactly if that commit does.
"""

from __future__ import annotations

from persist.core.frontier import Antichain
from persist.core.ids import SeqNo, ShardId
from persist.core.record import Record

INFO_BYTES_MAX = 4_096  # of a caller's text for one command, as JSON without blanks
PURPOSE_CHARS_MAX = 256
PAGE_MAX = 1_000  # entries in one answer

CLONE = "clone"
POINTS = {"restore": "restore to", "truncate": "truncate before", "drop_before": "drop before"}
"""Operations with a target time, which their entry's purpose contains, and the words before that time."""
MERGE, BUNDLE, COLLECT, AGE = "merge", "bundle", "collect", "age"
MAINTENANCE = frozenset({MERGE, BUNDLE, COLLECT, AGE})  # operations that do not change the contents


class Caller(Record, frozen=True):
    """The caller of a command: the id of its HTTP token, the purpose of the writer, and the caller's text (JSON).

    Empty: unknown. It is not part of the command: a retry may have another text.
    """

    who: str = ""
    purpose: str = ""
    info: bytes = b""


NOBODY = Caller()


class CommandEntry(Record, frozen=True):
    """What one command did. `[lower, upper)` are the times that it added or affected (docs/history.md).

    `rows` and `size` (bytes) are what it added, as in `event_count` and `byte_count`. `retractions` are the rows with a
    negative multiplicity; None: unknown. `caller` None: unknown.
    """

    operation: str
    lower: Antichain
    upper: Antichain
    rows: int = 0
    size: int = 0
    retractions: int | None = 0
    caller: Caller | None = None


def purpose_of(operation: str, point: int, purpose: str) -> str:
    """The purpose in the entry of an operation with a target time: the caller's text, then that time."""
    words = f"{POINTS[operation]} {point}"
    return purpose if purpose == words else ", ".join(filter(None, (purpose, words)))


def point_of(entry: CommandEntry) -> int | None:
    """The time to which a restore went back, or before which a truncation removed rows; None: not recorded."""
    words, caller = POINTS.get(entry.operation), entry.caller
    if words is None or caller is None:
        return None
    first, _, point = caller.purpose.rpartition(" ")
    return int(point) if first.endswith(words) and point.isascii() and point.isdecimal() else None


class Committed(Record, frozen=True):
    """The entries of one commit, in the order of its commands, and the time of the commit by its committer's clock."""

    at_ms: int
    entries: tuple[CommandEntry, ...]

    @property
    def info_bytes(self) -> int:
        return sum(len(entry.caller.info) for entry in self.entries if entry.caller is not None)


class EntryPlace(Record, frozen=True):
    """The place of an entry: its seqno, and the `number` of its command in the commit, from 0 on."""

    seqno: SeqNo
    number: int


class PlacedEntry(Record, frozen=True):
    """An entry, its place, and when it was committed (milliseconds since 1970, by the committer's clock)."""

    place: EntryPlace
    at_ms: int
    entry: CommandEntry


class HistoryPage(Record, frozen=True):
    """A page of entries of a shard, newest first. The next page is before `following`; None: this is the last."""

    shard: ShardId
    entries: tuple[PlacedEntry, ...]
    following: EntryPlace | None = None
