"""Rows in the shell: create, import, cat, head, count, tail, diff, export, drop, on the stores and through a server."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import persist
from rpc.cli.program import main
from tests.support.examples import thinned
from tests.support.typed import KINDS, Place, place_of

SCHEMA = "id int64, state string"
ROWS = "id,state\n1,new\n2,new\n"


@pytest.fixture(scope="module", params=thinned(KINDS, 2))
def one_place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place_of(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture
def place(one_place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.chdir(tmp_path)
    yield one_place
    one_place.clear()


@pytest.fixture
def typed(place: Place, capsys: pytest.CaptureFixture[str]) -> Any:
    """Types a command that has to succeed; its lines."""

    def run(*words: str) -> list[str]:
        found = place.type(capsys, *words)
        assert (found.code, found.err) == (0, ""), found.err
        return found.lines

    return run


@pytest.fixture
def orders(typed: Any) -> Any:
    """A shard with two rows at time 0, one of which is changed at time 1; types commands."""
    Path("orders.csv").write_text(ROWS)
    Path("paid.csv").write_text("id,state\n1,paid\n")
    typed("create", "orders", "--schema", SCHEMA, "--key", "id")
    typed("import", "orders", "orders.csv")
    typed("import", "orders", "paid.csv", "--upsert")
    return typed


BY_BOTH = pytest.mark.parametrize("one_place", KINDS, indirect=True)


@BY_BOTH
def test_cat_in_every_format(orders: Any) -> None:
    assert orders("cat", "orders", "--format", "table") == ["id  state", " 1  paid", " 2  new"]
    assert orders("cat", "orders", "--format", "csv") == ['"id","state"', '1,"paid"', '2,"new"']
    assert orders("cat", "orders", "--format", "csv", "--columns", "state", "--where", "id = 2") == ['"state"', '"new"']
    assert orders("cat", "orders", "--as-of", "0", "--limit", "1") == ['{"id":1,"state":"new"}']
    assert orders("cat", "orders", "--format", "table", "--where", "id > 9") == ["id  state"]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_cat_writes_bytes_that_are_read_back(
    orders: Any, place: Place, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdout", written)
    assert main(["cat", "orders", "--format", form, *place.where]) == 0
    data = pa.py_buffer(written.buffer.getvalue())  # type: ignore[attr-defined]
    table = pq.read_table(pa.BufferReader(data)) if form == "parquet" else pa.ipc.open_stream(data).read_all()
    assert table.to_pylist() == [{"id": 1, "state": "paid"}, {"id": 2, "state": "new"}]


def test_tail_shows_the_changes_of_the_last_times(orders: Any) -> None:
    last = ['{"id":1,"state":"new","__time":1,"__diff":-1}', '{"id":1,"state":"paid","__time":1,"__diff":1}']
    first = [f'{{"id":{number},"state":"new","__time":0,"__diff":1}}' for number in (1, 2)]
    assert orders("tail", "orders") == first + last
    assert orders("tail", "orders", "-n", "1") == last
    assert orders("tail", "orders", "--as-of", "0") == last
    assert orders("tail", "orders", "--as-of", "-1", "--where", "id = 2") == first[1:]
    assert orders("tail", "orders", "-n", "0") == []
    assert orders("tail", "orders", "--as-of", "1", "--columns", "id") == []


def test_tail_begins_where_history_does(orders: Any, place: Place) -> None:
    with place.client() as client:
        client.shard("orders").forget(1)
    assert orders("tail", "orders") == []


def test_diff_of_two_times(orders: Any, tmp_path: Path) -> None:
    expected = ['{"id":1,"state":"new","__diff":-1}', '{"id":1,"state":"paid","__diff":1}']
    assert orders("diff", "orders", "0", "1") == orders("diff", "orders", "0") == expected
    assert orders("diff", "orders", "0", "1", "--parquet", str(tmp_path / "rows.parquet")) == []
    assert pq.read_table(tmp_path / "rows.parquet").to_pylist() == [json.loads(line) for line in expected]
    with pytest.raises(AssertionError):
        orders("diff", "orders", "0", "99", "--parquet", str(tmp_path / "none.parquet"))
    assert not list(tmp_path.glob("*none.parquet*")), "whole or not at all"
    back = [json.loads(line)["__diff"] for line in orders("diff", "orders", "1", "0")]
    assert back == [1, -1]


@pytest.mark.parametrize("form", ["parquet", "csv", "ndjson", "arrow"])
def test_what_is_exported_is_imported_again_and_is_the_same(orders: Any, form: str) -> None:
    file = f"orders.{form}"
    assert orders("export", "orders", file, "--as-of", "0") == [
        f'{{"shard": "orders", "file": "{file}", "rows": 2, "as_of": 0}}'
    ]
    orders("import", "again", file, "--create", "--key", "id")
    assert orders("diff", "orders", "0", "0", "--other", "again") == []
    assert not [path for path in Path().iterdir() if path.name.endswith(".part")]


def test_an_export_that_fails_leaves_the_file_that_was_there(
    orders: Any, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("kept.csv").write_text("as it was")
    with place.client() as client:
        client.shard("orders").insert([{"id": 7, "state": "gone", "__diff": -1}])
    found = place.type(capsys, "export", "orders", "kept.csv")
    assert found.code == 1
    assert "retracted more often than added" in found.err
    assert Path("kept.csv").read_text() == "as it was"
    assert sorted(path.name for path in Path().iterdir()) == ["kept.csv", "orders.csv", "paid.csv"]


# --- create


def test_a_shard_is_made_like_a_file_or_by_a_file_with_its_schema(typed: Any, place: Place) -> None:
    pq.write_table(pa.table({"id": pa.array([1], pa.int32()), "at": pa.array([0], pa.timestamp("ms"))}), "rows.parquet")
    Path("rows.csv").write_text("id,amount,day\n1,1.5,2030-01-01\n")
    Path("schema.txt").write_text(
        '# orders\nid int64 not null\n"the amount" decimal128(10, 2), at timestamp[us, UTC]\n'
    )
    Path("schema.json").write_text('{"fields": [{"name": "id", "type": "int64", "key": true}]}')
    typed("create", "like", "--like", "rows.parquet", "--key", "id")
    typed("create", "csv", "--like", "rows.csv", "--key", "day,id", "--history", "30d")
    typed("create", "text", "--schema-file", "schema.txt", "--key", "id")
    typed("create", "json", "--schema-file", "schema.json")
    with place.client() as client:
        assert client.shard("like").schema.arrow == pa.schema([("id", pa.int32()), ("at", pa.timestamp("ms"))])
        csv = client.shard("csv")
        assert csv.schema.arrow == pa.schema([("id", pa.int64()), ("amount", pa.float64()), ("day", pa.date32())])
        assert csv.schema.key == ("day", "id")
        assert csv.settings.history_ms == 30 * 86_400_000
        kept = [
            pa.field("id", pa.int64(), False),
            ("the amount", pa.decimal128(10, 2)),
            ("at", pa.timestamp("us", "UTC")),
        ]
        assert client.shard("text").schema.arrow == pa.schema(kept)
        assert client.shard("json").schema.key == ("id",)


# --- import


def told(lines: list[str]) -> list[tuple[str, int, int]]:
    return [(line["done"], line["rows"], line["time"]) for line in map(json.loads, lines)]


def test_each_file_is_a_commit_and_a_second_run_writes_what_is_missing(typed: Any) -> None:
    for number in range(3):
        Path(f"{number}.ndjson").write_text(f'{{"id":{number}}}\n')
    typed("create", "orders", "--schema", SCHEMA, "--key", "id")
    assert told(typed("import", "orders", "0.ndjson")) == [("imported", 1, 0)]
    files = ("0.ndjson", "1.ndjson", "2.ndjson")
    assert told(typed("import", "orders", *files)) == [
        ("already imported", 1, 0),
        ("imported", 1, 1),
        ("imported", 1, 2),
    ]
    assert typed("cat", "orders", "--count") == ["3"]


def test_an_upsert_of_some_columns_keeps_the_values_of_the_others(orders: Any) -> None:
    orders("create", "wide", "--schema", "id int64, a string, b string", "--key", "id")
    Path("all.csv").write_text("id,a,b\n1,x,y\n")
    Path("some.csv").write_text("id,b,other\n1,z,9\n2,z,9\n")
    orders("import", "wide", "all.csv")
    orders("import", "wide", "some.csv", "--upsert", "--columns", "id,b")
    assert orders("cat", "wide") == ['{"id":1,"a":"x","b":"z"}', '{"id":2,"a":null,"b":"z"}']


@pytest.mark.parametrize("form", ["csv", "ndjson", "parquet"])
def test_an_upsert_keeps_the_columns_that_the_file_lacks(
    typed: Any, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persist.cli.row_files.CHUNK_BYTES", 64)
    typed("create", "wide", "--schema", "id int64, a string, b string", "--key", "id")
    Path("all.csv").write_text("id,a,b\n1,x,y\n")
    typed("import", "wide", "all.csv")
    Path("some.csv").write_text("id,a\n1,z\n" + "".join(f"{number},z\n" for number in range(10, 30)))
    Path("some.ndjson").write_text("".join(f'{{"a":"z","id":{number}}}\n' for number in (1, *range(10, 30))))
    pq.write_table(pa.table({"id": [1, *range(10, 30)], "a": ["z"] * 21}), "some.parquet")
    typed("import", "wide", f"some.{form}", "--upsert")
    assert typed("cat", "wide", "-n", "2") == ['{"id":1,"a":"z","b":"y"}', '{"id":10,"a":"z","b":null}']


def test_lines_of_an_upsert_that_differ_in_their_columns_are_refused_by_their_line(
    orders: Any, place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persist.cli.row_files.CHUNK_BYTES", 64)
    lines = [f'{{"id":{number},"state":"sent"}}' for number in range(20)]
    for uneven in ('{"id":20}', '{"id":20,"state":"sent","more":1}', '{"id":20,"sta'):
        Path("uneven.ndjson").write_text("\n".join([*lines, "", uneven]))
        refused = place.type(capsys, "import", "orders", "uneven.ndjson", "--upsert")
        assert (refused.code, refused.out) == (1, "")
        assert refused.err.startswith("persist import: uneven.ndjson, line 22: "), refused.err
    assert orders("cat", "orders", "--count") == ["2"]
    Path("uneven.ndjson").write_text('{"id":1}\n{"id":2,"state":"sent"}')
    orders("import", "orders", "uneven.ndjson", "--upsert", "--columns", "id,state")
    assert orders("cat", "orders") == ['{"id":1,"state":null}', '{"id":2,"state":"sent"}']


def test_files_of_one_upsert_have_the_same_columns(
    typed: Any, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("create", "wide", "--schema", "id int64, a string, b string", "--key", "id")
    Path("a.csv").write_text("id,a\n1,x\n")
    Path("b.ndjson").write_text('{"id":1,"b":"y"}\n')
    refused = place.type(capsys, "import", "wide", "a.csv", "b.ndjson", "--upsert", "--one-commit")
    assert (refused.code, refused.err.startswith("persist import: b.ndjson, it has the columns ")) == (1, True)
    typed("import", "wide", "a.csv", "b.ndjson", "--upsert")
    assert typed("cat", "wide") == ['{"id":1,"a":"x","b":"y"}']


def test_a_file_with_the_bytes_of_another_one_is_imported_by_a_token_or_by_one_commit(typed: Any) -> None:
    Path("a.csv").write_text(ROWS)
    Path("b.csv").write_text(ROWS)
    typed("create", "orders", "--schema", SCHEMA, "--key", "id")
    assert told(typed("import", "orders", "a.csv", "b.csv")) == [("imported", 2, 0), ("already imported", 2, 0)]
    assert told(typed("import", "orders", "b.csv", "--token", "b")) == [("imported", 2, 1)]
    assert told(typed("import", "orders", "a.csv", "b.csv", "--one-commit")) == [("imported", 4, 2)]


def test_rows_come_by_standard_input(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    typed("create", "orders", "--schema", SCHEMA, "--key", "id")
    Path("rows").write_text(ROWS)
    for done in ("imported", "already imported"):
        with open("rows") as rows:
            monkeypatch.setattr(sys, "stdin", rows)
            assert told(typed("import", "orders", "-", "--format", "csv")) == [(done, 2, 0)]


def test_an_import_is_in_the_commit_history(orders: Any, place: Place) -> None:
    with place.client() as client:
        assert [entry.info for entry in client.shard("orders").history(2)] == [
            {"imported": ["paid.csv"]},
            {"imported": ["orders.csv"]},
        ]


def test_cells_of_several_lines_and_blank_lines_are_counted_as_an_editor_counts_them(
    typed: Any, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("create", "orders", "--schema", SCHEMA, "--key", "id")
    Path("bad.csv").write_text('id,state\n1,"two\nlines"\n\n2,5" pipe\nx,new\n')
    assert (
        "bad.csv, line 6: column 'id': invalid value 'x' for int64"
        in place.type(capsys, "import", "orders", "bad.csv").err
    )
    Path("bad.ndjson").write_text('{"id":1}\n\n{"id":2.5}\n')
    assert "bad.ndjson, line 3: " in place.type(capsys, "import", "orders", "bad.ndjson").err
    Path("good.csv").write_text('id,state\n1,"two\nlines"\n\n2,5" pipe\n')
    assert told(typed("import", "orders", "good.csv")) == [("imported", 2, 0)]


def test_a_bad_row_far_into_a_file_is_told_by_its_line_and_nothing_is_written(
    typed: Any, place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persist.cli.row_files.CSV_BLOCK_BYTES", 4_096)
    monkeypatch.setattr("persist.cli.row_files.CHUNK_BYTES", 4_096)
    monkeypatch.setattr("persist.cli.row_files.BATCH_ROWS", 100)
    typed("create", "days", "--schema", "id int64 not null, day date32", "--key", "id")
    good = [(number, f"2030-01-{number % 28 + 1:02}") for number in range(3_000)]
    for row, line in ((2_000, 2_002), (2_999, 3_001)):
        texts = [f"{number},{day}" for number, day in good]
        texts[row] = f"{row},2030-02-30"
        Path("bad.csv").write_text("\n".join(["id,day", *texts]) + "\n")
        found = place.type(capsys, "import", "days", "bad.csv")
        assert found.code == 1
        assert found.err.startswith(f"persist import: bad.csv, line {line}: column 'day': ")
    lines = [json.dumps({"id": number, "day": day}) for number, day in good]
    lines[2_000] = '{"day": "2030-01-01"}'
    Path("bad.ndjson").write_text("\n".join(lines))
    assert (
        "bad.ndjson, line 2001: Object missing required field `id`"
        in place.type(capsys, "import", "days", "bad.ndjson").err
    )
    ids = pa.array([*range(500), None])
    pq.write_table(pa.table({"id": ids, "day": pa.nulls(501, pa.date32())}), "bad.parquet")
    assert "bad.parquet, row 501: column 'id' holds 1 nulls" in place.type(capsys, "import", "days", "bad.parquet").err
    assert typed("cat", "days", "--count") == ["0"]
    with place.client() as client:
        assert client.shard("days").upper() == persist.Antichain(0)


def test_a_new_shard_is_not_made_for_rows_that_it_cannot_take(
    place: Place, typed: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persist.cli.row_files.CHUNK_BYTES", 64)
    Path("late.ndjson").write_text('{"id":1}\n' * 50 + '{"id":"x"}\n')
    found = place.type(capsys, "import", "late", "late.ndjson", "--create", "--key", "id")
    assert (found.code, "line 51" in found.err) == (1, True)
    assert typed("shards", "--names") == []


def test_a_csv_file_without_rows_has_no_types_for_a_new_shard(
    place: Place, typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """All columns were text, also for the rows of the next day."""
    Path("day1.csv").write_text("id,amount\n")
    Path("day2.csv").write_text("id,amount\n10,5\n9,7\n")
    for words in (("import", "t", "day1.csv", "--create"), ("create", "t", "--like", "day1.csv")):
        found = place.type(capsys, *words, "--key", "id")
        assert (found.code, "day1.csv, it has no rows" in found.err) == (1, True), found.err
    assert typed("shards", "--names") == []
    typed("import", "t", "day2.csv", "--create", "--key", "id")
    with place.client() as client:
        assert client.shard("t").schema.arrow.types == [pa.int64(), pa.int64()]
    assert json.loads(typed("import", "t", "day1.csv", "--create", "--key", "id")[0])["done"] == "nothing to do"


def test_types_of_a_new_shard_lose_nothing_and_null_tells_what_is_none(typed: Any, place: Place) -> None:
    Path("p.csv").write_text("zip,mass,price\n01234,NA,1.50\n0870,5,2.25\n")
    typed("import", "plain", "p.csv", "--create", "--key", "zip")
    typed("import", "told", "p.csv", "--create", "--key", "zip", "--null", "NA")
    assert told(typed("import", "told", "p.csv", "--null", "NA")) == [("already imported", 2, 0)]
    assert told(typed("import", "plain", "p.csv", "--null", "NA", "--upsert")) == [("imported", 2, 1)]
    with place.client() as client:
        types = [client.shard(name).schema.arrow.types for name in ("plain", "told")]
        found = client.shard("plain").snapshot().to_arrow().column("mass").to_pylist()
    price = pa.decimal128(38, 2)
    assert types == [[pa.string(), pa.string(), price], [pa.string(), pa.int64(), price]]
    assert found == [None, "5"]


# --- shards and drop


@pytest.mark.parametrize(("answer", "left"), [("y", []), ("YES", []), ("n", ["orders"]), ("", ["orders"])])
def test_drop_asks_in_a_terminal(
    answer: str, left: list[str], orders: Any, place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal(f"{answer}\n"))
    asked = place.type(capsys, "drop", "orders")
    assert "drop orders? [y/N]" in asked.err
    assert asked.code == (2 if left else 0)
    assert orders("shards", "--names") == left


def test_the_last_times_of_a_closed_shard_are_its_last_writes(typed: Any, place: Place) -> None:
    with place.client() as client:
        shard = client.create_shard("closed", pa.schema([("id", pa.int64())]), ["id"])
        for number in range(5):
            shard.insert([{"id": number}])
        shard.advance_upper(None)
    assert [json.loads(line)["id"] for line in typed("tail", "closed", "-n", "2")] == [3, 4]
