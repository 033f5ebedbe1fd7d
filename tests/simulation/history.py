"""What clients were told, in the order of real time, and checks that need nothing else.

They know neither States nor stores: any client's record of a run against any backend can be checked with them, and
the crash tests do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from persist.core.shard_settings import ShardSettings
from tests.simulation.fencing import FenceOp, check_fenced
from tests.simulation.oracle import REWRITES, Row, Write, expect


@dataclass(frozen=True)
class Read:
    shard: str
    as_of: int
    who: str
    rows: frozenset[tuple[Row, int]]


Configured = tuple[str, str, ShardSettings]  # shard, who, what was acknowledged
UpperRead = tuple[str, str, int, int, int | None]  # shard, who, invoked, returned, upper (or since)


@dataclass
class History:
    writes: list[Write] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    uppers: list[UpperRead] = field(default_factory=list)
    sinces: list[UpperRead] = field(default_factory=list)
    fences: list[FenceOp] = field(default_factory=list)
    settings: list[Configured] = field(default_factory=list)
    drops: dict[str, int] = field(default_factory=dict)  # by shard, when the first was acknowledged

    def check(self, firsts: Mapping[str, int] | None = None) -> None:
        """Raises Violation. `firsts`: the uppers with which clones began, by life."""
        for shard in sorted({write.shard for write in self.writes}):
            writes = [write for write in self.writes if write.shard == shard]
            check_linearisable(writes, [read for read in self.uppers if read[0] == shard], (firsts or {}).get(shard, 0))
        check_definite(self.reads)
        check_ascending(self.sinces)
        check_fenced(self.fences)
        check_dropped(self.writes, self.drops)
        check_configured(self.settings)


def check_configured(settings: Iterable[Configured]) -> None:
    """Of each version of a shard's settings there is one, whoever made it."""
    first: dict[tuple[str, int], Configured] = {}
    for found in settings:
        shard, who, now = found
        other = first.setdefault((shard, now.version), found)
        expect(other[2] == now, "settings", f"{shard}: {other[1]} was told {other[2]}, and {who} {now}")


def check_ascending(sinces: Iterable[UpperRead]) -> None:
    """Nobody sees a since that is behind one which was seen before he began to look."""
    found = list(sinces)
    by_return = sorted(found, key=lambda read: read[3])
    highest: dict[str, float] = {}
    at = 0
    for shard, who, invoked, _, since in sorted(found, key=lambda read: read[2]):
        while at < len(by_return) and by_return[at][3] < invoked:
            other, _, _, _, seen = by_return[at]
            highest[other] = max(highest.get(other, 0), math.inf if seen is None else seen)
            at += 1
        value = math.inf if since is None else since
        expect(
            highest.get(shard, 0) <= value,
            "monotone",
            f"{who} sees since {since} of {shard} after {highest.get(shard)}",
        )


def check_definite(reads: Iterable[Read]) -> None:
    """All reads of one `(shard, as_of)` are equal, whoever made them."""
    first: dict[tuple[str, int], Read] = {}
    for read in reads:
        other = first.setdefault((read.shard, read.as_of), read)
        expect(
            other.rows == read.rows,
            "definite",
            f"{read.shard} as of {read.as_of}: {other.who} and {read.who} differ in "
            f"{sorted(other.rows ^ read.rows, key=repr)[:4]}",
        )


def check_dropped(writes: Iterable[Write], drops: Mapping[str, int]) -> None:
    """Nothing is written to a shard whose drop was acknowledged before."""
    for write in writes:
        late = write.shard in drops and write.invoked > drops[write.shard] and write.answer == "ok"
        expect(not late, "dropped", f"#{write.number} of {write.who} was acknowledged after {write.shard} was dropped")


@dataclass(frozen=True)
class _Point:
    """An operation on the register `upper`: at one moment in `[invoked, returned]` it went from `low` to `high`."""

    invoked: int
    returned: int
    low: int
    high: int
    what: str


