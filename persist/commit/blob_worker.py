"""Does what commits and upkeep ask of the blob store: a task goes in, the command in which it ends comes out.

A blob that is never named, because its command was refused or lost, is an orphan, which maintenance sweeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from blob import Blob, BlobNotFound
from persist.attributes.index import AttributeIndex
from persist.commit.bundler import Bundler
from persist.commit.commit_plan import BundleUp, Count, FlushHistory, FlushIndex, FlushTokens, Merge, RollUp, Spill
from persist.commit.counters import MachineMetrics
from persist.commit.entry_files import EntryFiles
from persist.commit.outcome_files import OutcomeFiles
from persist.commit.versions import Versions
from persist.core import commands as c
from persist.core.batch import HollowBatch, Part, Run
from persist.core.errors import Corruption
from persist.core.ids import IdSource
from persist.core.invariants import check_state
from persist.core.keys import FLUSHER
from persist.core.record import replace
from persist.core.state import Policy, State, kept_below
from persist.formats.store_errors import translated, translated_but_missing
from persist.parts import PartReader, PartSink, PartWriter, newest, sound_schemas, spill_inline
from persist.parts.files import Bound, Files

PART_BYTES_TARGET = 64 * 1024 * 1024
MEMORY_BYTES = 64 * 1024 * 1024

WorkTask = Count | Spill | Merge | BundleUp | RollUp | FlushIndex | FlushTokens | FlushHistory


class WorkerFiles(NamedTuple):
    """What State is kept in blobs of its own."""

    attributes: AttributeIndex
    outcomes: OutcomeFiles
    entries: EntryFiles


class BlobWorker:
    """Works for one shard. Thread-safe. Every method may raise Unavailable."""

    def __init__(
        self,
        versions: Versions,
        files: WorkerFiles,
        ids: IdSource,
        metrics: MachineMetrics,
        policy: Policy,
    ) -> None:
        self._versions = versions
        self._files = files
        self._ids = ids
        self._bundler = Bundler(versions, ids, policy)
        self._metrics = metrics

    def done(self, task: WorkTask, newest: State, refresh: Callable[[], State] | None = None) -> c.Command | None:
        """The command in which the task ends; None if there is nothing to do any more.

        `newest` is the newest State that this process knows. `refresh` reads what others have committed since, by which
        a blob may be gone that the task needs.
        """
        if isinstance(task, Count):
            return self._counted(task)
        if isinstance(task, Spill):
            return self._spilled(task)
        if isinstance(task, Merge):
            if newest is not task.state and newest.trace.covering(task.inputs) is None:
                return None  # another has merged these batches since the task was set
            try:
                merge = merged(task.state, task.batches, self._versions.blob, self._ids, self._versions.bound)
            except Corruption:
                if refresh is not None and refresh().trace.covering(task.inputs) is None:
                    return None  # another process has merged them, and nothing is damaged
                raise
            outputs = merge.outputs if merge is not None else ()
            self._metrics.upkeep_bytes += sum(part.size for run in outputs for part in run.parts)
            return merge
        if isinstance(task, BundleUp):
            return self._bundler.bundled(task.state, task.batch)
        if isinstance(task, RollUp):
            check_state(task.state)  # commits have only checked what each of them changed
            return c.AddRollup(task.state.seqno, *self._versions.write_rollup(task.state))
        if isinstance(task, FlushTokens):
            return self._files.outcomes.flush(newest, task.policy)
        if isinstance(task, FlushHistory):
            return self._files.entries.flush(newest)
        return self._files.attributes.flush(newest)

    def _counted(self, task: Count) -> c.Command:
        command, upper = task.command, task.state.upper.element
        assert upper is not None
        files = Files(self._versions.blob, sound_schemas(task.state.schemas))

        def counting(part: Part) -> Part:
            if not part.time_min < upper <= part.time_max:
                return part
            with suppress(BlobNotFound), translated_but_missing():
                return replace(part, given=files.rows_from(part, upper))
            return part

        return replace(command, runs=tuple(Run(tuple(map(counting, run.parts))) for run in command.runs))

    def _spilled(self, task: Spill) -> c.Command:
        command, state, blob = task.command, task.state, self._versions.blob
        assert isinstance(command, (c.CompareAndAppend, c.Append, c.Insert, c.Rewrite))
        runs: list[Run] = [run for run in command.runs if not any(part.is_inline for part in run.parts)]
        inline = [part for run in command.runs for part in run.parts if part.is_inline]
        with translated():
            for part in inline:
                written = spill_inline(part, state.schemas, blob, state.shard_id, command.writer, self._ids)
                if written is not None:
                    runs.append(Run((written,)))
        self._metrics.spills += 1
        return replace(command, runs=tuple(runs))


def merged(
    state: State, batches: Sequence[HollowBatch], blob: Blob, ids: IdSource, bound: Bound | None = None
) -> c.MergeResult | None:
    """The merge of these adjacent batches into one part, whose blob is written; None if there is nothing to merge.

    Raises Unavailable, and Corruption also when an input is gone because another has merged it.
    """
    inputs = [part for batch in batches for part in batch.parts()]
    since = state.merge_since
    if len(inputs) < 2 or since.element is None:
        return None
    schemas = sound_schemas(state.schemas)
    schema_id, schema = newest(schemas)
    reader = PartReader(blob, schemas, schema, use_threads=False, memory_bytes=MEMORY_BYTES, bound=bound)
    sink = PartSink(schema, schema_id, blob, state.shard_id, FLUSHER, ids)
    writer = PartWriter(sink, PART_BYTES_TARGET)
    outputs: list[Part] = []
    runs = [run for batch in batches for run in batch.runs]
    with translated():
        for table in reader.read_merged(runs, since.element, kept_below(state, since)):
            outputs += writer.write(table)
        outputs += writer.finish()
    return c.MergeResult(tuple(part.id for part in inputs), (Run(tuple(outputs)),) if outputs else (), since)
