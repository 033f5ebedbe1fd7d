"""Types of a new shard's columns: nothing of a cell is lost but notation, whatever else is in the file."""

from __future__ import annotations

import csv
import io
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from persist.cli.inference import Texts
from persist.cli.row_files import opened
from persist.core.errors import InvalidUsage
from persist.parts import ShardSchema

INT, UINT, FLOAT, TEXT = pa.int64(), pa.uint64(), pa.float64(), pa.string()
US, NS, UTC = pa.timestamp("us"), pa.timestamp("ns"), pa.timestamp("us", "UTC")
BIG, HUGE = "12345678901234567890", "123456789012345678901234567890"


def rows_of(path: Path, nulls: tuple[str, ...] = ()) -> pa.Table:
    """The rows of a file in the types that a new shard would have."""
    with opened([str(path)], None, nulls) as [source]:
        columns = source.inferred()
        pieces = list(source.pieces(ShardSchema(columns, (columns.names[0],)), None))
    return pa.concat_tables([piece.table.select(columns.names) for piece in pieces]).cast(columns)


def of_cells(*blocks: list[str]) -> pa.DataType:
    column = Texts.of_cells()
    for block in blocks:
        column.add(pa.array(block, pa.string()))
    return column.kind()


@pytest.mark.parametrize(("cells", "kind"), [
    (["1", "-2", "0"], INT),
    (["9223372036854775807", "-9223372036854775808"], INT),
    ([BIG, "1"], UINT),
    ([BIG, "-1"], pa.decimal128(38, 0)),
    ([HUGE, "1"], pa.decimal128(38, 0)),
    (["1" * 60], pa.decimal256(76, 0)),
    (["1" * 77], TEXT),
    (["007", "7"], TEXT),
    (["-07"], TEXT),
    (["+4915112345678"], TEXT),
    (["1,000"], TEXT),
    (["0xFF"], TEXT),
    (["a", "b" * 1001], TEXT),
    ([".", "."], TEXT),
    (["1.", "2."], TEXT),
    (["1_000"], TEXT),
    (["-0", "0"], TEXT),
    ([" 5"], TEXT),
    (["21", "22.8"], FLOAT),
    (["1.0", "2.0"], FLOAT),
    (["-0.0", "0.0"], FLOAT),
    ([".5", "-.25"], FLOAT),
    (["0.1", "123456.789"], FLOAT),
    (["0.12345678901234568", "1"], FLOAT),
    (["0.12345678901234567", "1"], TEXT),
    (["1e-05", "2"], FLOAT),
    (["1.5E3", "1E+300"], FLOAT),
    (["1.500000e+00"], FLOAT),
    (["12E3", "1E10"], TEXT),
    (["0.10", "2.50"], pa.decimal128(38, 2)),
    (["0.10", "12345678901234567.89"], pa.decimal128(38, 2)),
    (["-0.00", "1.10"], TEXT),
    (["0." + "1" * 50], pa.decimal256(76, 50)),
    (["1.10", "1.1"], TEXT),
    (["9007199254740993", "1.5"], TEXT),
    (["9007199254740992", "1.5"], FLOAT),
    (["12345678901234567.89", "1.5"], TEXT),
    (["1e400"], TEXT),
    (["1e-400"], TEXT),
    (["1e99999999999"], TEXT),
    (["007.5"], TEXT),
    (["nan", "1.5"], TEXT),
    (["inf"], TEXT),
    (["1", "NA"], TEXT),
    (["true", "false"], pa.bool_()),
    (["TRUE", "False"], pa.bool_()),
    (["true", "0"], TEXT),
    (["2024-01-31", "0001-01-01", "9999-12-31"], pa.date32()),
    (["2023-02-29"], TEXT),
    (["20240131"], INT),
    (["2024-01-31T12:00:00", "9999-12-31 23:59:59.999999"], US),
    (["2024-01-31 12:00"], US),
    (["2024-01-31T12:00:00.123456789"], NS),
    (["2024-01-31T12:00:00.123456789", "9999-12-31T00:00:00"], TEXT),
    (["2024-01-31T12:00:00Z", "2024-01-31 12:00:00.5+02:00"], UTC),
    (["2024-01-31T12:00:00Z", "2024-01-31T12:00:00"], TEXT),
    (["2024-01-31", "2024-01-31T12:00:00"], TEXT),
    (["2024-01-31T12"], TEXT),
    (["12:00:00"], TEXT),
    (["", "1"], TEXT),
    ([], TEXT),
])  # fmt: skip
def test_a_type_is_chosen_by_all_cells_in_whichever_blocks_they_come(cells: list[str], kind: pa.DataType) -> None:
    assert of_cells(cells) == kind
    assert of_cells(*([cell] for cell in cells)) == kind
    assert of_cells(*([cell] for cell in reversed(cells))) == kind


NUMBERS = st.one_of(
    st.integers(-(10**40), 10**40).map(str),
    st.integers(-300, 300).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.decimals(-1000, 1000, places=2).map(str),
    st.from_regex(r"-?0{0,2}[0-9]{1,3}(\.[0-9]{1,3})?([eE][+-]?[0-9]{1,3})?", fullmatch=True),
)
OTHERS = st.one_of(
    st.sampled_from(["true", "false", "NA", "", "nan", "2024-01-31", "2024-01-31T10:00:00", "2024-01-31 10:00:00Z"]),
    st.dates().map(str),
    st.datetimes().map(str),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5),
)
COLUMN = st.one_of(st.lists(NUMBERS, min_size=1), st.lists(OTHERS, min_size=1))


