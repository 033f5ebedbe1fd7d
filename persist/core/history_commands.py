"""Commands that change history: clocks, settings, tags, retention policies and erasures."""

from __future__ import annotations

from typing import Annotated, ClassVar

from persist.core.clock_index import MARKS_PAGE_MAX
from persist.core.command import MAINTAIN, MANAGE, TIME_MS_MAX, Command, MaintainCommand, ManageCommand, ReadCommand
from persist.core.erasure import Doomed, Proof
from persist.core.frontier import Antichain
from persist.core.named_holds import KEEP_MS_MAX
from persist.core.record import Meta
from persist.core.results import Result
from persist.core.retention_plan import Facts
from persist.core.shard_settings import MARK_EVERY_MS, Looked, RowPolicy, Rung

# Commands about wall clocks, settings of a shard, its history, tags and cuts. `commands` exports all of them.


class ResolveTime(ReadCommand, frozen=True):
    """The upper of the shard at the wall clock `at_ms`, which is sealed by this command. -> TimeResolved

    The answer never changes. TimeToCome: the instant is in the future. NotReadable: it is unknown or forgotten.
    Unavailable: the clock of the committer could not be checked.
    """

    at_ms: Annotated[int, Meta(ge=0, le=TIME_MS_MAX)]


class TimesShown(ReadCommand, frozen=True):
    """The wall clocks from which the times from `first` to `last` are visible. -> MarksShown, page by page

    NotReadable: `first` was forgotten. InvalidUsage: it is not complete. It commits only if a checked clock can date
    rows that were committed without one.
    """

    first: Annotated[int, Meta(ge=0)]
    last: Annotated[int, Meta(ge=0)]
    limit: Annotated[int, Meta(ge=2, le=MARKS_PAGE_MAX)] = MARKS_PAGE_MAX


class LowerSeal(Command, frozen=True):
    """Repair a seal that a wrong clock has moved far ahead: set it back to the checked clock. -> SealLowered

    Marks are kept. Other instants in between lose their answer. Changes nothing if the seal is not far ahead.
    """


class SetSettings(ManageCommand, frozen=True):
    """Change the shard's settings iff their version is the expected one. -> SettingsAre

    `history_ms` None: unlimited; 0: as long as readers need it. `rows` None: all rows are kept. Conflict carries the
    actual version. A retry is safe.
    """

    expected_version: Annotated[int, Meta(ge=0)]
    history_ms: int | None
    mark_every_ms: int = MARK_EVERY_MS
    rows: RowPolicy | None = None


class ForgetOutlived(MaintainCommand, frozen=True):
    """Forget history before `before_ms`, expired tags, and dropped rows. -> HistoryMoved

    History: the shard's own hold moves to the upper at `before_ms`, if that instant is beyond the retention of the
    shard by the clock of this commit; without retention, since follows the latest time as far as readers allow. None:
    it is unchanged. Dropped rows leave the State, by metadata alone, if no readable time precedes their drop: parts
    wholly before a cut are removed, parts across it are clipped. A retry is safe. Unavailable: the clock of the
    committer, which decides what has expired, could not be checked.
    """

    before_ms: Annotated[int, Meta(ge=0, le=TIME_MS_MAX)] | None = None


class ForgetHistory(Command, frozen=True):
    """Move the shard's own hold to `before`, and since as far as readers allow. -> HistoryMoved. A retry is safe."""

    scopes: ClassVar[tuple[str, ...]] = (MANAGE, MAINTAIN)

    before: Antichain


class SetTag(ManageCommand, frozen=True):
    """Keep `time` readable under the name `tag`, for `keep_ms` from now on (None: until it is removed). -> TagsAre

    The time must be readable: not before since, or kept by a tag already. An existing tag of the same time gets this
    `keep_ms`; Conflict if it is of another time. A retry is safe.
    """

    tag: str
    time: Annotated[int, Meta(ge=0)]
    keep_ms: Annotated[int, Meta(ge=0, le=KEEP_MS_MAX)] | None = None


class RemoveTag(ManageCommand, frozen=True):
    """Remove a tag; its time is forgotten unless something else keeps it. -> TagRemoved, also if there is none"""

    tag: str


# Commands of row policies, and their results.


RUNGS_AT_ONCE = 8


CUTS_TRIED_MAX = 2  # that one run takes


class ReadRetention(ReadCommand, frozen=True):
    """The shard's row policy, and the facts for its plan. -> RetentionIs; changes nothing.

    With `policy` or `cuts_ms`: as they would be with this policy, and after taking the cuts of these instants.
    """

    policy: RowPolicy | None = None
    cuts_ms: Annotated[tuple[Annotated[int, Meta(ge=0, le=TIME_MS_MAX)], ...], Meta(max_length=CUTS_TRIED_MAX)] = ()


class TakeCuts(Command, frozen=True):
    """Take the cuts and the tags of the row policy at some instants. -> CutsTaken

    An instant that is unknown or no longer readable is skipped, as is a cut if nothing was written since the one before
    it, and a tag whose name exists. Tags in excess of the ladder are removed. A retry is safe. Unavailable: the clock
    of the committer could not be checked, or an instant is in the future.
    """

    scopes: ClassVar[tuple[str, ...]] = (MANAGE, MAINTAIN)

    at_ms: Annotated[tuple[Annotated[int, Meta(ge=0, le=TIME_MS_MAX)], ...], Meta(max_length=CUTS_TRIED_MAX)] = ()
    rungs: Annotated[tuple[Rung, ...], Meta(max_length=RUNGS_AT_ONCE)] = ()


class NoteLooked(Command, frozen=True):
    """Record the progress of the policy by its column. -> Done. A retry is safe.

    Nothing changes if the settings have another version by now, or if the policy has progressed further. `overran`:
    rows that a consumer has not passed were removed.
    """

    scopes: ClassVar[tuple[str, ...]] = (MANAGE, MAINTAIN)

    looked: Looked
    overran: bool = False


class RetentionIs(Result, frozen=True):
    """`checked_ms` is the committer's clock if the blob store agrees with it, else None.

    `rows` is the number of rows at the latest time; None: unknown.
    """

    facts: Facts
    checked_ms: int | None
    rows: int | None


class CutsTaken(Result, frozen=True):
    """The number of new cuts."""

    count: int


# Commands of erasures.


class ReadErasures(MaintainCommand, frozen=True):
    """The shard's erasures, and what each waits for. -> ErasuresAre; changes nothing."""


class NoteRewritten(MaintainCommand, frozen=True):
    """Record that no part of the shard contains the rows of this erasure; `doomed` are blobs that did. -> Done

    Changes nothing if a part may still contain them, or if it was recorded before.
    """

    erasure: str
    doomed: Doomed


class ProveErasure(MaintainCommand, frozen=True):
    """Record the proof that a scan of both stores found nothing left of this erasure. -> Done

    Changes nothing if a rollup from before `rewritten` is still named, or if it was proved before.
    """

    erasure: str
    proof: Proof
