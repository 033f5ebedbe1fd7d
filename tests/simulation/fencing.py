"""Fencing: the opaque tokens of a critical reader form one chain, and nobody who was fenced moves it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.simulation.oracle import expect

FIRST = ""  # the token of a critical reader that nobody has moved yet
NEVER = 1 << 62  # when an operation returned whose caller died


@dataclass
class FenceOp:
    """A downgrade that moved the token from `expected` to `new` if `answer` is "ok"; or it saw the token `seen`."""

    cursor: str
    who: str
    invoked: int
    returned: int = NEVER
    expected: str = ""
    new: str = ""
    answer: str | None = None
    seen: str | None = None


def check_fenced(ops: Iterable[FenceOp]) -> None:
    """Raises Violation unless one order of the operations fits all answers and real time."""
    by_cursor: dict[str, list[FenceOp]] = {}
    for op in ops:
        by_cursor.setdefault(op.cursor, []).append(op)
    for cursor, of_cursor in by_cursor.items():
        landed = _landed(of_cursor)
        for op in of_cursor:
            refused = op.answer == "refused" and op.new
            expect(not (refused and op in landed), "fenced", f"{op.who} was refused, but moved {cursor} to {op.new}")
        _check_real_time(cursor, of_cursor, landed, _positions(cursor, landed))


def _landed(ops: Sequence[FenceOp]) -> list[FenceOp]:
    """Those that were acknowledged, and those whose token somebody has met."""
    met = {op.seen for op in ops if op.seen is not None} | {op.expected for op in ops if op.answer == "ok"}
    while True:
        found = [op for op in ops if op.new and (op.answer == "ok" or op.new in met)]
        more = met | {op.expected for op in found}
        if more == met:
            return found
        met = more


def _positions(cursor: str, landed: Sequence[FenceOp]) -> dict[str, int]:
    """Where each token stands in the chain."""
    following: dict[str, FenceOp] = {}
    for op in landed:
        other = following.setdefault(op.expected, op)
        expect(other is op, "fenced", f"{other.who} and {op.who} both moved {cursor} on from {op.expected!r}")
    positions = {FIRST: 0}
    token = FIRST
    while token in following:
        token = following[token].new
        positions[token] = len(positions)
    lost = [op.expected for op in landed if op.expected not in positions]
    expect(not lost, "fenced", f"{cursor} was moved on from {lost}, which it never was")
    return positions


def _check_real_time(cursor: str, ops: Sequence[FenceOp], landed: Sequence[FenceOp], positions: dict[str, int]) -> None:
    """What returned before another began stands before it in the chain."""
    points = sorted(_points(ops, landed, positions))
    by_return = sorted(points, key=lambda point: point[1])
    highest = at = 0
    for invoked, _, low, _, who in points:
        while at < len(by_return) and by_return[at][1] < invoked:
            highest = max(highest, by_return[at][3])
            at += 1
        expect(highest <= low, "fenced", f"{who} met the token {low} of {cursor} after the token {highest} was known")


def _points(
    ops: Sequence[FenceOp], landed: Sequence[FenceOp], positions: dict[str, int]
) -> Iterator[tuple[int, int, int, int, str]]:
    """When it began and returned, and between which places of the chain it went."""
    for op in ops:
        if op.seen is not None:
            expect(op.seen in positions, "fenced", f"{op.who} met the token {op.seen!r}, which nobody made")
            yield op.invoked, op.returned, positions[op.seen], positions[op.seen], op.who
        elif op in landed:
            returned = op.returned if op.answer == "ok" else NEVER
            yield op.invoked, returned, positions[op.expected], positions[op.new], op.who


__all__ = ["FenceOp", "check_fenced"]
