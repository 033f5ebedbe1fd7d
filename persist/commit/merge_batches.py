"""Merging adjacent batches into one part in the blob store, in this process: for inline rows and other small merges."""

from __future__ import annotations

from collections.abc import Sequence

from blob import Blob
from persist.core import commands as c
from persist.core.batch import HollowBatch, Part, Run
from persist.core.ids import IdSource, WriterId
from persist.core.state import State
from persist.formats.store_errors import translated
from persist.parts import PartReader, PartWriter, ShardSchema

FLUSHER = WriterId("w" + "f0" * 16)
PART_BYTES_TARGET = 64 * 1024 * 1024
MEMORY_BYTES = 64 * 1024 * 1024


def merged(state: State, batches: Sequence[HollowBatch], blob: Blob, ids: IdSource) -> c.MergeResult | None:
    """The merge of these adjacent batches into one part, whose blob is written; None if there is nothing to merge.

    A part that is never named is an orphan, which maintenance sweeps. Raises Unavailable, and Corruption also
    when an input is gone because another has merged it.
    """
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
    runs = [run for batch in batches for run in batch.runs]
    with translated():
        for table in reader.read_range(runs, since=state.since.element, memory_bytes=MEMORY_BYTES):
            outputs += writer.write(table)
        outputs += writer.finish()
    return c.MergeResult(tuple(part.id for part in inputs), (Run(tuple(outputs)),) if outputs else (), state.since)
