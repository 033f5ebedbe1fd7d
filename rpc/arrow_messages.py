"""What an Arrow stream says that its buffers take once they are decompressed, read before anything is.

An IPC message begins with a FlatBuffer that Arrow has verified when we see it. Compressed buffers begin with their
length as it will be. Arrow takes so much memory, and refuses a buffer that turns out to hold more or less.
"""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa

_OLD_COMPRESSION = b"ARROW:experimental_compression"  # how it was said in metadata, before there was a field for it
_BUFFER_BYTES = 16  # an offset and a length, of 64 bits each
_UNCOMPRESSED = -1
# Places of fields in the tables of Arrow's Message.fbs.
_MESSAGE_KIND, _MESSAGE_HEADER = 1, 2
_BATCH_ROWS, _BATCH_NODES, _BATCH_BUFFERS, _BATCH_COMPRESSION = 0, 1, 2, 3
_DICTIONARY_BATCH = 1
_IS_DICTIONARY, _IS_BATCH = 2, 3


class Declared:
    """Sums over the messages of a stream. `bytes` are those of compressed buffers, once they are decompressed.

    `nodes` are the arrays that hold them, one a column and batch at every depth.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.rows = 0
        self.nodes = 0
        self.dictionaries = 0

    def add(self, message: Any) -> None:
        """Count a `pyarrow.ipc.Message`."""
        data = message.metadata.to_pybytes()
        try:
            self._add(data, message.body)
        except (struct.error, IndexError) as error:  # it has been verified: another format than the one above
            raise pa.ArrowInvalid("a message of the stream cannot be read") from error

    def _add(self, data: bytes, body: Any) -> None:
        table = _follow(data, 0)
        kind_at, header_at = _field(data, table, _MESSAGE_KIND), _field(data, table, _MESSAGE_HEADER)
        kind = data[kind_at] if kind_at else 0
        if kind not in (_IS_DICTIONARY, _IS_BATCH) or not header_at:
            return
        batch = _follow(data, header_at)
        if kind == _IS_DICTIONARY:
            inner = _field(data, batch, _DICTIONARY_BATCH)
            self.dictionaries += 1
            if not inner:
                return
            batch = _follow(data, inner)
        elif rows_at := _field(data, batch, _BATCH_ROWS):
            self.rows += max(0, struct.unpack_from("<q", data, rows_at)[0])
        if nodes_at := _field(data, batch, _BATCH_NODES):
            self.nodes += struct.unpack_from("<I", data, _follow(data, nodes_at))[0]
        buffers_at = _field(data, batch, _BATCH_BUFFERS)
        if buffers_at and (_field(data, batch, _BATCH_COMPRESSION) or _OLD_COMPRESSION in data):
            vector = _follow(data, buffers_at)
            (count,) = struct.unpack_from("<I", data, vector)
            for index in range(count):
                offset, length = struct.unpack_from("<qq", data, vector + 4 + index * _BUFFER_BYTES)
                self.bytes += _declared(offset, length, body)


def _declared(offset: int, length: int, body: Any) -> int:
    """The bytes that a compressed buffer says to have. Arrow refuses one that lies outside the body."""
    if length < 8 or offset < 0 or body is None or offset + 8 > body.size:
        return max(0, length)
    (said,) = struct.unpack("<q", body.slice(offset, 8).to_pybytes())
    return length if said == _UNCOMPRESSED else max(0, said)


def _follow(data: bytes, at: int) -> int:
    """Where an offset leads: to a table or a vector."""
    return at + int(struct.unpack_from("<I", data, at)[0])


def _field(data: bytes, table: int, place: int) -> int:
    """Where a field of a table is; 0 where the table does not have it."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if 4 + 2 * place >= struct.unpack_from("<H", data, vtable)[0]:
        return 0
    offset = struct.unpack_from("<H", data, vtable + 4 + 2 * place)[0]
    return table + int(offset) if offset else 0
