"""Wall clock and times: marks say which upper belongs to which instant, and a seal says how far they are settled.

A mark `(at_ms, upper)` holds from `at_ms` up to the next mark: it is the upper of the last State that was stamped
before `at_ms`. Marks lie on a grid of instants, so there is at most one for each point. An instant that is sealed is
answered the same for ever: no later mark lies at or before it. Only a checked clock seals (one on which the committer
and the blob store agree). Instants are milliseconds since 1970, UTC. Pure.
"""

from __future__ import annotations

from persist.core.attribute import MARK_PREFIX, AttributeKey
from persist.core.frontier import MINIMUM, Antichain
from persist.core.record import Record, replace

INSTANT_MAX = 2**48 - 1  # that the key of a mark can hold
MARKS_PAGE_MAX = 4_096  # that one answer has
REPAIRS_MAX = 16  # older ones are joined
GRIDS_MAX = 16  # of before; instants of an older one go by the oldest that is known


class Mark(Record, frozen=True):
    """From the instant `at_ms` on, up to the next mark, the answer is `upper`."""

    at_ms: int
    upper: Antichain


class Seal(Record, frozen=True):
    """How far instants are settled. `last` is the newest mark.

    `sealed_ms` is the checked stamp of the first commit beyond the last point of the grid that was settled. Stamps
    between that and the next point settle nothing, and leave the seal as it is.

    `passed` is there once a commit with an unchecked clock has come since that stamp: the upper before the first such.
    `repairs` are intervals `(lowered_to, lowered_from]` of instants that a spoilt clock had sealed. A repair opened
    them again, so that they have no answer but where a mark lies.
    `grids` are those of before the current one, ascending, as (until_ms, every_ms): what lies before `until_ms`, which
    is the point where the next grid began, goes by points that are `every_ms` apart.
    """

    sealed_ms: int = 0
    last: Mark | None = None
    repairs: tuple[tuple[int, int], ...] = ()
    passed: Antichain | None = None
    grids: tuple[tuple[int, int], ...] = ()

    @property
    def floor_ms(self) -> int:
        """No mark that is still to come lies at or before this instant."""
        if not self.repairs:
            return self.sealed_ms
        return max(self.sealed_ms, *(lowered_from for _, lowered_from in self.repairs))

    def known_ms(self, every_ms: int) -> int:
        """The last instant that has its answer already. The next mark lies beyond it."""
        if self.sealed_ms < self.floor_ms:
            return self.sealed_ms
        return self.next_ms(every_ms) - 1

    def next_ms(self, every_ms: int) -> int:
        """Where the next mark lies at the earliest: the first point that is still to come. `every_ms` is the current

        grid. One that was changed goes on up to there, since who asked was told already what lies before it.
        """
        floor_ms = self.floor_ms
        return point_after(floor_ms, next((every for until, every in self.grids if floor_ms < until), every_ms))

    def point_ms(self, at_ms: int, every_ms: int) -> int:
        """The point by which this instant is answered, of the grid it belongs to. `every_ms` is the current one."""
        began = max((until for until, _ in self.grids if until <= at_ms), default=0)
        every_ms = next((every for until, every in self.grids if at_ms < until), every_ms)
        return max(began, point_at(at_ms, every_ms))

    def repair_of(self, at_ms: int) -> tuple[int, int] | None:
        """The repair that opened this instant again, if one did."""
        return next((found for found in self.repairs if found[0] < at_ms <= found[1]), None)


UNSEALED = Seal()  # of a shard that is older than marks: what was before its first stamp is not known
NEWBORN = Seal(last=Mark(0, MINIMUM))  # of a new shard: before it was there, nothing was written


def point_after(at_ms: int, every_ms: int) -> int:
    """The first point of the grid beyond this instant."""
    return (at_ms // every_ms + 1) * every_ms


def point_at(at_ms: int, every_ms: int) -> int:
    """The last point of the grid at or before this instant."""
    return at_ms // every_ms * every_ms


def sealed_by(seal: Seal, upper: Antichain, checked_ms: int, every_ms: int) -> Seal:
    """The seal after a commit that was stamped by a checked clock. `upper` is that of the State before the commit.

    The first commit beyond a point of the grid settles that point, whatever it commits. So the last rows before a pause
    are told as soon as anything is committed after it. The others between two points change nothing: the same seal.
    """
    if not seal.sealed_ms and seal.last is None:
        return replace(seal, sealed_ms=checked_ms)
    point = seal.next_ms(every_ms)
    settles_nothing = checked_ms < point and seal.sealed_ms == seal.floor_ms
    if settles_nothing or checked_ms <= seal.sealed_ms:  # what unchecked commits brought had come by then
        return seal if seal.passed is None else replace(seal, passed=None)
    shown, last = upper if seal.passed is None else seal.passed, seal.last
    if checked_ms >= point and (last is None or last.upper != shown):
        last = Mark(point, shown)
    return replace(seal, sealed_ms=checked_ms, last=last, passed=None)


def passed_by(seal: Seal, upper: Antichain) -> Seal:
    """The seal after a commit whose clock was not checked. `upper` is that of the State before the commit.

    Nobody knows when its rows came. So they show from the next checked stamp on, and not before.
    """
    return seal if seal == UNSEALED or seal.passed is not None else replace(seal, passed=upper)


def lowered(seal: Seal, to_ms: int, every_ms: int) -> Seal:
    """The seal after the repair of a spoilt clock: what lies beyond `to_ms` is open again. Marks stay."""
    repairs = (*seal.repairs, (to_ms, seal.known_ms(every_ms)))
    if len(repairs) > REPAIRS_MAX:
        first, second = repairs[:2]
        repairs = ((min(first[0], second[0]), max(first[1], second[1])), *repairs[2:])
    return replace(seal, sealed_ms=to_ms, repairs=repairs)


def with_grid(seal: Seal, every_ms: int) -> Seal:
    """The seal before the grid changes from `every_ms`: it holds up to its next point, as was told.

    Where nothing is sealed yet nothing was told. Of several changes before that point only the first is remembered.
    """
    until_ms = seal.next_ms(every_ms)
    if not seal.sealed_ms or (seal.grids and seal.grids[-1][0] == until_ms):
        return seal
    return replace(seal, grids=(*seal.grids, (until_ms, every_ms))[-GRIDS_MAX:])


# --- in the index of attributes


def mark_key(at_ms: int) -> AttributeKey:
    """Where a mark lies in the index of attributes. Later ones come first: so the newest one at or before an instant

    is the first entry from that instant's key on.
    """
    return AttributeKey(f"{MARK_PREFIX}{INSTANT_MAX - at_ms:012x}")


def mark_value(upper: Antichain) -> int:
    return -1 if upper.element is None else upper.element


def mark_of(key: AttributeKey, value: int) -> Mark:
    """The mark that an entry of the index is."""
    return Mark(INSTANT_MAX - int(key[len(MARK_PREFIX) :], 16), Antichain(None if value < 0 else value))
