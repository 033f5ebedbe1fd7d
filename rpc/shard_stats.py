"""What a State tells of a shard's structure, as JSON: its batches, merges under way, who holds since, recent commits.

It tells sizes, times and counts, and no row, key of a row, or id by which a lease or a merge could be taken from
somebody. Everything is bounded, whatever the State holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from heapq import nlargest
from itertools import islice
from typing import Any, NamedTuple

from persist.client.timestamps import instant_text
from persist.core.audit_log import MAINTENANCE, CommandEntry, Committed
from persist.core.batch import HollowBatch
from persist.core.frontier import Antichain
from persist.core.ids import SeqNo
from persist.core.state import Claim, State

BATCHES_MAX = 512  # that are told one by one: of a longer trace neighbours are told together
MERGES_MAX = 64
HOLDS_MAX = 100  # the earliest ones
NAMES_MAX = 3  # of those that hold the same time
RECENT_MAX = 64  # commands, the newest
ACTIVITY_MAX = 32  # commits that wrote, the newest
NAME_CHARS_MAX = 200


class ShardHold(NamedTuple):
    """What keeps `since` where it is, or one time readable. `lapses_in_s` None: it does not lapse."""

    kind: str
    since: Antichain
    name: str
    lapses_in_s: float | None = None


def trace_json(state: State, *, tells_names: bool) -> dict[str, Any]:
    """One version of a shard. `tells_names`: also what readers and cursors are called, which others have chosen."""
    batches, claims = state.trace.batches, _merges(state)
    claimed = frozenset(part for claim in claims for part in claim.inputs)
    return {
        "shard": state.name,
        **_size_json(state),
        "inline_bytes": state.trace.inline_bytes,
        "batch_count": len(batches),
        "batches": [_stretch_json(some, claimed) for some in _stretches(batches)],
        "merges": [_merge_json(state, claim) for claim in islice(claims, MERGES_MAX)],
        "holds": _holds_json(state, tells_names),
        "readers": len(state.leased_readers),
        "cursors": len(state.critical_readers),
        "writers": len(state.writers),
        "tags": len(state.tags),
        "history_ms": state.settings.history_ms,
        "recent": [_entry_json(*one) for one in _recent(state, RECENT_MAX)],
    }


def _size_json(state: State) -> dict[str, Any]:
    """Which version it is, its frontiers, and how much it holds."""
    return {
        "seqno": int(state.seqno),
        "at": instant_text(state.walltime_ms),
        "since": state.since.to_json(),
        "upper": state.upper.to_json(),
        "rows": state.trace.rows,
        "bytes": sum(batch.size for batch in state.trace.batches),
    }


def activity_json(state: State) -> dict[str, Any]:
    """A shard in a line: how large it is, and what was written last, `[milliseconds since 1970, rows, bytes]` each."""
    written = [one for one in _recent(state, ACTIVITY_MAX, maintenance=False) if one[2].rows]
    return {
        "name": state.name,
        **_size_json(state),
        "batches": len(state.trace.batches),
        "recent": [[at_ms, entry.rows, entry.size] for _, at_ms, entry in reversed(written)],
    }


def level_of(rows: int) -> int:
    """The tier of a batch: level k holds from 4^k to less than 4^(k+1) updates, since four of a kind are merged."""
    return max(rows.bit_length() - 1, 0) // 2


def _stretches(batches: Sequence[HollowBatch]) -> Iterator[Sequence[HollowBatch]]:
    """The batches, as many neighbours together as it takes to have few."""
    size = -(-len(batches) // BATCHES_MAX) or 1
    for first in range(0, len(batches), size):
        yield batches[first : first + size]


def _stretch_json(batches: Sequence[HollowBatch], claimed: frozenset[str]) -> dict[str, Any]:
    rows = sum(batch.rows for batch in batches)
    return {
        "lower": batches[0].desc.lower.to_json(),
        "upper": batches[-1].desc.upper.to_json(),
        "since": batches[-1].desc.since.to_json(),
        "batches": len(batches),
        "runs": sum(batch.run_count for batch in batches),
        "parts": sum(batch.part_count for batch in batches),
        "rows": rows,
        "bytes": sum(batch.size for batch in batches),
        "inline_bytes": sum(batch.inline_size for batch in batches),
        "level": level_of(rows),
        "merging": bool(claimed) and any(part.id in claimed for batch in batches for part in batch.parts()),
    }


def _merges(state: State) -> list[Claim]:
    return [claim for _, claim in sorted(state.claims.items())]


def _merge_json(state: State, claim: Claim) -> dict[str, Any]:
    """A merge under way. `lower` and `upper` None: its inputs are not in the trace any more."""
    inputs = frozenset(claim.inputs)
    place = state.trace.covering(inputs)
    found = [] if place is None else state.trace.batches[place[0] : place[0] + place[1]]
    return {
        "lower": found[0].desc.lower.to_json() if found else None,
        "upper": found[-1].desc.upper.to_json() if found else None,
        "batches": len(found),
        "inputs": len(inputs),
        "rows": sum(batch.rows for batch in found),
        "done_parts": len(claim.done),
        "done_rows": sum(part.rows for part in claim.done),
        "done_bytes": sum(part.size for part in claim.done),
    }


# --- who holds since


def _holds(state: State) -> Iterator[ShardHold]:
    if not state.history_hold.is_empty:
        yield ShardHold("history", state.history_hold, "")
    for cursor in state.critical_readers.values():
        yield ShardHold("cursor", cursor.since, cursor.purpose)
    for reader in state.leased_readers.values():
        if not reader.since.is_empty:
            left_s = (reader.lapses_ms - state.lease_now_ms) / 1000
            yield ShardHold("point" if reader.point else "reader", reader.since, reader.purpose, left_s)
    for name, tag in state.tags.items():
        yield ShardHold("tag", Antichain(tag.time), name)


def _holds_json(state: State, tells_names: bool) -> list[dict[str, Any]]:
    """Those that hold the same time in the same way are told together, the earliest times first."""
    found: dict[tuple[str, Antichain], list[ShardHold]] = defaultdict(list)
    for hold in _holds(state):
        found[hold.kind, hold.since].append(hold)
    ordered = sorted(found.items(), key=lambda item: (item[0][1].is_empty, item[0][1].element or 0, item[0][0]))
    return [_hold_json(kind, since, holds, tells_names) for (kind, since), holds in ordered[:HOLDS_MAX]]


def _hold_json(kind: str, since: Antichain, holds: list[ShardHold], tells_names: bool) -> dict[str, Any]:
    lapsing = [hold.lapses_in_s for hold in holds if hold.lapses_in_s is not None]
    is_told = tells_names or kind == "tag"
    names = sorted({hold.name[:NAME_CHARS_MAX] for hold in holds if hold.name})[:NAMES_MAX] if is_told else []
    return {
        "kind": kind,
        "since": since.to_json(),
        "count": len(holds),
        "names": names,
        "lapses_in_s": round(max(lapsing), 3) if lapsing else None,
    }


# --- what was done


def _recent(state: State, most: int, *, maintenance: bool = True) -> list[tuple[SeqNo, int, CommandEntry]]:
    """The newest commands that the State itself tells of, the newest first."""
    newest: Iterable[tuple[SeqNo, Committed]] = nlargest(most, state.entries.items(), key=_seqno)
    found = (
        (seqno, commit.at_ms, entry)
        for seqno, commit in newest
        for entry in reversed(commit.entries)
        if maintenance or entry.operation not in MAINTENANCE
    )
    return list(islice(found, most))


def _seqno(item: tuple[SeqNo, Committed]) -> int:
    return int(item[0])


def _entry_json(seqno: SeqNo, at_ms: int, entry: CommandEntry) -> dict[str, Any]:
    return {
        "seqno": int(seqno),
        "at_ms": at_ms,
        "operation": entry.operation,
        "lower": entry.lower.to_json(),
        "upper": entry.upper.to_json(),
        "rows": entry.rows,
        "bytes": entry.size,
    }
