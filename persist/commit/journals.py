"""Journals of publications that show a shard before its log begins: an erasure waits until there are none."""

from __future__ import annotations

from collections.abc import Iterator

from blob import BlobNotFound, BlobStat
from persist.commit.place import Place
from persist.commit.publishing import Publisher, PublishSettings
from persist.core.errors import Corruption, Unavailable
from persist.core.ids import SeqNo
from persist.core.publications import JOURNALS, Journal, is_journal_key
from persist.formats.publication_frames import decode_journal
from persist.formats.state_frames import decode_diff
from persist.formats.store_errors import translated, translated_but_missing


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
