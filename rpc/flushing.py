"""Inline rows leave the State while the server works, so that small writes keep having room there.

Rows inside the State make a small append one compare-and-set; there is room for 1 MiB a shard. Maintenance moves them
out now and then, which is not soon enough for a busy shard: then each commit would have to write its own blob. So
the server merges them into one part as soon as they take a quarter of the room. Losing a flush is safe: maintenance
does it then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from persist import commands as c
from persist.batch import HollowBatch, Part, Run
from persist.errors import PersistError
from persist.ids import WriterId
from persist.location import Location
from persist.machine import Machine
from persist.parts import PartReader, PartWriter, ShardSchema
from persist.state import State
from persist.store_errors import translated

FLUSHER = WriterId("w" + "f0" * 16)
ROOM_PART = 4  # a flush begins when inline rows take this part of their room
THREADS = 2
PART_BYTES_TARGET = 64 * 1024 * 1024
MEMORY_BYTES = 64 * 1024 * 1024
_log = logging.getLogger("persist.rpc")


class InlineFlusher:
    """Flushes shards in the background, each at most once at a time. Thread-safe."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="persist-flush")
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        self.flushes = 0

    def consider(self, machine: Machine) -> None:
        """Begin a flush if the shard's inline rows take much of their room. Never blocks."""
        state = machine.cached
        if state is None or state.trace.inline_bytes * ROOM_PART < machine.policy.inline_shard_bytes_max:
            return
        with self._lock:
            if machine.name in self._busy:
                return
            self._busy.add(machine.name)
        try:
            self._pool.submit(self._run, machine)
        except RuntimeError:  # closing
            self._busy.discard(machine.name)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, machine: Machine) -> None:
        try:
            state = machine.state()
            command = flushed(state, self._location)
            if command is not None:
                machine.apply(command)
                self.flushes += 1
        except PersistError as error:
            _log.warning("inline rows of shard %s were not flushed: %s", machine.name, error)
        except Exception:
            _log.exception("flushing the inline rows of shard %s failed", machine.name)
        finally:
            self._busy.discard(machine.name)


def flushed(state: State, location: Location) -> c.MergeRes | None:
    """The merge that moves the longest stretch of inline rows into one part, whose blob is written; or None.

    A part that is never named is an orphan, which maintenance sweeps.
    """
    batches = _stretch(state.trace.batches)
    inputs = [part for batch in batches for part in batch.parts()]
    if len(inputs) < 2 or state.since.element is None:
        return None
    schemas = {number: ShardSchema.from_record(record) for number, record in state.schemas.items()}
    schema = schemas[state.schema_id]
    reader = PartReader(location.blob, schemas, schema, use_threads=False)
    writer = PartWriter(
        schema=schema,
        schema_id=state.schema_id,
        blob=location.blob,
        shard_id=state.shard_id,
        writer=FLUSHER,
        ids=location.ids,
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


__all__ = ["FLUSHER", "InlineFlusher", "flushed"]
