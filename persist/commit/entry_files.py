"""The commit history of a shard: reading a page of it, and moving entries from the State to a file of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np

from blob import BlobNotFound
from persist.attributes.storage import NodeCache
from persist.commit.versions import Versions
from persist.core import commands as c
from persist.core.errors import Corruption
from persist.core.ids import IdSource, SeqNo
from persist.core.keys import entries_key
from persist.core.recorded import Committed, EntryFile, HistoryPage, Place, Told, to_merge
from persist.core.state import State
from persist.core.transitions.recording import is_maintenance
from persist.formats.entry_frames import FileWriter, descending, read_block, read_index
from persist.formats.store_errors import translated, translated_but_missing

log = logging.getLogger("persist.history")

CACHED_BYTES_MAX = 256 * 1024  # of a file that was written: the next one may take it in
LOOKED_AT_MAX = 20_000  # entries of maintenance that one page skips; then it ends early, and says where it goes on


class EntryFiles:
    """The files of one location. Thread-safe. Raises the errors of the store."""

    def __init__(self, versions: Versions, ids: IdSource, cache: NodeCache) -> None:
        self._versions = versions
        self._ids = ids
        self._cache = cache

    def page(self, state: State, before: Place | None, limit: int, maintenance: bool) -> HistoryPage:
        """At most `limit` entries of the State's history before that place, newest first.

        Raises BlobNotFound where a file is gone, and Corruption.
        """
        told: list[Told] = []
        looked_at = 0
        for seqno, commit in self._commits(state, before.seqno if before is not None else state.seqno):
            for number in reversed(range(len(commit.entries))):
                place = Place(seqno, number)
                if before is not None and (seqno, number) >= (before.seqno, before.number):
                    continue
                if len(told) == limit or looked_at == LOOKED_AT_MAX:
                    return HistoryPage(state.shard_id, tuple(told), Place(seqno, number + 1))
                looked_at += 1
                if maintenance or not is_maintenance(commit.entries[number]):
                    told.append(Told(place, commit.at_ms, commit.entries[number]))
        return HistoryPage(state.shard_id, tuple(told))

    def flush(self, state: State) -> c.FlushEntries | None:
        """Write the entries of the State to a file, together with newer files where that leaves fewer of them.

        None: there is nothing to do. A file that cannot be read is left as it is.
        """
        if not state.entries:
            return None
        recent = sorted(state.entries.items())
        entries = sum(len(commit.entries) for _, commit in recent)
        merged = to_merge(state.entry_files, entries, _checked_ms(state), state.settings.history_ms)
        writer = FileWriter(self._versions.format_version)
        try:
            for file in merged:
                writer.add_file(self._whole(file), file.index_at)
        except (BlobNotFound, Corruption) as error:
            log.error("commit history cannot be read", extra={"shard": state.name, "why": str(error)})
            merged, writer = (), FileWriter(self._versions.format_version)
        writer.add(recent)
        data, index_at, blocks = writer.finish()
        key = entries_key(state.shard_id, self._ids)
        with translated():
            self._versions.blob.put(key, data)
        if len(data) <= CACHED_BYTES_MAX:
            self._cache.put((key, 0), np.frombuffer(data, np.uint8))  # its `size` is in bytes
        begun = [file.begun_ms for file in merged if file.begun_ms]
        file = EntryFile(
            key,
            len(data),
            index_at,
            sum(at.entries for at in blocks),
            blocks[0].first,
            blocks[-1].last,
            min(begun, default=0),
        )
        return c.FlushEntries(tuple(file.key for file in merged), recent[0][0], recent[-1][0], file)

    def _commits(self, state: State, before: SeqNo) -> Iterator[tuple[SeqNo, Committed]]:
        """The commits up to `before`, newest first."""
        yield from ((seqno, state.entries[seqno]) for seqno in sorted(state.entries, reverse=True) if seqno <= before)
        for file in reversed(state.entry_files):
            if file.first > before:
                continue
            index = read_index(self._read(file, file.index_at, file.size - file.index_at))
            for at in descending(index.blocks, before):
                commits = read_block(self._read(file, at.offset, at.length), at)
                yield from ((seqno, commit) for seqno, commit in reversed(commits) if seqno <= before)

    def _whole(self, file: EntryFile) -> bytes:
        """A file that is to be merged: this process may have written it, a short while ago."""
        cached = self._cache.get((file.key, 0))
        return self._read(file, 0, file.size) if cached is None else cached.tobytes()

    def _read(self, file: EntryFile, start: int, length: int) -> bytes:
        with translated_but_missing():
            return self._versions.blob.get_range(file.key, start, length)


def _checked_ms(state: State) -> int:
    """The newest checked clock of which the State tells; 0: none yet. The seal may be that of a point long ago."""
    return max([state.seal.sealed_ms, *(file.until_ms for file in state.entry_files[-1:])])
