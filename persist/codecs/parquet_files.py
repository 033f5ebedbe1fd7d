"""Parquet files of other makers: opened so that no value changes and no damage passes unnoticed.

Arrow's defaults are lenient: it ignores the checksums of pages, and the times of INT96 wrap around beyond the years
1677 to 2262, which nanoseconds of 64 bits cannot tell.
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

from persist.codecs.allowance import Allowance
from persist.parts.column_types import check_input_types, plain_type
from persist.parts.parquet_guard import Decoded, FooterProbe, read_unknown_footer, row_group_bytes_max

BATCH_ROWS = 64 * 1024
_INT64_MAX = 2**63 - 1
_UNBOUNDED = 1 << 62
_MAGIC, _LENGTH_BYTES = b"PAR1", 4


def open_parquet(source: Any) -> pq.ParquetFile:
    """A Parquet file whose pages are verified as they are read, with INT96 as nanoseconds, or else as microseconds.

    `source` is a path or an Arrow file. Raises ValueError: INT96 times need both, the footer contradicts itself, or
    there are several files one behind the other.
    """
    file = _open(source, "ns")
    try:
        check_counts(file.metadata)
        _check_alone(source, file.metadata)
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
    """The rows of a file, decoded only after its footer and its pages show that they stay within the allowance.

    Raises ValueError, or an error of Arrow, where it is no such file; InvalidUsage where no shard can hold its types;
    BodyTooLarge, Overloaded.
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
        arrow_extensions_enabled=False,  # UUID and JSON of DuckDB and Polars are bytes and text
    )


def check_counts(metadata: pq.FileMetaData) -> None:
    """Raise ValueError where the footer has other numbers of rows than of values: rows would be lost, or invented."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    if sum(group.num_rows for group in groups) != metadata.num_rows:
        raise ValueError("it is damaged: its row groups have other rows than its footer says")
    for group in groups:
        for index in range(group.num_columns):
            is_flat, values = metadata.schema.column(index).max_repetition_level == 0, group.column(index).num_values
            if values != group.num_rows if is_flat else values < group.num_rows:
                raise ValueError(
                    f"it is damaged: column {metadata.schema.column(index).path!r} has {values} values in a row group "
                    f"of {group.num_rows} rows"
                )


def _check_alone(source: Any, metadata: pq.FileMetaData) -> None:
    """Raise ValueError where other Parquet files come before this one in the same bytes, as `cat a b` makes them.

    The last footer counts from its own file's start, so that a reader takes the pages of the first file for its own.
    The bytes between the last page and the footer are indexes and filters, or at least the files before.
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
    """Raise ValueError where the bytes begin with a whole file, which `read` can read, and another one follows it.

    Such files begin and end with their mark.
    """
    for found in re.finditer(mark + b"(?=" + mark + b")", memoryview(start)):
        with contextlib.suppress(pa.ArrowException, OSError):
            read(start.slice(0, found.start() + len(mark)))
            raise ValueError(f"it has several {form} files one behind the other: give each by itself")


def _pages_end(metadata: pq.FileMetaData) -> int:
    """Where the last page ends, in bytes from the start."""
    ends = [0]
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            starts = [chunk.data_page_offset]
            if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                starts.append(chunk.dictionary_page_offset)
            ends.append(min(starts) + chunk.total_compressed_size)
    return max(ends)


def _int96_unit(source: Any, paths: list[str]) -> str:
    """The unit that holds each time of these columns: `ns` or `us`. Raises ValueError where none does."""
    files = [_open(source, unit) for unit in ("ms", "us", "ns")]
    needs_ns = needs_us = False
    for batches in zip(*(file.iter_batches(BATCH_ROWS, columns=paths) for file in files), strict=True):
        for ms, us, ns in zip(*map(_times, batches), strict=True):
            # Beyond its range each unit wraps around modulo 2**64, so that this difference is exact all the same.
            has_ns = bool((ns.view(np.uint64) != us.view(np.uint64) * np.uint64(1_000)).any())
            needs_ns = needs_ns or has_ns
            needs_us = needs_us or not _is_within(ms, 1_000_000)
            if (needs_ns and needs_us) or not _is_within(ms, 1_000):
                raise ValueError(
                    "its INT96 times need both nanoseconds and years beyond 1677 to 2262, which no type of times holds"
                )
    for file in files:
        file.close()
    return "us" if needs_us else "ns"


def _is_within(ms: np.ndarray[Any, Any], factor: int) -> bool:
    """Whether milliseconds times `factor` have room in 64 bits."""
    bound = _INT64_MAX // factor - 1
    return not len(ms) or (-bound <= int(ms.min()) and int(ms.max()) <= bound)


def _times(batch: pa.RecordBatch) -> list[np.ndarray[Any, Any]]:
    """The times in a batch at every depth, as whole numbers, without nulls."""
    return [leaf.cast(pa.int64()).to_numpy() for column in batch.columns for leaf in _leaves(column)]


def _leaves(column: pa.Array) -> Iterator[pa.Array]:
    kind, types = column.type, pa.types
    if types.is_map(kind):
        pairs = pa.struct([pa.field("key", kind.key_type, False), pa.field("value", kind.item_type)])
        yield from _leaves(column.cast(pa.list_(pairs)))
    elif types.is_struct(kind):
        for child in column.flatten():
            yield from _leaves(child)
    elif types.is_nested(kind):
        yield from _leaves(column.flatten())
    elif types.is_timestamp(kind):
        yield pc.drop_null(column)
