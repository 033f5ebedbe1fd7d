"""The Spark engine: a merge as a PySpark job. Executors read key ranges and write parts; the driver applies the result.

The same planner, claims, ranges and apply step as everywhere; only the ranges are merged elsewhere. Executors open the
blob store by its URL, so it must be one that all of them reach; they never commit. A range that Spark runs twice leaves
one of its parts as an orphan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from threading import Event, Thread
from typing import Any

from blob import Blob, open_blob
from compactor.engine import EngineSettings, Keep, MergedChunk, MergeJob, RangeMerger
from persist.commit.system import SystemIds
from persist.parts import KeyRange
from persist.parts.read_plan import expand_bundles

HEARTBEAT_POLL_S = 1.0
WAVE_TASKS_PER_CORE = 2  # ranges in one Spark job, for each core: what a crash of the driver can lose


@dataclass(frozen=True)
class SparkEngine:
    """Merges on the executors of `session`. `memory_bytes` of the settings is that of one task."""

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
                taken = ranges[start : start + wave]
                numbered = context.parallelize(list(enumerate(taken)), len(taken))
                collected = _waited(partial(numbered.map(partial(_merge_one, shared)).collect), keep)
                for _, chunk in sorted(collected, key=_number):
                    yield chunk
        finally:
            shared.destroy()


def _number(result: tuple[int, MergedChunk]) -> int:
    return result[0]


def _merge_one(shared: Any, numbered: tuple[int, KeyRange]) -> tuple[int, MergedChunk]:
    """On an executor: merge one key range."""
    number, key_range = numbered
    job, url, settings = shared.value
    blob = open_blob(url)
    try:
        shares = settings.threads
        merger = RangeMerger(job, blob, SystemIds(), settings, shares=shares, reads_ahead=shares > 1)
        return number, merger.merged(key_range, _alone)
    finally:
        blob.close()


def _alone() -> None:
    """Executors renew no claim: the driver does."""


def _waited(work: Callable[[], Any], keep: Keep) -> Any:
    """The result of `work`, which blocks, while the claim is kept from this thread."""
    outcome: list[Any] = []
    failed: list[BaseException] = []
    done = Event()

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    Thread(target=run, name="persist-spark-merge", daemon=True).start()
    while not done.wait(HEARTBEAT_POLL_S):
        keep()
    if failed:
        raise failed[0]
    return outcome[0]


def local_session(name: str = "persist maintain run") -> Any:
    """The active Spark session, or a new one as the environment of Spark configures it."""
    from pyspark.sql import SparkSession

    return SparkSession.builder.appName(name).getOrCreate()
