"""Blob work of commits and background duties: tasks, manifests, and what a group of commands reads beforehand."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct

from blob import Blob, BlobNotFound, BlobUnavailable
from blob.metrics import ForwardingBlob
from persist.attributes.attribute_index import AttributeIndex
from persist.attributes.node_store import NodeCache, StaleIndex
from persist.commit.commit_plan import AppendCount, BatchMerge, BundleUp, FlushIndex, FlushRecent, RollUp
from persist.commit.spill_files import SpillReader, SpillWriter
from persist.commit.state_loader import Versions
from persist.core import commands as c
from persist.core.attribute import AttributeKey
from persist.core.audit_log import TokenOutcome
from persist.core.batch import HollowBatch, Listing, Part, Run, parts_of
from persist.core.blob_keys import COMPACTOR, FLUSHER, bundle_key, is_of_maintenance
from persist.core.bundles import Listed, bundle_of, packed, to_bundle
from persist.core.clock_index import Mark
from persist.core.errors import Corruption, InvalidUsage, PersistError
from persist.core.ids import IdSource, PartId, mint
from persist.core.invariants import check_state
from persist.core.readable_times import kept_below
from persist.core.record import replace
from persist.core.state import Policy, State
from persist.core.transitions.context import Indexed, IndexPage
from persist.formats.state_frames import encode_listing
from persist.formats.store_errors import translated, translated_but_missing
from persist.parts import PartReader, PartSink, PartWriter, newest, valid_schemas
from persist.parts.part_files import DecodeLimit, PartFiles
from persist.parts.read_plan import decode_bundle, expand_bundles, read_bundle
from persist.telemetry.metrics import MachineMetrics


def write_bundles(
    versions: Versions, ids: IdSource, policy: Policy, state: State, batch: HollowBatch
) -> c.BundleParts | None:
    """Write excess parts of the batch to bundles. None: it does not have too many parts.

    One bundle is in memory at a time. Raises the errors of the blob store.
    """
    plain = to_bundle(batch, policy, state.shard_id)
    if not plain:
        return None

    def written(listed: Listed) -> Part:
        is_merged = all(part.key is not None and is_of_maintenance(part.key) for part in parts_of(listed))
        bundle_id = mint(PartId, ids)
        key = bundle_key(state.shard_id, COMPACTOR if is_merged else FLUSHER, bundle_id)
        data = encode_listing(Listing(listed), versions.format_version)
        with translated():
            versions.blob.put(key, data)
        return bundle_of(bundle_id, key, listed, len(data), zlib.crc32(data))

    runs = tuple(Run(tuple(map(written, group))) for group in packed(plain, policy.bundle_parts_max))
    return c.BundleParts(tuple(part.id for part in parts_of(plain)), runs)


def keys_in(blob: Blob, key: str) -> list[str]:
    """The keys of the parts that the bundle `key` lists.

    Raises BlobNotFound, Corruption (the bundle is damaged), Unavailable.
    """
    with translated_but_missing():
        data = blob.get(key)
    return [part.key for run in decode_bundle(data, key) for part in run.parts if part.key is not None]


def check_moved(command: c.BundleParts | c.ReplacePart, state: State, blob: Blob) -> None:
    """Raise InvalidUsage unless the command moves parts unchanged. The plan refuses parts that the State does not name.

    Raises the errors of the blob store as well.
    """
    held = {part.id: part for part in state.trace.parts()}
    if isinstance(command, c.ReplacePart):
        bundle = held.get(command.within or command.part)
        is_same = bundle is not None and bundle.bundle is not None and read_bundle(bundle, blob) == command.listed
    else:
        named = list(parts_of(command.outputs))
        if any(part.bundle is None or part.id in held for part in named):
            raise InvalidUsage(f"parts of shard {state.name!r} can only be bundled in new bundles")
        listed = [part for run in expand_bundles(command.outputs, blob) for part in run.parts]
        ids = [part.id for part in listed]
        is_same = sorted(ids) == sorted(command.inputs) and all(held.get(part.id) == part for part in listed)
    if not is_same:
        raise InvalidUsage(f"a bundle of shard {state.name!r} does not list the parts in whose place it stands")


# Tasks of commits and upkeep on the blob store: a task goes in, the resulting command comes out.
#
# A blob that is never named, because its command was refused or lost, is an orphan, which maintenance sweeps.


PART_BYTES_TARGET = 64 * 1024 * 1024
MEMORY_BYTES = 64 * 1024 * 1024

WorkTask = AppendCount | BatchMerge | BundleUp | RollUp | FlushIndex | FlushRecent


class BlobWorker:
    """Runs the blob tasks of one shard. Thread-safe. Every method may raise Unavailable."""

    def __init__(
        self,
        versions: Versions,
        attributes: AttributeIndex,
        spilled: SpillWriter,
        ids: IdSource,
        metrics: MachineMetrics,
        policy: Policy,
    ) -> None:
        self._versions = versions
        self._attributes = attributes
        self._spilled = spilled
        self._ids = ids
        self._policy = policy
        self._metrics = metrics

    def finish(self, task: WorkTask, newest: State, refresh: Callable[[], State] | None = None) -> c.Command | None:
        """The command that results from the task; None if there is nothing left to do.

        `newest` is the newest State that this process knows. `refresh` reads the current State: another process may
        have removed a blob that the task needs.
        """
        if isinstance(task, AppendCount):
            return self._counted(task)
        if isinstance(task, BatchMerge):
            if newest is not task.state and newest.trace.covering(task.inputs) is None:
                return None  # another process has merged these batches since the task was created
            try:
                merge = merged(task.state, task.batches, self._versions.blob, self._ids, self._versions.bound)
            except Corruption:
                if refresh is not None and refresh().trace.covering(task.inputs) is None:
                    return None  # another process has merged them, and nothing is damaged
                raise
            outputs = merge.outputs if merge is not None else ()
            self._metrics.upkeep_bytes += sum(part.size for part in parts_of(outputs))
            return merge
        if isinstance(task, BundleUp):
            return write_bundles(self._versions, self._ids, self._policy, task.state, task.batch)
        if isinstance(task, RollUp):
            check_state(task.state)  # commits have only checked what each of them changed
            return c.AddRollup(task.state.seqno, *self._versions.write_rollup(task.state))
        if isinstance(task, FlushRecent):
            return self._spilled.flush(newest, task.kind, self._policy)
        return self._attributes.flush(newest)

    def _counted(self, task: AppendCount) -> c.Command:
        command, upper = task.command, task.state.upper.element
        assert upper is not None
        files = PartFiles(self._versions.blob, valid_schemas(task.state.schemas))

        def counting(part: Part) -> Part:
            if not part.time_min < upper <= part.time_max:
                return part
            with suppress(BlobNotFound), translated_but_missing():
                return replace(part, given=files.rows_from(part, upper))
            return part

        return replace(command, runs=tuple(Run(tuple(map(counting, run.parts))) for run in command.runs))


def merged(
    state: State, batches: Sequence[HollowBatch], blob: Blob, ids: IdSource, bound: DecodeLimit | None = None
) -> c.MergeResult | None:
    """Merge the runs of adjacent batches into one part and write its blob; None: there is nothing to merge.

    Raises Unavailable, and Corruption, also if an input is gone because another process has merged it.
    """
    inputs = [part for batch in batches for part in batch.parts()]
    since = state.merge_since
    if not inputs or since.element is None:
        return None
    schemas = valid_schemas(state.schemas)
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


# What a group of commands needs from the blob store before it can be planned.
#
# If a blob cannot be read, only the commands that need it fail. The rest of their group is committed.


class GroupRead(Struct, frozen=True):
    """The entries of the attribute index and of files of outcomes that a group needs.

    `unread` maps the index of a command in the group to the error with which its entries could not be read.
    """

    indexed: Indexed
    remembered: Mapping[str, TokenOutcome]
    unread: Mapping[int, PersistError] = {}


def read_apart(state: State, commands: Sequence[c.Command], blob: Blob, ids: IdSource, cache: NodeCache) -> GroupRead:
    """Read separately for each command, to find out which ones fail. Does not raise.

    An unavailable store is called once; after that only the cache is read.
    """
    patient = _UntilAway(blob)
    attributes, outcomes = AttributeIndex(patient, ids, cache), SpillReader(patient, cache)
    values: dict[AttributeKey, int | None] = {}
    pages: dict[tuple[AttributeKey, AttributeKey | None], IndexPage] = {}
    marks: dict[int, Mark | None] = {}
    spans: dict[tuple[int, int], tuple[Mark, ...]] = {}
    first_ms: int | None = None
    remembered: dict[str, TokenOutcome] = {}
    unread: dict[int, PersistError] = {}
    for place, command in enumerate(commands):
        try:
            indexed, found = attributes.indexed(state, [command]), outcomes.remembered(state, [command])
        except StaleIndex as error:
            unread[place] = Corruption(f"shard {state.name!r} has lost a blob of its metadata: {error}")
        except PersistError as error:
            unread[place] = error
        else:
            values.update(indexed.values)
            pages.update(indexed.pages)
            marks.update(indexed.marks)
            spans.update(indexed.spans)
            first_ms = indexed.first_ms if first_ms is None else first_ms
            remembered.update(found)
    indexed = Indexed(state.attribute_root.flushes, values, pages, marks, spans, first_ms)
    return GroupRead(indexed, remembered, unread)


class _UntilAway(ForwardingBlob):
    """Stops calling the store once it was unavailable."""

    _away: BlobUnavailable | None = None

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if self._away is not None:
            raise self._away
        try:
            return super().get_range(key, start, length)
        except BlobUnavailable as error:
            self._away = error
            raise
