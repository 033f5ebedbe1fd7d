"""Merging and collecting one shard on request; maintenance does both anyway."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from persist.client.shard_base import ShardBase
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


class MaintenanceMethods(ShardBase):
    """The methods of `Shard` that do at once what maintenance does anyway."""

    def optimize(self) -> Optimized:
        """Run the merges that are worth it now; maintenance runs them automatically on an idle shard. Scope `maintain`.

        No row is changed, and no reader or writer is affected. It takes as long as the merges do. Repeating it is safe.

        Returns: how many merges there were, and how much the shard holds before and after.
        Raises: UnknownShard, Unavailable, and what every call may. Completed merges stay.
        """
        pieces = _pieces(self._transport, self.name, OPTIMIZE)
        merges = sum(piece["merges"] for piece in pieces)
        before, after = Size(**pieces[0]["before"]), Size(**pieces[-1]["after"])
        return Optimized(merges, before, after, pieces[-1]["complete"])

    def vacuum(self) -> Vacuumed:
        """Delete now what can no longer be read; maintenance does that automatically. Scope `maintain`.

        It deletes nothing that history keeps (`configure`, `forget`), nor what a reader holds. Repeating it is safe.

        Returns: how many blobs and entries of the log were deleted.
        Raises: UnknownShard, Unavailable, and what every call may. Completed deletions stay.
        """
        pieces = _pieces(self._transport, self.name, VACUUM)
        blobs, entries = (sum(piece[what] for piece in pieces) for what in ("blobs", "entries"))
        return Vacuumed(blobs, entries, pieces[-1]["complete"])


def _pieces(transport: OneShard, name: str, verb: str) -> list[dict[str, Any]]:
    pieces = [transport.maintain(name, verb)]
    while pieces[-1]["more"] and len(pieces) < PIECES_MAX:
        pieces.append(transport.maintain(name, verb))
    return pieces
