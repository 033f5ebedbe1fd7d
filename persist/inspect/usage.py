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

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from blob import BlobNotFound, BlobStat
from persist.commit.blob_tasks import keys_in
from persist.commit.clone_refs import LoanLists
from persist.core.blob_keys import belongs_to, born_ms, is_bundle_key, shard_of
from persist.core.errors import Corruption, PersistError, UpgradeNeeded
from persist.core.frontier import TIME_MAX
from persist.core.ids import ReaderId, family_of, shard_id_of
from persist.core.named_holds import is_foreign
from persist.core.state import State, auxiliary_blob_keys
from persist.core.truncation import contents
from persist.formats.store_errors import translated, translated_but_missing
from persist.inspect.documents import Document, Findings, JsonRecord
from persist.inspect.log_listing import walked
from persist.inspect.part_listing import listed_by
from persist.inspect.readonly_location import LocationSummary, Look, check_named, location_summary, matching, prefix_of
from persist.inspect.state_history import Rechecked, Seen, newest

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
_LOCATION = ("location-id", "copy-of")
_FAMILY_CHARS = len(family_of(shard_id_of("any")))


class Room(JsonRecord, frozen=True):
    """How many blobs, and their bytes."""

    blobs: int
    bytes: int

    def __add__(self, other: Room) -> Room:
        return Room(self.blobs + other.blobs, self.bytes + other.bytes)


NOTHING = Room(0, 0)


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


@dataclass
class _Sums:
    rooms: dict[str, Room] = field(default_factory=dict)

    def add(self, kind: str, size: int) -> None:
        self.rooms[kind] = self.rooms.get(kind, NOTHING) + Room(1, size)

    def of(self, kind: str) -> Room:
        return self.rooms.get(kind, NOTHING)


def usage_document(look: Look, pattern: str | None) -> Document:
    """What each shard takes whose name matches; without a pattern also what else lies there.

    Raises InvalidUsage, UnknownShard. Both stores are read one after the other: what is written meanwhile counts as
    what it is by then.
    """
    findings = Findings()
    location = location_summary(look, findings)
    if pattern is not None and prefix_of(pattern) == pattern:
        check_named(look, pattern)
    names = {family_of(shard_id_of(name)): name for name in matching(look, pattern)}
    found: dict[str, ShardUsage] = {}
    rest = _Sums()
    whole = pattern is None and not look.prefixes
    if whole:
        for family, stats in groupby(_listed(look, ""), _group):
            if family in names:
                name = names[family]
                found[family] = _usage(look, name, list(stats), findings)
            else:
                for stat in stats:
                    rest.add("of_no_shard" if family else _kind(stat.key), stat.size)
    for family, name in names.items():
        if family not in found:
            found[family] = _usage(look, name, list(_listed(look, family)), findings)
    rows = sorted(found.values(), key=lambda one: one.shard or "")
    return Document("usage", findings, about=_location(look, location, rows, rest, whole), rows=rows)


def _location(look: Look, location: LocationSummary, rows: list[ShardUsage], rest: _Sums, whole: bool) -> LocationUsage:
    of_shards = sum((one.total for one in rows), NOTHING)
    beside = {kind: rest.of(kind) for kind in ("published", "bindings", "of_no_shard", "other")}
    unfinished: Room | None = None
    if whole:
        with translated():
            unfinished = sum((Room(1, max(one.size, 0)) for one in look.blob.unfinished("")), NOTHING)
    entries = sum(one.log_entries for one in rows), sum(one.log_bytes for one in rows)
    shown = beside if whole else dict.fromkeys(beside)
    listed = sum(beside.values(), of_shards)
    told = (shown["published"], shown["bindings"], shown["of_no_shard"], shown["other"], unfinished)
    return LocationUsage(location, len(rows), listed, of_shards, *told, *entries)


def _listed(look: Look, prefix: str) -> Iterator[BlobStat]:
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


