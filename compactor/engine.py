"""Doing a merge: read the input runs range by range, write key-ordered output; with the allocator's settings."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pyarrow as pa

from persist.core.batch import Part, Run
from persist.core.blob_keys import COMPACTOR
from persist.core.ids import IdSource, ShardId
from persist.core.state import SchemaRecord
from persist.core.truncation import Drops
from persist.parts import (
    ALL_KEYS,
    KeyRange,
    PartReader,
    PartSink,
    PartWriter,
    newest,
    plan_splits,
    read_ahead,
    valid_schemas,
)
from persist.parts.constraint_checks import DuplicateKeyCounter
from persist.parts.part_files import DecodeLimit
from persist.parts.read_plan import expand_bundles

# Doing a merge: read the input runs key range after key range, write key-ordered parts.
#
# An engine takes a `MergeJob` and yields `Chunk`s in key order; each says up to which key everything is written, so a
# merge can be saved chunk by chunk. `LocalEngine` works in this process within a memory budget; the Spark engine
# (`compactor.spark_engine`) sends the same ranges to executors.


RANGES_MAX = 10_000
KEPT_LEAST = 256 * 1024 * 1024  # what row groups that are read together may take, and as much meanwhile
HEARTBEAT_POLL_S = 1.0

Keep = Callable[[], None]
CHUNK_PARTS = 4  # parts of full size that are made durable at once
READ_AHEAD = 1  # tables that are merged in advance


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`memory_bytes` bounds what a merge holds, whatever its size.

    `threads`: key ranges of one merge at a time. With more than one, a merge that is too small for more than one range
    has another thread merge in advance while this one encodes.
    """

    memory_bytes: int = 1024 * 1024 * 1024
    part_bytes_target: int = 128 * 1024 * 1024
    threads: int = 1

    @property
    def chunk_bytes(self) -> int:
        """What is made durable at once (encoded): so much a crash can lose."""
        return CHUNK_PARTS * self.part_bytes_target


@dataclass(frozen=True)
class MergeJob:
    """What to merge, from the key `resume_key` on. Picklable: it may be done elsewhere.

    Times before `since` become the least of `kept` at or beyond them (ascending, all before `since`), or else `since`.
    `drops` are those of the shard: rows that they took away do not stand beside those that came after.
    """

    shard: str
    shard_id: ShardId
    runs: tuple[Run, ...]
    schemas: Mapping[int, SchemaRecord]
    since: int
    resume_key: bytes
    kept: tuple[int, ...] = ()
    drops: Drops = ()

    @property
    def size(self) -> int:
        return sum(part.size for run in self.runs for part in run.parts)


@dataclass(frozen=True, slots=True)
class MergedChunk:
    """Parts that are durable; with those of earlier chunks they hold every row below `resume_key` (None: all rows).

    `crowded` is how many keys have more than one row at some time, where the shard asks that they have one.
    """

    parts: tuple[Part, ...]
    resume_key: bytes | None
    crowded: int = 0


class Engine(Protocol):
    def merge(self, job: MergeJob, keep: Keep) -> Iterator[MergedChunk]:
        """Write the job's rows as parts. `keep` is called from this thread now and then; what it raises ends the merge.

        BlobNotFound: an input is gone, because another has merged it. Errors of the blob store pass through.
        """
        ...


class Blobs(Protocol):
    """What a merge needs of a blob store."""

    def get_range(self, key: str, start: int, length: int) -> bytes: ...

    def stat(self, key: str) -> Any: ...

    def put(self, key: str, data: bytes) -> None: ...


