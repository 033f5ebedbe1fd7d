"""Is a part what it says? Everything that the State will believe of it is compared with its bytes.

Inline rows are decoded whole. Of a blob up to `WHOLE_BYTES_MAX` so are all rows; of a larger one the footer is read,
and the columns `__time` and `__diff` row group by row group. What does not fit is the caller's mistake: InvalidUsage.

The `KnownRows` of an index are believed of parts of maintenance alone, so a part that a writer stages must not have
them. Of parts of maintenance it is compared with the rows: the bounds always, twins where all rows are decoded.
"""

from __future__ import annotations

from dataclasses import replace
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
from persist.core.record import asdict
from persist.parts.codec import DATA_ERRORS, decode_inline, describe_inline, empty_metadata
from persist.parts.constraint_checks import check_rows as check_added
from persist.parts.ipc_guard import is_compressed
from persist.parts.part_files import WHOLE_BYTES_MAX, BlobReads, DecodeLimit, PartFile, PartFiles
from persist.parts.row_stats import KnownRows, KnownRowsCollector, Stats, decode_twins
from persist.parts.shard_schema import DIFF, TIME, ShardSchema

TOLD_TWICE, TOLD_BYTES = 2, 64 * 1024  # of the bytes that an index tells: schemas may have longer offsets
UNREADABLE = (pa.ArrowException, ValueError, KeyError, IndexError, TypeError, OverflowError)
_SAID = ("rows", "time_min", "time_max", "diff_min", "diff_max", "diff_sum")


