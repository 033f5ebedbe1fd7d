"""The structure of a shard by its State, as JSON: batches, merges in progress, holds on since, recent commits.

It contains sizes, times and counts, but no rows, no keys of rows, and no ids that authorise a command. All lists are
bounded.
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

BATCHES_MAX = 512  # entries for batches: in a longer trace an entry covers several neighbours
MERGES_MAX = 64
HOLDS_MAX = 100  # the earliest ones
NAMES_MAX = 3  # of holds on the same time
RECENT_MAX = 64  # commands, the newest
ACTIVITY_MAX = 32  # commits with rows, the newest
NAME_CHARS_MAX = 200


class ShardHold(NamedTuple):
    """What holds `since`, or keeps one time readable. `lapses_in_s` None: it does not lapse."""

    kind: str
    since: Antichain
    name: str
    lapses_in_s: float | None = None


def trace_json(state: State, *, tells_names: bool) -> dict[str, Any]:
    """One version of a shard. `tells_names`: include the names of readers and cursors, which other users chose."""
    batches = state.trace.batches
    claims = [claim for _, claim in sorted(state.claims.items())]
    claimed = frozenset(part for claim in claims for part in claim.inputs)
    return {
        "shard": state.name,
        **_size_json(state),
        "inline_bytes": state.trace.inline_bytes,
        "batch_count": len(batches),
        "batches": [_stretch_json(stretch, claimed) for stretch in _stretches(batches)],
        "merges": [_merge_json(state, claim) for claim in islice(claims, MERGES_MAX)],
        "holds": _holds_json(state, tells_names),
        "readers": len(state.leased_readers),
        "cursors": len(state.critical_readers),
        "writers": len(state.writers),
        "tags": len(state.tags),
        "history_ms": state.settings.history_ms,
        "recent": [_entry_json(*entry) for entry in _recent(state, RECENT_MAX)],
    }


def _size_json(state: State) -> dict[str, Any]:
    """The version, its frontiers, and its size."""
    return {
        "seqno": int(state.seqno),
        "at": instant_text(state.walltime_ms),
        "since": state.since.to_json(),
        "upper": state.upper.to_json(),
        "rows": state.trace.rows,
        "bytes": sum(batch.size for batch in state.trace.batches),
    }


def activity_json(state: State) -> dict[str, Any]:
    """A short summary of a shard: its size, and its latest writes, each `[milliseconds since 1970, rows, bytes]`."""
    written = [commit for commit in _recent(state, ACTIVITY_MAX, maintenance=False) if commit[2].rows]
    return {
        "name": state.name,
        **_size_json(state),
        "batches": len(state.trace.batches),
        "recent": [[at_ms, entry.rows, entry.size] for _, at_ms, entry in reversed(written)],
    }


def level_of(rows: int) -> int:
    """The tier of a batch: level k holds 4^k to 4^(k+1) - 1 updates, since four batches of a tier are merged."""
    return max(rows.bit_length() - 1, 0) // 2


def _stretches(batches: Sequence[HollowBatch]) -> Iterator[Sequence[HollowBatch]]:
    """The batches in at most BATCHES_MAX groups of neighbours."""
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


def _merge_json(state: State, claim: Claim) -> dict[str, Any]:
    """A merge in progress. `lower` and `upper` None: its inputs are no longer in the trace."""
    inputs = frozenset(claim.inputs)
    place = state.trace.covering(inputs)
    batches = [] if place is None else state.trace.batches[place[0] : place[0] + place[1]]
    return {
        "lower": batches[0].desc.lower.to_json() if batches else None,
        "upper": batches[-1].desc.upper.to_json() if batches else None,
        "batches": len(batches),
        "inputs": len(inputs),
        "rows": sum(batch.rows for batch in batches),
        "done_parts": len(claim.done),
        "done_rows": sum(part.rows for part in claim.done),
        "done_bytes": sum(part.size for part in claim.done),
    }


# --- holds on since


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
    """Holds of the same kind on the same time share an entry; the earliest times come first."""
    grouped: dict[tuple[str, Antichain], list[ShardHold]] = defaultdict(list)
    for hold in _holds(state):
        grouped[hold.kind, hold.since].append(hold)
    ordered = sorted(grouped.items(), key=lambda item: (item[0][1].is_empty, item[0][1].element or 0, item[0][0]))
    return [_hold_json(kind, since, holds, tells_names) for (kind, since), holds in ordered[:HOLDS_MAX]]


def _hold_json(kind: str, since: Antichain, holds: list[ShardHold], tells_names: bool) -> dict[str, Any]:
    lapsing = [hold.lapses_in_s for hold in holds if hold.lapses_in_s is not None]
    is_named = tells_names or kind == "tag"
    names = sorted({hold.name[:NAME_CHARS_MAX] for hold in holds if hold.name})[:NAMES_MAX] if is_named else []
    return {
        "kind": kind,
        "since": since.to_json(),
        "count": len(holds),
        "names": names,
        "lapses_in_s": round(max(lapsing), 3) if lapsing else None,
    }


# --- recent commands


def _recent(state: State, most: int, *, maintenance: bool = True) -> list[tuple[SeqNo, int, CommandEntry]]:
    """The newest commands in the State itself, newest first."""
    newest: Iterable[tuple[SeqNo, Committed]] = nlargest(most, state.entries.items(), key=lambda item: int(item[0]))
    commands = (
        (seqno, commit.at_ms, entry)
        for seqno, commit in newest
        for entry in reversed(commit.entries)
        if maintenance or entry.operation not in MAINTENANCE
    )
    return list(islice(commands, most))


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
