"""A digest of rows: the same for the same rows in the same order, however they are cut into tables.

It tells a token that comes with other rows than before. It is no protection against somebody who looks for two inputs
with one digest.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from persist.core.outcomes import DIGEST_BYTES

_TEXTS = (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())


class RowsDigest:
    """Takes tables of one schema, in their order. A column in which all is null does not count: it may be new."""

    def __init__(self) -> None:
        self._streams: dict[str, Any] = {}
        self.rows = 0

    def update(self, rows: pa.Table) -> None:
        for field, column in zip(rows.schema, rows.columns, strict=True):
            path = f"{field.name}: {field.type}"
            if path not in self._streams:
                if column.null_count == len(column):
                    continue
                self._stream(path).update(bytes(self.rows))  # the rows before had nulls here
            for chunk in column.chunks:
                self._feed(path, chunk)
        self.rows += len(rows)

    def digest(self) -> bytes:
        """The digest of all rows so far."""
        whole = hashlib.blake2b(str(self.rows).encode(), digest_size=DIGEST_BYTES)
        for path in sorted(self._streams):
            whole.update(path.encode("utf-8", "surrogatepass"))
            whole.update(self._streams[path].digest())
        return whole.digest()

    def _stream(self, path: str) -> Any:
        if path not in self._streams:
            self._streams[path] = hashlib.blake2b(digest_size=DIGEST_BYTES)
        return self._streams[path]

    def _feed(self, path: str, values: pa.Array) -> None:
        """Which values are null, then the others: the first on the stream of the path, the others on those below it."""
        kind = values.type
        self._stream(path).update(_bytes(pc.cast(values.is_valid(), pa.uint8())))
        values = values.drop_null() if values.null_count else values
        if types.is_struct(kind):
            for number, child in enumerate(values.flatten()):
                self._feed(f"{path}.{number}", child)
        elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            self._stream(f"{path} lengths").update(_bytes(pc.cast(pc.list_value_length(values), pa.int64())))
            self._feed(f"{path} items", values.flatten())
        elif types.is_boolean(kind):
            self._stream(f"{path} values").update(_bytes(pc.cast(values, pa.uint8())))
        elif types.is_primitive(kind) or types.is_decimal(kind) or types.is_fixed_size_binary(kind):
            self._stream(f"{path} values").update(_bytes(values))
        elif (
            types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind)
        ):
            self._stream(f"{path} lengths").update(_bytes(pc.cast(pc.binary_length(values), pa.int64())))
            self._stream(f"{path} values").update(_text(values))
        else:  # maps and the like
            self._stream(f"{path} values").update(
                "".join(map(repr, values.to_pylist())).encode("utf-8", "backslashreplace")
            )


def _bytes(values: pa.Array) -> memoryview:
    """The bytes of values of one width, without nulls."""
    width = values.type.bit_width // 8
    data = values.buffers()[1]
    if data is None:
        return memoryview(b"")
    return memoryview(data)[values.offset * width : (values.offset + len(values)) * width]


def _text(values: pa.Array) -> memoryview:
    """The bytes of strings or binaries, one after another, without nulls."""
    _, ends, data = values.buffers()
    if data is None or not len(values):
        return memoryview(b"")
    wide = types.is_large_string(values.type) or types.is_large_binary(values.type)
    offsets = np.frombuffer(ends, np.int64 if wide else np.int32)
    return memoryview(data)[int(offsets[values.offset]) : int(offsets[values.offset + len(values)])]
