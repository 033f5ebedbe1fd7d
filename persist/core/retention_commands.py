"""Commands of row policies, and their results. `commands` has all of their names too."""

from __future__ import annotations

from typing import Annotated, ClassVar

from persist.core.command import MAINTAIN, MANAGE, TIME_MS_MAX, Command, ReadCommand
from persist.core.record import Meta
from persist.core.results import Result
from persist.core.retention_plan import Facts
from persist.core.rewrite_commands import Rewrite
from persist.core.row_policy import Looked, RowPolicy, Rung
from persist.core.tags import TAGS_MAX

RUNGS_AT_ONCE = 8


CUTS_TRIED_MAX = 2  # so many a run takes


class ReadRetention(ReadCommand, frozen=True):
    """The shard's policy of rows, and what it goes by. -> RetentionIs; changes nothing.

    With `policy` or `cuts_ms`: as it would be with this policy, and once the cuts of these instants were taken.
    """

    policy: RowPolicy | None = None
    cuts_ms: Annotated[tuple[Annotated[int, Meta(ge=0, le=TIME_MS_MAX)], ...], Meta(max_length=CUTS_TRIED_MAX)] = ()


class TakeCut(Command, frozen=True):
    """Keep the upper that the shard had by the instant `at_ms`, for its policy of rows. -> CutKept. A retry is safe.

    Nothing is kept where that is not known or not readable any more, or nothing came since the cut before it.
    Unavailable: the clock of the committer could not be checked, or the instant is to come.
    """

    scopes: ClassVar[tuple[str, ...]] = (MANAGE, MAINTAIN)

    at_ms: Annotated[int, Meta(ge=0, le=TIME_MS_MAX)]


class PassCut(Command, frozen=True):
    """The policy is done with everything before the time `upper`, the cut of `cut_ms`. -> CutKept. A retry is safe.

    Earlier cuts go. `removed` rows went by it (None: not known); `overran`: it has passed a consumer.
    """

    scopes: ClassVar[tuple[str, ...]] = (MANAGE, MAINTAIN)

    cut_ms: Annotated[int, Meta(ge=0, le=TIME_MS_MAX)]
    upper: Annotated[int, Meta(ge=0)]
    removed: int | None = None
    overran: bool = False


class RetractAged(Rewrite, frozen=True, kw_only=True):
    """The rows take away what the policy of rows says by its column, as the settings of `version` have it. -> Appended

    Conflict where the settings have another version by now: then nothing is taken away.
    """

    scopes: ClassVar[tuple[str, ...]] = (MANAGE, MAINTAIN)

    version: Annotated[int, Meta(ge=0)] = 0


class NoteLooked(Command, frozen=True):
    """Remember how far the policy has come by its column. -> CutKept. A retry is safe.

    Nothing changes where the settings have another version by now, or where it has come further. `overran`: what a
    consumer has not passed went.
    """

    scopes: ClassVar[tuple[str, ...]] = (MANAGE, MAINTAIN)

    looked: Looked
    overran: bool = False


class SetRungs(Command, frozen=True):
    """Set tags of the policy's ladder, and take the tags `gone` away, of those that it has set. -> TagsAre

    A tag is set at what was there by its instant. It is left out where that is not known or not readable any more, or
    where there is one of that name. A retry is safe. Unavailable: no clock can be trusted, or an instant is to come.
    """

    scopes: ClassVar[tuple[str, ...]] = (MANAGE, MAINTAIN)

    rungs: Annotated[tuple[Rung, ...], Meta(max_length=RUNGS_AT_ONCE)]
    gone: Annotated[tuple[str, ...], Meta(max_length=TAGS_MAX)] = ()


class RetentionIs(Result, frozen=True):
    """`checked_ms` is the committer's clock, where the blob store agrees with it; None: nobody knows the time."""

    facts: Facts
    checked_ms: int | None


class CutKept(Result, frozen=True):
    """Whether anything changed."""

    changed: bool
