"""Parquet files of other makers: no time changes, no damage passes."""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from persist.cli.row_files import opened
from persist.codecs import rows
from persist.codecs.decode_limits import Allowance, BodyTooLarge
from persist.codecs.json_rows import UNREADABLE
from persist.codecs.parquet_files import check_counts, open_parquet, read_bounded
from persist.core.errors import InvalidUsage
from persist.parts import ShardSchema
from tests.support.examples import thinned

LATE, EARLY, NOW = dt.datetime(9999, 12, 31, 23, 59, 59), dt.datetime(1, 1, 1), dt.datetime(2026, 1, 1, 0, 0, 0, 7)  # noqa: DTZ001
US, NS = pa.timestamp("us"), pa.timestamp("ns")


def written(columns: dict[str, pa.Array], **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, use_deprecated_int96_timestamps=True, **options)
    return sink.getvalue()


def read(data: bytes) -> pa.Table:
    with open_parquet(pa.BufferReader(data)) as file:
        return file.read()


@pytest.mark.parametrize(("column", "kind"), [
    (pa.array([NOW, None], US), NS),
    (pa.array([LATE, EARLY, None], US), US),
    (pa.array([[LATE, None], None, [EARLY]], pa.list_(US)), pa.list_(US)),
    (pa.array([{"x": LATE}, None], pa.struct([("x", US)])), pa.struct([("x", US)])),
    (pa.array([1_234_567_891], NS), NS),
])  # fmt: skip
def test_times_of_int96_are_nanoseconds_or_microseconds_as_they_have_room(column: pa.Array, kind: pa.DataType) -> None:
    found = read(written({"t": column})).column("t")
    assert str(found.type).replace("element", "item") == str(kind)
    assert found.to_pylist() == column.cast(kind).to_pylist()


def test_int96_that_needs_nanoseconds_and_far_years_is_refused_by_file_and_body(tmp_path: Any) -> None:
    data = written({"t": pa.array([1_234_567_891], NS), "u": pa.array([LATE], US)})
    schema = ShardSchema(pa.schema([("t", US), ("u", US)]), ("t",))
    with pytest.raises(InvalidUsage):
        rows.read(data, "parquet", schema, 10)
    (tmp_path / "f.parquet").write_bytes(data)
    with pytest.raises(InvalidUsage), opened([str(tmp_path / "f.parquet")], None):
        pass


def test_a_page_whose_checksum_does_not_match_is_refused() -> None:
    options: Any = {"write_page_checksum": True, "compression": "none", "use_dictionary": False}
    data = written({"a": pa.array(range(1_000))}, **options)
    assert read(data).num_rows == 1_000
    place = data.find((500).to_bytes(8, "little"))
    damaged = data[:place] + b"\xff" + data[place + 1 :]
    schema = ShardSchema(pa.schema([("a", pa.int64())]), ("a",))
    with pytest.raises(InvalidUsage):
        rows.read(damaged, "parquet", schema, 10_000)


class Footer:
    """A footer of one column, whose numbers may contradict each other."""

    def __init__(self, rows_all: int, rows_group: int, values: int, levels: int) -> None:
        self.num_rows, self.num_row_groups, self.num_columns = rows_all, 1, 1
        self._group, self._values, self.max_repetition_level, self.path = rows_group, values, levels, "a"
        self.schema = self

    def row_group(self, index: int) -> Any:
        return Footer(0, 0, self._values, 0) if index else _Group(self._group, self._values)

    def column(self, index: int) -> Any:
        return self


class _Group:
    def __init__(self, count: int, values: int) -> None:
        self.num_rows, self.num_columns, self.num_values = count, 1, values

    def column(self, index: int) -> Any:
        return self


@pytest.mark.parametrize(("numbers", "is_sound"), [
    ((8, 8, 8, 0), True), ((8, 8, 9, 1), True), ((0, 0, 8, 0), False), ((0, 8, 8, 0), False), ((8, 8, 7, 0), False),
    ((8, 8, 7, 1), False),
])  # fmt: skip
def test_a_footer_whose_numbers_contradict_each_other_is_refused(
    numbers: tuple[int, int, int, int], is_sound: bool
) -> None:
    footer: Any = Footer(*numbers)
    if is_sound:
        check_counts(footer)
    else:
        with pytest.raises(ValueError, match="damaged"):
            check_counts(footer)


