"""Commit history and token outcomes that have moved from the State to files."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import numpy as np

from blob import Blob, BlobNotFound
from persist.attributes.node_store import NodeCache, StaleIndex
from persist.commit.state_loader import Versions
from persist.commit.system import probed
from persist.core import commands as c
from persist.core.audit_log import Committed, EntryFile, EntryPlace, HistoryPage, PlacedEntry, entry_files_to_merge
from persist.core.blob_keys import entries_key, outcomes_key
from persist.core.dedup import OutcomeFile, TokenOutcome, births, key_of, outcome_files_to_merge
from persist.core.errors import Corruption
from persist.core.ids import IdSource, SeqNo
from persist.core.state import Policy, State
from persist.core.transitions.audit_recording import (
    OUTCOME_KEPT_MS,
    is_alone,
    is_maintenance,
    is_outcome_file_outlived,
    outcome_flush_is_due,
    to_flush,
)
from persist.formats.outcome_frames import HEADER_BYTES, PREFIX_BYTES, decode, encode, places, read_prefixes
from persist.formats.state_frames import FileWriter, descending, read_block, read_index
from persist.formats.store_errors import translated, translated_but_missing

# The commit history of a shard: reading a page of it, and moving entries from the State to a file of its own.


log = logging.getLogger("persist.history")

CACHED_BYTES_MAX = 256 * 1024  # of a file that was written: the next one may take it in
LOOKED_AT_MAX = 20_000  # entries of maintenance that one page skips; then it ends early, and says where it goes on


class EntryFiles:
    """The files of one location. Thread-safe. Raises the errors of the store."""

    def __init__(self, versions: Versions, ids: IdSource, cache: NodeCache) -> None:
        self._versions = versions
        self._ids = ids
        self._cache = cache

    def page(self, state: State, before: EntryPlace | None, limit: int, maintenance: bool) -> HistoryPage:
        """At most `limit` entries of the State's history before that place, newest first.

        Raises BlobNotFound where a file is gone, and Corruption.
        """
        told: list[PlacedEntry] = []
        looked_at = 0
        for seqno, commit in self._commits(state, before.seqno if before is not None else state.seqno):
            for number in reversed(range(len(commit.entries))):
                place = EntryPlace(seqno, number)
                if before is not None and (seqno, number) >= (before.seqno, before.number):
                    continue
                if len(told) == limit or looked_at == LOOKED_AT_MAX:
                    return HistoryPage(state.shard_id, tuple(told), EntryPlace(seqno, number + 1))
                looked_at += 1
                if maintenance or not is_maintenance(commit.entries[number]):
                    told.append(PlacedEntry(place, commit.at_ms, commit.entries[number]))
        return HistoryPage(state.shard_id, tuple(told))

    def flush(self, state: State) -> c.FlushEntries | None:
        """Write the entries of the State to a file, together with newer files where that leaves fewer of them.

        None: there is nothing to do. A file that cannot be read is left as it is.
        """
        if not state.entries:
            return None
        recent = sorted(state.entries.items())
        entries = sum(len(commit.entries) for _, commit in recent)
        merged = entry_files_to_merge(state.entry_files, entries, _checked_ms(state), state.settings.history_ms)
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


# Files of outcomes in the blob store: what a commit must know of them, and moving outcomes from the State into one.


class OutcomeFiles:
    """The files of one location. Thread-safe. Raises StaleIndex when a file is gone, and the errors of the store."""

    def __init__(self, blob: Blob, ids: IdSource, cache: NodeCache) -> None:
        self._blob = blob
        self._ids = ids
        self._cache = cache

    def remembered(self, state: State, commands: Iterable[c.Command]) -> dict[str, TokenOutcome]:
        """What the files hold of the tokens of these commands, and of writers that are not registered."""
        found = {}
        for command in commands:
            key = _key_in_files(state, command)
            if key is None or key in state.outcomes:
                continue
            for file in reversed(state.outcome_files):
                if file.may_hold(key) and (outcome := self._lookup(file, key)) is not None:
                    found[key] = outcome
                    break
        return found

    def flush(self, state: State, policy: Policy) -> c.FlushOutcomes | None:
        """Write the recent outcomes of the State to a file, together with newer files where that leaves fewer of them.

        None: there is nothing to do.
        """
        if not outcome_flush_is_due(state, policy):
            return None
        outcomes = to_flush(state)
        if len(outcomes) < policy.overlay_flush_at:
            return c.FlushOutcomes((), (), None, self._store_ms(state))
        merged = outcome_files_to_merge(state.outcome_files, len(outcomes), state.lease_now_ms, OUTCOME_KEPT_MS)
        data = encode(outcomes, [self._read(file, 0, file.size) for file in merged])
        key = outcomes_key(state.shard_id, self._ids)
        with translated():
            self._blob.put(key, data)
        ages = [outcome.at_ms for outcome in outcomes.values()]
        born = births(outcomes)
        file = OutcomeFile(
            key,
            len(data),
            len(outcomes) + sum(file.count for file in merged),
            min([*ages, *(file.first_ms for file in merged)]),
            max([*ages, *(file.last_ms for file in merged)]),
            min([*born, *(file.born_first for file in merged if file.born_last)], default=0),
            max([*born, *(file.born_last for file in merged)], default=0),
            len(born) < len(outcomes) or any(file.free for file in merged),
        )
        taken = tuple(file.key for file in merged)
        return c.FlushOutcomes(taken, tuple(outcomes), file, self._store_ms(state))

    def _store_ms(self, state: State) -> int | None:
        """The store's time, where a file is to be forgotten."""
        if any(is_outcome_file_outlived(file, state.lease_now_ms) for file in state.outcome_files):
            return probed(self._blob, self._ids)
        return None

    def _lookup(self, file: OutcomeFile, key: str) -> TokenOutcome | None:
        place = (file.key, 0)
        cached = self._cache.get(place)
        if cached is None:
            prefixes = read_prefixes(self._read(file, 0, HEADER_BYTES + PREFIX_BYTES * file.count))
            cached = prefixes.view(np.uint8)  # its `size` is in bytes
            self._cache.put(place, cached)
        start, length = places(cached.view(np.uint32), key)
        return dict(decode(self._read(file, start, length))).get(key) if length else None

    def _read(self, file: OutcomeFile, start: int, length: int) -> bytes:
        try:
            with translated_but_missing():
                return self._blob.get_range(file.key, start, length)
        except BlobNotFound as error:
            raise StaleIndex(str(error)) from error


def _key_in_files(state: State, command: c.Command) -> str | None:
    """The id under which a file may remember something that the command must know."""
    if isinstance(command, c.WriterCommand) and is_alone(command):
        return key_of(command.token)
    if not isinstance(command, (c.WriterCommand, c.ExpireWriter)):
        return None
    return None if command.writer in state.writers else key_of(command.writer)
