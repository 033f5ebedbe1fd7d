"""Parquet files of other makers: no time changes, no damage passes."""

from __future__ import annotations

import datetime as dt
import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from persist.core.errors import InvalidUsage
from persist.parts import ShardSchema
from rpc import rows
from rpc.cli.files import opened
from rpc.decoder_process import decode
from rpc.parquet_files import check_counts, open_parquet

LATE, EARLY, NOW = dt.datetime(9999, 12, 31, 23, 59, 59), dt.datetime(1, 1, 1), dt.datetime(2026, 1, 1, 0, 0, 0, 7)  # noqa: DTZ001
US, NS = pa.timestamp("us"), pa.timestamp("ns")


def written(columns: dict[str, pa.Array], **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, use_deprecated_int96_timestamps=True, **options)
    return sink.getvalue()


def read(data: bytes) -> pa.Table:
    with open_parquet(pa.BufferReader(data)) as file:
        return file.read()


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([NOW, None], US), NS),
        (pa.array([LATE, EARLY, None], US), US),
        (pa.array([[LATE, None], None, [EARLY]], pa.list_(US)), pa.list_(US)),
        (pa.array([{"x": LATE}, None], pa.struct([("x", US)])), pa.struct([("x", US)])),
        (pa.array([1_234_567_891], NS), NS),
    ],
)
def test_times_of_int96_are_nanoseconds_or_microseconds_as_they_have_room(column: pa.Array, kind: pa.DataType) -> None:
    found = read(written({"t": column})).column("t")
    assert str(found.type).replace("element", "item") == str(kind)
    assert found.to_pylist() == column.cast(kind).to_pylist()


def test_int96_that_needs_nanoseconds_and_far_years_is_refused_by_file_and_body(tmp_path: Any) -> None:
    data = written({"t": pa.array([1_234_567_891], NS), "u": pa.array([LATE], US)})
    schema = ShardSchema(pa.schema([("t", US), ("u", US)]), ("t",))
    with pytest.raises(InvalidUsage):
        rows.read(data, "parquet", schema, 10)
    with pytest.raises(ValueError, match="INT96"):
        decode(data, io.BytesIO())
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
    with pytest.raises(OSError, match="CRC"):
        decode(damaged, io.BytesIO())


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


@pytest.mark.parametrize(
    ("numbers", "is_sound"),
    [
        ((8, 8, 8, 0), True),
        ((8, 8, 9, 1), True),
        ((0, 0, 8, 0), False),
        ((0, 8, 8, 0), False),
        ((8, 8, 7, 0), False),
        ((8, 8, 7, 1), False),
    ],
)
def test_a_footer_whose_numbers_contradict_each_other_is_refused(
    numbers: tuple[int, int, int, int], is_sound: bool
) -> None:
    footer: Any = Footer(*numbers)
    if is_sound:
        check_counts(footer)
    else:
        with pytest.raises(ValueError, match="damaged"):
            check_counts(footer)