class PartCheck:
    """Checks parts of one schema. Thread-safe.

    `bound`: what a row group may take; large ones are looked at one after the other.
    """

    def __init__(self, schema: ShardSchema, bound: DecodeLimit | None = None) -> None:
        self._schema = schema
        self._bound = bound

    @cached_property
    def _columns(self) -> Any:
        """The columns of every file of this schema, as Parquet has them."""
        return empty_metadata(self._schema).schema

    @cached_property
    def _arrow(self) -> Any:
        """The same as Arrow has them."""
        return self._columns.to_arrow_schema()

    def inline(self, part: Part) -> None:
        """Raise InvalidUsage unless the inline part is what `encode_inline` makes of its rows."""
        if part.format != FORMAT_IPC or part.data is None or part.key is not None:
            raise InvalidUsage(f"part {part.id} is {part.format}; inline rows are one Arrow IPC batch")
        if part.rows <= 0:
            raise InvalidUsage(f"part {part.id} has no rows; leave it out")
        try:
            _check_plain(part)
            batch = decode_inline(part, {part.schema_id: self._schema}).to_batches()[0]
        except Corruption as error:
            raise InvalidUsage(f"{error.message}; encode its rows again") from error
        _check_values(batch, self._schema, part.id)
        _check_constrained(batch, self._schema, part)
        _check_same(part, describe_inline(batch, self._schema, part))

    def inline_rows(self, part: Part) -> None:
        """Raise InvalidUsage unless an inline part that was committed says what its rows are.

        It may have come from an older build, and a commit may have chosen its time or hidden some of its rows. Raises
        Corruption: it cannot be decoded.
        """
        rows, stats = decode_inline(part, {part.schema_id: self._schema}), Stats()
        stats.add(rows)
        _check_said(part, stats)
        found = describe_inline(rows.to_batches()[0], self._schema, part)
        ends = None if part.key_upper is None else found.key_upper
        if found.key_lower < part.key_lower or (part.key_upper is not None and (ends is None or ends > part.key_upper)):
            raise InvalidUsage(f"part {part.id} says other bounds of its keys than its rows have")

    def blob(self, part: Part, blob: BlobReads, *, whole: bool = False) -> None:
        """Raise InvalidUsage unless the blob of the part is there and says what the part says.

        `whole`: every row is decoded, however large the blob. Other errors of the blob store pass through. Memory: a
        row group, or the blob where it is small.
        """
        if part.format != FORMAT_PARQUET or not 0 < part.footer_size <= part.size or not part.sorted:
            raise InvalidUsage(f"part {part.id} is {part.format}; a blob is one sorted Parquet file")
        check_presence(part, blob)
        try:
            file = PartFiles(blob, {part.schema_id: self._schema}, bound=self._bound, are_foreign=True).open(part)
            self._check_footer(part, file)
            stats, whole = Stats(), whole or part.size <= WHOLE_BYTES_MAX
            names = self._schema.updates_schema.names if whole else [TIME, DIFF]
            teller = KnownRowsCollector(self._schema) if whole else None
            for number, group in enumerate(file.groups):
                file.check_described(number, self._schema.updates_schema.names)
                with file.reading([number], names) as rows:
                    if whole:
                        _check_size(part, group.nbytes, rows)
                        check_rows(rows, self._schema, part.id)
                        _check_constrained(rows, self._schema, part)
                    stats.add(rows)
                    if group.known is not None:
                        firsts = file.firsts([number]) if whole and group.twins is not None else None
                        _check_known(part, group.known, rows, teller, firsts)
                del rows
        except BlobNotFound:
            raise _missing(part) from None
        except Corruption as error:
            raise InvalidUsage(f"{error.message}; write its rows again") from error
        except UNREADABLE as error:
            raise InvalidUsage(
                f"the file of part {part.id} cannot be decoded: {error}; write its rows again"
            ) from error
        _check_said(part, stats)

    def _check_footer(self, part: Part, file: PartFile) -> None:
        metadata, groups = file.metadata, file.groups
        as_arrow = metadata.schema.to_arrow_schema()  # the file names types of Arrow, too, as which it is read
        if not metadata.schema.equals(self._columns) or not as_arrow.equals(self._arrow):
            raise InvalidUsage(f"the file of part {part.id} does not have the columns of schema {part.schema_id}")
        if not groups or metadata.num_rows != part.rows or metadata.num_row_groups != len(groups):
            raise InvalidUsage(f"the file of part {part.id} has {metadata.num_rows} rows, not {part.rows}")
        told = [group for group in groups if group.known is not None]
        if told and (len(told) < len(groups) or not is_of_maintenance(part.key or "")):
            raise InvalidUsage(
                f"the index of part {part.id} tells which rows share key and value, as only maintenance may; write its "
                "rows again"
            )
        body = part.size - part.footer_size
        for number, group in enumerate(groups):
            if metadata.row_group(number).num_rows != group.rows or len(group.chunks) != metadata.num_columns:
                raise InvalidUsage(f"the index of part {part.id} does not fit its file")
            chunks = group.chunks if group.twins is None else (*group.chunks, group.twins)
            if any(chunk.start < 0 or chunk.size < 0 or chunk.start + chunk.size > body for chunk in chunks):
                raise InvalidUsage(f"the index of part {part.id} names bytes outside its file")
        if (part.key_lower, part.key_upper) != (groups[0].key_lower, groups[-1].key_upper):
            raise InvalidUsage(f"part {part.id} says other bounds of its keys than its file")
        if any(after.key_lower < before.key_lower for before, after in pairwise(groups)):
            raise InvalidUsage(f"the row groups of part {part.id} are not in the order of their keys")


def _check_plain(part: Part) -> None:
    """Raise Corruption where an inline part is compressed, which it never is: 25 kB of it became a gigabyte."""
    try:
        is_plain = not is_compressed(pa.ipc.read_message(pa.py_buffer(part.data or b"")))
    except DATA_ERRORS as error:
        raise Corruption(f"inline part {part.id} cannot be decoded: {error}", part=str(part.id)) from error
    if not is_plain:
        raise Corruption(f"inline part {part.id} is compressed", part=str(part.id))


def check_presence(part: Part, blob: BlobReads) -> None:
    """Raise InvalidUsage unless the blob of the part is there, with its size. Errors of the blob store pass through."""
    found = blob.stat(part.key or "")
    if found is None:
        raise _missing(part)
    if found.size != part.size:
        raise InvalidUsage(f"the blob of part {part.id} has {found.size} bytes, not {part.size}; write its rows again")


