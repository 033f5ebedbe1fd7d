"""Merge engines: read the input runs key range by key range and write key-ordered parts.

An engine takes a `MergeJob` and yields `MergedChunk`s in key order; each says up to which key everything is written, so
the progress of a merge can be saved chunk by chunk. `LocalEngine` runs in this process within a memory budget; the
Spark engine (`compactor.spark_engine`) sends the same ranges to executors.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import pyarrow as pa

from blob import Blob
from persist.core.batch import Part, Run
from persist.core.blob_keys import COMPACTOR
from persist.core.ids import IdSource, ShardId
from persist.core.state import SchemaRecord
from persist.core.truncations_and_drops import Drops
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

RANGES_MAX = 10_000
READ_BYTES_MIN = 256 * 1024 * 1024  # the least bound for row groups that are read together, and for decoding them
HEARTBEAT_POLL_S = 1.0

Keep = Callable[[], None]
CHUNK_PARTS = 4  # parts of full size that become durable together

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`memory_bytes` bounds the memory of a merge of any size.

    `threads`: key ranges of one merge in parallel. With more than one, a merge of only one range uses a second thread
    that merges in advance while the first one encodes.
    """

    memory_bytes: int = 1024 * 1024 * 1024
    part_bytes_target: int = 128 * 1024 * 1024
    threads: int = 1

    @property
    def chunk_bytes(self) -> int:
        """Encoded bytes that become durable together: the work that a crash can lose."""
        return CHUNK_PARTS * self.part_bytes_target


