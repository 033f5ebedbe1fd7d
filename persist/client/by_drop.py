"""Policies of rows that truncate by a drop: the cut that is due, where a drop is allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from persist.client.changes import Named
from persist.client.past import HandleSettings
from persist.client.snapshot import holding
from persist.client.transport import OneShard
from persist.client.truncate import DROP, Dropping, Truncated
from persist.core.drops import check_droppable, check_not_erasing
from persist.core.errors import InvalidUsage, NotReadable
from persist.core.retention_plan import Due
from persist.core.state import State
from persist.core.transitions.dropping import drops_rows
from persist.core.view import ViewRequest


def dropped(
    transport: OneShard, name: str, due: Due, settings: HandleSettings, info: bytes, *, dry_run: bool
) -> Truncated | str:
    """What went by a drop, or in a sentence why a drop is refused. Raises what `Shard.truncate` says."""
    dropping = Dropping.of(transport, name, Named(due.cut.upper, None), settings.write, settings.read)
    try:
        if dry_run:
            return _counted(dropping, due.cut.upper)
        return replace(dropping, info=info).run(None, dry_run=False)
    except InvalidUsage as error:
        return error.message


def _counted(dropping: Dropping, cut: int) -> Truncated:
    """How many rows a drop before a cut of the policy would take away. They are told apart, and read as they are now.

    Raises InvalidUsage where it is refused.
    """
    with holding(dropping.transport, dropping.name, None, dropping.purpose, 0.0, dropping.read) as held:
        upper, removed = dropping.counted(held, cut)
        return Truncated(cut, None, upper, upper, removed, DROP)


def refused_drop(transport: OneShard, name: str, cut: int) -> str | None:
    """Why a drop before the cut is refused now, as far as a view tells; None: it is not."""
    view = transport.view(name, ViewRequest())
    return _refusal(lambda: check_not_erasing(name, view.upper, view.retracting)) or _refusal(
        lambda: check_droppable(name, view.batches, view.drops, cut)
    )


def is_refused(state: State, cut: int) -> bool:
    """Whether a drop before the cut is refused as of this State, so that it is not worth asking for."""
    return _refusal(lambda: drops_rows(state, cut)) is not None


def _refusal(check: Callable[[], object]) -> str | None:
    try:
        check()
    except (InvalidUsage, NotReadable) as error:
        return error.message
    return None


def count_dropped(transport: OneShard, name: str, upper: int, settings: HandleSettings) -> int:
    """How many rows a drop before `upper` would take away; 0 where it is refused."""
    dropping = Dropping.of(transport, name, Named(upper, None), settings.write, settings.read)
    try:
        return dropping.run(None, dry_run=True).removed or 0
    except (InvalidUsage, NotReadable):
        return 0
