"""The Spark engine: a merge as a PySpark job. Executors read key ranges and write parts; the driver applies the result.

The planner, the claims, the ranges and the apply step are the same as for other engines. Executors open the blob store
by its URL, so all of them must be able to reach it; they never commit. A range that Spark runs twice leaves orphans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from threading import Thread
from typing import Any

from blob import Blob, open_blob
from compactor.engine import EngineSettings, Keep, MergedChunk, MergeJob, RangeMerger, keep_until_done
from persist.commit.clocks_and_ids import SystemIds
from persist.parts import KeyRange
from persist.parts.read_plan import expand_bundles

WAVE_TASKS_PER_CORE = 2  # ranges per core in one Spark job: the work that a crash of the driver can lose


@dataclass(frozen=True)
class SparkEngine:
    """Merges on the executors of `session`. `memory_bytes` of the settings applies to one task."""

    session: Any
    blob: Blob
    settings: EngineSettings

    def merge(self, job: MergeJob, keep: Keep) -> Iterator[MergedChunk]:
        job = replace(job, runs=tuple(expand_bundles(job.runs, self.blob)))  # once for all ranges
        merger = RangeMerger(job, self.blob, SystemIds(), self.settings, shares=self.settings.threads)
        ranges = merger.ranges(self.settings.chunk_bytes)
        context = self.session.sparkContext
        shared = context.broadcast((job, self.blob.url, self.settings))
        wave = max(1, context.defaultParallelism * WAVE_TASKS_PER_CORE)
        try:
            for start in range(0, len(ranges), wave):
                batch = ranges[start : start + wave]
                numbered = context.parallelize(list(enumerate(batch)), len(batch))
                collected = _run_in_thread(numbered.map(partial(_merge_one, shared)).collect, keep)
                for _, chunk in sorted(collected, key=itemgetter(0)):
                    yield chunk
        finally:
            shared.destroy()


def _merge_one(shared: Any, numbered: tuple[int, KeyRange]) -> tuple[int, MergedChunk]:
    """Merge one key range, on an executor."""
    number, key_range = numbered
    job, url, settings = shared.value
    blob = open_blob(url)
    try:
        shares = settings.threads
        merger = RangeMerger(job, blob, SystemIds(), settings, shares=shares, reads_ahead=shares > 1)
        return number, merger.merge(key_range, lambda: None)  # the driver renews the claim
    finally:
        blob.close()


def _run_in_thread(work: Callable[[], Any], keep: Keep) -> Any:
    """The result of `work`, which blocks, while this thread keeps the claim. A daemon thread may outlive the claim."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="persist-spark-merge", daemon=True).start()
    return keep_until_done(future, keep)


def local_session() -> Any:
    """The active Spark session, or a new one configured by the Spark environment."""
    from pyspark.sql import SparkSession

    return SparkSession.builder.appName("persist maintain run").getOrCreate()
