"""The latest complete time of a shard, and what it is where nothing was written yet."""

from __future__ import annotations

from persist.core.antichain import TIME_MAX
from persist.core.errors import NotReadable
from persist.core.view import ShardView

BEFORE_ALL = -1  # as of it a shard has no rows; `as_of + 1` is the upper that it has then, as of every other time


class NothingWritten(NotReadable):
    """No time is complete yet, and none was forgotten."""


def latest(view: ShardView) -> int:
    """The last complete time of a shard. Raises NotReadable when no time is readable any more.

    Raises NothingWritten: no time is complete yet.
    """
    if view.since.is_empty:
        raise NotReadable(f"shard {view.name!r} was closed to reads", as_of=None, since=view.since.to_json())
    if view.upper.element == 0:
        kind = NothingWritten if view.since.element == 0 else NotReadable
        raise kind(
            f"shard {view.name!r} has no complete time yet: nothing was written", as_of=None, since=view.since.to_json()
        )
    if view.upper < view.since:
        raise NotReadable(
            f"shard {view.name!r} has since {view.since}, beyond its upper {view.upper}: nothing can be read until "
            "somebody writes that far",
            as_of=None,
            since=view.since.to_json(),
        )
    last = TIME_MAX if view.upper.element is None else view.upper.element - 1
    return max(last, view.since.element or 0)
