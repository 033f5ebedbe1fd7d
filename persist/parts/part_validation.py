"""Validation of parts: everything that the State will record about a part is compared with its bytes.

Inline rows are decoded completely, and so are the rows of a blob up to `WHOLE_BYTES_MAX`. Of a larger blob the footer
is read, and the columns `__time` and `__diff` row group by row group. A mismatch is an error of the caller:
InvalidUsage.

The `KnownRows` of an index are trusted only for parts of maintenance, so a part that a writer stages must not have
them. For parts of maintenance they are compared with the rows: always the bounds, and the twins if all rows are
decoded.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import Any

import pyarrow as pa

from blob import Blob
from blob.errors import BlobNotFound
from persist.core.batch import FORMAT_IPC, FORMAT_PARQUET, Part
from persist.core.blob_keys import is_of_maintenance
from persist.core.errors import Corruption, InvalidUsage
from persist.core.frontier import TIME_MAX
from persist.core.record import asdict, replace
from persist.parts.codec import decode_inline, decoding, describe_inline, empty_metadata
from persist.parts.constraint_checks import check_rows as check_added
from persist.parts.ipc_guard import DeclaredSize
from persist.parts.part_files import WHOLE_BYTES_MAX, BlobReads, DecodeLimit, PartFile, PartFiles
from persist.parts.row_stats import KnownRows, KnownRowsCollector, Stats, decode_twins
from persist.parts.shard_schema import DIFF, TIME, ShardSchema

INDEX_FACTOR, INDEX_BYTES = 2, 64 * 1024  # by how much rows may exceed the size in the index: offsets may be longer
UNREADABLE = (pa.ArrowException, ValueError, KeyError, IndexError, TypeError, OverflowError)


class PartCheck:
    """Validates parts of one schema. Thread-safe.

    `bound`: the memory limit of a row group; large ones are checked one at a time.
    """

    def __init__(self, schema: ShardSchema, bound: DecodeLimit | None = None) -> None:
        self._schema = schema
        self._bound = bound

    @cached_property
    def _columns(self) -> Any:
        """The Parquet schema of every file of this schema."""
        return empty_metadata(self._schema).schema

    @cached_property
    def _arrow(self) -> Any:
        """The corresponding Arrow schema."""
        return self._columns.to_arrow_schema()

    def inline(self, part: Part) -> None:
        """Raise InvalidUsage unless the inline part is what `encode_inline` returns for its rows."""
        if part.format != FORMAT_IPC or part.data is None or part.key is not None:
            raise InvalidUsage(f"part {part.id} is {part.format}; inline rows are one Arrow IPC batch")
        if part.rows <= 0:
            raise InvalidUsage(f"part {part.id} has no rows; leave it out")
        try:
            _check_uncompressed(part)
            batch = decode_inline(part, {part.schema_id: self._schema}).to_batches()[0]
        except Corruption as error:
            raise InvalidUsage(f"{error.message}; encode its rows again") from error
        _check_values(batch, self._schema, part.id)
        _check_constraints(batch, self._schema, part)
        _check_same(part, describe_inline(batch, self._schema, part))

    def inline_rows(self, part: Part) -> None:
        """Raise InvalidUsage unless a committed inline part describes its rows correctly.

        It may be from an older version, and a commit may have assigned its time or hidden some of its rows. Raises
        Corruption if it cannot be decoded.
        """
        rows, stats = decode_inline(part, {part.schema_id: self._schema}), Stats()
        stats.add(rows)
        _check_stats(part, stats)
        actual = describe_inline(rows.to_batches()[0], self._schema, part)
        is_beyond = part.key_upper is not None and (actual.key_upper is None or actual.key_upper > part.key_upper)
        if is_beyond or actual.key_lower < part.key_lower:
            raise InvalidUsage(f"part {part.id} has other key bounds than its rows")

    def blob(self, part: Part, blob: BlobReads, *, whole: bool = False) -> None:
        """Raise InvalidUsage unless the blob of the part exists and matches the part.

        `whole`: decode every row, however large the blob is. Other errors of the blob store pass through. Memory: a
        row group, or the whole blob if it is small.
        """
        if part.format != FORMAT_PARQUET or not 0 < part.footer_size <= part.size or not part.sorted:
            raise InvalidUsage(f"part {part.id} is {part.format}; a blob is one sorted Parquet file")
        check_presence(part, blob)
        try:
            file = PartFiles(blob, {part.schema_id: self._schema}, bound=self._bound, are_foreign=True).open(part)
            self._check_footer(part, file)
            stats, whole = Stats(), whole or part.size <= WHOLE_BYTES_MAX
            names = self._schema.updates_schema.names if whole else [TIME, DIFF]
            collector = KnownRowsCollector(self._schema) if whole else None
            for number, group in enumerate(file.groups):
                file.check_metadata(number, self._schema.updates_schema.names)
                with file.reading([number], names) as rows:
                    if whole:
                        _check_size(part, group.nbytes, rows)
                        check_rows(rows, self._schema, part.id)
                        _check_constraints(rows, self._schema, part)
                    stats.add(rows)
                    if group.known is not None:
                        firsts = file.firsts([number]) if whole and group.twins is not None else None
                        _check_known(part, group.known, rows, collector, firsts)
                del rows
        except BlobNotFound:
            raise _missing_blob(part) from None
        except Corruption as error:
            raise InvalidUsage(f"{error.message}; write its rows again") from error
        except UNREADABLE as error:
            raise InvalidUsage(
                f"the file of part {part.id} cannot be decoded: {error}; write its rows again"
            ) from error
        _check_stats(part, stats)

    def _check_footer(self, part: Part, file: PartFile) -> None:
        metadata, groups = file.metadata, file.groups
        as_arrow = metadata.schema.to_arrow_schema()  # the file also records the Arrow types with which it is read
        if not metadata.schema.equals(self._columns) or not as_arrow.equals(self._arrow):
            raise InvalidUsage(f"the file of part {part.id} does not have the columns of schema {part.schema_id}")
        if not groups or metadata.num_rows != part.rows or metadata.num_row_groups != len(groups):
            raise InvalidUsage(f"the file of part {part.id} has {metadata.num_rows} rows, not {part.rows}")
        known = [group for group in groups if group.known is not None]
        if known and (len(known) < len(groups) or not is_of_maintenance(part.key or "")):
            raise InvalidUsage(
                f"the index of part {part.id} has statistics of rows, which only maintenance may write; write its rows "
                "again"
            )
        body = part.size - part.footer_size
        for number, group in enumerate(groups):
            if metadata.row_group(number).num_rows != group.rows or len(group.chunks) != metadata.num_columns:
                raise InvalidUsage(f"the index of part {part.id} does not match its file")
            chunks = group.chunks if group.twins is None else (*group.chunks, group.twins)
            if any(chunk.start < 0 or chunk.size < 0 or chunk.start + chunk.size > body for chunk in chunks):
                raise InvalidUsage(f"the index of part {part.id} refers to bytes outside its file")
        if (part.key_lower, part.key_upper) != (groups[0].key_lower, groups[-1].key_upper):
            raise InvalidUsage(f"part {part.id} has other key bounds than its file")
        if any(after.key_lower < before.key_lower for before, after in pairwise(groups)):
            raise InvalidUsage(f"the row groups of part {part.id} are not in the order of their keys")


def _check_uncompressed(part: Part) -> None:
    """Raise Corruption if an inline part is compressed, which persist never does: 25 kB could become a gigabyte."""
    declared = DeclaredSize()
    with decoding(part):
        declared.add(pa.ipc.read_message(pa.py_buffer(part.data or b"")))
    if declared.is_compressed:
        raise Corruption(f"inline part {part.id} is compressed", part=str(part.id))


def check_presence(part: Part, blob: BlobReads) -> None:
    """Raise InvalidUsage unless the blob of the part exists and has its size. Errors of the blob store pass through."""
    stat = blob.stat(part.key or "")
    if stat is None:
        raise _missing_blob(part)
    if stat.size != part.size:
        raise InvalidUsage(f"the blob of part {part.id} has {stat.size} bytes, not {part.size}; write its rows again")


def check_put(part: Part, blob: Blob) -> None:
    """As `check_presence`, for a commit. The store is not asked about a blob that this process has just put.

    The put was acknowledged, and no sweep deletes a blob so soon.
    """
    if blob.put_here(part.key or "") != part.size:
        check_presence(part, blob)


def _missing_blob(part: Part) -> InvalidUsage:
    return InvalidUsage(f"the blob of part {part.id} is not there; write its rows again")


def check_rows(rows: Any, schema: ShardSchema, part_id: str) -> None:
    """Raise InvalidUsage if rows hold what no shard can store: invalid UTF-8, or a null where none is allowed."""
    try:
        rows.validate(full=True)
    except (pa.ArrowException, ValueError) as error:
        raise InvalidUsage(f"the rows of part {part_id} do not fit the schema: {error}") from error
    _check_values(rows, schema, part_id)


def _check_constraints(rows: Any, schema: ShardSchema, part: Part) -> None:
    """Raise ConstraintViolated if rows that a writer adds violate a constraint. Maintenance rewrites existing rows."""
    details = schema.details
    if not (details.checks or details.not_null) or (part.key is not None and is_of_maintenance(part.key)):
        return
    check_added(pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows, schema)


def _check_values(rows: Any, schema: ShardSchema, part_id: str) -> None:
    try:
        schema.check_values(rows)
    except InvalidUsage as error:
        raise InvalidUsage(f"the rows of part {part_id} do not fit the schema: {error.message}") from error


def _check_size(part: Part, nbytes: int, rows: Any) -> None:
    """Refuse a size of a row group in the index that its rows exceed by far: reads are planned by it."""
    if rows.nbytes > INDEX_FACTOR * nbytes + INDEX_BYTES:
        raise InvalidUsage(
            f"the index of part {part.id} has {nbytes} bytes of rows, which take {rows.nbytes}; write its rows again"
        )


def _check_stats(part: Part, stats: Stats) -> None:
    is_assigned = part.time is not None or part.clip is not None  # by a commit: the rows themselves have other times
    for name, value in stats.of_part().items():
        if is_assigned and (name.startswith("time") or (name == "diff_sum" and part.clip is not None)):
            continue
        if getattr(part, name) != value:
            raise InvalidUsage(f"part {part.id} has {name} {getattr(part, name)}, but its rows have {value}")
    if not 0 <= stats.time_min <= stats.time_max <= TIME_MAX:
        raise InvalidUsage(f"part {part.id} has times from {stats.time_min} to {stats.time_max}; times begin at 0")


def _check_known(part: Part, known: KnownRows, rows: Any, collector: KnownRowsCollector | None, firsts: Any) -> None:
    """Refuse statistics in the index that differ from the row group's rows. Without a collector only the bounds."""
    stats = Stats()
    stats.add(rows)
    actual = replace(
        known, time_min=stats.time_min, time_max=stats.time_max, diff_min=stats.diff_min, diff_max=stats.diff_max
    )
    if collector is not None:
        actual, twins = collector.describe(rows)
        if firsts is not None and not (firsts == decode_twins(twins, len(rows))).all():
            raise InvalidUsage(f"the index of part {part.id} lists other twins than its rows have; write them again")
    if actual != known:
        raise InvalidUsage(f"the index of part {part.id} has {known}, but its rows have {actual}; write its rows again")


def _check_same(part: Part, actual: Part) -> None:
    part = part.without_receipt()
    if part.time is not None:  # it was assigned after the rows were staged
        actual = actual.at(part.time)
    if part == actual:
        return
    recorded, real = asdict(part), asdict(actual)
    name = next(name for name in recorded if recorded[name] != real[name])
    raise InvalidUsage(f"part {part.id} has {name} {recorded[name]!r:.80}, but its rows have {real[name]!r:.80}")
