"""What a shard was truncated to: before which time it lets no row come that was to go. Pure."""

from __future__ import annotations

from persist.core.errors import InvalidUsage
from persist.core.record import Record

TRUNCATIONS_MAX = 1_000  # of a shard, that something readable still tells apart


class Truncation(Record, frozen=True):
    """At the time `at` the rows were taken away that were there before the time `before` and still were. 0: none were.

    It makes a truncation to the same time, or to an earlier one, change nothing when it comes again. `removed` rows
    went by it and by those before it. `wrote`: there are retractions of it at the time `at`; otherwise nothing was to
    be taken away, or a drop did it. What goes was worked out where the upper was `seen`; since then rows were only
    added (0: a drop).
    """

    before: int = 0
    at: int = 0
    removed: int = 0
    wrote: bool = False
    seen: int = 0


NOT_TRUNCATED = Truncation()
Truncations = tuple[Truncation, ...]  # `before` and `at` ascend


def owned_by_appenders(name: str, upper: object) -> InvalidUsage:
    """Why a shard that is fed by `append` is not changed by verbs that read it first."""
    return InvalidUsage(
        f"shard {name!r} is fed by append, whose writer owns the times: this would take the time {upper}, and what is "
        "appended there would be refused; let the writer append the changes, or stop it and insert from then on"
    )


def with_truncation(known: Truncations, new: Truncation, earliest: int) -> Truncations:
    """With one more. Of those that no time before is readable, which begins at `earliest`, only the last one stays."""
    passed = [old for old in known if old.at <= earliest]
    return (*passed[-1:], *(old for old in known if old.at > earliest), new)


def until(known: Truncations, as_of: int) -> Truncations:
    """Those that a restore to a time leaves: what came after it is undone."""
    return tuple(old for old in known if old.at <= as_of)
