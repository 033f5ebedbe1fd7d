"""Files of entries that were moved out of the State: looking entries up, and flushing recent ones to a new file."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from blob import Blob, BlobNotFound
from persist.attributes.node_store import NodeCache, StaleIndex
from persist.commit.state_loader import Versions
from persist.core import commands as c
from persist.core.audit_log import (
    Committed,
    EntryPlace,
    HistoryPage,
    PlacedEntry,
    TokenOutcome,
    births,
    born_ms,
    key_of,
)
from persist.core.blob_keys import spill_key
from persist.core.errors import Corruption
from persist.core.ids import IdSource, SeqNo
from persist.core.spill import ENTRIES, OUTCOMES, SpillFile, SpillKind, files_to_merge
from persist.core.state import Policy, State
from persist.core.transitions.outcomes_and_audit import is_alone, is_flush_due, is_maintenance, kept_until, to_flush
from persist.formats.spill_frames import LAYOUTS, Pair, RunIndex, decode_run, encode_run
from persist.formats.store_errors import translated, translated_but_missing

log = logging.getLogger("persist.history")

CACHED_BYTES_MAX = 256 * 1024  # of a written file, since the next flush may merge it
LOOKED_AT_MAX = 20_000  # maintenance entries that one page skips; then it ends early, with the place of the next page


class SpillReader:
    """Reads the files of one location. Thread-safe.

    Raises StaleIndex if a file is gone, Corruption, UpgradeNeeded, and the errors of the store.
    """

    def __init__(self, blob: Blob, cache: NodeCache) -> None:
        self._blob = blob
        self._cache = cache

    def remembered(self, state: State, commands: Iterable[c.Command]) -> dict[str, TokenOutcome]:
        """The outcomes in files of the tokens of these commands, and of writers that are not registered."""
        outcomes = {}
        for command in commands:
            key = _key_in_files(state, command)
            if key is None or key in state.outcomes:
                continue
            for file in reversed(state.files_of(OUTCOMES)):
                if file.may_hold(born_ms(key)) and (outcome := self._outcome(file, key)) is not None:
                    outcomes[key] = outcome
                    break
        return outcomes

    def page(self, state: State, before: EntryPlace | None, limit: int, maintenance: bool) -> HistoryPage:
        """At most `limit` entries of the State's history before that place, newest first."""
        entries: list[PlacedEntry] = []
        looked_at = 0
        for seqno, commit in self._commits(state, before.seqno if before is not None else state.seqno):
            for number in reversed(range(len(commit.entries))):
                place = EntryPlace(seqno, number)
                if before is not None and (seqno, number) >= (before.seqno, before.number):
                    continue
                if len(entries) == limit or looked_at == LOOKED_AT_MAX:
                    return HistoryPage(state.shard_id, tuple(entries), EntryPlace(seqno, number + 1))
                looked_at += 1
                if maintenance or not is_maintenance(commit.entries[number]):
                    entries.append(PlacedEntry(place, commit.at_ms, commit.entries[number]))
        return HistoryPage(state.shard_id, tuple(entries))

    def whole(self, kind: SpillKind, file: SpillFile) -> Iterator[Pair]:
        """All entries of a file, ascending by key; from the cache if this process has just written it."""
        cached = self._cache.get((file.key, 0))
        data = self._read(file, 0, file.size) if cached is None else cached.tobytes()
        return decode_run(data, LAYOUTS[kind], file.index_at)

    def _outcome(self, file: SpillFile, key: str) -> TokenOutcome | None:
        layout, index = LAYOUTS[OUTCOMES], self._index(OUTCOMES, file)
        raw = layout.to_key(key)
        block = index.block_of(raw) if index.may_hold(raw) else -1
        if block < 0:
            return None
        data = dict(index.pairs(block, self._read(file, *index.place(block)))).get(raw)
        return None if data is None else layout.value(data)

    def _commits(self, state: State, before: SeqNo) -> Iterator[tuple[SeqNo, Committed]]:
        """The commits up to `before`, newest first."""
        yield from ((seqno, state.entries[seqno]) for seqno in sorted(state.entries, reverse=True) if seqno <= before)
        layout = LAYOUTS[ENTRIES]
        last = layout.to_key(before)
        for file in reversed(state.files_of(ENTRIES)):
            if file.first > before:
                continue
            index = self._index(ENTRIES, file)
            for block in range(index.block_of(last), -1, -1):
                for key, data in reversed(index.pairs(block, self._read(file, *index.place(block)))):
                    if key <= last:
                        yield layout.from_key(key), layout.value(data)

    def _index(self, kind: SpillKind, file: SpillFile) -> RunIndex:
        place = (file.key, file.index_at)
        index: RunIndex | None = self._cache.get(place)
        if index is None:
            data = self._read(file, file.index_at, file.size - file.index_at)
            index = RunIndex(data, LAYOUTS[kind], file.index_at)
            self._cache.put(place, index)
        return index

    def _read(self, file: SpillFile, start: int, length: int) -> bytes:
        try:
            with translated_but_missing():
                return self._blob.get_range(file.key, start, length)
        except BlobNotFound as error:
            raise StaleIndex(str(error)) from error


