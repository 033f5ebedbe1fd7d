"""Merging and collecting one shard now, because somebody asks for it. Maintenance does both anyway."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from persist.client.transport import OneShard
from persist.commit.location import Location

OPTIMIZE, VACUUM = VERBS = ("optimize", "vacuum")
PIECES_MAX: Final = 1_000  # of one call
Maintain = Callable[[Location, str, str], dict[str, Any]]
"""Does one piece of a verb on a shard of a location, as JSON; `more` says whether to ask again. It is injected, since
what merges and collects is above. Raises InvalidUsage, UnknownShard, Unavailable."""


@dataclass(frozen=True)
class Size:
    """How much a shard holds, with all history: `updates` are stored rows, `bytes` those of its parts."""

    batches: int
    parts: int
    updates: int
    bytes: int


@dataclass(frozen=True)
class Optimized:
    """What `Shard.optimize` did. `complete`: no merge is due any more; False: other workers are at the rest."""

    merges: int
    before: Size
    after: Size
    complete: bool


@dataclass(frozen=True)
class Vacuumed:
    """What `Shard.vacuum` deleted: blobs, and entries of the log. `complete`: nothing more can go for now."""

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
    found = [transport.maintain(name, verb)]
    while found[-1]["more"] and len(found) < PIECES_MAX:
        found.append(transport.maintain(name, verb))
    return found
