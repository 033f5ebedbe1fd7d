"""CSV is read strictly: quotes, numbers, and the places of both."""

from __future__ import annotations

import csv
import io

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.codecs import rows
from persist.codecs.csv_rows import BadQuote, CsvScan, check_quotes, scan_csv
from persist.core.errors import InvalidUsage
from persist.parts import ShardSchema

CELLS = st.text(st.sampled_from('a",\n\r é'), max_size=4)


def read(text: str, kind: pa.DataType) -> list[object]:
    schema = ShardSchema(pa.schema([("id", pa.int64()), ("v", kind)]), ("id",))
    return rows.read(text.encode(), "csv", schema, 100).column("v").to_pylist()


def is_strict(text: str) -> bool:
    try:
        list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error:
        return False
    return True


def is_taken(data: bytes, size: int) -> bool:
    scan = CsvScan()
    for start in range(0, len(data), size):
        scan.feed(data[start : start + size])
    try:
        if not scan.is_regular:
            check_quotes(data)
    except BadQuote:
        return False
    return True


@given(st.text(st.sampled_from('a",\n'), max_size=12), st.integers(1, 5), st.sampled_from([b"", b"\xef\xbb\xbf"]))
def test_quotes_are_taken_exactly_where_pythons_strict_reader_takes_them(text: str, size: int, mark: bytes) -> None:
    assert is_taken(mark + text.encode(), max(size, len(mark))) == is_strict(text)


@given(st.lists(st.lists(CELLS, min_size=1, max_size=3), max_size=4), st.integers(1, 5))
def test_what_a_writer_quotes_is_regular(cells: list[list[str]], size: int) -> None:
    sink = io.StringIO(newline="")
    csv.writer(sink, quoting=csv.QUOTE_ALL).writerows(cells)
    scan, data = CsvScan(counts_lines=True), sink.getvalue().encode()
    for start in range(0, len(data), size):
        scan.feed(data[start : start + size])
    assert scan.is_regular
    assert scan.lines == len(cells)


@pytest.mark.parametrize(
    ("text", "line"),
    [('id,v\n1,a\n2,"abc"def\n', 3), ('id,v\n1,"say \\"hi\\""\n', 2), ('id,v\n1,a\n2,"b\n3,c\n', 3), ('id,"v"w\n', 1)],
)
def test_text_after_a_closing_quote_and_an_open_one_are_refused_with_their_line(text: str, line: int) -> None:
    with pytest.raises(BadQuote) as error:
        scan_csv(text.encode())
    assert error.value.line == line
    with pytest.raises(InvalidUsage):
        read(text, pa.string())


@pytest.mark.parametrize("cell", ["2024-01-31 12:00", "2024-01-31T12:00:00.5", "x"])
def test_an_instant_without_a_zone_is_refused_in_our_own_words(cell: str) -> None:
    with pytest.raises(InvalidUsage) as error:
        read(f"id,v\n1,{cell}\n", pa.timestamp("us", "UTC"))
    assert cell in error.value.message
    assert "assume_timezone" not in error.value.message


@pytest.mark.parametrize(("kind", "cell"), [
    (pa.float64(), "1e400"), (pa.float64(), "-1e999"), (pa.float64(), "1e-400"),
    (pa.float64(), "-0." + "0" * 400 + "1"), (pa.float32(), "1e-60"), (pa.float16(), "1e-30"),
    (pa.list_(pa.float64()), "[1e-400]"), (pa.float32(), "1e39"), (pa.float32(), "1e400"), (pa.float16(), "70000"),
    (pa.float16(), "1e400"), (pa.float64(), "9007199254740993"), (pa.float64(), "-12345678901234567890"),
    (pa.float32(), "16777217"), (pa.float16(), "2049"), (pa.float64(), "0x10"), (pa.int64(), "0x10"),
    (pa.uint8(), "0X1"), (pa.int64(), " 0x10"), (pa.int64(), "-0x10"), (pa.int64(), "1.0"),
])  # fmt: skip
def test_a_number_that_would_be_another_one_is_refused(kind: pa.DataType, cell: str) -> None:
    with pytest.raises(InvalidUsage):
        read(f"id,v\n1,{cell}\n", kind)


@pytest.mark.parametrize(("kind", "cell", "value"), [
    (pa.float64(), "9007199254740992", 2.0**53), (pa.float64(), "1e23", 1e23), (pa.float64(), "5e-324", 5e-324),
    (pa.float64(), "0e-400", 0.0), (pa.list_(pa.float64()), "[0e-400]", [0.0]), (pa.float64(), " 1.5\t", 1.5),
    (pa.float64(), "Infinity", float("inf")), (pa.float64(), "-inf", float("-inf")),
    (pa.float32(), "810751300", 810751296.0), (pa.float32(), "-1325607000", -1325607040.0),  # as they are written
    (pa.float32(), "inf", float("inf")), (pa.int64(), "007", 7), (pa.string(), "0x10", "0x10"),
])  # fmt: skip
def test_other_numbers_are_read(kind: pa.DataType, cell: str, value: object) -> None:
    assert read(f'id,v\n1,{cell}\n2,"{cell}"\n3,\n', kind) == [value, value, None]


def test_hexadecimal_elsewhere_changes_nothing() -> None:
    text = "id,v\n 1 ,0x10\n-2,\n"
    schema = ShardSchema(pa.schema([("id", pa.int64()), ("v", pa.string())]), ("id",))
    found = rows.read(text.encode(), "csv", schema, 100)
    assert found.column("id").to_pylist() == [1, -2]
    assert found.column("v").to_pylist() == ["0x10", None]