class SpillWriter:
    """Flushes recent entries to files. Thread-safe. Raises the errors of the store."""

    def __init__(self, versions: Versions, ids: IdSource, cache: NodeCache) -> None:
        self._versions = versions
        self._ids = ids
        self._cache = cache
        self._reader = SpillReader(versions.blob, cache)

    def flush(self, state: State, kind: SpillKind, policy: Policy) -> c.Flush | None:
        """Write recent entries to a new file, merged with the newest files if that reduces their number.

        None: no flush is due. A file that cannot be read is left as it is.
        """
        recent = to_flush(state, kind)
        if not recent or not is_flush_due(state, kind, policy, in_turn=True):
            return None
        layout, count, (now_ms, kept_ms) = LAYOUTS[kind], _count(kind, recent), kept_until(state, kind)
        merged = files_to_merge(state.files_of(kind), count, now_ms, kept_ms)
        try:
            older = dict(pair for file in merged for pair in self._reader.whole(kind, file))
        except (StaleIndex, Corruption) as error:
            log.error(f"a file of {kind} cannot be read", extra={"shard": state.name, "why": str(error)})
            merged, older = (), {}
        pairs = sorted((older | dict(layout.pair(key, value) for key, value in recent.items())).items())
        data, index_at = encode_run(pairs, layout, self._versions.format_version)
        key = spill_key(state.shard_id, self._ids)
        with translated():
            self._versions.blob.put(key, data)
        if len(data) <= CACHED_BYTES_MAX:
            self._cache.put((key, 0), np.frombuffer(data, np.uint8))  # its `size` is in bytes
        numbers = list(recent) if kind == ENTRIES else births(recent)
        file = SpillFile(
            key,
            len(data),
            index_at,
            count + sum(file.count for file in merged),
            min([*numbers, *(file.first for file in merged if file.last)], default=0),
            max([*numbers, *(file.last for file in merged)], default=0),
            len(numbers) < len(recent) or any(file.unnumbered for file in merged),
            min((file.begun_ms for file in merged if file.begun_ms), default=0),
        )
        return c.Flush(kind, tuple(file.key for file in merged), tuple(recent), file)


def _count(kind: SpillKind, recent: Mapping[Any, Any]) -> int:
    return sum(len(commit.entries) for commit in recent.values()) if kind == ENTRIES else len(recent)


def _key_in_files(state: State, command: c.Command) -> str | None:
    """The id of the outcome that the command needs and that a file may hold; None: there is none."""
    if isinstance(command, c.WriterCommand) and is_alone(command):
        return key_of(command.token)
    if not isinstance(command, (c.WriterCommand, c.ExpireWriter)):
        return None
    return None if command.writer in state.writers else key_of(command.writer)
