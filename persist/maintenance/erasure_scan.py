"""Scans of both stores, and of published journals, for remaining copies of erased rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from blob import BlobNotFound, BlobStat
from persist.commit.blob_tasks import keys_in
from persist.commit.committer import Committer
from persist.commit.location import Location
from persist.core.blob_keys import (
    JOURNALS,
    Journal,
    belongs_to,
    born_ms,
    is_bundle_key,
    is_diff_key,
    is_journal_key,
    is_rollup_key,
    rollup_seqno,
    shard_of,
)
from persist.core.erasure import Scanned
from persist.core.erasure_progress import is_rewritten
from persist.core.errors import Corruption, Unavailable
from persist.core.ids import SeqNo, family_of
from persist.formats.state_frames import decode_diff, decode_journal
from persist.formats.store_errors import translated, translated_but_missing
from persist.maintenance.journal_writer import Publisher, PublishSettings

KEYS_MAX = 100  # keys of each kind in the result
STRAGGLER_MS = 3_600_000  # how long a merge may still write old rows after its inputs were replaced


def remove_entries_before(place: Location, name: str, first: SeqNo) -> None:
    """Rewrite the journals with entries of the shard from before `first` without these. A retry is safe.

    Raises Unavailable if a journal is damaged.
    """
    for stat, journal in _journals(place):
        old = _entries_before(place, journal, name, first)
        if not old:
            continue
        kept = {shard.name: tuple(entry for entry in shard.entries if entry not in old) for shard in journal.shards}
        kept = {shard: entries for shard, entries in kept.items() if entries}
        publisher = Publisher(place.blob, place.identity, place.clock, place.ids, PublishSettings())
        with translated():
            if kept:
                publisher.put(kept)
            place.identity.confirm()
            place.blob.delete([stat.key])


def _entries_before(place: Location, journal: Journal, name: str, first: SeqNo) -> frozenset[bytes]:
    """The entries of the shard from before `first`, where its log begins. They may have rows inline."""
    entries = [entry for shard in journal.shards if shard.name == name for entry in shard.entries]
    return frozenset(entry for entry in entries if decode_diff(entry, place.versions.build).seqno < first)


def _journals(place: Location) -> Iterator[tuple[BlobStat, Journal]]:
    with translated():
        stats = [stat for stat in place.blob.list(JOURNALS) if is_journal_key(stat.key)]
    for stat in stats:
        try:
            with translated_but_missing():
                yield stat, decode_journal(place.blob.get(stat.key), place.versions.build)
        except BlobNotFound:
            continue
        except Corruption as error:
            raise Unavailable(
                f"journal {stat.key} cannot be read, so its content is unknown: {error}. Delete it: the log and the "
                "rollups contain its entries"
            ) from error


def scan_shard(place: Location, machine: Committer, at: int, rewritten_ms: int | None = None) -> Scanned:
    """Scan both stores for remaining copies of deleted rows of a shard. Changes nothing. Raises as the stores.

    It lists every blob, reads every log entry, and loads the oldest State that can be loaded: if that shows no such
    row, no later one does. The other blobs belong to an earlier State (`older`) or are named by no State (`unnamed`),
    because a process died or has not committed them yet; so do the bytes of unfinished puts, which have no keys.

    `rewritten_ms`: since when no part of the State contains rows that were deleted by the time `at`. Unnamed blobs that
    were minted more than an hour later do not count. None: all unnamed blobs count.
    """
    before = machine.refresh()
    family = family_of(before.shard_id)
    with translated():
        unfinished = list(place.blob.unfinished(family))  # first: a put that completes meanwhile is in the listing
        blobs = list(place.blob.list(family))
    first, entries, at_first, later = _read_log(place, machine.name)
    state = machine.refresh()
    named = {*before.blob_keys(), *state.blob_keys()}
    named.update(_parts_of(place, filter(is_bundle_key, named)))
    later.update(_parts_of(place, filter(is_bundle_key, later)))
    rollup = state.rollups.get(first)  # None: the log was truncated meanwhile
    oldest = None if rollup is None else place.versions.read_rollup(rollup.key)
    rewritten = oldest is not None and is_rewritten(oldest, at)
    if not rewritten:  # every stored State, and every blob that left one, may contain such rows
        at_first |= later
        at_first.update([*(rollup.key for rollup in state.rollups.values()), *state.long_diffs.values()])
        named -= at_first
    older: list[BlobStat] = []
    unnamed: list[BlobStat] = []
    waiting: list[BlobStat] = []  # for the sweep, because no collection deletes them
    for stat in blobs:
        if stat.key in named or not belongs_to(stat.key, shard_of(stat.key)):
            continue
        if stat.key in at_first:
            older.append(stat)
        elif _may_show_before(place, stat.key, first, at):  # perhaps written late, by a suspended process
            older.append(stat)
            if stat.key not in later:  # else the next collection deletes it
                waiting.append(stat)
        elif stat.key in later:
            continue  # it left a State without such rows
        elif rewritten_ms is None or _written_ms(stat) <= rewritten_ms + STRAGGLER_MS:
            unnamed.append(stat)
    journals = [stat for stat, journal in _journals(place) if _entries_before(place, journal, machine.name, first)]
    older += journals
    older.sort(key=lambda stat: stat.key)
    puts = [put for put in unfinished if rewritten_ms is None or put.begun_ms <= rewritten_ms + STRAGGLER_MS]
    unnamed_since_ms = [*map(_written_ms, (*unnamed, *waiting)), *(put.begun_ms for put in puts)]
    return Scanned(
        at_ms=place.clock.now_ms(),
        horizon=first,
        entries=entries,
        blobs=len(blobs),
        size=sum(stat.size for stat in blobs),
        rewritten=rewritten,
        older=tuple(stat.key for stat in older[:KEYS_MAX]),
        older_count=len(older),
        older_size=sum(stat.size for stat in older),
        older_digest=hashlib.sha256(b"".join(stat.key.encode() + b"\n" for stat in older)).digest(),
        unnamed=(*(stat.key for stat in unnamed), *(put.where for put in puts))[:KEYS_MAX],
        unnamed_count=len(unnamed) + len(puts),
        unnamed_ms=min(unnamed_since_ms, default=None),
        waiting_count=len(waiting) + len(journals),  # journals are rewritten, not collected
    )


def _read_log(place: Location, name: str) -> tuple[SeqNo, int, set[str], set[str]]:
    """The first seqno of the log, its length, and the blobs removed by its first entry and by later ones."""
    first, count, at_first, later = SeqNo(0), 0, set[str](), set[str]()
    for change in place.versions.whole_diffs(name, SeqNo(-1)):
        count += 1
        first = first or change.seqno
        (at_first if change.seqno == first else later).update(change.gone)
    if not count:
        raise Corruption(f"the log of shard {name!r} has vanished from the consensus store")
    return first, count, at_first, later


def _may_show_before(place: Location, key: str, first: SeqNo, at: int) -> bool:
    """Whether an unnamed blob is a long state diff, or an older rollup than the log, that may contain the rows.

    Every collection leaves the rollup of the previous one, so such a rollup is read.
    """
    if not is_rollup_key(key):
        return is_diff_key(key)
    if rollup_seqno(key) >= first:
        return False
    state = place.versions.read_rollup(key)
    return state is not None and not is_rewritten(state, at)


def _written_ms(stat: BlobStat) -> int:
    """When a blob was written, by the earlier of the store's clock and that of the process that minted its key."""
    return min(born_ms(stat.key), stat.modified_ms)


def _parts_of(place: Location, bundles: Iterator[str]) -> set[str]:
    """The parts of these bundles. A missing bundle was deleted after its parts."""
    parts: set[str] = set()
    for bundle in list(bundles):
        try:
            parts.update(keys_in(place.blob, bundle))
        except BlobNotFound:
            continue
        except Corruption as error:
            raise Unavailable(f"bundle {bundle} cannot be read, so its parts are unknown: {error}") from error
    return parts
