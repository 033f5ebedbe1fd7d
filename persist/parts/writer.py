"""Writing parts: staging a writer's updates in bounded memory, and the sorted output of a compaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from persist.core.batch import Part, Run, diff_sum_of
from persist.core.blob_keys import COMPACTOR, FLUSHER, part_key
from persist.core.errors import Corruption, InvalidUsage
from persist.core.ids import IdSource, PartId, ShardId, WriterId, mint
from persist.core.record import replace
from persist.core.transitions.part_admission import DIFF_MAX
from persist.parts.codec import ParquetEncoder, encode_inline, encode_inline_parts, row_group_rows
from persist.parts.column_types import to_plain
from persist.parts.consolidate import consolidate, join
from persist.parts.constraint_checks import check_rows
from persist.parts.key_encoding import SortedKeys
from persist.parts.row_stats import digest_of_rows
from persist.parts.shard_schema import DIFF, TIME, ShardSchema

PART_BYTES = 64 * 1024 * 1024  # of rows in memory that a writer buffers for a part
COMPACTED_BYTES = 128 * 1024 * 1024  # encoded bytes of a compacted part
GATHERED_BYTES = 4 * 1024 * 1024  # of small batches that are conformed together
GATHERED_SHARE = 16  # at most this fraction of a part, so that its rows are not held twice
SMALL_BYTES = 64 * 1024  # of rows whose exact size is not computed
UNASSIGNED_TIME = 0  # of rows whose time the service assigns at commit

Updates: TypeAlias = Any  # pa.Table | pa.RecordBatch | pa.RecordBatchReader | Iterable[pa.RecordBatch]


class BlobPuts(Protocol):
    """The method of a blob store that writing parts needs."""

    def put(self, key: str, data: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class PartSink:
    """The destination of parts: rows of `schema`, with the id `schema_id` in the shard, as blobs of one of its writers.

    With `digests` staged parts carry the digest of their rows.
    """

    schema: ShardSchema
    schema_id: int
    blob: BlobPuts
    shard_id: ShardId
    writer: WriterId
    ids: IdSource
    digests: bool = False

    def encoder(self) -> ParquetEncoder:
        return ParquetEncoder(self.schema, with_statistics=self.writer in (FLUSHER, COMPACTOR))

    def put(self, encoder: ParquetEncoder) -> Part:
        """Write the encoded rows as a blob; the part that names it."""
        part_id = mint(PartId, self.ids)
        key = part_key(self.shard_id, self.writer, part_id)
        part, data = encoder.finish(self.schema_id, part_id, key)
        self.blob.put(key, data)
        return part

    def describe(self, part: Part, rows: pa.Table) -> Part:
        """The part with the count, before equal rows were summed, and the digest of its rows."""
        count = None if part.rows == len(rows) else len(rows)
        return replace(part, given=count, rows_digest=digest_of_rows(rows) if self.digests else None)


def stage(
    updates: Updates,
    sink: PartSink,
    *,
    default_time: int | None,
    inline_bytes_max: int,
    part_bytes_target: int = PART_BYTES,
    on_part: Callable[[Part], None] | None = None,
) -> tuple[Run, ...]:
    """Write updates as parts, which are invisible until a batch names them.

    Rows are converted with `ShardSchema.conform`. `default_time` None: the service assigns the time at commit; the rows
    have time 0 until `Part.at`, and a column `__time` is refused. At most about `part_bytes_target` bytes of rows are
    buffered, whatever the size of the input; every full buffer becomes one blob, and `on_part` is called when it is
    durable. Updates that encode to at most `inline_bytes_max` bytes become one inline part instead. No updates, and
    updates that cancel out, result in no runs. Errors of the blob store pass through; staging again is safe.
    """
    schema = sink.schema
    runs: list[list[Part]] = []
    checked = _CheckedUpdates(updates)
    for rows, nbytes, is_all in _buffers(checked, schema, default_time, part_bytes_target):
        if is_all and (inline := _inline_runs(rows, nbytes, sink, inline_bytes_max)) is not None:
            checked.check(inline)
            if on_part is not None and inline:
                on_part(inline[0].parts[0])
            return inline
        rows = join([rows])  # the chunks are freed before the rows are sorted
        sorted_rows = consolidate([rows], schema)
        if not len(sorted_rows):
            continue
        encoder = sink.encoder()
        encoder.write(sorted_rows)
        part = sink.describe(sink.put(encoder), rows)
        if on_part is not None:
            on_part(part)
        upper = runs[-1][-1].key_upper if runs else None
        if upper is not None and part.key_lower > upper:
            runs[-1].append(part)
        else:
            runs.append([part])
    staged = tuple(Run(tuple(parts)) for parts in runs)
    checked.check(staged)
    return staged


def stage_inline(
    rows: pa.Table, sink: PartSink, *, default_time: int | None, inline_bytes_max: int
) -> tuple[Run, ...] | None:
    """As `stage` for rows that fit an inline part; None if they do not, and nothing was written."""
    if rows.get_total_buffer_size() > inline_bytes_max and rows.nbytes > inline_bytes_max:
        return None
    checked = _CheckedUpdates(rows)
    for conformed, nbytes, is_all in _buffers(checked, sink.schema, default_time, PART_BYTES):
        runs = _inline_runs(conformed, nbytes, sink, inline_bytes_max) if is_all else None
        if runs is not None:
            checked.check(runs)
        return runs
    return ()


def stage_inserts(
    rows: pa.Table, counts: Sequence[int], sink: PartSink, inline_bytes_max: int
) -> list[tuple[Run, ...] | None]:
    """`stage_inline` for several inserts, each of `counts` consecutive rows; Arrow is called once for all of them.

    `rows` are in the form of `ShardSchema.conform`. None: an insert that needs a blob. Raises ConstraintViolated if the
    rows of one insert violate a constraint.
    """
    check_rows(rows, sink.schema)
    filled = [count for count in counts if count]
    part_ids = [mint(PartId, sink.ids) for _ in filled]
    parts = encode_inline_parts(rows, filled, sink.schema, sink.schema_id, part_ids) if filled else []
    _check_sum(_diff_sum(rows), parts)
    start, rest = 0, iter(parts)
    staged: list[tuple[Run, ...] | None] = []
    for count in counts:
        own = rows.slice(start, count)
        staged.append(_runs_of(next(rest), own, sink, inline_bytes_max) if count else ())
        start += count
    return staged


class _CheckedUpdates:
    """The tables and batches of updates, and the sum of their diffs, to verify the encoded parts.

    The number of rows may differ from that of the encoded rows, since equal rows are summed; the sum of the diffs must
    not. The commit records the sum (`Part.diff_sum`), and a check of a part compares it with its rows.
    """

    def __init__(self, updates: Updates) -> None:
        self._updates = updates
        self._sum = 0

    def __iter__(self) -> Iterator[pa.Table | pa.RecordBatch]:
        for piece in iter_pieces(self._updates):
            self._sum += _diff_sum(piece)
            yield piece

    def check(self, runs: tuple[Run, ...]) -> None:
        """Raise Corruption if the sum of the parts differs."""
        _check_sum(self._sum, (part for run in runs for part in run.parts))


def _check_sum(given: int, parts: Iterable[Part]) -> None:
    """Raise Corruption if the diffs of the parts do not sum to `given`."""
    encoded = diff_sum_of(parts)
    if encoded is not None and (encoded - given) % 2**64:  # Arrow's sums wrap around
        raise Corruption(
            f"the {DIFF} of the rows sums to {given}, but that of the encoded rows to {encoded}; nothing was written; "
            "this is a bug: report it",
            given=given,
            encoded=encoded,
        )


def _diff_sum(rows: pa.Table | pa.RecordBatch) -> int:
    """The sum of the diffs of unconverted rows, modulo 2**64. Diffs that are not integers are refused later."""
    place = rows.schema.get_field_index(DIFF)
    if place < 0:
        return int(rows.num_rows)
    try:
        return pc.sum(to_plain(rows.column(place)).cast(pa.int64())).as_py() or 0
    except (pa.ArrowException, TypeError):
        return 0


def _inline_runs(rows: pa.Table, nbytes: int, sink: PartSink, inline_bytes_max: int) -> tuple[Run, ...] | None:
    """All rows of a write as one inline part; no run if they cancel out, None if they are too large."""
    if inline_bytes_max <= 0 or nbytes > 2 * inline_bytes_max:
        return None
    part = sink.describe(encode_inline(rows, sink.schema, sink.schema_id, mint(PartId, sink.ids)), rows)
    return _runs_of(part, rows, sink, inline_bytes_max)


def _runs_of(part: Part, rows: pa.Table, sink: PartSink, inline_bytes_max: int) -> tuple[Run, ...] | None:
    """The runs of a write whose rows were encoded as this part; as `_inline_runs`."""
    schema = sink.schema
    if part.diff_sum == 0 and not len(consolidate([rows], schema)):
        return ()  # the rows cancel out, as they would in a blob
    if part.rows * max(-part.diff_min, part.diff_max) > DIFF_MAX:  # the limit applies to the sum of equal rows
        summed = consolidate([rows], schema)
        part = sink.describe(encode_inline(summed, schema, sink.schema_id, part.id), rows)
    return (Run((part,)),) if part.size <= inline_bytes_max else None


class PartWriter:
    """Writes consolidated rows in key order as parts of about `part_bytes_target` encoded bytes.

    A part ends where the key changes, so that parts do not overlap; only a key with more rows than a whole part
    continues in the next one. `write` and `finish` return the parts that became durable. Memory: one part's encoded
    bytes and one row group.
    """

    def __init__(self, sink: PartSink, part_bytes_target: int = COMPACTED_BYTES) -> None:
        self._sink = sink
        self._target = part_bytes_target
        self._encoder: ParquetEncoder | None = None
        self._last: bytes = b""
        self._pending: list[pa.Table] = []
        self._pending_rows = 0

    def write(self, rows: pa.Table) -> list[Part]:
        """Add the next rows, in `updates_schema`. Returns the parts that were completed."""
        if not len(rows):
            return []
        self._pending.append(rows)
        self._pending_rows += len(rows)
        step = row_group_rows(rows)
        return self._flush(step) if self._pending_rows >= step else []

    def finish(self) -> list[Part]:
        """Write the remaining rows. Returns the last parts."""
        parts = self._flush(1)
        if self._encoder is not None:
            parts.append(self._sink.put(self._encoder))
            self._encoder = None
        return parts

    def _flush(self, step: int) -> list[Part]:
        """Write whole row groups of `step` rows (1: everything), and complete parts that are full."""
        if not self._pending:
            return []
        table = join(self._pending)
        size = row_group_rows(table)
        parts = []
        start = 0
        while start < len(table) and (step == 1 or len(table) - start >= step):
            end = min(len(table), start + size)
            keys = SortedKeys(table.slice(start, end - start), self._sink.schema.key)
            if self._encoder is not None and self._encoder.size >= self._target:
                head = keys.bisect(self._last + b"\x00")  # rows of the key that the part ends with
                if head == len(keys) and self._encoder.size < 2 * self._target:
                    end = start + head
                else:
                    if head < len(keys) and head:
                        self._encoder.write(table.slice(start, head))
                        start += head
                    parts.append(self._sink.put(self._encoder))
                    self._encoder = None
                    continue
            if self._encoder is None:
                self._encoder = self._sink.encoder()
            self._encoder.write(table.slice(start, end - start))
            self._last = keys[end - start - 1]
            start = end
        rest = table.slice(start)
        self._pending = [rest] if len(rest) else []
        self._pending_rows = len(rest)
        return parts


def _buffers(
    updates: _CheckedUpdates, schema: ShardSchema, default_time: int | None, target: int
) -> Iterator[tuple[pa.Table, int, bool]]:
    """The rows in buffers of about `target` bytes, their bytes in memory, and whether the buffer holds all of them."""
    pending: list[pa.Table] = []
    size = 0
    flushed = False
    for piece in _gather(iter(updates), min(GATHERED_BYTES, target // GATHERED_SHARE)):
        if default_time is None and TIME in piece.schema.names:
            raise InvalidUsage(
                f"rows of an insert have a column {TIME}, but the service chooses the time of an insert; leave the "
                "column out, or use compare_and_append"
            )
        conformed = schema.conform(piece, default_time or UNASSIGNED_TIME)
        check_rows(conformed, schema)
        for rows, nbytes in _slices(conformed, target):
            if pending and size + nbytes > target:
                full, pending = pa.concat_tables(pending), []
                flushed = True
                yield full, size, False
                size = 0
            pending.append(rows)
            size += nbytes
    if pending:
        yield pending[0] if len(pending) == 1 else pa.concat_tables(pending), size, not flushed


def _gather(pieces: Iterator[pa.Table | pa.RecordBatch], most: int) -> Iterator[pa.Table | pa.RecordBatch]:
    """The same rows, with consecutive batches of less than `most` bytes combined to tables of about so many bytes.

    The cost per table is about the same for a few rows as for some thousand.
    """
    held: list[pa.RecordBatch] = []
    size = 0
    for piece in pieces:
        is_small = isinstance(piece, pa.RecordBatch) and piece.nbytes < most
        if held and not (is_small and size < most and piece.schema.equals(held[0].schema)):
            yield pa.Table.from_batches(held)
            held, size = [], 0
        if is_small:
            held.append(piece)
            size += piece.nbytes
        else:
            yield piece
    if held:
        yield pa.Table.from_batches(held)


def _slices(rows: pa.Table, target: int) -> Iterator[tuple[pa.Table, int]]:
    """The rows in slices of about `target` bytes, and the bytes of each."""
    nbytes = rows.get_total_buffer_size()  # fast, but includes the rows around a slice
    if nbytes > SMALL_BYTES:
        nbytes = rows.nbytes
    if nbytes <= target:
        yield rows, nbytes
        return
    step = max(1, len(rows) * target // nbytes)
    for start in range(0, len(rows), step):
        part = rows.slice(start, step)
        yield part, part.nbytes


def iter_pieces(updates: Any) -> Iterator[pa.Table | pa.RecordBatch]:
    """The tables and batches of the updates, without empty ones. Raises InvalidUsage."""
    if isinstance(updates, pa.Table | pa.RecordBatch):
        updates = [updates]
    for piece in updates:
        if not isinstance(piece, pa.Table | pa.RecordBatch):
            raise InvalidUsage(f"rows are a list of dicts, or Arrow tables or batches, not {type(piece).__name__}")
        if piece.num_rows:
            yield piece
