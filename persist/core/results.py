"""The results of commands on a shard, one record each. `commands` exports all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from persist.core.attribute import AttributeKey
from persist.core.batch import Part
from persist.core.clock_index import Mark
from persist.core.erasure import Erasure, Wait
from persist.core.frontier import MINIMUM, Antichain, last_time
from persist.core.ids import SeqNo
from persist.core.named_holds import Tag
from persist.core.record import Record
from persist.core.shard_settings import ShardSettings


def snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Result(Record, frozen=True, tag=snake):
    """The base of all results."""


class PartReplaced(Result, frozen=True):
    """The part that was removed, as it was in the State; None: an earlier try has done it."""

    part: Part | None


class Done(Result, frozen=True):
    pass


class Appended(Result, frozen=True):
    """The batch covers `[lower, upper)`; an insert's rows have the time `lower`."""

    lower: Antichain
    upper: Antichain

    @property
    def time(self) -> int | None:
        """The last time that it completed: a snapshot as of it shows the rows. None: it added no time."""
        return last_time(self.lower, self.upper)


class AttributeValues(Result, frozen=True):
    """Values by key; None: unset. `following`: the first key of the next page (None: this is the last)."""

    values: Mapping[AttributeKey, int | None]
    following: AttributeKey | None = None


class Flushed(Result, frozen=True):
    """`applied` (now or by an earlier try), or refused because another flush was committed first."""

    applied: bool


class ReaderRegistered(Result, frozen=True):
    """The reader may read as of any time in `[since, upper)`; it holds every blob from `seqno` on."""

    since: Antichain
    upper: Antichain
    seqno: SeqNo


class SinceDowngraded(Result, frozen=True):
    reader_since: Antichain
    shard_since: Antichain


class CriticalReaderState(Result, frozen=True):
    """`registered` distinguishes this hold from others of its name."""

    since: Antichain
    opaque: str
    shard_since: Antichain
    registered: SeqNo = SeqNo(0)


class HoldGivenUp(Result, frozen=True):
    """A critical reader was given up at `seqno`, which the caller did not know: retry with `seen=seqno`."""

    seqno: SeqNo


class TimeResolved(Result, frozen=True):
    """Everything before `upper` was written by the wall clock `at_ms`, a grid point: read as of `upper` - 1."""

    upper: Antichain
    at_ms: int


class TimeToCome(Result, frozen=True):
    """The requested instant is in the future: it is `now_ms` now."""

    now_ms: int


class MarksShown(Result, frozen=True):
    """Marks, newest first. At instants from a mark up to the next newer one, the times below its upper are visible.

    So a time is visible from the oldest mark beyond it. If no mark is beyond it, or all are, its instant is unknown.
    `following`: times up to this one are on the next page; None: this is the last.
    """

    marks: tuple[Mark, ...]
    following: int | None


class SealLowered(Result, frozen=True):
    """The seal now, and the instant up to which it reached before; None: it was not far ahead."""

    sealed_ms: int
    lowered_from_ms: int | None


class SettingsAre(Result, frozen=True):
    settings: ShardSettings


class HistoryMoved(Result, frozen=True):
    """The shard's own hold (`[]`: it holds nothing), and its since."""

    hold: Antichain
    since: Antichain


class TagsAre(Result, frozen=True):
    tags: Mapping[str, Tag]


class TagRemoved(Result, frozen=True):
    """The tag that was removed; None: there was none."""

    tag: Tag | None


class ErasuresAre(Result, frozen=True):
    """The shard's erasures by id, and what unfinished ones wait for; `()`: the next garbage collection.

    `now_ms` is the clock of the service.
    """

    erasures: Mapping[str, Erasure]
    waits: Mapping[str, tuple[Wait, ...]]
    now_ms: int = 0


class SchemaRegistered(Result, frozen=True):
    schema_id: int


class RollupAdded(Result, frozen=True):
    added: bool


class Finalised(Result, frozen=True):
    """`done` once the shard is a tombstone."""

    done: bool


class Claimed(Result, frozen=True):
    """Whether the caller holds the claim, and the progress of an earlier holder with the same inputs."""

    granted: bool
    owner: str
    inputs: tuple[str, ...] = ()
    done: tuple[Part, ...] = ()
    resume_key: bytes = b""
    since: Antichain = MINIMUM


class SweptBefore(Result, frozen=True):
    """Blobs whose key was minted before `before_ms` are refused now."""

    before_ms: int


class Bundled(Result, frozen=True):
    """`applied`, or refused because a part is gone or being merged."""

    applied: bool


class MergeApplied(Result, frozen=True):
    """`applied` (now, or by an earlier try whose answer was lost), or refused because an input is gone."""

    applied: bool
