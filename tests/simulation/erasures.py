"""The naive truth of erasures: which rows one takes away, and that no byte shows them once there is a receipt.

Rows of *markers* have keys that nothing else holds. So a search for these keys in all bytes of both stores needs no
knowledge of States and parts. Parts are written as their bytes are in runs with erasures (`plain_parts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq

from persist.core.erasure import Proof
from persist.core.frontier import Antichain
from persist.core.state import State
from tests.simulation.oracle_errors import expect

MARKER = "erase-me-"  # every marker begins with it
HEX = 32  # and ends with so many digits; half of them are searched for, as statistics may be cut short
PHASES = ("pending", "retracted", "rewritten", "erased")
Rows = dict[tuple[str, Any], int]


@dataclass(frozen=True)
class Meant:
    """The rows that an erasure takes away: those of one of these keys, and of this value alone (None: of every one)."""

    keys: tuple[str, ...] = ()
    value: int | None = None

    def of(self, contents: Rows) -> Rows:
        """Those of the rows that are meant."""

        def value_of(value: Any) -> Any:
            return value[0] if isinstance(value, tuple) else value

        return {
            (key, value): count
            for (key, value), count in contents.items()
            if key in self.keys and self.value in (None, value_of(value))
        }


def plain_parts() -> AbstractContextManager[Any]:
    """Parts are written as their bytes are."""
    real = pq.ParquetWriter

    def plain(*given: Any, **named: Any) -> Any:
        return real(*given, **{**named, "compression": "none", "compression_level": None, "use_dictionary": False})

    return patch.object(pq, "ParquetWriter", plain)


@dataclass
class ErasureTruth:
    """What is true of the erasures of one life of a shard. `scans`: when the scan of a receipt began, by true time."""

    scans: dict[tuple[int, ...], int] = field(default_factory=dict)

    def scanned(self, found: tuple[int, ...], began_ms: int) -> None:
        """Two scans that found the same may be the same to a receipt, so the earlier one counts."""
        self.scans[found] = min(began_ms, self.scans.get(found, began_ms))

    def began(self, old: State, new: State) -> int | None:
        """The time of the last erasure that began with this commit. The shard itself holds nothing before it."""
        fresh = [erasure.at for key, erasure in new.erasures.items() if key not in old.erasures]
        begins = new.settings.keeps_history and not old.settings.keeps_history  # in the same commit: from since on
        for at in fresh:
            holds = begins or new.history_hold.is_empty or Antichain(at) <= new.history_hold
            expect(holds, "erased", f"{new.name} holds {new.history_hold}, and erased at {at}")
        return max(fresh, default=None)

    def receipts(self, old: State, new: State) -> list[tuple[int, Proof]]:
        """The times and proofs of those that ended with this commit. None leaves the State before it has ended."""
        left = [key for key, erasure in old.erasures.items() if key not in new.erasures and erasure.proof is None]
        expect(not left, "erased", f"{new.name} has forgotten the erasures {left}, which have not ended")
        for key, erasure in old.erasures.items():
            later = new.erasures.get(key, erasure)
            ascends = PHASES.index(erasure.phase) <= PHASES.index(later.phase)
            expect(ascends, "erased", f"erasure {key} was {erasure.phase}, and is {later.phase}")
        proved = {key for key, erasure in new.erasures.items() if erasure.proof is not None}
        proved -= {key for key, erasure in old.erasures.items() if erasure.proof is not None}
        found = [(erasure.at, erasure.proof) for key, erasure in new.erasures.items() if key in proved]
        for at, _ in found:
            kept = new.since < Antichain(at) and not new.since.is_empty
            expect(not kept, "erased", f"a receipt says that what was there before {at} is gone; since is {new.since}")
        return [(at, proof) for at, proof in found if proof is not None]

    def check_gone(
        self,
        at: int,
        proof: Proof,
        updates: Iterable[tuple[str, Any, int, int]],
        stored: Mapping[str, bytes],
        stragglers: Callable[[int], set[str]],
    ) -> None:
        """With a receipt no byte shows a marker whose rows were gone at `at`, unless it was written again since.

        A blob that was on its way when the scan began, and that nothing names, is a straggler: the sweep takes it.
        """
        seen = (proof.at_ms, proof.horizon, proof.entries, proof.blobs, proof.size)
        expect(seen in self.scans, "erased", f"the receipt of the erasure at {at} tells of a scan that nobody made")
        late = stragglers(self.scans[seen])
        left = shown(gone_markers(updates, at), stored, late)
        expect(not left, "erased", f"a receipt for the erasure at {at}, and still: {left[:4]}")


def gone_markers(updates: Iterable[tuple[str, Any, int, int]], at: int) -> set[str]:
    """The markers of which no row is there as of `at`, and none was written since.

    A shorter key is none: it begins as a marker does that may be there.
    """
    left: dict[tuple[str, Any], int] = {}
    again: set[str] = set()
    for key, value, time, diff in updates:
        if not key.startswith(MARKER) or len(key) != len(MARKER) + HEX:
            continue
        if time > at:
            again.add(key)
        left[key, value] = left.get((key, value), 0) + diff
    return {key for key, _ in left} - {key for (key, _), count in left.items() if count} - again


def shown(markers: Iterable[str], stored: Mapping[str, bytes], but: Set[str] = frozenset()) -> list[str]:
    """Which of the markers lies where, in the names of what is stored; `but` are places that do not count."""
    needles = {marker: marker[: len(MARKER) + HEX // 2].encode() for marker in markers}
    return sorted(
        f"{marker} in {place}"
        for place, data in stored.items()
        if place not in but
        for marker, needle in needles.items()
        if needle in data
    )
