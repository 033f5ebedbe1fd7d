"""What column chunks take once they are decoded: never less than they do, and not much more."""

from __future__ import annotations

import contextlib
import decimal
import io
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from persist.parts.parquet_guard import Decoded, chunk_bytes_max
from tests.support.examples import thinned

MIB = 1024 * 1024
GIB = 1024 * MIB
MOST = 32 * MIB
ROWS = 5_000
SEEDS = thinned([range(at, at + 400) for at in range(0, 2_000, 400)], 5)


class _Chunk:
    """A column chunk: its bytes and what the footer says of it."""

    def __init__(self, data: bytes, metadata: Any, group: int, position: int) -> None:
        self.told, self.rows = metadata.row_group(group).column(position), metadata.row_group(group).num_rows
        self.column = metadata.schema.column(position)
        start = self.told.data_page_offset
        if self.told.has_dictionary_page and self.told.dictionary_page_offset:
            start = min(start, self.told.dictionary_page_offset)
        self.data = data[start : start + self.told.total_compressed_size]

    def most(self, most: int, data: bytes | None = None) -> int:
        chosen = memoryview(self.data if data is None else data)
        return sum(chunk_bytes_max(chosen, self.told, self.column, self.rows, Decoded(most, most)))


def _chunks(data: bytes) -> list[_Chunk]:
    metadata = pq.read_metadata(pa.BufferReader(data))
    return [
        _Chunk(data, metadata, group, position)
        for group in range(metadata.num_row_groups)
        for position in range(metadata.num_columns)
    ]


def _file(column: Any, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"a": column}), sink, row_group_size=len(column), **{"compression": "zstd", **options})
    return sink.getvalue()


def _chunk(column: Any, **options: Any) -> _Chunk:
    (found,) = _chunks(_file(column, **options))
    return found


def _is_beyond(chunk: _Chunk) -> bool:
    return chunk.most(MOST) > MOST


# Tables of many shapes.


def _with_nulls(rng: np.random.Generator, values: list[Any], share: float) -> list[Any]:
    return [None if missing else value for value, missing in zip(values, rng.random(len(values)) < share, strict=True)]