class LocalEngine:
    """Merges in this process, in `threads` key ranges at a time."""

    def __init__(self, blob: Blobs, ids: IdSource, settings: EngineSettings) -> None:
        self._blob = blob
        self._ids = ids
        self._settings = settings

    def merge(self, job: MergeJob, keep: Keep) -> Iterator[MergedChunk]:
        threads = self._settings.threads
        job = replace(job, runs=tuple(expand_bundles(job.runs, self._blob)))  # once for all ranges
        alone = RangeMerger(job, self._blob, self._ids, self._settings, shares=1, reads_ahead=threads > 1)
        ranges = alone.ranges(self._range_bytes(job))
        if threads > 1 and len(ranges) > 1:
            yield from self._merge_in_threads(job, ranges, keep)
            return
        for key_range in ranges:
            yield alone.merged(key_range, keep)

    def _range_bytes(self, job: MergeJob) -> int:
        """Encoded bytes of one key range: few enough for every thread to have work, enough for parts of full size."""
        settings = self._settings
        fair = job.size // settings.threads
        return max(1, min(settings.chunk_bytes, max(fair, settings.part_bytes_target // 8)))

    def _merge_in_threads(self, job: MergeJob, ranges: Sequence[KeyRange], keep: Keep) -> Iterator[MergedChunk]:
        threads, local = self._settings.threads, threading.local()
        stop = threading.Event()

        def check() -> None:
            if stop.is_set():
                raise InterruptedError("the merge was given up")

        def work(key_range: KeyRange) -> MergedChunk:
            if not hasattr(local, "merger"):  # one for each thread: it keeps the footers that it read
                local.merger = RangeMerger(job, self._blob, self._ids, self._settings, shares=threads)
            found: MergedChunk = local.merger.merged(key_range, check)
            return found

        pool = ThreadPoolExecutor(threads, thread_name_prefix="persist-merge")
        waiting = deque(ranges)
        running: deque[Future[MergedChunk]] = deque()
        try:
            while waiting or running:
                while waiting and len(running) < 2 * threads:
                    running.append(pool.submit(work, waiting.popleft()))
                future = running.popleft()
                while not future.done():
                    keep()
                    _wait(future)
                yield future.result()
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)


class RangeMerger:
    """Merges key ranges of one job, one at a time, with one of so many shares of the memory. Not thread-safe.

    `reads_ahead`: another thread merges a table in advance. Else the ranges keep the threads busy already.
    """

    def __init__(
        self,
        job: MergeJob,
        blob: Blobs,
        ids: IdSource,
        settings: EngineSettings,
        *,
        shares: int,
        reads_ahead: bool = False,
    ) -> None:
        self._job = job
        self._reads_ahead = reads_ahead
        memory_bytes = settings.memory_bytes // shares
        # A part being encoded is held twice for a moment: the file that grows and the bytes that are sent.
        self._target = max(1, min(settings.part_bytes_target, memory_bytes // 6))
        reading, alone = max(1, memory_bytes - 3 * self._target), shares == 1
        schemas = valid_schemas(job.schemas)
        schema_id, schema = newest(schemas)
        self._sink = PartSink(schema, schema_id, blob, job.shard_id, COMPACTOR, ids)
        # A part of one tenant must not end the maintenance of all.
        bound = DecodeLimit(max(2 * reading, KEPT_LEAST), max(2 * reading, KEPT_LEAST))
        self._reader = PartReader(blob, schemas, schema, use_threads=alone, memory_bytes=reading, bound=bound)

    def ranges(self, range_bytes: int) -> list[KeyRange]:
        """The job's keys from `resume_key` on, in ranges of about `range_bytes` encoded bytes, none of them empty."""
        job, rest = self._job, KeyRange(self._job.resume_key or None, None)
        count = min(RANGES_MAX, max(1, -(-job.size // range_bytes)))
        planned = plan_splits(job.runs, count, self._sink.schema, self._reader) if count > 1 else [ALL_KEYS]
        # Empty splits (equal boundaries) are left out. The range after them begins where the one before them ended.
        return [found for found in (split.meet(rest) for split in planned) if not found.is_empty]

    def merged(self, key_range: KeyRange, keep: Keep) -> MergedChunk:
        """Merge one key range to its end. Keys that are not unique, though they should be, do not hold it up."""
        crowds = DuplicateKeyCounter(self._sink.schema, self._job.drops) if self._sink.schema.details.unique else None
        parts = tuple(self._merge(key_range, keep, crowds))
        return MergedChunk(parts, key_range.upper, 0 if crowds is None else crowds.finish().count)

    def _merge(self, key_range: KeyRange, keep: Keep, crowds: DuplicateKeyCounter | None) -> Iterator[Part]:
        """The parts written, each as soon as it is durable."""
        writer = PartWriter(self._sink, self._target)
        job = self._job
        tables = self._reader.read_merged(job.runs, job.since, job.kept, key_range)
        for table in read_ahead(tables, READ_AHEAD) if self._reads_ahead else tables:
            keep()
            if crowds is not None:
                crowds.add(table)
            yield from writer.write(table)
        yield from writer.finish()


def _wait(future: Future[MergedChunk]) -> None:
    try:
        future.exception(timeout=HEARTBEAT_POLL_S)
    except TimeoutError:
        return


# The allocator of a process that merges.


def use_system_allocator() -> None:
    """Let Arrow take its memory from the C library, for the whole process: to be called where a process begins.

    Arrow's own allocators keep what they were given back for the next time: 125 MiB of 1.2 GiB at the peak of a merge
    of 10 M updates, 50 of 290 MiB where the budget is 24 MiB. The merge is no slower without them.
    """
    pa.set_memory_pool(pa.system_memory_pool())