def parquet(ids: range, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"id": list(ids)}), sink, **options)
    return sink.getvalue()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"compression": "none", "use_dictionary": False},
    {"write_page_index": True, "row_group_size": 7},
    {"write_page_checksum": True, "data_page_version": "2.0"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("counts", [(2, 2), (1, 900), (900, 1), (0, 5), (5, 0), (3, 3, 3)], ids=str)
def test_files_one_behind_the_other_are_refused(
    counts: tuple[int, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    """The pages of the first were read by the footer of the last: rows were lost."""
    files = [parquet(range(100 * number, 100 * number + count), **options) for number, count in enumerate(counts)]
    with pytest.raises(ValueError, match="several Parquet files"):
        open_parquet(pa.BufferReader(b"".join(files)))
    (tmp_path / "both.parquet").write_bytes(b"".join(files))
    with pytest.raises(ValueError, match="several Parquet files"):
        open_parquet(str(tmp_path / "both.parquet"))
    for data, count in zip(files, counts, strict=True):
        assert read(data).num_rows == count


def test_a_file_whose_values_are_files_is_one_file() -> None:
    inner = parquet(range(3), write_page_index=True)
    table = pa.table({"file": [inner + inner, inner], "n": [1, 2]})
    for options in OPTIONS:
        sink = io.BytesIO()
        pq.write_table(table, sink, **options)
        assert read(sink.getvalue()).equals(table)


def arrow(ids: range, form: str, **options: Any) -> bytes:
    sink, table = io.BytesIO(), pa.table({"id": list(ids)})
    new = pa.ipc.new_file if form == "file" else pa.ipc.new_stream
    with new(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=3)
    return sink.getvalue()


@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}, {"use_legacy_format": True}], ids=str)
@pytest.mark.parametrize("form", ["file", "stream"])
@pytest.mark.parametrize("counts", [(4, 4), (1, 90), (90, 1), (0, 5), (5, 0)], ids=str)
def test_arrow_one_behind_the_other_is_refused(
    counts: tuple[int, ...], form: str, options: dict[str, Any], tmp_path: Path
) -> None:
    schema = ShardSchema(pa.schema([("id", pa.int64())]), ("id",))
    files = [arrow(range(count), form, **options) for count in counts]

    def rows_of(data: bytes) -> int:
        (tmp_path / "a.arrow").write_bytes(data)
        with opened([str(tmp_path / "a.arrow")], None) as [source]:
            return sum(piece.table.num_rows for piece in source.pieces(schema, None))

    assert [rows_of(data) for data in files] == list(counts)
    with pytest.raises(InvalidUsage):
        rows_of(b"".join(files))


MIB = 1 << 20
ROWS = 30_000
COLUMNS: dict[str, Callable[[random.Random], pa.Array]] = {
    "keys": lambda r: pa.array([f"common/prefix/{n:08}" for n in range(ROWS)]),
    "texts": lambda r: pa.array([None if n % 3 else r.randbytes(9).hex() for n in range(ROWS)]),
    "few texts": lambda r: pa.array([f"city {r.randrange(500)}" * 9 for _ in range(ROWS)]),
    "a dictionary": lambda r: pa.array([f"city {r.randrange(9)}" for _ in range(ROWS)]).dictionary_encode(),
    "views": lambda r: pa.array([r.randbytes(r.randrange(30)).hex() for _ in range(ROWS)], pa.string_view()),
    "numbers": lambda r: pa.array([r.getrandbits(60) for _ in range(ROWS)]),
    "floats": lambda r: pa.array([r.random() for _ in range(ROWS)]),
    "booleans": lambda r: pa.array([bool(n & 1) for n in range(ROWS)]),
    "nulls": lambda r: pa.nulls(ROWS, pa.int32()),
    "lists": lambda r: pa.array([[n] * r.randrange(5) if n % 4 else None for n in range(ROWS)]),
    "pairs": lambda r: pa.array([[1.5, 2.5] if n % 5 else None for n in range(ROWS)], pa.list_(pa.float32(), 2)),
    "structs": lambda r: pa.array([{"x": n, "y": "z" * (n % 9)} for n in range(ROWS)]),
    "times": lambda r: pa.array([r.getrandbits(50) for _ in range(ROWS)], pa.timestamp("us", "UTC")),
}
WRITERS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "plain": {"use_dictionary": False, "compression": "none"},
    "small row groups": {"row_group_size": 4_000, "compression": "gzip"},
    "pages of version 2": {"data_page_version": "2.0", "compression": "zstd"},
    "an index of pages": {"write_page_index": True, "write_page_checksum": True},
    "another version": {"version": "1.0", "compression": "brotli", "store_schema": False},
}


@pytest.mark.parametrize("options", WRITERS.values(), ids=WRITERS)
def test_rows_of_other_writers_are_counted_for_about_what_they_take(options: dict[str, Any]) -> None:
    chance = random.Random(7)
    for name, make in COLUMNS.items():
        sink = io.BytesIO()
        pq.write_table(pa.table({"c": make(chance)}), sink, **options)
        allowed, expected = Allowance(None, 1 << 40), read(sink.getvalue())
        assert read_bounded(sink.getvalue(), allowed).equals(expected), name
        assert allowed.spent <= 5 * expected.nbytes + MIB, name


