"""Few bytes that become many, in the formats of rows."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def stream(rows: pa.Table, compression: str | None = "zstd") -> bytes:
    """Rows as an Arrow IPC stream."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, rows.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(rows)
    return sink.getvalue()


def file(rows: pa.Table, **options: Any) -> bytes:
    """Rows as a Parquet file."""
    sink = io.BytesIO()
    pq.write_table(rows, sink, compression="zstd", **options)
    return sink.getvalue()


def zeros(count: int) -> pa.Array:
    return pa.array(np.zeros(count, np.int64))


def named(count: int, chars: int) -> pa.Array:
    """So many rows that name one text of so many characters."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int8)), pa.array(["x" * chars]))


def viewed(count: int, chars: int) -> pa.Array:
    """The same as views of one buffer."""
    view = struct.pack("<i4sii", chars, b"xxxx", 0, 0)
    buffers = [None, pa.py_buffer(view * count), pa.py_buffer(b"x" * chars)]
    return pa.Array.from_buffers(pa.string_view(), count, buffers)


def nulls_within(count: int) -> pa.Array:
    """One list of so many nulls, which take no bytes."""
    return pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.nulls(count))
