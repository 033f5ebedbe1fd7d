"""Limits on untrusted Arrow streams: the declared size of schemas and of compressed buffers, before they are read.

An IPC message begins with a FlatBuffer that Arrow has verified before it is returned. Compressed buffers begin with
their decompressed length: Arrow allocates it, and refuses a buffer that has another length.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pyarrow as pa

_OLD_COMPRESSION = b"ARROW:experimental_compression"  # metadata of early versions, before there was a field for it
_BUFFER_BYTES = 16  # an offset and a length, of 64 bits each
_UNCOMPRESSED = -1
# Places of fields in the tables of Arrow's Message.fbs.
_MESSAGE_KIND, _MESSAGE_HEADER = 1, 2
_BATCH_ROWS, _BATCH_NODES, _BATCH_BUFFERS, _BATCH_COMPRESSION = 0, 1, 2, 3
_DICTIONARY_BATCH = 1
_SCHEMA_FIELDS, _SCHEMA_PAIRS = 1, 2
_FIELD_NAME, _FIELD_KIND, _FIELD_TYPE, _FIELD_CHILDREN, _FIELD_PAIRS = 0, 2, 3, 5, 6
_WITH_VECTOR = (10, 14)  # timestamps and unions
_TYPE_VECTOR = 1  # the time zone of a timestamp, the numbers of a union
_CONTINUES = b"\xff\xff\xff\xff"
_PAIR_BYTES = 64  # of an entry of metadata, besides its texts
SCHEMA_BYTES_MAX = 4 * 1024 * 1024  # of the FlatBuffer of a schema
FIELDS_MAX = 20_000  # of a schema, at all depths
DEPTH_MAX = 64  # the limit of Arrow itself
UNFOLDED_BYTES_MAX = 16 * 1024 * 1024  # of names, metadata and the like
_IS_DICTIONARY, _IS_BATCH = 2, 3


def check_schema(message: bytes | memoryview) -> None:
    """Raise ArrowInvalid if an IPC message with a schema, or a stream that begins with one, expands too much.

    A few bytes may expand to millions of fields or to a thousand copies of a long name, since several offsets of a
    FlatBuffer may point to the same table. Arrow itself refuses other messages.
    """
    start = 8 if message[:4] == _CONTINUES else 4
    try:
        (size,) = struct.unpack_from("<I", message, start - 4)
        if size > SCHEMA_BYTES_MAX:
            raise pa.ArrowInvalid(f"its schema takes more than {SCHEMA_BYTES_MAX} bytes")
        data = bytes(message[start : start + size])  # of a stream, only its schema
        table = _follow(data, 0)
        header_at = _field(data, table, _MESSAGE_HEADER)
        if header_at:
            _Unfolded(data).schema(_follow(data, header_at))
    except (struct.error, IndexError) as error:
        raise pa.ArrowInvalid("its schema cannot be read") from error


class _Unfolded:
    """Counts the fields of a schema and their bytes, without sharing."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._fields = 0
        self._bytes = 0

    def schema(self, table: int) -> None:
        self._children(table, _SCHEMA_FIELDS, 0)
        self._pairs(table, _SCHEMA_PAIRS)

    def _children(self, table: int, place: int, depth: int) -> None:
        for field in self._tables(table, place):
            self._fields += 1
            if self._fields > FIELDS_MAX or depth > DEPTH_MAX:
                raise pa.ArrowInvalid(f"its schema has more than {FIELDS_MAX} fields, or {DEPTH_MAX} levels of them")
            self._take(field, _FIELD_NAME)
            self._pairs(field, _FIELD_PAIRS)
            self._type(field)
            self._children(field, _FIELD_CHILDREN, depth + 1)

    def _pairs(self, table: int, place: int) -> None:
        for pair in self._tables(table, place):
            self._spend(_PAIR_BYTES)
            self._take(pair, 0)
            self._take(pair, 1)

    def _tables(self, table: int, place: int) -> Iterator[int]:
        """The positions of the tables of a vector."""
        if at := _field(self._data, table, place):
            vector = _follow(self._data, at)
            (count,) = struct.unpack_from("<I", self._data, vector)
            for index in range(count):
                yield _follow(self._data, vector + 4 + 4 * index)

    def _take(self, table: int, place: int) -> None:
        """Count a text."""
        if at := _field(self._data, table, place):
            self._spend(struct.unpack_from("<I", self._data, _follow(self._data, at))[0])

    def _type(self, field: int) -> None:
        """Count the variable data of a type: the time zone of a timestamp, or the numbers of a union."""
        kind_at, type_at = _field(self._data, field, _FIELD_KIND), _field(self._data, field, _FIELD_TYPE)
        if not type_at or not kind_at or self._data[kind_at] not in _WITH_VECTOR:
            return
        if at := _field(self._data, _follow(self._data, type_at), _TYPE_VECTOR):
            self._spend(4 * struct.unpack_from("<I", self._data, _follow(self._data, at))[0])

    def _spend(self, count: int) -> None:
        self._bytes += count
        if self._bytes > UNFOLDED_BYTES_MAX:
            raise pa.ArrowInvalid(f"its schema takes more than {UNFOLDED_BYTES_MAX} bytes when it is expanded")


class DeclaredSize:
    """Sums over the messages of a stream. `bytes` is the decompressed size of compressed buffers.

    `nodes` is the number of arrays: one per column and batch, at every depth. `is_compressed`: a batch is compressed.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.rows = 0
        self.nodes = 0
        self.dictionaries = 0
        self.is_compressed = False

    def add(self, message: Any) -> None:
        """Count a `pyarrow.ipc.Message`."""
        data = message.metadata.to_pybytes()
        try:
            self._add(data, message.body)
        except (struct.error, IndexError) as error:  # it was verified, so it has another format
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
        if not _field(data, batch, _BATCH_COMPRESSION) and _OLD_COMPRESSION not in data:
            return
        self.is_compressed = True
        if buffers_at := _field(data, batch, _BATCH_BUFFERS):
            vector = _follow(data, buffers_at)
            (count,) = struct.unpack_from("<I", data, vector)
            for index in range(count):
                offset, length = struct.unpack_from("<qq", data, vector + 4 + index * _BUFFER_BYTES)
                self.bytes += _decompressed_bytes(offset, length, body)


def declared_sizes(data: bytes) -> Iterator[DeclaredSize]:
    """The sums up to each message of a stream, all in one object. Raises ArrowInvalid."""
    messages, declared = pa.ipc.MessageReader.open_stream(pa.py_buffer(data)), DeclaredSize()
    with suppress(StopIteration):
        while True:
            declared.add(messages.read_next_message())
            yield declared


def _decompressed_bytes(offset: int, length: int, body: Any) -> int:
    """The declared size of a compressed buffer. Arrow refuses one outside the body."""
    if length < 8 or offset < 0 or body is None or offset + 8 > body.size:
        return max(0, length)
    (declared,) = struct.unpack("<q", body.slice(offset, 8).to_pybytes())
    return length if declared == _UNCOMPRESSED else max(0, declared)


def _follow(data: bytes, at: int) -> int:
    """The position of the table or vector to which an offset points."""
    return at + int(struct.unpack_from("<I", data, at)[0])


def _field(data: bytes, table: int, place: int) -> int:
    """The position of a field of a table; 0 if the table does not have it."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if 4 + 2 * place >= struct.unpack_from("<H", data, vtable)[0]:
        return 0
    offset = struct.unpack_from("<H", data, vtable + 4 + 2 * place)[0]
    return table + int(offset) if offset else 0