@dataclass(frozen=True)
class MergeJob:
    """A merge to do, from the key `resume_key` on. Picklable.

    Times before `since` become the least of `kept` at or beyond them (ascending, all before `since`), or else `since`.
    `drops` are those of the shard: rows that they deleted do not violate unique keys together with later rows.
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
    """Durable parts; with those of earlier chunks they contain every row below `resume_key` (None: all rows).

    `crowded` is the number of keys that have more than one row at some time although the shard has unique keys.
    """

    parts: tuple[Part, ...]
    resume_key: bytes | None
    crowded: int = 0


class Engine(Protocol):
    def merge(self, job: MergeJob, keep: Keep) -> Iterator[MergedChunk]:
        """Write the job's rows as parts. `keep` is called regularly from this thread; its exceptions end the merge.

        BlobNotFound: an input was deleted, because another worker has merged it. Errors of the blob store pass through.
        """
        ...


@dataclass(frozen=True)
class LocalEngine:
    """Merges in this process, `threads` key ranges in parallel."""

    blob: Blob
    ids: IdSource
    settings: EngineSettings

    def merge(self, job: MergeJob, keep: Keep) -> Iterator[MergedChunk]:
        threads = self.settings.threads
        job = replace(job, runs=tuple(expand_bundles(job.runs, self.blob)))  # once for all ranges
        merger = RangeMerger(job, self.blob, self.ids, self.settings, shares=1, reads_ahead=threads > 1)
        # Encoded bytes of one key range: few enough to occupy every thread, enough for parts of full size.
        thread_bytes = max(job.size // threads, self.settings.part_bytes_target // 8)
        ranges = merger.ranges(max(1, min(self.settings.chunk_bytes, thread_bytes)))
        if threads > 1 and len(ranges) > 1:
            yield from self._merge_in_threads(job, ranges, keep)
            return
        for key_range in ranges:
            yield merger.merge(key_range, keep)

    def _merge_in_threads(self, job: MergeJob, ranges: Sequence[KeyRange], keep: Keep) -> Iterator[MergedChunk]:
        threads, local = self.settings.threads, threading.local()
        stop = threading.Event()

        def check() -> None:
            if stop.is_set():
                raise InterruptedError("the merge was aborted")

        def merge_range(key_range: KeyRange) -> MergedChunk:
            if not hasattr(local, "merger"):  # one per thread, because it caches footers
                local.merger = RangeMerger(job, self.blob, self.ids, self.settings, shares=threads)
            chunk: MergedChunk = local.merger.merge(key_range, check)
            return chunk

        pool = ThreadPoolExecutor(threads, thread_name_prefix="persist-merge")
        waiting = deque(ranges)
        running: deque[Future[MergedChunk]] = deque()
        try:
            while waiting or running:
                while waiting and len(running) < 2 * threads:
                    running.append(pool.submit(merge_range, waiting.popleft()))
                yield keep_until_done(running.popleft(), keep)
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)


class RangeMerger:
    """Merges key ranges of one job, one at a time, with 1 / `shares` of the memory. Not thread-safe.

    `reads_ahead`: another thread merges a table in advance. Not needed if several ranges are merged in parallel.
    """

    def __init__(
        self,
        job: MergeJob,
        blob: Blob,
        ids: IdSource,
        settings: EngineSettings,
        *,
        shares: int,
        reads_ahead: bool = False,
    ) -> None:
        self._job = job
        self._reads_ahead = reads_ahead
        memory_bytes = settings.memory_bytes // shares
        # A part that is being encoded is briefly in memory twice: the growing file and the bytes that are sent.
        self._target = max(1, min(settings.part_bytes_target, memory_bytes // 6))
        read_bytes = max(1, memory_bytes - 3 * self._target)
        schemas = valid_schemas(job.schemas)
        schema_id, schema = newest(schemas)
        self._sink = PartSink(schema, schema_id, blob, job.shard_id, COMPACTOR, ids)
        # A part of one tenant must not end the maintenance of all tenants.
        bound = DecodeLimit(max(2 * read_bytes, READ_BYTES_MIN), max(2 * read_bytes, READ_BYTES_MIN))
        self._reader = PartReader(blob, schemas, schema, use_threads=shares == 1, memory_bytes=read_bytes, bound=bound)

    def ranges(self, range_bytes: int) -> list[KeyRange]:
        """The job's keys from `resume_key` on, in non-empty ranges of about `range_bytes` encoded bytes."""
        job, rest = self._job, KeyRange(self._job.resume_key or None, None)
        count = min(RANGES_MAX, max(1, -(-job.size // range_bytes)))
        planned = plan_splits(job.runs, count, self._sink.schema, self._reader) if count > 1 else [ALL_KEYS]
        # Empty splits (equal boundaries) are omitted; the next range begins where the previous one ended.
        return [clipped for split in planned if not (clipped := split.meet(rest)).is_empty]

    def merge(self, key_range: KeyRange, keep: Keep) -> MergedChunk:
        """Merge one key range completely. Violations of unique keys are counted and do not stop it."""
        schema = self._sink.schema
        duplicates = DuplicateKeyCounter(schema, self._job.drops) if schema.details.unique else None
        parts = tuple(self._write_parts(key_range, keep, duplicates))
        return MergedChunk(parts, key_range.upper, 0 if duplicates is None else duplicates.finish().count)

    def _write_parts(self, key_range: KeyRange, keep: Keep, duplicates: DuplicateKeyCounter | None) -> Iterator[Part]:
        """The parts written, each as soon as it is durable."""
        writer = PartWriter(self._sink, self._target)
        job = self._job
        tables = self._reader.read_merged(job.runs, job.since, job.kept, key_range)
        for table in read_ahead(tables) if self._reads_ahead else tables:
            keep()
            if duplicates is not None:
                duplicates.add(table)
            yield from writer.write(table)
        yield from writer.finish()


def keep_until_done(future: Future[T], keep: Keep) -> T:
    """The result of `future`. Meanwhile `keep` is called at least every HEARTBEAT_POLL_S seconds."""
    while not future.done():
        keep()
        wait([future], HEARTBEAT_POLL_S)
    return future.result()


def use_system_allocator() -> None:
    """Let Arrow allocate memory from the C library in the whole process. Call it when the process starts.

    Arrow's own allocators cache freed memory: 125 MiB of 1.2 GiB at the peak of a merge of 10 M updates, 50 of 290 MiB
    with a budget of 24 MiB. The merge is not slower without them.
    """
    pa.set_memory_pool(pa.system_memory_pool())