def check_linearisable(writes: list[Write], uppers: Iterable[UpperRead], first: int = 0) -> None:
    """The acknowledged appends, mismatches and reads of the upper fit one register that only compare-and-set moves.

    Every value is taken once and values ascend, so one order is given by the values; what is left to check is that
    it respects real time, that appended intervals do not overlap, and that every value seen was somebody's.
    An operation of unknown outcome may fill a gap and need not.
    """
    acknowledged = [w for w in writes if w.answer == "ok" and w.told is not None]
    points = [_point(w, w.told) for w in acknowledged]
    points += [
        _seen(w.invoked, w.returned, w.actual, f"#{w.number}'s mismatch") for w in writes if w.actual is not None
    ]
    points += [_seen(invoked, back, upper, f"{who}'s read") for _, who, invoked, back, upper in uppers]
    _check_disjoint([w for w in acknowledged if w.kind in ("compare_and_append", *REWRITES)], acknowledged)
    _check_real_time([p for p in points if p is not None])
    _check_values(writes, acknowledged, [p for p in points if p is not None], first)


def _point(write: Write, told: tuple[int | None, int | None] | None) -> _Point | None:
    assert told is not None
    low, high = told
    if low is None or high is None:
        return None
    what = f"#{write.number} {write.kind}"
    if write.kind == "append" or (write.kind == "advance" and low == high):
        # It says only that the upper is beyond now: the beginning may have been another's.
        return _Point(write.invoked, write.returned, -1, high, what)
    return _Point(write.invoked, write.returned, low, high, what)


def _seen(invoked: int, returned: int, upper: int | None, what: str) -> _Point | None:
    return None if upper is None else _Point(invoked, returned, upper, upper, what)


def _check_disjoint(appends: list[Write], acknowledged: list[Write]) -> None:
    spans: list[tuple[int, int, int]] = []
    shared: set[tuple[int, int]] = set()
    for write in acknowledged:
        assert write.told is not None
        low, high = write.told
        if low is None or high is None or low == high or write.kind == "append":
            continue
        if write.kind not in (
            "compare_and_append",
            *REWRITES,
        ):  # inserts that were committed together share one interval
            if (low, high) in shared:
                continue
            shared.add((low, high))
        spans.append((low, high, write.number))
    spans.sort()
    for (low, high, number), (low2, high2, number2) in pairwise(spans):
        expect(
            high <= low2,
            "linearisable",
            f"#{number} was told that it appended [{low}, {high}), #{number2} that it appended [{low2}, {high2})",
        )


def _check_real_time(points: list[_Point]) -> None:
    """What returned before another began cannot have seen more than that other did."""
    by_return = sorted(points, key=lambda p: p.returned)
    highest: _Point | None = None
    at = 0
    for point in sorted(points, key=lambda p: p.invoked):
        while at < len(by_return) and by_return[at].returned < point.invoked:
            if highest is None or by_return[at].high > highest.high:
                highest = by_return[at]
            at += 1
        if highest is None:
            continue
        seen = point.high if point.low < 0 else point.low
        if point.low < 0:
            continue  # "the upper is beyond" holds of every later moment
        expect(
            highest.high <= seen,
            "linearisable",
            f"{highest.what} had seen the upper {highest.high} before {point.what} began and saw {seen}",
        )


def _check_values(writes: list[Write], acknowledged: list[Write], points: list[_Point], first: int) -> None:
    """Every value seen is a value that some write made, or may have made."""
    if any(w.kind in ("insert", "append", *REWRITES) and w.answer in (None, "unknown") for w in writes):
        return  # an insert of unknown outcome may have made any value
    made = {first} | {w.told[1] for w in acknowledged if w.told is not None}
    made |= {w.upper for w in writes if w.answer in (None, "unknown")}
    for point in points:
        for value in (point.low, point.high):
            expect(value < 0 or value in made, "linearisable", f"{point.what} saw the upper {value}, which nobody made")


__all__ = ["History", "Read", "UpperRead", "check_ascending", "check_definite", "check_linearisable"]
