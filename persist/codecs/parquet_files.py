"""Parquet files of other writers: opened so that no value changes and no damage goes unnoticed.

Arrow's defaults are lenient: it ignores the checksums of pages, and INT96 times outside the years 1677 to 2262, the
range of 64-bit nanoseconds, wrap around.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from persist.codecs.decode_limits import Allowance
from persist.parts.column_types import check_input_types, plain_type, visible_children
from persist.parts.parquet_guard import Decoded, FooterProbe, chunk_start, read_unknown_footer, row_group_bytes_max

BATCH_ROWS = 64 * 1024
_INT64_MAX = 2**63 - 1
_UNBOUNDED = 1 << 62
_MAGIC, _LENGTH_BYTES = b"PAR1", 4


def open_parquet(source: Any) -> pq.ParquetFile:
    """A Parquet file whose pages are verified as they are read, with INT96 as nanoseconds or, if needed, microseconds.

    `source` is a path or an Arrow file. Raises ValueError if INT96 times need both units, the footer is inconsistent,
    or several files are concatenated.
    """
    file = _open(source, "ns")
    try:
        check_counts(file.metadata)
        _check_single(source, file.metadata)
        is_int96 = [file.schema.column(index).physical_type == "INT96" for index in range(len(file.schema))]
        if not any(is_int96):
            return file
        paths = [file.schema.column(index).path for index, chosen in enumerate(is_int96) if chosen]
        unit = _int96_unit(source, paths)
    except BaseException:
        file.close()
        raise
    if unit == "ns":
        return file
    file.close()
    return _open(source, unit)


def read_bounded(data: bytes, allowed: Allowance) -> pa.Table:
    """The rows of a file, decoded only after its footer and its pages prove that they stay within the allowance.

    Raises ValueError or an error of Arrow if the file is invalid, InvalidUsage if a shard cannot store its types,
    BodyTooLarge and Overloaded.
    """
    metadata = read_unknown_footer(data, allowed.spend)
    arrow = metadata.schema.to_arrow_schema()
    check_input_types(arrow)
    schema, spent = pa.schema([field.with_type(plain_type(field.type)) for field in arrow]), allowed.spent
    groups, kept, passing = range(metadata.num_row_groups), 0, 0
    described = FooterProbe(metadata, len(data))
    for group in groups:
        left = _UNBOUNDED if allowed.left is None else allowed.left - kept
        decoded = row_group_bytes_max(data, metadata, described, group, schema, Decoded(left, left))
        kept, passing = kept + decoded.kept, max(passing, decoded.passing)
        allowed.reach(spent + kept + passing)
    with open_parquet(pa.BufferReader(data)) as file:
        tables = [file.read_row_group(group, use_threads=False) for group in groups]
        return pa.concat_tables([file.schema_arrow.empty_table(), *tables])


def _open(source: Any, unit: str) -> pq.ParquetFile:
    return pq.ParquetFile(
        source,
        pre_buffer=False,
        page_checksum_verification=True,
        coerce_int96_timestamp_unit=unit,
        arrow_extensions_enabled=False,  # UUID and JSON of DuckDB and Polars become bytes and text
    )


def check_counts(metadata: pq.FileMetaData) -> None:
    """Raise ValueError if the numbers of rows and values in the footer differ: rows would be lost or invented."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    if sum(group.num_rows for group in groups) != metadata.num_rows:
        raise ValueError("the file is damaged: the row counts of its row groups and its footer differ")
    for group in groups:
        for index in range(group.num_columns):
            is_flat, values = metadata.schema.column(index).max_repetition_level == 0, group.column(index).num_values
            if values != group.num_rows if is_flat else values < group.num_rows:
                raise ValueError(
                    f"the file is damaged: column {metadata.schema.column(index).path!r} has {values} values in a row "
                    f"group of {group.num_rows} rows"
                )


def _check_single(source: Any, metadata: pq.FileMetaData) -> None:
    """Raise ValueError if other Parquet files precede this one in the same bytes, as after `cat a b`.

    The offsets of the last footer count from its own file's start, so a reader would take pages of the first file for
    it. Between the last page and the footer there are indexes and filters, or at least the preceding files.
    """
    with pa.OSFile(source) if isinstance(source, (str, bytes, os.PathLike)) else contextlib.nullcontext(source) as data:
        size = data.size()
        between = size - len(_MAGIC) - _LENGTH_BYTES - metadata.serialized_size - _pages_end(metadata)
        if between < 2 * len(_MAGIC) + _LENGTH_BYTES:
            return
        data.seek(0)
        start = data.read_buffer(min(size, between + len(_MAGIC)))
        data.seek(0)
    check_single_file("Parquet", start, _MAGIC, lambda before: pq.read_metadata(pa.BufferReader(before)))


def check_single_file(form: str, start: pa.Buffer, mark: bytes, read: Callable[[pa.Buffer], object]) -> None:
    """Raise ValueError if the bytes begin with a whole file, which `read` accepts, and another one follows it.

    Such files begin and end with `mark`.
    """
    for match in re.finditer(mark + b"(?=" + mark + b")", memoryview(start)):
        with contextlib.suppress(pa.ArrowException, OSError):
            read(start.slice(0, match.start() + len(mark)))
            raise ValueError(f"several {form} files are concatenated: pass each one separately")


def _pages_end(metadata: pq.FileMetaData) -> int:
    """The end of the last page, in bytes from the start."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    chunks = (chunk for group in groups for chunk in map(group.column, range(group.num_columns)))
    return max((chunk_start(chunk) + chunk.total_compressed_size for chunk in chunks), default=0)


def _int96_unit(source: Any, paths: list[str]) -> str:
    """The unit that holds every time of these columns: `ns` or `us`. Raises ValueError if neither does."""
    files = [_open(source, unit) for unit in ("ms", "us", "ns")]
    needs_ns = needs_us = False
    for batches in zip(*(file.iter_batches(BATCH_ROWS, columns=paths) for file in files), strict=True):
        for ms, us, ns in zip(*map(_times, batches), strict=True):
            # Outside its range each unit wraps around modulo 2**64, so the comparison is exact all the same.
            has_ns = bool((ns.view(np.uint64) != us.view(np.uint64) * np.uint64(1_000)).any())
            needs_ns = needs_ns or has_ns
            needs_us = needs_us or not _is_within(ms, 1_000_000)
            if (needs_ns and needs_us) or not _is_within(ms, 1_000):
                raise ValueError(
                    "its INT96 times need both nanoseconds and years outside 1677 to 2262, which no timestamp type has"
                )
    for file in files:
        file.close()
    return "us" if needs_us else "ns"


def _is_within(ms: np.ndarray[Any, Any], factor: int) -> bool:
    """Whether milliseconds times `factor` fit into 64 bits."""
    bound = _INT64_MAX // factor - 1
    return not len(ms) or (-bound <= int(ms.min()) and int(ms.max()) <= bound)


def _times(batch: pa.RecordBatch) -> list[np.ndarray[Any, Any]]:
    """The times in a batch at every depth, as integers, without nulls."""
    return [leaf.cast(pa.int64()).to_numpy() for column in batch.columns for leaf in _timestamps(column)]


def _timestamps(column: pa.Array) -> Iterator[pa.Array]:
    if pa.types.is_nested(column.type):
        for child in visible_children(column):
            yield from _timestamps(child)
    elif pa.types.is_timestamp(column.type):
        yield pc.drop_null(column)