@pytest.mark.parametrize("options", WRITERS.values(), ids=WRITERS)
def test_files_without_rows_are_read(options: dict[str, Any]) -> None:
    chance = random.Random(7)
    sink = io.BytesIO()
    pq.write_table(pa.table({name: make(chance).slice(0, 0) for name, make in COLUMNS.items()}), sink, **options)
    assert read_bounded(sink.getvalue(), Allowance(None, MIB)).equals(read(sink.getvalue()))


def test_a_file_of_many_columns_is_opened_as_often_as_one_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a file takes time for each of its columns."""
    opened: list[object] = []

    class Counted(pq.ParquetFile):  # type: ignore[misc]
        def __init__(self, *args: Any, **how: Any) -> None:
            opened.append(args)
            super().__init__(*args, **how)

    monkeypatch.setattr(pq, "ParquetFile", Counted)
    counts = []
    for width in (1, 300):
        sink = io.BytesIO()
        pq.write_table(pa.table({f"c{n}": [n] for n in range(width)}), sink)
        opened.clear()
        assert read_bounded(sink.getvalue(), Allowance()).num_columns == width
        counts.append(len(opened))
    assert counts[0] == counts[1]


def test_a_row_group_of_a_million_rows_with_a_large_dictionary_is_read() -> None:
    """As pyarrow writes them by default."""
    indices = pa.array([(7 * n * n + n) % 20_000 for n in range(1_000_000)], pa.int32())
    texts = pa.DictionaryArray.from_arrays(indices, pa.array([f"{n:040}" for n in range(20_000)]))
    sink = io.BytesIO()
    pq.write_table(pa.table({"c": texts.cast(pa.string())}), sink)
    assert read_bounded(sink.getvalue(), Allowance(None, 144 * MIB)).num_rows == 1_000_000


def _bombs() -> dict[str, bytes]:
    def file(column: pa.Array, **options: Any) -> bytes:
        sink = io.BytesIO()
        pq.write_table(pa.table({"c": column}), sink, **{"compression": "zstd", "store_schema": False, **options})
        return sink.getvalue()

    one = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int8()), pa.array(["x" * 9_000]))
    far = pa.array(["x" * 200_000 + str(n) for n in range(100)])
    return {
        "zeros": file(pa.array([0] * 4_000_000)),
        "nulls": file(pa.nulls(8_000_000, pa.string())),
        "a text that all rows name": file(one),
        "long texts that are alike": file(far),
        "prefixes": file(far, use_dictionary=False, column_encoding={"c": "DELTA_BYTE_ARRAY"}),
        "nulls within a list": file(pa.array([[None] * 4_000_000], pa.list_(pa.int64()))),
        "null lists of a fixed size": file(pa.nulls(3_000, pa.list_(pa.float32(), 4_000)), store_schema=True),
        "many row groups": file(pa.array([1] * 4_000), row_group_size=1),
    }


def test_a_file_that_becomes_large_is_refused_before_it_does() -> None:
    for name, data in _bombs().items():
        before = pa.total_allocated_bytes()
        with pytest.raises(BodyTooLarge):
            read_bounded(data, Allowance(None, 3 * MIB if name == "many row groups" else 16 * MIB))
        assert pa.total_allocated_bytes() - before < 16 * MIB, name


@pytest.mark.parametrize("seeds", thinned([range(at, at + 100) for at in range(0, 1_000, 100)], 5), ids=str)
def test_a_hostile_file_ends_no_process_and_takes_no_more_than_it_may(seeds: range) -> None:
    """Of some footers pyarrow ends the process when it is asked for what they say of a column."""
    columns = {
        "t": [f"text {n % 7}" for n in range(300)],
        "l": pa.array([[[n, None], None] if n % 3 else None for n in range(300)], pa.list_(pa.list_(pa.int64(), 2))),
    }
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, row_group_size=150)
    data = sink.getvalue()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for seed in seeds:
        chance, evil = random.Random(seed), bytearray(data)
        for _ in range(chance.choice([1, 1, 2, 8])):
            at = chance.randrange(footer, len(data)) if seed % 2 else chance.randrange(footer)
            evil[at] = chance.choice([0, 255, evil[at] ^ (1 << chance.randrange(8)), chance.randrange(256)])
        with contextlib.suppress(*UNREADABLE, InvalidUsage):
            found = read_bounded(bytes(evil), Allowance(None, 4 * MIB))
            found.validate(full=True)
            assert found.nbytes <= 4 * MIB


@pytest.mark.parametrize("value", [1, "text"], ids=["a number", "a text"])
def test_an_unknown_compression_is_refused(value: Any) -> None:
    """Asked for the name of such a codec pyarrow aborts the process."""
    sink = io.BytesIO()
    pq.write_table(pa.table({"a": [value]}), sink, compression="zstd")
    data = sink.getvalue()
    codec = data.rindex(b"a\x15\x0c") + 2  # in the footer, after the path of the column: ZSTD is 6
    with pytest.raises(ValueError, match="unknown compression 8"):
        read_bounded(data[:codec] + b"\x10" + data[codec + 1 :], Allowance())