def check_put(part: Part, blob: Blob) -> None:
    """As `check_presence`, for a commit. What this process has just put is there without asking.

    The store has said that it has it, and no sweep takes a blob so soon.
    """
    if blob.put_here(part.key or "") != part.size:
        check_presence(part, blob)


def _missing(part: Part) -> InvalidUsage:
    return InvalidUsage(f"the blob of part {part.id} is not there; write its rows again")


def check_rows(rows: Any, schema: ShardSchema, part_id: str) -> None:
    """Raise InvalidUsage where rows hold what no shard can: text that is not UTF-8, a null where none is allowed."""
    try:
        rows.validate(full=True)
    except (pa.ArrowException, ValueError) as error:
        raise InvalidUsage(f"the rows of part {part_id} do not fit the schema: {error}") from error
    _check_values(rows, schema, part_id)


def _check_constrained(rows: Any, schema: ShardSchema, part: Part) -> None:
    """Raise ConstraintViolated where rows that a writer adds break a check. Maintenance writes what was there."""
    asked = schema.details
    if not (asked.checks or asked.not_null) or (part.key is not None and is_of_maintenance(part.key)):
        return
    check_added(pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows, schema)


def _check_values(rows: Any, schema: ShardSchema, part_id: str) -> None:
    try:
        schema.check_values(rows)
    except InvalidUsage as error:
        raise InvalidUsage(f"the rows of part {part_id} do not fit the schema: {error.message}") from error


def _check_size(part: Part, said: int, rows: Any) -> None:
    """Refuse what the index tells that a row group takes where it takes far more: by that reads are planned."""
    if rows.nbytes > TOLD_TWICE * said + TOLD_BYTES:
        raise InvalidUsage(
            f"the index of part {part.id} tells of {said} bytes of rows, which take {rows.nbytes}; write its rows again"
        )


def _check_said(part: Part, stats: Stats) -> None:
    found = {
        "rows": part.rows, "time_min": stats.time_min, "time_max": stats.time_max, "diff_min": stats.diff_min,
        "diff_max": stats.diff_max, "diff_sum": stats.known_sum,
    }  # fmt: skip
    chosen = part.time is not None or part.clip is not None  # by a commit: then the rows themselves have other times
    for name in _SAID:
        if chosen and (name.startswith("time") or (name == "diff_sum" and part.clip is not None)):
            continue
        if getattr(part, name) != found[name]:
            raise InvalidUsage(f"part {part.id} says {name} {getattr(part, name)}, but its rows have {found[name]}")
    if not 0 <= stats.time_min <= stats.time_max <= TIME_MAX:
        raise InvalidUsage(f"part {part.id} has times from {stats.time_min} to {stats.time_max}; times begin at 0")


def _check_known(part: Part, known: KnownRows, rows: Any, teller: KnownRowsCollector | None, firsts: Any) -> None:
    """Refuse what the index tells of a row group's rows where they are others. Without a teller: their bounds alone."""
    stats = Stats()
    stats.add(rows)
    found = replace(
        known, time_min=stats.time_min, time_max=stats.time_max, diff_min=stats.diff_min, diff_max=stats.diff_max
    )
    if teller is not None:
        found, twins = teller.told(rows)
        if firsts is not None and not (firsts == decode_twins(twins, len(rows))).all():
            raise InvalidUsage(f"the index of part {part.id} tells of other twins than its rows have; write them again")
    if found != known:
        raise InvalidUsage(f"the index of part {part.id} tells {known} of rows that are {found}; write its rows again")


def _check_same(part: Part, found: Part) -> None:
    part = part.without_receipt()
    if part.time is not None:  # it was chosen after the rows were staged
        found = found.at(part.time)
    if part == found:
        return
    said, real = asdict(part), asdict(found)
    name = next(name for name in said if said[name] != real[name])
    raise InvalidUsage(f"part {part.id} says {name} {said[name]!r:.80}, but its rows have {real[name]!r:.80}")
