"""Inline rows of a State, merged into one part in the blob store, so that small writes keep having room."""

from __future__ import annotations

from collections.abc import Sequence

from blob import Blob
from persist import commands as c
from persist.batch import HollowBatch, Part, Run
from persist.ids import IdSource, WriterId
from persist.parts import PartReader, PartWriter, ShardSchema
from persist.state import State
from persist.store_errors import translated

FLUSHER = WriterId("w" + "f0" * 16)
PART_BYTES_TARGET = 64 * 1024 * 1024
MEMORY_BYTES = 64 * 1024 * 1024


def flushed(state: State, blob: Blob, ids: IdSource) -> c.MergeRes | None:
    """The merge that moves the longest stretch of inline rows into one part, whose blob is written; or None.

    A part that is never named is an orphan, which maintenance sweeps.
    """
    batches = _stretch(state.trace.batches)
    inputs = [part for batch in batches for part in batch.parts()]
    if len(inputs) < 2 or state.since.element is None:
        return None
    schemas = {number: ShardSchema.from_record(record) for number, record in state.schemas.items()}
    schema = schemas[state.schema_id]
    reader = PartReader(blob, schemas, schema, use_threads=False)
    writer = PartWriter(
        schema=schema,
        schema_id=state.schema_id,
        blob=blob,
        shard_id=state.shard_id,
        writer=FLUSHER,
        ids=ids,
        part_bytes_target=PART_BYTES_TARGET,
    )
    outputs: list[Part] = []
    with translated():
        runs = [Run((part,)) for part in inputs]
        for table in reader.read_range(runs, since=state.since.element, memory_bytes=MEMORY_BYTES):
            outputs += writer.write(table)
        outputs += writer.finish()
    return c.MergeRes(tuple(part.id for part in inputs), (Run(tuple(outputs)),) if outputs else (), state.since)


def _stretch(batches: Sequence[HollowBatch]) -> list[HollowBatch]:
    """Adjacent batches that hold inline rows only (or none), the stretch with the most bytes."""
    best = (0, 0, 0)  # bytes, first, end
    first = size = 0
    for index, batch in enumerate(batches):
        if all(part.is_inline for part in batch.parts()):
            size += batch.inline_size
            best = max(best, (size, first, index + 1))
        else:
            first, size = index + 1, 0
    return list(batches[best[1] : best[2]])


__all__ = ["FLUSHER", "flushed"]
