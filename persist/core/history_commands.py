"""Commands that change history: clocks, settings, tags, retention policies and erasures."""

from __future__ import annotations

from typing import Annotated, ClassVar

from persist.core.clock_index import MARKS_PAGE_MAX
from persist.core.command import (
    MAINTAIN,
    MANAGE,
    TIME_MS_MAX,
    Command,
    MaintainCommand,
    ManageCommand,
    ReadCommand,
)
from persist.core.erasure import Doomed, Proof
from persist.core.frontier import Antichain
from persist.core.named_holds import KEEP_MS_MAX
from persist.core.record import Meta
from persist.core.results import Result
from persist.core.retention_plan import Facts
from persist.core.shard_settings import MARK_EVERY_MS, Looked, RowPolicy, Rung

# Commands about wall clocks, settings of a shard, its history, tags and cuts. `commands` has all of their names.


class ResolveTime(ReadCommand, frozen=True):
    """The upper that the shard had by the wall clock `at_ms`, which is sealed by this. -> TimeResolved

    It is answered the same for ever. TimeToCome: the instant is not over yet. NotReadable: it is not known, or not any
    more. Unavailable: the clock of the committer could not be checked.
    """

    at_ms: Annotated[int, Meta(ge=0, le=TIME_MS_MAX)]


class TimesShown(ReadCommand, frozen=True):
    """From which wall clocks on the times from `first` to `last` are shown. -> MarksShown, page by page

    NotReadable: `first` was forgotten. InvalidUsage: it is not complete. It commits only where a checked clock can
    date what came without one.
    """

    first: Annotated[int, Meta(ge=0)]
    last: Annotated[int, Meta(ge=0)]
    limit: Annotated[int, Meta(ge=2, le=MARKS_PAGE_MAX)] = MARKS_PAGE_MAX


class LowerSeal(Command, frozen=True):
    """Repair a seal that a wrong clock has moved far ahead: it goes back to the checked clock. -> SealLowered

    Marks stay. Other instants in between have no answer any more. Changes nothing where the seal is not far ahead.
    """


class SetSettings(ManageCommand, frozen=True):
    """Change the shard's settings iff their version is the expected one. -> SettingsAre

    `history_ms` None: for ever; 0: as readers need it. `rows` None: all of them are kept. Conflict carries the actual
    version. A retry is safe.
    """

    expected_version: Annotated[int, Meta(ge=0)]
    history_ms: int | None
    mark_every_ms: int = MARK_EVERY_MS
    rows: RowPolicy | None = None


class ForgetOutlived(MaintainCommand, frozen=True):
    """Forget history of before `before_ms`, tags that were kept long enough, and dropped rows. -> HistoryMoved

    History: the shard's own hold moves to what was there at `before_ms`, where that is older than the history of the
    shard by the clock of this commit; where the shard keeps none, since follows the latest time as far as readers
    allow. None: it stays. Dropped rows leave the State where no readable time comes before their drop, by metadata
    alone: parts wholly before a cut go, parts across it are clipped. A retry is safe. Unavailable: the clock of the
    committer could not be checked, by which history or a tag is due.
    """

    before_ms: Annotated[int, Meta(ge=0, le=TIME_MS_MAX)] | None = None


class ForgetHistory(Command, frozen=True):
    """Move the shard's own hold to `before`, and since as far as readers allow. -> HistoryMoved. A retry is safe."""

    scopes: ClassVar[tuple[str, ...]] = (MANAGE, MAINTAIN)

    before: Antichain


class SetTag(ManageCommand, frozen=True):
    """Keep `time` readable under the name `tag`, for `keep_ms` from now on (None: until it is taken away). -> TagsAre

    The time must be readable: not before since, or kept by a tag already. A tag that is there stays at its time, and
    gets this `keep_ms`; Conflict where it is at another time. A retry is safe.
    """

    tag: str
    time: Annotated[int, Meta(ge=0)]
    keep_ms: Annotated[int, Meta(ge=0, le=KEEP_MS_MAX)] | None = None


class RemoveTag(ManageCommand, frozen=True):
    """Take a tag away; its time is forgotten unless something else keeps it. -> TagRemoved, also where there is none"""

    tag: str


# Commands of row policies, and their results. `commands` has all of their names too.


RUNGS_AT_ONCE = 8


CUTS_TRIED_MAX = 2  # so many a run takes


class ReadRetention(ReadCommand, frozen=True):
    """The shard's policy of rows, and what it goes by. -> RetentionIs; changes nothing.

    With `policy` or `cuts_ms`: as it would be with this policy, and once the cuts of these instants were taken.
    """

    policy: RowPolicy | None = None
    cuts_ms: Annotated[tuple[Annotated[int, Meta(ge=0, le=TIME_MS_MAX)], ...], Meta(max_length=CUTS_TRIED_MAX)] = ()


class TakeCuts(Command, frozen=True):
    """Keep what the shard had by some instants, for its policy of rows: cuts, and tags of its ladder. -> CutsTaken

    Nothing is kept where that is not known or not readable any more, nor by a cut where nothing came since the one
    before it, nor by a tag where there is one of that name. Tags beyond those that the ladder keeps go. A retry is
    safe. Unavailable: the clock of the committer could not be checked, or an instant is to come.
    """

    scopes: ClassVar[tuple[str, ...]] = (MANAGE, MAINTAIN)

    at_ms: Annotated[tuple[Annotated[int, Meta(ge=0, le=TIME_MS_MAX)], ...], Meta(max_length=CUTS_TRIED_MAX)] = ()
    rungs: Annotated[tuple[Rung, ...], Meta(max_length=RUNGS_AT_ONCE)] = ()


class NoteLooked(Command, frozen=True):
    """Remember how far the policy has come by its column. -> Done. A retry is safe.

    Nothing changes where the settings have another version by now, or where it has come further. `overran`: what a
    consumer has not passed went.
    """

    scopes: ClassVar[tuple[str, ...]] = (MANAGE, MAINTAIN)

    looked: Looked
    overran: bool = False


class RetentionIs(Result, frozen=True):
    """`checked_ms` is the committer's clock, where the blob store agrees with it; None: nobody knows the time.

    `rows` are there at the latest time; None: that is not known.
    """

    facts: Facts
    checked_ms: int | None
    rows: int | None


class CutsTaken(Result, frozen=True):
    """How many cuts are new."""

    count: int


# Commands of erasures. `commands` has all of their names too.


class ReadErasures(MaintainCommand, frozen=True):
    """The shard's erasures as of now, and what each waits for. -> ErasuresAre; changes nothing."""


class NoteRewritten(MaintainCommand, frozen=True):
    """From now on no part of the shard shows the rows of this erasure; `doomed` are blobs that did. -> Done

    Changes nothing where a part may still show them, or where it was noted before.
    """

    erasure: str
    doomed: Doomed


class ProveErasure(MaintainCommand, frozen=True):
    """Both stores were looked through, and nothing of this erasure is left. -> Done

    Changes nothing where a rollup of before `rewritten` is still named, or where it was proved before.
    """

    erasure: str
    proof: Proof