def _usage(look: Look, name: str, listed: list[BlobStat], findings: Findings) -> ShardUsage:
    seen = newest(look, name)
    sums, gone, log_entries, log_bytes = _Sums(), dict[str, int](), 0, 0
    for logged in walked(look, name):
        log_entries, log_bytes = log_entries + 1, log_bytes + logged.size
        if logged.change is None:
            seen.findings.note(logged.wrong or "")
            continue
        gone.update(dict.fromkeys(logged.change.gone, logged.seqno))
    _with_lists(look, gone)
    named = {} if seen.state is None else _named(look, seen.state, seen.findings)
    lent = set() if seen.state is None else _lent(look, seen.state, seen.findings)
    holders = {} if seen.state is None else {key: one.seqno for key, one in seen.state.leased_readers.items()}
    held_from = min(holders.values(), default=None)
    held: dict[ReaderId, Room] = {}
    now_ms = look.clock.now_ms()
    there: set[str] = set()
    for stat in listed:
        there.add(stat.key)
        kind, left_at = named.get(stat.key), gone.get(stat.key)
        if kind is None and left_at is not None:
            for key, seqno in holders.items():
                if seqno < left_at:
                    held[key] = held.get(key, NOTHING) + Room(1, stat.size)
        if kind is None:
            kind = _unnamed_kind(stat, stat.key in lent, left_at, held_from, now_ms)
        sums.add(kind, stat.size)
    borrowed = _compared(look, seen, named, there)
    findings.take(seen.findings)
    orphans = Orphans(sums.of("orphan-hour"), sums.of("orphan-day"), sums.of("orphan-older"))
    return ShardUsage(
        shard=name,
        total=sum(sums.rooms.values(), NOTHING),
        live=sums.of("live"),
        history=sums.of("history"),
        index=sums.of("index"),
        merging=sums.of("merging"),
        rollups=sums.of("rollups"),
        lent=sums.of("lent"),
        held=sums.of("held"),
        waiting=sums.of("waiting"),
        orphans=orphans,
        unknown=sums.of("unknown"),
        holders=_holders(seen, held),
        borrowed=borrowed,
        inline_bytes=0 if seen.state is None else seen.state.trace.inline_bytes,
        log_entries=log_entries,
        log_bytes=log_bytes,
    )


def _unnamed_kind(stat: BlobStat, lent: bool, left_at: int | None, held_from: int | None, now_ms: int) -> str:
    """What a blob is that the State does not name."""
    if not belongs_to(stat.key, shard_of(stat.key)):
        return "unknown"
    if lent:
        return "lent"
    if left_at is not None:
        return "held" if held_from is not None and held_from < left_at else "waiting"
    age_ms = now_ms - min(born_ms(stat.key), stat.modified_ms)
    return "orphan-hour" if age_ms < HOUR_MS else "orphan-day" if age_ms < DAY_MS else "orphan-older"


def _named(look: Look, state: State, findings: Findings) -> dict[str, str]:
    """The blobs that the State names, also by what bundles list, and of which kind each is."""
    again = Rechecked(look, state)
    found = dict.fromkeys(auxiliary_blob_keys(state), "index")
    found.update({rollup.key: "rollups" for rollup in state.rollups.values()})
    done = (part.key for claim in state.claims.values() for part in claim.done)
    found.update({key: "merging" for key in done if key is not None})
    upper = state.upper.element
    runs = (run for batch in state.trace.batches for run in batch.runs)
    latest = contents(runs, state.drops, TIME_MAX if upper is None else max(upper - 1, 0))
    needed = {part.id for run in latest for part in run.parts}
    for part in state.trace.parts():
        kind = "live" if part.id in needed else "history"
        if part.key is not None:
            found[part.key] = kind
        inner = (one.key for run in listed_by(look, part, findings, again) for one in run.parts)
        found.update({key: kind for key in inner if key is not None})
    return found


def _compared(look: Look, seen: Seen, named: Mapping[str, str], there: set[str]) -> Room:
    """What is borrowed. What is named and not there is noted."""
    borrowed = NOTHING
    if seen.state is None:
        return borrowed
    again = Rechecked(look, seen.state)
    itself = frozenset(seen.state.blob_keys())
    for key in named.keys() - there:
        with translated():
            stat = look.blob.stat(key)
        if stat is not None:
            borrowed += Room(1, stat.size) if is_foreign(key, seen.state.shard_id) else NOTHING
        elif again.is_named(key) if key in itself else not again.has_moved:  # else its bundle may be gone by now
            seen.findings.note(f"the blob {key} is not there", key)
    return borrowed


def _lent(look: Look, state: State, findings: Findings) -> set[str]:
    lists, found = LoanLists(look.blob), set[str]()
    for loan in state.loans.values():
        try:
            found.update(lists.keys(loan.list_key))
        except BlobNotFound:
            if not Rechecked(look, state).is_named(loan.list_key):
                continue
            findings.note(f"the blob {loan.list_key} is not there", loan.list_key)
        except (Corruption, UpgradeNeeded) as error:
            findings.note(error.message, loan.list_key)
    return found


def _with_lists(look: Look, gone: dict[str, int]) -> None:
    """What bundles that left list has left with them. One that is gone, or damaged, tells nothing."""
    for bundle in [key for key in gone if is_bundle_key(key)]:
        try:
            with translated_but_missing():
                listed: Iterable[str] = keys_in(look.blob, bundle)
        except (BlobNotFound, PersistError):
            continue
        for key in listed:
            gone.setdefault(key, gone[bundle])


def _holders(seen: Seen, held: Mapping[ReaderId, Room]) -> list[HeldBy]:
    readers = {} if seen.state is None else seen.state.leased_readers
    return [
        HeldBy(str(key), readers[key].purpose, int(readers[key].seqno), room.blobs, room.bytes)
        for key, room in sorted(held.items())
    ]
