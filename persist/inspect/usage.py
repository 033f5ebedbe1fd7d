"""What takes room: every blob that lies in the store counts once, so the sums are those of a listing.

A blob of a shard is what the first of these says that fits:

- `live`: a part, or a bundle, that the contents as of the latest time need
- `history`: one that the State names for earlier times alone
- `index`: attributes, outcomes of tokens, the commit history, long state diffs, lists of what is lent
- `merging`: what merges under way have written so far
- `rollups`: those that the State names
- `lent`: it left the State, and a clone may name it
- `held`: it left the State, and a reader holds a version that names it
- `waiting`: it left the State, and GC deletes it
- `orphans`: nothing names it: a write under way, or one that failed; by age
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby

from blob import BlobStat
from persist.copies.shard_facts import NOT_THERE, FaultKind, Faults, ShardFacts, newest
from persist.core.blob_keys import belongs_to, born_ms, shard_of
from persist.core.frontier import TIME_MAX
from persist.core.ids import ReaderId, family_of, shard_id_of
from persist.core.named_holds import is_foreign
from persist.core.state import State, auxiliary_blob_keys
from persist.core.truncation import contents
from persist.formats.store_errors import translated
from persist.inspect.documents import Document, JsonRecord
from persist.inspect.part_listing import noted_parts
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
    """How many blobs, and their bytes."""

    blobs: int
    bytes: int

    def __add__(self, other: Room) -> Room:
        return Room(self.blobs + other.blobs, self.bytes + other.bytes)


NOTHING = Room(0, 0)
Rooms = defaultdict[str, Room]  # by kind


class HeldBy(JsonRecord, frozen=True):
    """What a reader keeps from being deleted; what two readers hold counts for both."""

    reader: str
    purpose: str
    seqno: int
    blobs: int
    bytes: int


class Orphans(JsonRecord, frozen=True):
    """Blobs that nothing names by their age: below an hour, below a day, older."""

    hour: Room
    day: Room
    older: Room


class ShardUsage(JsonRecord, frozen=True):
    """What a shard takes, in all lives of its name. `total` is the sum of all kinds, and what a listing gives.

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
    """What the location takes besides shards, and in all. What is only known of the whole store is null for a pattern.

    `published` are journals, beats and catalogues. `of_no_shard` are blobs of shards of which there is no log, `other`
    those of which the key is of no kind that persist makes. `unfinished` is what puts have left that did not end; it
    is listed under no key. `listed` is what the listing gave: the sum of all.
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


def usage_document(look: ReadOnlyLocation, pattern: str | None) -> Document:
    """What each shard takes whose name matches; without a pattern also what else lies there.

    Raises InvalidUsage, UnknownShard. Both stores are read one after the other: what is written meanwhile counts as
    what it is by then.
    """
    faults = Faults()
    location = location_summary(look, faults)
    if pattern is not None and prefix_of(pattern) == pattern:
        check_named(look, pattern)
    names = {family_of(shard_id_of(name)): name for name in matching(look, pattern)}
    found: dict[str, ShardUsage] = {}
    rest: Rooms = defaultdict(lambda: NOTHING)
    whole = pattern is None and not look.prefixes
    if whole:
        for family, stats in groupby(_listed(look, ""), _group):
            if family in names:
                name = names[family]
                found[family] = _usage(look, name, stats, faults)
            else:
                for stat in stats:
                    rest["of_no_shard" if family else _kind(stat.key)] += Room(1, stat.size)
    for family, name in names.items():
        if family not in found:
            found[family] = _usage(look, name, None, faults)
    rows = sorted(found.values(), key=lambda one: one.shard or "")
    return Document("usage", faults, about=_location(look, location, rows, rest, whole), rows=rows)


def _location(
    look: ReadOnlyLocation, location: LocationSummary, rows: list[ShardUsage], rest: Rooms, whole: bool
) -> LocationUsage:
    of_shards = sum((one.total for one in rows), NOTHING)
    beside = {kind: rest[kind] for kind in ("published", "bindings", "of_no_shard", "other")}
    unfinished: Room | None = None
    if whole:
        with translated():
            unfinished = sum((Room(1, max(one.size, 0)) for one in look.blob.unfinished("")), NOTHING)
    return LocationUsage(
        location,
        len(rows),
        sum(beside.values(), of_shards),
        of_shards,
        **(beside if whole else dict.fromkeys(beside)),
        unfinished=unfinished,
        log_entries=sum(one.log_entries for one in rows),
        log_bytes=sum(one.log_bytes for one in rows),
    )


def _listed(look: ReadOnlyLocation, prefix: str) -> Iterator[BlobStat]:
    with translated():
        yield from look.blob.list(prefix)


def _group(stat: BlobStat) -> str:
    """What the ids of all lives of the shard begin with to which a blob belongs; "": it belongs to none."""
    shard = shard_of(stat.key)
    return shard[:_FAMILY_CHARS] if "/" in stat.key and len(shard) == 33 and shard.startswith("s") else ""


def _kind(key: str) -> str:
    if key.startswith(("pub/", "cat/")):
        return "published"
    return "bindings" if key in _LOCATION or key.startswith(("epoch/", "offer/", "format/", "receipt")) else "other"


def _usage(look: ReadOnlyLocation, name: str, stats: Iterable[BlobStat] | None, faults: Faults) -> ShardUsage:
    """What a shard takes. `stats`: its blobs, where they are listed already."""
    facts = newest(look, name)
    if stats is not None:
        facts.listed = {stat.key: stat for stat in stats}
    log = facts.read_log()
    for what in log.wrong:
        facts.faults.note(FaultKind.LOG, what)
    sums: Rooms = defaultdict(lambda: NOTHING)
    left = facts.keys_left(Faults())
    readers = {} if facts.state is None else facts.state.leased_readers
    named = {} if facts.state is None else _named(facts, facts.state)
    lent = set() if facts.state is None else set().union(*facts.lent(facts.faults).values())
    held_from = min((reader.seqno for reader in readers.values()), default=None)
    held: defaultdict[ReaderId, Room] = defaultdict(lambda: NOTHING)
    now_ms = look.clock.now_ms()
    for key, stat in facts.listed.items():
        kind, left_at = named.get(key), left.get(key)
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
    """The blobs that the State names, also by what bundles list, and of which kind each is."""
    kinds = dict.fromkeys(auxiliary_blob_keys(state), "index")
    kinds.update({rollup.key: "rollups" for rollup in state.rollups.values()})
    done = (part.key for claim in state.claims.values() for part in claim.done)
    kinds.update({key: "merging" for key in done if key is not None})
    upper = state.upper.element
    runs = (run for batch in state.trace.batches for run in batch.runs)
    latest = contents(runs, state.drops, TIME_MAX if upper is None else max(upper - 1, 0))
    needed = {part.id for run in latest for part in run.parts}
    for one in noted_parts(facts, facts.faults):
        if one.part.key is not None:
            kinds[one.part.key] = "live" if (one.within or one.part).id in needed else "history"
    return kinds


def _borrowed(facts: ShardFacts, state: State, named: Iterable[str]) -> Room:
    """What is borrowed. What is named and not there is noted."""
    borrowed = NOTHING
    itself = frozenset(state.blob_keys())
    for key in (key for key in named if key not in facts.listed):
        stat = facts.stat(key)
        if stat is not None:
            borrowed += Room(1, stat.size) if is_foreign(key, state.shard_id) else NOTHING
        elif facts.is_named(key) if key in itself else not facts.has_moved:  # else its bundle may be gone by now
            facts.faults.note(FaultKind.MISSING, f"the blob {key} {NOT_THERE}", key)
    return borrowed
