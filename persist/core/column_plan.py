"""When a row policy has to look for rows by its column, and what its consumers have passed. Pure.

A look reads what may have become of age. So it is worth one only where something was written since the last one, where
one of the values that it left can have come of age, or where consumers have passed what waited for them.
"""

from __future__ import annotations

from persist.core.retention_plan import Facts, behind, blocked_by_column

NEVER_MS = 253_370_764_800_000  # the year 9999 begins


def passed(facts: Facts) -> int | None:
    """The time that all consumers have passed: each has read what came before it. None: there are no consumers.

    A consumer that is not registered has passed nothing.
    """
    policy = facts.policy
    if policy is None or not policy.consumers:
        return None
    upper = facts.upper.element or 0
    holds = [facts.holds.get(name) for name in policy.consumers]
    return min(0 if hold is None else upper if hold.element is None else min(hold.element, upper) for hold in holds)


def has_to_look(facts: Facts, now_ms: int, *, by_hand: bool = False) -> bool:
    """Whether rows are to be looked for by the column now. `by_hand`: also where it did so a moment ago."""
    at_ms = next_look_ms(facts, now_ms, by_hand=by_hand)
    return at_ms is not None and at_ms <= now_ms


def next_look_ms(facts: Facts, now_ms: int, *, by_hand: bool = False) -> int | None:
    """The next instant at which to look, if nothing moves the shard; None: not before it moves."""
    policy, looked = facts.policy, facts.done.looked
    if policy is None or policy.column is None or not facts.upper.element or blocked_by_column(facts) is not None:
        return None
    if looked.version != facts.version:
        return now_ms
    earliest_ms = now_ms if by_hand else looked.at_ms + policy.cut_every_ms
    so_far = passed(facts)
    if facts.upper.element > looked.upper or (looked.held is not None and (so_far is None or so_far > looked.held)):
        return earliest_ms
    return None if looked.next_ms is None or looked.next_ms > NEVER_MS else max(earliest_ms, looked.next_ms)


def of_age_ms(*found: int) -> int | None:
    """The first of these instants; None: there is none, or it is so far away that nothing comes of age.

    Rows often have a far value for "valid for ever", such as 9999-12-31, or the greatest number.
    """
    first = min(found, default=None)
    return None if first is None or first > NEVER_MS else first


def waiting(facts: Facts) -> tuple[str, ...]:
    """For whom rows wait that are old enough by the column, in sentences."""
    policy, looked, so_far = facts.policy, facts.done.looked, passed(facts)
    if policy is None or looked.held is None or looked.version != facts.version or so_far is None:
        return ()
    told = []
    for name in behind(facts, looked.held + 1):
        hold = facts.holds.get(name)
        where = "has no critical reader yet" if hold is None else f"is at {hold}"
        told.append(f"consumer {name!r} {where}, and rows that are old enough by column {policy.column!r} wait for it")
    return tuple(told)
