"""Storage usage: every blob in the store is counted once, so that the sums match those of a listing.

The kind of a blob of a shard is the first of these that applies:

- `live`: a part, or a bundle, that the contents at the latest time need
- `history`: one that the State only names for earlier times
- `index`: attributes, idempotency outcomes, the commit history, long state diffs, lists of loans
- `merging`: outputs of merges that are in progress
- `rollups`: those that the State names
- `lent`: it left the State, and a clone may name it
- `held`: it left the State, and a reader holds a version that names it
- `waiting`: it left the State, and GC will delete it
- `orphans`: no State names it: a write in progress or a failed one; by age
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import groupby

from blob import BlobStat
from persist.copies.shard_facts import NOT_THERE, FaultKind, Faults, ShardFacts, newest
from persist.core.blob_keys import belongs_to, born_ms, shard_of
from persist.core.frontier import TIME_MAX
from persist.core.ids import ReaderId, family_of, shard_id_of
from persist.core.named_holds import is_foreign
from persist.core.state import State, auxiliary_blob_keys
from persist.core.truncations_and_drops import contents
from persist.formats.store_errors import translated
from persist.inspect.documents import Document, JsonRecord
from persist.inspect.part_listing import parts_noting_faults
from persist.inspect.readonly_location import (
    LocationSummary,
    ReadOnlyLocation,
    check_named,
    location_summary,
    matching,
    prefix_of,
)

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
KINDS = ("live", "history", "index", "merging", "rollups", "lent", "held", "waiting", "unknown")
_LOCATION = ("location-id", "copy-of")
_FAMILY_CHARS = len(family_of(shard_id_of("any")))


class Room(JsonRecord, frozen=True):
    """A number of blobs, and their bytes."""

    blobs: int
    bytes: int

    def __add__(self, other: Room) -> Room:
        return Room(self.blobs + other.blobs, self.bytes + other.bytes)


NOTHING = Room(0, 0)
Rooms = defaultdict[str, Room]  # by kind


class HeldBy(JsonRecord, frozen=True):
    """Blobs that a reader keeps from being deleted; blobs held by two readers count for both."""

    reader: str
    purpose: str
    seqno: int
    blobs: int
    bytes: int


class Orphans(JsonRecord, frozen=True):
    """Blobs that no State names, by age: less than an hour, less than a day, older."""

    hour: Room
    day: Room
    older: Room


class ShardUsage(JsonRecord, frozen=True):
    """The storage of a shard, in all incarnations of its name. `total` is the sum of all kinds, as in a listing.

    `inline_bytes` are rows in the State. `borrowed` are blobs of other shards that it names; they count there.
    """

    shard: str | None
    total: Room
    live: Room
    history: Room
    index: Room
    merging: Room
    rollups: Room
    lent: Room
    held: Room
    waiting: Room
    orphans: Orphans
    unknown: Room
    holders: list[HeldBy]
    borrowed: Room
    inline_bytes: int
    log_entries: int
    log_bytes: int


class LocationUsage(JsonRecord, frozen=True):
    """The storage of the location besides shards, and in total. What only the whole store shows is null for a pattern.

    `published` are journals, heartbeats and catalogues. `of_no_shard` are blobs of shards without a log, `other` those
    with unknown keys. `unfinished` are incomplete uploads, which a listing does not show. `listed` is the sum of the
    listing.
    """

    location: LocationSummary
    shards: int
    listed: Room
    of_shards: Room
    published: Room | None
    bindings: Room | None
    of_no_shard: Room | None
    other: Room | None
    unfinished: Room | None
    log_entries: int
    log_bytes: int


def usage_document(location: ReadOnlyLocation, pattern: str | None) -> Document:
    """The usage of each shard whose name matches; without a pattern also of everything else.

    Raises InvalidUsage, UnknownShard. The stores are read one after the other; what is written meanwhile is counted in
    its state at that time.
    """
    faults = Faults()
    summary = location_summary(location, faults)
    if pattern is not None and prefix_of(pattern) == pattern:
        check_named(location, pattern)
    names = {family_of(shard_id_of(name)): name for name in matching(location, pattern)}
    usages: dict[str, ShardUsage] = {}
    others: Rooms = defaultdict(lambda: NOTHING)
    is_whole = pattern is None and not location.prefixes
    if is_whole:
        with translated():
            for family, stats in groupby(location.blob.list(""), _family):
                if family in names:
                    usages[family] = _shard_usage(location, names[family], stats, faults)
                else:
                    for stat in stats:
                        others["of_no_shard" if family else _kind(stat.key)] += Room(1, stat.size)
    for family, name in names.items():
        if family not in usages:
            usages[family] = _shard_usage(location, name, None, faults)
    rows = sorted(usages.values(), key=lambda usage: usage.shard or "")
    return Document("usage", faults, about=_location_usage(location, summary, rows, others, is_whole), rows=rows)


def _location_usage(
    location: ReadOnlyLocation, summary: LocationSummary, rows: list[ShardUsage], others: Rooms, is_whole: bool
) -> LocationUsage:
    of_shards = sum((usage.total for usage in rows), NOTHING)
    others_by_kind = {kind: others[kind] for kind in ("published", "bindings", "of_no_shard", "other")}
    unfinished: Room | None = None
    if is_whole:
        with translated():
            unfinished = sum((Room(1, max(usage.size, 0)) for usage in location.blob.unfinished("")), NOTHING)
    return LocationUsage(
        summary,
        len(rows),
        sum(others_by_kind.values(), of_shards),
        of_shards,
        **(others_by_kind if is_whole else dict.fromkeys(others_by_kind)),
        unfinished=unfinished,
        log_entries=sum(usage.log_entries for usage in rows),
        log_bytes=sum(usage.log_bytes for usage in rows),
    )


def _family(stat: BlobStat) -> str:
    """The common prefix of the ids of all incarnations of the shard that a blob belongs to; "": none."""
    shard = shard_of(stat.key)
    return shard[:_FAMILY_CHARS] if "/" in stat.key and len(shard) == 33 and shard.startswith("s") else ""


def _kind(key: str) -> str:
    if key.startswith(("pub/", "cat/")):
        return "published"
    return "bindings" if key in _LOCATION or key.startswith(("epoch/", "offer/", "format/", "receipt")) else "other"


def _shard_usage(location: ReadOnlyLocation, name: str, stats: Iterable[BlobStat] | None, faults: Faults) -> ShardUsage:
    """The usage of a shard. `stats`: its blobs, if they are listed already."""
    facts = newest(location, name)
    if stats is not None:
        facts.listed = {stat.key: stat for stat in stats}
    log = facts.read_log()
    for problem in log.wrong:
        facts.faults.note(FaultKind.LOG, problem)
    sums: Rooms = defaultdict(lambda: NOTHING)
    left_at_by_key = facts.keys_left(Faults())
    readers = {} if facts.state is None else facts.state.leased_readers
    named = {} if facts.state is None else _named(facts, facts.state)
    lent = set() if facts.state is None else set().union(*facts.lent(facts.faults).values())
    held_from = min((reader.seqno for reader in readers.values()), default=None)
    held: defaultdict[ReaderId, Room] = defaultdict(lambda: NOTHING)
    now_ms = location.clock.now_ms()
    for key, stat in facts.listed.items():
        kind, left_at = named.get(key), left_at_by_key.get(key)
        if kind is None and left_at is not None:
            for reader_id, reader in readers.items():
                if reader.seqno < left_at:
                    held[reader_id] += Room(1, stat.size)
        sums[kind or _unnamed_kind(stat, key in lent, left_at, held_from, now_ms)] += Room(1, stat.size)
    borrowed = NOTHING if facts.state is None else _borrowed(facts, facts.state, named)
    faults.take(facts.faults)
    return ShardUsage(
        shard=name,
        total=sum(sums.values(), NOTHING),
        **{kind: sums[kind] for kind in KINDS},
        orphans=Orphans(sums["orphan-hour"], sums["orphan-day"], sums["orphan-older"]),
        holders=[
            HeldBy(str(key), readers[key].purpose, int(readers[key].seqno), room.blobs, room.bytes)
            for key, room in sorted(held.items())
        ],
        borrowed=borrowed,
        inline_bytes=0 if facts.state is None else facts.state.trace.inline_bytes,
        log_entries=log.entries,
        log_bytes=log.bytes,
    )


def _unnamed_kind(stat: BlobStat, lent: bool, left_at: int | None, held_from: int | None, now_ms: int) -> str:
    if not belongs_to(stat.key, shard_of(stat.key)):
        return "unknown"
    if lent:
        return "lent"
    if left_at is not None:
        return "held" if held_from is not None and held_from < left_at else "waiting"
    age_ms = now_ms - min(born_ms(stat.key), stat.modified_ms)
    return "orphan-hour" if age_ms < HOUR_MS else "orphan-day" if age_ms < DAY_MS else "orphan-older"


def _named(facts: ShardFacts, state: State) -> dict[str, str]:
    """The kinds of the blobs that the State names, including those in bundles."""
    kinds = dict.fromkeys(auxiliary_blob_keys(state), "index")
    kinds.update({rollup.key: "rollups" for rollup in state.rollups.values()})
    done = (part.key for claim in state.claims.values() for part in claim.done)
    kinds.update({key: "merging" for key in done if key is not None})
    upper = state.upper.element
    runs = (run for batch in state.trace.batches for run in batch.runs)
    latest = contents(runs, state.drops, TIME_MAX if upper is None else max(upper - 1, 0))
    needed = {part.id for run in latest for part in run.parts}
    for usage in parts_noting_faults(facts, facts.faults):
        if usage.part.key is not None:
            kinds[usage.part.key] = "live" if (usage.within or usage.part).id in needed else "history"
    return kinds


def _borrowed(facts: ShardFacts, state: State, named: Iterable[str]) -> Room:
    """The borrowed blobs. Missing ones are noted."""
    borrowed = NOTHING
    own_keys = frozenset(state.blob_keys())
    for key in (key for key in named if key not in facts.listed):
        stat = facts.stat(key)
        if stat is not None:
            borrowed += Room(1, stat.size) if is_foreign(key, state.shard_id) else NOTHING
        elif facts.is_named(key) if key in own_keys else not facts.has_moved:  # else its bundle may be deleted by now
            facts.faults.note(FaultKind.MISSING, f"the blob {key} {NOT_THERE}", key)
    return borrowed
