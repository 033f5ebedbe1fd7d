"""Commands that end what has lapsed. `commands` has all of their names too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from persist.core.command import TIME_MS_MAX, MaintainCommand
from persist.core.ids import ReaderId, WriterId, written
from persist.core.record import Meta, Record
from persist.core.state import Claim, LeasedReader, WriterState


class Leases(Record, frozen=True):
    """Leases as they are in some State."""

    leased_readers: Mapping[Annotated[ReaderId, written(ReaderId)], LeasedReader] = {}
    writers: Mapping[Annotated[WriterId, written(WriterId)], WriterState] = {}
    claims: Mapping[str, Claim] = {}


class ForgetLapsed(MaintainCommand, frozen=True):
    """Forget readers, writers and claims whose leases lapsed, in a commit that happens even if none did. -> Done

    The caller vouches that those in `silent` lapsed too. One of them that was renewed since, so that it differs from
    what is given here, is kept.
    """

    silent: Leases = Leases()


class RefuseStagedBefore(MaintainCommand, frozen=True):
    """From now on name no blob whose key was minted before `before_ms`, unless it is named already. -> SweptBefore

    Never beyond the committer's own clock. It also forgets what ForgetLapsed does. After it, a commit that was stepped
    from an earlier State loses its race: so what is that old and is not named now may be deleted.
    """

    before_ms: Annotated[int, Meta(ge=0, le=TIME_MS_MAX)]
