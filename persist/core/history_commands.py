"""Commands about wall clocks, settings of a shard and its history. `commands` has all of their names too."""

from __future__ import annotations

from typing import Annotated

from persist.core.antichain import Antichain
from persist.core.command import TIME_MS_MAX, Command, ReadCommand
from persist.core.ids import SeqNo
from persist.core.marks import MARKS_PAGE_MAX
from persist.core.record import Meta
from persist.core.recorded import EntryFile
from persist.core.shard_settings import MARK_EVERY_MS


class ResolveTime(ReadCommand, frozen=True):
    """The upper that the shard had by the wall clock `at_ms`, which is sealed by this. -> TimeResolved

    It is answered the same for ever. TimeToCome: the instant is not over yet. NotReadable: it is not known, or not any
    more. Unavailable: the clock of the committer could not be checked.
    """

    at_ms: Annotated[int, Meta(ge=0, le=TIME_MS_MAX)]


class TimeShown(ReadCommand, frozen=True):
    """From which wall clock on this time is shown. -> ShownFrom; changes nothing. InvalidUsage: it is not complete."""

    time: Annotated[int, Meta(ge=0)]


class TimesShown(ReadCommand, frozen=True):
    """From which wall clocks on the times from `first` to `last` are shown. -> MarksShown, page by page

    NotReadable: `first` was forgotten. It commits only where a checked clock can date what came without one.
    """

    first: Annotated[int, Meta(ge=0)]
    last: Annotated[int, Meta(ge=0)]
    limit: Annotated[int, Meta(ge=2, le=MARKS_PAGE_MAX)] = MARKS_PAGE_MAX


class LowerSeal(Command, frozen=True):
    """Repair a seal that a wrong clock has moved far ahead: it goes back to the checked clock. -> SealLowered

    Marks stay. Other instants in between have no answer any more. Changes nothing where the seal is not far ahead.
    """


class SetSettings(Command, frozen=True):
    """Change the shard's settings iff their version is the expected one. -> SettingsAre

    `history_ms` None: for ever; 0: as readers need it. Conflict carries the actual version. A retry is safe.
    """

    expected_version: Annotated[int, Meta(ge=0)]
    history_ms: int | None
    mark_every_ms: int = MARK_EVERY_MS


class ReadShardSettings(ReadCommand, frozen=True):
    """The shard's settings as of now. -> SettingsAre; changes nothing."""


class AgeHistory(Command, frozen=True):
    """Move the shard's own hold to what was there at `before_ms`. -> HistoryMoved

    Changes nothing where that is not older than the history of the shard by the clock of this commit.
    Where the shard keeps no history, since follows the latest time as far as readers allow.
    """

    before_ms: Annotated[int, Meta(ge=0, le=TIME_MS_MAX)]


class ForgetHistory(Command, frozen=True):
    """Move the shard's own hold to `before`, and since as far as readers allow. -> HistoryMoved. A retry is safe."""

    before: Antichain


class FlushEntries(Command, frozen=True):
    """Put `file` in the place of the files `merged` and of the recent entries from `first` to `last`. -> Flushed

    Iff the State holds all of these still, and `first` is its oldest one.
    """

    merged: tuple[str, ...]  # keys
    first: SeqNo
    last: SeqNo
    file: EntryFile
