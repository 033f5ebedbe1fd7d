"""What a State remembers of commands: the commit history, and the outcomes of callers' tokens.

The State holds the recent entries; older ones are in files (`persist.core.spill`). An entry is part of the commit that
it describes, so it exists exactly if that commit does.
"""

from __future__ import annotations

from collections.abc import Iterable

from persist.core.frontier import Antichain
from persist.core.ids import SeqNo, ShardId, Token, WriterId
from persist.core.record import Record

INFO_BYTES_MAX = 4_096  # of a caller's text for one command, as JSON without blanks
PURPOSE_CHARS_MAX = 256
PAGE_MAX = 1_000  # entries in one answer

CLONE = "clone"
POINTS = {"restore": "restore to", "truncate": "truncate before", "drop_before": "drop before", "erase": "erasure"}
"""Operations with a target, a time or the id of an erasure, which their entry's purpose contains, and the words before
it.
"""
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

    A drop or an erasure that is pending affects none; once it is effective it has a second entry, with its time.

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


def purpose_of(operation: str, target: int | str, purpose: str) -> str:
    """The purpose in the entry of an operation with a target: the caller's text, then the target."""
    words = f"{POINTS[operation]} {target}"
    return purpose if purpose == words else ", ".join(filter(None, (purpose, words)))


def is_about(entry: CommandEntry, operation: str, target: int | str) -> bool:
    """Whether the entry is of this operation with this target."""
    purpose = entry.caller.purpose if entry.caller is not None else ""
    return entry.operation == operation and purpose_of(operation, target, "") == purpose.rpartition(", ")[2]


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


# Outcomes of commands with a caller's token: kept so that a retry receives the same answer.
#
# The State holds the recent ones; older ones are in files (`persist.core.spill`). A token that persist minted contains
# the time at which it was minted. Once an outcome is forgotten, every minted token that is as old is refused, since it
# may have landed: such a token never lands twice. A free-form token counts as new once its outcome is forgotten.


_VERSION_AT = 12  # index of the hex digit of a UUID that is its version
_MINTED = "7"
DIGEST_BYTES = 16
RETIRED = b"retired"  # in place of a digest: the id is that of a retired writer
ENDED = b"ended"  # in place of a digest: the token landed in an earlier life of the name
ENDED_MAX = 1_000  # of these that the next life inherits
FUTURE_MS_MAX = 24 * 3600 * 1000  # a token minted later than this after now is refused: a clock is wrong
RETIRED_PER_COMMIT_MAX = 1_000  # lapsed writers; the rest follows with later commits


class TokenOutcome(Record, frozen=True):
    """The outcome of the command of one token: its interval `[lower, upper)`; `at_ms`: when, by the State's clock.

    A drop that waited for the time `lower` of an appending writer took no time, and has an `upper` of `[0]`.
    `digest` is of the request, so that a token is not reused for another command. Empty: unknown.
    """

    lower: Antichain
    upper: Antichain
    digest: bytes
    at_ms: int

    @property
    def waited(self) -> bool:
        """Whether it is of a drop that was pending when it was answered."""
        return self.upper < self.lower


def key_of(identity: Token | WriterId) -> str:
    """The 32 hex digits under which the outcome of a token, or the retirement of a writer, is stored."""
    return identity[1:]


def born_ms(key: str) -> int | None:
    """When the id was minted, in milliseconds since 1970 by its maker's clock; None: it is free-form."""
    return int(key[:_VERSION_AT], 16) if key[_VERSION_AT] == _MINTED else None


def births(keys: Iterable[str]) -> list[int]:
    """When the minted ids among these were minted."""
    return [born for key in keys if (born := born_ms(key)) is not None]
