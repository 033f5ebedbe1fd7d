"""Merging and collecting one shard on request; maintenance does both anyway."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from persist.client.transport import OneShard
from persist.commit.location import Location

OPTIMIZE, VACUUM = VERBS = ("optimize", "vacuum")
PIECES_MAX: Final = 1_000  # of one call
Maintain = Callable[[Location, str, str], dict[str, Any]]
"""Does one step of a verb on a shard of a location, as JSON; `more` says whether to call it again. It is injected,
since the packages that merge and collect depend on this one. Raises InvalidUsage, UnknownShard, Unavailable."""


@dataclass(frozen=True)
class Size:
    """How much a shard holds, with all history: `updates` are stored rows, `bytes` those of its parts."""

    batches: int
    parts: int
    updates: int
    bytes: int


@dataclass(frozen=True)
class Optimized:
    """The result of `Shard.optimize`. `complete`: no merge is due any more; False: other workers do the rest."""

    merges: int
    before: Size
    after: Size
    complete: bool


@dataclass(frozen=True)
class Vacuumed:
    """The result of `Shard.vacuum`: deleted blobs and log entries. `complete`: nothing else can be deleted now."""

    blobs: int
    entries: int
    complete: bool


def optimize(transport: OneShard, name: str) -> Optimized:
    """Raises what `Shard.optimize` says."""
    pieces = _pieces(transport, name, OPTIMIZE)
    merges = sum(piece["merges"] for piece in pieces)
    before, after = Size(**pieces[0]["before"]), Size(**pieces[-1]["after"])
    return Optimized(merges, before, after, pieces[-1]["complete"])


def vacuum(transport: OneShard, name: str) -> Vacuumed:
    """Raises what `Shard.vacuum` says."""
    pieces = _pieces(transport, name, VACUUM)
    blobs, entries = (sum(piece[what] for piece in pieces) for what in ("blobs", "entries"))
    return Vacuumed(blobs, entries, pieces[-1]["complete"])


def _pieces(transport: OneShard, name: str, verb: str) -> list[dict[str, Any]]:
    pieces = [transport.maintain(name, verb)]
    while pieces[-1]["more"] and len(pieces) < PIECES_MAX:
        pieces.append(transport.maintain(name, verb))
    return pieces
