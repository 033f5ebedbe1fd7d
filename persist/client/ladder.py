"""A ladder of tags: the last so many hours, days and months, in UTC. Pure.

`hourly-2026-11-23T04Z` is what was there by 04:00. An hour in which nothing came has no tag of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime

from persist.client.wall_clock import instant_ms, shown_instant
from persist.core.retention_plan import Facts
from persist.core.row_policy import Ladder, Rung
from persist.core.tags import Tag

# Of each rung: how its tags are named, and the begin of the period that an instant lies in.
_RUNGS: Mapping[str, tuple[str, Callable[[datetime], datetime]]] = {
    "hourly": ("%Y-%m-%dT%HZ", lambda at: at.replace(minute=0, second=0, microsecond=0)),
    "daily": ("%Y-%m-%d", lambda at: at.replace(hour=0, minute=0, second=0, microsecond=0)),
    "monthly": ("%Y-%m", lambda at: at.replace(day=1, hour=0, minute=0, second=0, microsecond=0)),
}


def due_rungs(facts: Facts, now_ms: int) -> tuple[Rung, ...]:
    """The tags that are to be set at this instant: where something came since the newest one of that rung."""
    return tuple(rung for rung in _now(facts, now_ms) if rung.tag not in facts.tags)


def outlived(facts: Facts) -> tuple[str, ...]:
    """The tags of the ladder that are beyond what it keeps; the newest ones stay."""
    ladder = _ladder(facts)
    gone: list[str] = []
    for rung in _RUNGS:
        own = _own(facts, rung)
        gone += own[: max(0, len(own) - getattr(ladder, rung))]
    return tuple(gone)


def next_rung_ms(facts: Facts, now_ms: int) -> int | None:
    """When the next tag may be due, if nothing moves the shard; None: nothing came since the newest ones."""
    hour_ms = 3_600_000
    return (now_ms // hour_ms + 1) * hour_ms if any(_now(facts, now_ms)) else None


def _now(facts: Facts, now_ms: int) -> Iterator[Rung]:
    ladder, latest = _ladder(facts), (facts.upper.element or 0) - 1
    for rung, (form, begin) in _RUNGS.items():
        if not getattr(ladder, rung) or latest < 0 or facts.since.is_empty or _newest(facts, rung) == latest:
            continue
        at = begin(shown_instant(now_ms))
        yield Rung(f"{rung}-{at.strftime(form)}", instant_ms("now", at))


def _ladder(facts: Facts) -> Ladder:
    return Ladder() if facts.policy is None else facts.policy.tags


def _own(facts: Facts, rung: str) -> list[str]:
    """The tags of a rung, oldest first: their names are in that order."""
    return sorted(tag for tag in facts.tags if tag.startswith(f"{rung}-"))


def _newest(facts: Facts, rung: str) -> int | None:
    """The time of the newest tag of a rung."""
    own = _own(facts, rung)
    found: Tag | None = facts.tags[own[-1]] if own else None
    return None if found is None else found.time
