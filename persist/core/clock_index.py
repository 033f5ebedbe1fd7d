"""The mapping from wall clocks to times: marks map instants to uppers, and a seal says up to where they are final.

A mark `(at_ms, upper)` holds from `at_ms` up to the next mark: it is the upper of the last State that was stamped
before `at_ms`. Marks are on a grid of instants, at most one for each point. The answer for a sealed instant never
changes: no later mark is at or before it. Only a checked clock seals (one on which the committer and the blob store
agree). Instants are milliseconds since 1970, UTC. Pure.
"""

from __future__ import annotations

from persist.core.attribute import MARK_PREFIX, AttributeKey
from persist.core.frontier import MINIMUM, Antichain
from persist.core.record import Record, replace

INSTANT_MAX = 2**48 - 1  # that the key of a mark can hold
MARKS_PAGE_MAX = 4_096  # in one answer
REPAIRS_MAX = 16  # older ones are joined
GRIDS_MAX = 16  # earlier grids; older instants use the oldest one


class Mark(Record, frozen=True):
    """The upper at instants from `at_ms` up to the next mark."""

    at_ms: int
    upper: Antichain


class Seal(Record, frozen=True):
    """Up to where instants are final. `last` is the newest mark.

    `sealed_ms` is the checked stamp of the first commit beyond the last grid point that was sealed. Stamps between that
    and the next point seal nothing, and leave the seal unchanged.

    `passed` is set once a commit with an unchecked clock has followed that stamp: the upper before the first of them.
    `repairs` are intervals `(lowered_to, lowered_from]` of instants that a wrong clock had sealed. A repair reopened
    them, so that only those at a mark have an answer.
    `grids` are the earlier grids, ascending, as (until_ms, every_ms): instants before `until_ms`, the point at which
    the next grid began, use points that are `every_ms` apart.
    """

    sealed_ms: int = 0
    last: Mark | None = None
    repairs: tuple[tuple[int, int], ...] = ()
    passed: Antichain | None = None
    grids: tuple[tuple[int, int], ...] = ()

    @property
    def floor_ms(self) -> int:
        """The instant at or before which there will be no further mark."""
        if not self.repairs:
            return self.sealed_ms
        return max(self.sealed_ms, *(lowered_from for _, lowered_from in self.repairs))

    def known_ms(self, every_ms: int) -> int:
        """The last instant with a final answer. The next mark is beyond it."""
        if self.sealed_ms < self.floor_ms:
            return self.sealed_ms
        return self.next_ms(every_ms) - 1

    def next_ms(self, every_ms: int) -> int:
        """The earliest instant of the next mark: the first point after the seal. `every_ms` is the current grid.

        An earlier grid stays in effect up to this point, since instants before it may have been answered already.
        """
        floor_ms = self.floor_ms
        return point_after(floor_ms, next((every for until, every in self.grids if floor_ms < until), every_ms))

    def point_ms(self, at_ms: int, every_ms: int) -> int:
        """The grid point whose answer this instant has. `every_ms` is the current grid."""
        began = max((until for until, _ in self.grids if until <= at_ms), default=0)
        every_ms = next((every for until, every in self.grids if at_ms < until), every_ms)
        return max(began, point_at(at_ms, every_ms))

    def repair_of(self, at_ms: int) -> tuple[int, int] | None:
        return next((repair for repair in self.repairs if repair[0] < at_ms <= repair[1]), None)


UNSEALED = Seal()  # of a shard without marks: instants before its first stamp have no answer
NEWBORN = Seal(last=Mark(0, MINIMUM))  # of a new shard: before its creation nothing was written


def point_after(at_ms: int, every_ms: int) -> int:
    """The first point of the grid beyond this instant."""
    return (at_ms // every_ms + 1) * every_ms


def point_at(at_ms: int, every_ms: int) -> int:
    """The last point of the grid at or before this instant."""
    return at_ms // every_ms * every_ms


def sealed_by(seal: Seal, upper: Antichain, checked_ms: int, every_ms: int) -> Seal:
    """The seal after a commit that was stamped by a checked clock. `upper` is that of the State before the commit.

    The first commit beyond a grid point seals that point, whatever it commits. So the last rows before a pause become
    visible as soon as anything is committed after it. Other commits between two points return the same seal.
    """
    if not seal.sealed_ms and seal.last is None:
        return replace(seal, sealed_ms=checked_ms)
    point = seal.next_ms(every_ms)
    settles_nothing = checked_ms < point and seal.sealed_ms == seal.floor_ms
    if settles_nothing or checked_ms <= seal.sealed_ms:  # rows of unchecked commits had arrived by then
        return seal if seal.passed is None else replace(seal, passed=None)
    shown, last = upper if seal.passed is None else seal.passed, seal.last
    if checked_ms >= point and (last is None or last.upper != shown):
        last = Mark(point, shown)
    return replace(seal, sealed_ms=checked_ms, last=last, passed=None)


def passed_by(seal: Seal, upper: Antichain) -> Seal:
    """The seal after a commit whose clock was not checked. `upper` is that of the State before the commit.

    The arrival time of its rows is unknown, so they are visible only from the next checked stamp on.
    """
    return seal if seal == UNSEALED or seal.passed is not None else replace(seal, passed=upper)


def lowered(seal: Seal, to_ms: int, every_ms: int) -> Seal:
    """The seal after the repair of a wrong clock: instants beyond `to_ms` are open again. Marks are kept."""
    repairs = (*seal.repairs, (to_ms, seal.known_ms(every_ms)))
    if len(repairs) > REPAIRS_MAX:
        first, second = repairs[:2]
        repairs = ((min(first[0], second[0]), max(first[1], second[1])), *repairs[2:])
    return replace(seal, sealed_ms=to_ms, repairs=repairs)


def with_grid(seal: Seal, every_ms: int) -> Seal:
    """The seal before the grid changes from `every_ms`, which stays in effect up to its next point.

    Without a seal no instant was answered yet. Of several changes before that point only the first is remembered.
    """
    until_ms = seal.next_ms(every_ms)
    if not seal.sealed_ms or (seal.grids and seal.grids[-1][0] == until_ms):
        return seal
    return replace(seal, grids=(*seal.grids, (until_ms, every_ms))[-GRIDS_MAX:])


def mark_key(at_ms: int) -> AttributeKey:
    """The key of a mark in the attribute index. Later marks sort first, so the newest mark at or before an instant is
    the first entry at or after that instant's key.
    """
    return AttributeKey(f"{MARK_PREFIX}{INSTANT_MAX - at_ms:012x}")


def mark_value(upper: Antichain) -> int:
    return -1 if upper.element is None else upper.element


def mark_of(key: AttributeKey, value: int) -> Mark:
    return Mark(INSTANT_MAX - int(key[len(MARK_PREFIX) :], 16), Antichain(None if value < 0 else value))
