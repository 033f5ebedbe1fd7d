"""Whether the blobs that a State names besides parts are sound: each is read whole, and compared with its checksums."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from blob import Blob, BlobNotFound
from persist.attributes.node_codec import check_nodes
from persist.core.attribute import IndexChunk
from persist.core.audit_log import EntryFile
from persist.core.dedup import OutcomeFile
from persist.core.errors import Corruption
from persist.core.state import State, auxiliary_blob_keys
from persist.formats.entry_frames import read_block, read_index
from persist.formats.outcome_frames import HEADER_BYTES, PREFIX_BYTES, decode, read_prefixes
from persist.formats.state_frames import Build, decode_state
from persist.formats.store_errors import translated, translated_but_missing

Check = Callable[[bytes], object]


def auxiliary_faults(
    state: State, blob: Blob, build: Build, takes: Callable[[str], bool] = lambda key: True
) -> Iterator[tuple[str, str]]:
    """Of each blob that `takes` names and that is missing or damaged its key, and what is wrong.

    Raises Unavailable, UpgradeNeeded. Memory: one such blob.
    """
    checks = dict(_checks(state, build))
    for key in filter(takes, dict.fromkeys(auxiliary_blob_keys(state))):
        check = checks.get(key)
        try:
            if check is not None:
                with translated_but_missing():
                    data = blob.get(key)
                check(data)
                continue
            with translated():
                there = blob.stat(key) is not None
        except BlobNotFound:
            there = False
        except Corruption as error:
            yield key, f"the blob {key} is damaged: {error.message}"
            continue
        if not there:
            yield key, f"the blob {key} is not there"


def _checks(state: State, build: Build) -> Iterator[tuple[str, Check]]:
    for first, chunk in state.attribute_chunks.items():
        yield chunk.key, _chunk_check(chunk, first)
    for outcomes in state.outcome_files:
        yield outcomes.key, _outcomes_check(outcomes)
    for entries in state.entry_files:
        yield entries.key, _entries_check(entries)
    for rollup in state.rollups.values():
        yield rollup.key, lambda data: decode_state(data, build)


def _chunk_check(chunk: IndexChunk, first: int) -> Check:
    def check(data: bytes) -> None:
        _check_size(data, chunk.length)
        check_nodes(data, first)

    return check


def _outcomes_check(file: OutcomeFile) -> Check:
    def check(data: bytes) -> None:
        _check_size(data, file.size)
        read_prefixes(data)
        if sum(1 for _ in decode(data[HEADER_BYTES + PREFIX_BYTES * file.count :])) != file.count:
            raise Corruption(f"it does not have {file.count} outcomes")

    return check


def _entries_check(file: EntryFile) -> Check:
    def check(data: bytes) -> None:
        _check_size(data, file.size)
        for at in read_index(data[file.index_at :]).blocks:
            read_block(data[at.offset : at.offset + at.length], at)

    return check


def _check_size(data: bytes, size: int) -> None:
    if len(data) != size:
        raise Corruption(f"it has {len(data)} bytes, not {size}")