def _shapes(rng: np.random.Generator, rows: int = ROWS) -> dict[str, pa.Array]:
    numbers = rng.integers(0, 2**40, rows).tolist()
    texts = [f"{number:x}" for number in numbers]
    prefix = "common/" * 40
    outlier = ["x"] * (rows - 1) + ["y" * 200_000]
    lists = [texts[:at] for at in rng.integers(0, 4, rows)]
    amounts = [decimal.Decimal(number % 10**9).scaleb(-2) for number in numbers]
    fields = [{"x": number, "y": text} for number, text in zip(numbers, texts, strict=True)]
    return {
        "keys": pa.array(sorted(prefix + text for text in texts)),
        "texts": pa.array(_with_nulls(rng, texts, 0.3)),
        "empty texts": pa.array([""] * rows),
        "empty and null texts": pa.array(_with_nulls(rng, [""] * rows, 0.5)),
        "only nulls": pa.array([None] * rows, pa.string()),
        "one value": pa.array(["the same text as all others"] * rows),
        "few values": pa.array(_with_nulls(rng, [text[0] * 100 for text in texts], 0.2)),
        "one long text": pa.array(outlier),
        "one long text and nulls": pa.array([*[None] * (rows - 1), "y" * 200_000]),
        "one long text among others": pa.array([*texts[:-1], "y" * 200_000]),
        "bytes": pa.array([os.urandom(50) for _ in range(rows)], pa.large_binary()),
        "long": pa.array([os.urandom(5_000) for _ in range(rows // 20)]),
        "fixed": pa.array(_with_nulls(rng, [os.urandom(16) for _ in range(rows)], 0.1), pa.binary(16)),
        "int8": pa.array((np.array(numbers) % 100).tolist(), pa.int8()),
        "int64": pa.array(_with_nulls(rng, numbers, 0.1)),
        "date64": pa.array([number % 10**5 * 86_400_000 for number in numbers], pa.date64()),
        "floats": pa.array(rng.random(rows)),
        "half floats": pa.array(rng.random(rows).astype(np.float16)),
        "bools": pa.array(_with_nulls(rng, [number % 2 == 0 for number in numbers], 0.1)),
        "decimal128": pa.array(amounts, pa.decimal128(20, 2)),
        "decimal256": pa.array(amounts, pa.decimal256(60, 2)),
        "times": pa.array(numbers, pa.timestamp("us", "UTC")),
        "lists": pa.array(_with_nulls(rng, lists, 0.1), pa.list_(pa.string())),
        "lists of lists": pa.array([[one, None, []] for one in lists], pa.list_(pa.list_(pa.string()))),
        "structs": pa.array(_with_nulls(rng, fields, 0.1)),
        "maps": pa.array([list(zip(one, numbers, strict=False)) for one in lists], pa.map_(pa.string(), pa.int64())),
    }


WRITERS: dict[str, dict[str, Any]] = {
    "zstd": {},
    "plain": {"use_dictionary": False, "compression": "none"},
    "snappy": {"compression": "snappy"},
    "gzip": {"compression": "gzip", "use_dictionary": False},
    "brotli": {"compression": "brotli"},
    "lz4": {"compression": "lz4"},
    "second kind": {"data_page_version": "2.0"},
    "second kind, plain": {"data_page_version": "2.0", "compression": "none"},
    "small pages": {"data_page_size": 16 * 1024},
}
TEXT_ENCODINGS = ("DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN")


def _check(data: bytes, name: str) -> None:
    """The bound is no less than what the rows take, and stays within six times that and a mebibyte."""
    rows = pq.ParquetFile(pa.BufferReader(data)).read()
    found = 0
    for chunk in _chunks(data):
        most = 6 * rows.column(chunk.column.path.split(".")[0]).nbytes + MIB
        one = chunk.most(most)
        assert one <= most, (name, chunk.column.path, one, most)
        assert one >= chunk.told.total_uncompressed_size // 2
        found += one
    assert found >= rows.nbytes, name


@pytest.mark.parametrize("writer", WRITERS)
def test_what_writers_make_is_within_six_times_what_it_takes(writer: str) -> None:
    for name, column in _shapes(np.random.default_rng(1)).items():
        _check(_file(column, **WRITERS[writer]), name)


@pytest.mark.parametrize("encoding", TEXT_ENCODINGS)
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_texts_of_any_encoding_are_within_six_times_what_they_take(encoding: str, version: str) -> None:
    for name, column in _shapes(np.random.default_rng(2)).items():
        if pa.types.is_string(column.type) or pa.types.is_large_binary(column.type):
            for compression in ("zstd", "none"):
                data = _file(
                    column, use_dictionary=False, column_encoding={"a": encoding}, data_page_version=version,
                    compression=compression,
                )  # fmt: skip
                _check(data, name)


# Files that are made to hurt.


def _of_one_text() -> _Chunk:
    return _chunk(pa.DictionaryArray.from_arrays(pa.array(np.zeros(65_536, np.int32)), ["x" * 100_000]))


def _of_one_prefix() -> _Chunk:
    prefix = "p" * 100_000
    return _chunk(
        pa.array([f"{prefix}{number:05}" for number in range(600)]),
        use_dictionary=False, column_encoding={"a": "DELTA_BYTE_ARRAY"}, data_page_size=GIB,
    )  # fmt: skip


def _of_zeros() -> _Chunk:
    return _chunk(pa.array([bytes(MIB)] * 64), use_dictionary=False)


def _of_null_lists() -> _Chunk:
    count = 10_000_000
    return _chunk(pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.nulls(count, pa.int64())))


def _of_fixed() -> _Chunk:
    return _chunk(pa.array([bytes(MIB)] * 64, pa.binary(MIB)))


@pytest.mark.parametrize("made", [_of_one_text, _of_one_prefix, _of_zeros, _of_null_lists, _of_fixed])
def test_few_bytes_that_stand_for_many_are_beyond_the_bound(made: Callable[[], _Chunk]) -> None:
    chunk = made()
    assert len(chunk.data) < MIB
    assert _is_beyond(chunk)


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


@pytest.mark.parametrize("encoding", ["DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"])
def test_more_lengths_than_values_are_refused(encoding: str) -> None:
    """Arrow 26 unpacks as many lengths as these say to be: 400 MiB of a page of a few bytes."""
    chunk = _chunk(
        pa.array([f"x{number}" for number in range(1_000)]), compression="none",
        use_dictionary=False, column_encoding={"a": encoding},
    )  # fmt: skip
    at = chunk.data.find(_varint(128) + _varint(4) + _varint(1_000))
    many = 100_000_000
    head = _varint(many // 128 * 128 + 128) + _varint(1) + _varint(many) + bytes(3)
    assert chunk.most(MOST) < MOST
    with pytest.raises(ValueError):
        chunk.most(MOST, chunk.data[:at] + head + chunk.data[at + len(head) :])
    head = _varint(128) + _varint(4) + _varint(1_001)
    with pytest.raises(ValueError, match="1001 numbers are packed"):
        chunk.most(MOST, chunk.data[:at] + head + chunk.data[at + len(head) :])


class _Said:
    """A footer that says something else of a column chunk."""

    def __init__(self, told: Any, num_values: int) -> None:
        self.compression, self.num_values = told.compression, num_values


def _head(*fields: tuple[int, int], of_page: bytes) -> bytes:
    """A page's head: pairs of type and number of fields that follow each other."""
    numbers = b"".join(bytes([0x10 | kind]) + _varint(2 * number) for kind, number in fields)
    return numbers + of_page


def _data_page(size: int, packed: int, count: int, extra: bytes = b"") -> bytes:
    inner = b"".join(b"\x15" + _varint(2 * number) for number in (count, 0, 3, 3)) + b"\0"
    return _head((5, 0), (5, size), (5, packed), of_page=b"\x2c" + inner + extra + b"\0")


@pytest.fixture(scope="module")
def numbers() -> _Chunk:
    return _chunk(pa.array([1, 2, 3]), use_dictionary=False, compression="none")


def test_what_the_footer_says_counts(numbers: _Chunk) -> None:
    assert sum(chunk_bytes_max(numbers.data, _Said(numbers.told, 10**9), numbers.column, 3, Decoded(MOST, MOST))) > MOST
    for count in (-1, 2):
        with pytest.raises(ValueError):
            chunk_bytes_max(numbers.data, _Said(numbers.told, count), numbers.column, 3, Decoded(MOST, MOST))


def test_heads_are_read_as_arrow_reads_them_or_not_at_all(numbers: _Chunk) -> None:
    told, column = _Said(numbers.told, 3), numbers.column
    body = bytes(4)

    def read(data: bytes) -> int:
        return sum(chunk_bytes_max(data, told, column, 3, Decoded(MOST, MOST)))

    assert read(_data_page(4, 4, 3) + body) < MIB
    assert read(_data_page(2**30, 4, 3) + body) > MOST
    passed_over = b"\x28\x03abc" + b"\x17" + bytes(8) + b"\x13\x01" + b"\x16\x01"  # binary, double, byte, i64
    assert read(_data_page(4, 4, 3, passed_over) + body) == read(_data_page(4, 4, 3) + body)
    refused = {
        "a size again": b"\x05\x04\x02",  # field 2 by the long form
        "a field beyond 16 bits": b"\x05" + _varint(2 * 65_538) + b"\x02",
        "an end that is not zero": b"\x10",
        "a list": b"\x19\x05",
        "a type that there is not": b"\x1d",
        "too many bytes": b"\x18" + _varint(2**40),
        "no end of a number": b"\x15" + b"\xff" * 11,
        "structs in structs": b"\x1c" * 100,
    }
    for name, extra in refused.items():
        with pytest.raises(ValueError):
            pytest.fail(f"{name}: {read(_data_page(4, 4, 3, extra) + body)}")
    with pytest.raises(ValueError):
        read(_data_page(4, 5, 3) + body)
    with pytest.raises(ValueError):
        read(_data_page(4, 4, 4) + body)
    with pytest.raises(ValueError):
        read(_data_page(2**31, 4, 3) + body)


def test_many_empty_pages_soon_are_beyond_the_bound(numbers: _Chunk) -> None:
    data = _data_page(0, 0, 0) * 1_000_000
    assert sum(chunk_bytes_max(data, numbers.told, numbers.column, 3, Decoded(MOST, MOST))) > MOST


def _changed(rng: random.Random, data: bytes) -> bytes:
    """The bytes with some others in them, or fewer."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        # Most of what is told lies at the beginning.
        at = rng.randrange(min(len(found), rng.choice([40, 200, len(found)])))
        found[at] = rng.choice([found[at] ^ (1 << rng.randrange(8)), rng.randrange(256), 0, 0xFF])
    return bytes(found[: rng.randrange(len(found))] if rng.random() < 0.2 else found)


def _targets() -> list[_Chunk]:
    shapes = _shapes(np.random.default_rng(5), 300)
    found = []
    for name in ("keys", "texts", "few values", "one long text", "lists", "int64", "decimal128"):
        for options in WRITERS.values():
            found += _chunks(_file(shapes[name], **options))
    for encoding in TEXT_ENCODINGS:
        for compression in ("zstd", "none"):
            options = {"use_dictionary": False, "column_encoding": {"a": encoding}, "compression": compression}
            found.append(_chunk(shapes["keys"], **options))
    return found


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_changed_bytes_raise_value_errors_only(seeds: range) -> None:
    targets = _targets()
    for seed in seeds:
        rng = random.Random(seed)
        chunk = targets[seed % len(targets)]
        data = _changed(rng, chunk.data)
        with contextlib.suppress(ValueError):
            assert chunk.most(rng.choice([len(chunk.data) * 3, 100_000, MOST]), data) >= 0
