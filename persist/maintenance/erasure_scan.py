"""Scans for what may still show erased rows: both stores, and the published journals."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from blob import BlobNotFound, BlobStat
from persist.commit.blob_tasks import keys_in
from persist.commit.machine import Committer, Place
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
from persist.core.state import State
from persist.formats.state_frames import decode_diff, decode_journal
from persist.formats.store_errors import translated, translated_but_missing
from persist.maintenance.publication_writer import Publisher, PublishSettings

# Journals of publications that show a shard before its log begins: an erasure waits until there are none.


def showing_before(place: Place, name: str, first: SeqNo) -> list[BlobStat]:
    """The journals that hold an entry of the shard from before `first`, where its log begins: it may have rows inline.

    Raises Unavailable: a journal is damaged, so nobody knows.
    """
    return [stat for stat, journal in _journals(place) if _cut(place, journal, name, first)]


def leave_out_before(place: Place, name: str, first: SeqNo) -> int:
    """Write these journals anew without such entries, then delete them; how many. Repeating it is safe."""
    done = 0
    for stat, journal in _journals(place):
        cut = _cut(place, journal, name, first)
        if not cut:
            continue
        kept = {shard.name: tuple(entry for entry in shard.entries if entry not in cut) for shard in journal.shards}
        kept = {shard: entries for shard, entries in kept.items() if entries}
        publisher = Publisher(place.blob, place.identity, place.clock, place.ids, PublishSettings())
        with translated():
            if kept:
                publisher.put(kept)
            place.identity.confirm()
            place.blob.delete([stat.key])
        done += 1
    return done


def _cut(place: Place, journal: Journal, name: str, first: SeqNo) -> frozenset[bytes]:
    """The entries of the shard from before `first`."""
    entries = [entry for shard in journal.shards if shard.name == name for entry in shard.entries]
    return frozenset(entry for entry in entries if decode_diff(entry, place.versions.build).seqno < first)


def _journals(place: Place) -> Iterator[tuple[BlobStat, Journal]]:
    with translated():
        listed = [stat for stat in place.blob.list(JOURNALS) if is_journal_key(stat.key)]
    for stat in listed:
        try:
            with translated_but_missing():
                yield stat, decode_journal(place.blob.get(stat.key), place.versions.build)
        except BlobNotFound:
            continue
        except Corruption as error:
            raise Unavailable(
                f"journal {stat.key} cannot be read, so nobody knows what it shows: {error}. Delete it: the log "
                "and rollups have what it tells"
            ) from error


# A scan of both stores for what may still show rows that are gone, without a look at how parts are pruned.
#
# It lists every blob of the shard, reads every log entry, and loads the oldest State that anybody could load. If that
# one shows no such row, no later one does. Whatever else lies in the blob store is of an earlier State (`older`), or is
# named by nothing (`unnamed`): a process that died has left it, or one is about to name it. What a put has written that
# did not end counts as such too: the store lists it under no key.


TOLD_MAX = 100  # keys that are told of each kind
STRAGGLER_MS = 3_600_000  # a merge that read old parts has written for at most so long after these were replaced


def scanned(place: Place, machine: Committer, at: int, rewritten_ms: int | None = None) -> Scanned:
    """What is there of a shard. Changes nothing; repeating it is safe. Raises what the stores raise.

    `rewritten_ms`: since when no part of the State has shown rows that were gone by the time `at`. What was minted more
    than an hour after it, and is named by nothing yet, does not count. None: whatever is named by nothing counts.
    """
    before = machine.refresh()
    family = family_of(before.shard_id)
    with translated():
        unfinished = list(place.blob.unfinished(family))  # first: what ends meanwhile is listed then
        listed = list(place.blob.list(family))
    first, entries, at_first, later = _log(place, machine.name)
    state = machine.refresh()
    named = {*before.blob_keys(), *state.blob_keys()}
    named.update(_listed(place, filter(is_bundle_key, named)))
    later.update(_listed(place, filter(is_bundle_key, later)))
    oldest = _oldest(place, state, first)
    rewritten = oldest is not None and is_rewritten(oldest, at)
    if not rewritten:  # all States that are stored now may show such rows, and what left them
        at_first |= later
        at_first.update([*(rollup.key for rollup in state.rollups.values()), *state.long_diffs.values()])
        named -= at_first
    older: list[BlobStat] = []
    unnamed: list[BlobStat] = []
    waiting: list[BlobStat] = []  # for the sweep, where no collection takes them
    for stat in listed:
        if stat.key in named or not belongs_to(stat.key, shard_of(stat.key)):
            continue
        if stat.key in at_first:
            older.append(stat)
        elif _shows_before(place, stat.key, first, at):  # it may have come late, by a process that was asleep
            older.append(stat)
            if stat.key not in later:  # else the next collection takes it
                waiting.append(stat)
        elif stat.key in later:
            continue  # it left a State that showed no such row
        elif rewritten_ms is None or _written_ms(stat) <= rewritten_ms + STRAGGLER_MS:
            unnamed.append(stat)
    journals = showing_before(place, machine.name, first)
    older += journals
    older.sort(key=lambda stat: stat.key)
    begun = [one for one in unfinished if rewritten_ms is None or one.begun_ms <= rewritten_ms + STRAGGLER_MS]
    since = [*map(_written_ms, (*unnamed, *waiting)), *(one.begun_ms for one in begun)]
    return Scanned(
        at_ms=place.clock.now_ms(),
        horizon=first,
        entries=entries,
        blobs=len(listed),
        size=sum(stat.size for stat in listed),
        rewritten=rewritten,
        older=tuple(stat.key for stat in older[:TOLD_MAX]),
        older_count=len(older),
        older_size=sum(stat.size for stat in older),
        older_digest=hashlib.sha256(b"".join(stat.key.encode() + b"\n" for stat in older)).digest(),
        unnamed=(*(stat.key for stat in unnamed), *(one.where for one in begun))[:TOLD_MAX],
        unnamed_count=len(unnamed) + len(begun),
        unnamed_ms=min(since, default=None),
        waiting_count=len(waiting) + len(journals),  # these are written anew
    )


def _log(place: Place, name: str) -> tuple[SeqNo, int, set[str], set[str]]:
    """Where the log begins, how many entries it has, and what left the State by its first one, and by later ones."""
    first, count, at_first, later = SeqNo(0), 0, set[str](), set[str]()
    for change in place.versions.whole_diffs(name, SeqNo(-1)):
        count += 1
        first = first or change.seqno
        (at_first if change.seqno == first else later).update(change.gone)
    if not count:
        raise Corruption(f"the log of shard {name!r} has vanished from the consensus store")
    return first, count, at_first, later


def _oldest(place: Place, state: State, first: SeqNo) -> State | None:
    """The oldest State that can be loaded. None: the log was cut meanwhile."""
    rollup = state.rollups.get(first)
    return None if rollup is None else place.versions.read_rollup(rollup.key)


def _shows_before(place: Place, key: str, first: SeqNo, at: int) -> bool:
    """Whether a blob that the State does not name is a State of before the log begins, or a change, that may show rows.

    Every collection leaves the rollup of the one before. So such a one is looked at.
    """
    if not is_rollup_key(key):
        return is_diff_key(key)
    if rollup_seqno(key) >= first:
        return False
    state = place.versions.read_rollup(key)
    return state is not None and not is_rewritten(state, at)


def _written_ms(stat: BlobStat) -> int:
    """When a blob was written, by the earlier of two clocks: that of who made its key, and the store's."""
    return min(born_ms(stat.key), stat.modified_ms)


def _listed(place: Place, bundles: Iterator[str]) -> set[str]:
    """The parts that these bundles list. One that is gone lists nothing: its parts went before it."""
    found: set[str] = set()
    for bundle in list(bundles):
        try:
            with translated_but_missing():
                found.update(keys_in(place.blob, bundle))
        except BlobNotFound:
            continue
        except Corruption as error:
            raise Unavailable(f"bundle {bundle} cannot be read, so nobody knows what it lists: {error}") from error
    return found