def has_value(value: Any, cell: str) -> bool:
    """Whether a value is what the cell says, but for notation."""
    if isinstance(value, bool):
        return cell.lower() == str(value).lower()
    if isinstance(value, float):
        return Decimal(repr(value)) == Decimal(cell) and math.copysign(1, value) == (-1 if cell[0] == "-" else 1)
    if isinstance(value, int):
        return str(value) == cell
    if isinstance(value, Decimal):
        return str(value).replace("0.", ".", 1) in (cell, cell.replace("0.", ".", 1))
    if isinstance(value, str):
        return value == cell
    return cell.replace(" ", "T").startswith(value.isoformat()[:16])


@given(COLUMN)
@example(["0.5", "1192092895507812500000000000000000"])  # the shortest text of a double, which is another number
@example(["0.5", "25413345112752128"])  # a double, whose shortest text is another number
def test_every_cell_of_csv_is_read_as_what_it_says(tmp_path_factory: pytest.TempPathFactory, cells: list[str]) -> None:
    path = tmp_path_factory.mktemp("csv") / "f.csv"
    sink = io.StringIO(newline="")
    csv.writer(sink, quoting=csv.QUOTE_MINIMAL).writerows([["id", "v"], *enumerate(cells)])
    path.write_text(sink.getvalue(), newline="")
    found = rows_of(path).column("v").to_pylist()
    assert all(
        value is None if cell == "" else has_value(value, cell) for value, cell in zip(found, cells, strict=True)
    )


def test_what_is_null_is_so_for_the_types_and_for_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "f.csv"
    path.write_text('id,mass,name\n1,NA,NA\n2,5,"NA"\n3,,-\n')
    plain, told = rows_of(path), rows_of(path, ("NA", "-"))
    assert (plain.schema.types, told.schema.types) == ([INT, TEXT, TEXT], [INT, INT, TEXT])
    assert plain.column("mass").to_pylist() == ["NA", "5", None]
    assert told.to_pydict() == {"id": [1, 2, 3], "mass": [None, 5, None], "name": [None, "NA", None]}
    (tmp_path / "f.ndjson").write_text('{"id": 1}\n')
    with pytest.raises(InvalidUsage), opened([str(tmp_path / "f.ndjson")], None, ("NA",)):
        pass


@pytest.mark.parametrize(("values", "kind"), [
    (["1", "-2"], INT),
    ([BIG, "1"], UINT),
    ([HUGE], pa.decimal128(38, 0)),
    (["1.5", "2", "1.10"], FLOAT),
    (["12E3"], FLOAT),
    (["-0", "1"], FLOAT),
    (["-0", "1.5"], FLOAT),
    (['"007"', '"1"'], TEXT),
    (['"2024-01-31"'], pa.date32()),
    (['"2024-01-31T10:00:00Z"', '"2024-01-31 10:00:00+01:00"'], UTC),
    (["true", "null"], pa.bool_()),
    (["null"], TEXT),
    (["[1, null]", "[]", "[2.5]"], pa.list_(FLOAT)),
    (['{"a": 1}', '{"b": ["x"]}'], pa.struct([("a", INT), ("b", pa.list_(TEXT))])),
])  # fmt: skip
def test_values_of_ndjson_choose_types_too_and_fit_them(tmp_path: Path, values: list[str], kind: pa.DataType) -> None:
    path = tmp_path / "f.ndjson"
    path.write_text("".join(f'{{"id": {number}, "v": {value}}}\n' for number, value in enumerate(values)))
    found = rows_of(path)
    assert found.schema == pa.schema([("id", INT), ("v", kind)])
    if pa.types.is_decimal(kind):
        assert found.column("v").to_pylist() == [Decimal(value) for value in values]
    elif not pa.types.is_temporal(kind) and not pa.types.is_nested(kind):
        assert found.column("v").to_pylist() == [json.loads(value) for value in values]


@pytest.mark.parametrize("values", [
    ["9007199254740993", "1.5"], ["12345678901234567.89"], ["1e400"], ["1e-400"], ["1" * 80], ["1", '"x"'],
    ["true", "1"], ["[1]", "1"], ['{"a": 1}', '{"a": "x"}'], ['{"a": 1, "a": 2}'],
])  # fmt: skip
def test_ndjson_that_no_type_holds_is_refused_with_its_line(tmp_path: Path, values: list[str]) -> None:
    path = tmp_path / "f.ndjson"
    lines = [f'{{"id": {number}}}\n' for number in range(50)]
    path.write_text("".join([*lines, *(f'{{"id": {number}, "v": {value}}}\n' for number, value in enumerate(values))]))
    with pytest.raises(InvalidUsage, match=f"line {50 + len(values)}:"):
        rows_of(path)


@pytest.mark.parametrize("value", ["12345678901234567.89", "0.1000000000000000055511151231257827"])
def test_fractions_of_ndjson_that_are_no_doubles_are_refused_before_a_shard_is_made(tmp_path: Path, value: str) -> None:
    """A decimal was chosen, which rows of JSON give as texts: the shard was made, and then nothing was imported."""
    path = tmp_path / "f.ndjson"
    path.write_text(f'{{"id": 1, "v": {value}}}\n')
    with opened([str(path)], None) as [source], pytest.raises(InvalidUsage, match="'v'"):
        source.inferred()


def test_a_byte_order_mark_before_ndjson_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "f.ndjson"
    path.write_bytes(b'\xef\xbb\xbf{"id": 1}\n{"id": 2}\n')
    assert rows_of(path).column("id").to_pylist() == [1, 2]
