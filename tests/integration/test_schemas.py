"""The life of a schema: verbs, HTTP, the command line, old programs beside new ones. docs/schemas.md describes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pyarrow as pa
import pytest
from starlette.testclient import TestClient

import persist
from persist import Client, InvalidUsage, Shard
from persist.parts.schema_changes import (
    AddColumn,
    Change,
    DropColumn,
    MoveColumn,
    RelaxColumn,
    RenameColumn,
    WidenColumn,
)
from rpc.app import create_app
from rpc.cli.program import main
from rpc.settings import ServerSettings
from tests.integration.test_maintenance_http import served
from tests.support.asking import typed
from tests.support.embedded import client_of
from tests.support.location import memory_location
from tests.support.pages import blocks, run_python
from tests.support.waiting import WAIT_S

COLUMNS = pa.schema(
    [pa.field("id", pa.int32(), nullable=False), ("state", pa.string()), pa.field("n", pa.int32(), nullable=False)]
)
HISTORY = [{"id": 1, "state": "a", "n": 1}, {"id": 2, "state": "b", "n": 2}]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with persist.connect(f"persist://{tmp_path}") as client:
        yield client


@pytest.fixture
def shard(client: Client) -> Shard:
    found = client.create_shard("orders", COLUMNS, ["id"])
    found.insert(HISTORY)
    return found


def there(shard: Shard, as_of: int | None = None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = shard.snapshot(as_of).to_arrow(expand=True).to_pylist()
    return rows


def test_the_examples_of_the_page_print_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    python = [block for block in blocks("docs/schemas.md") if block.language == "python"]
    found = [block for block in python if "df.write" not in block.text]
    run_python("docs/schemas.md", found, {})


REFUSED: dict[str, tuple[list[Change], str]] = {
    "a name that is there": ([AddColumn("n", pa.int8())], "there is a column 'n' already"),
    "a new name that is there": ([RenameColumn("state", "n")], "there is a column 'n' already"),
    "no name": ([RenameColumn("state", "")], "a text that is not empty"),
    "a column that is not there": ([DropColumn("x")], "has no column 'x'"),
    "a place after none": ([AddColumn("x", pa.int8(), after="y")], "has no column 'y'"),
    "a place after itself": ([MoveColumn("n", "n")], "cannot be moved after itself"),
    "the key": ([DropColumn("id")], "is a key column, which cannot be dropped"),
    "a wider key": ([WidenColumn("id", pa.int64())], "key column 'id' changes from int32 to int64; rows are sorted"),
    "no default": ([AddColumn("x", pa.int8(), nullable=False)], "must allow nulls or have a default"),
    "a default of another type": ([AddColumn("x", pa.int8(), default="y")], "column 'x' does not fit int8"),
    "a default that is cut short": ([AddColumn("x", pa.int8(), default=300)], "column 'x' does not fit int8"),
    "a long default": ([AddColumn("x", pa.string(), default="y" * 2_000)], "the limit is 2048"),
    "a narrower type": ([WidenColumn("n", pa.int16())], "column 'n' changes from int32 to int16; only widening"),
    "another type": ([WidenColumn("n", pa.string())], "column 'n' changes from int32 to string"),
    "a float of a whole number": ([WidenColumn("n", pa.float64())], "column 'n' changes from int32 to double"),
    "a type that cannot be kept": ([AddColumn("x", pa.struct([]))], "a struct without fields"),
    "a reserved name": ([RenameColumn("n", "__Time")], "'__Time' is reserved"),
    "a long name": ([AddColumn("x" * 300, pa.int8())], "has 300 characters"),
    "no change": ([], "there are 0 changes"),
    "the second of two": ([AddColumn("x", pa.int8()), DropColumn("y")], "has no column 'y'"),
}


def test_what_cannot_be_is_refused_and_changes_nothing(shard: Shard) -> None:
    for changes, says in REFUSED.values():
        with pytest.raises(InvalidUsage, match=says):
            shard.alter(*changes)
    assert shard.view().schema_id == 1
    assert there(shard) == HISTORY


def test_old_programs_go_on_beside_new_ones_or_are_told_what_to_do() -> None:
    """A handle from before each change, one from after all, and posts of rows that know but names."""
    location = memory_location()
    client = client_of(location)
    shard = client.create_shard("orders", COLUMNS, ["id"])
    shard.insert(HISTORY)
    old = client.shard("orders")
    shard.alter(RenameColumn("state", "status"), DropColumn("n"), AddColumn("n", pa.string(), False, "none"))
    middle = client.shard("orders")
    shard.alter(RenameColumn("id", "order"), WidenColumn("n", pa.string()), RelaxColumn("n"), MoveColumn("n"))
    old.insert([{"id": 3, "state": "c", "n": 3}])  # its `n` was dropped: the value is not kept
    middle.insert([{"id": 4, "status": "d", "n": "four"}])
    with served(location) as url, persist.connect(url) as far:
        far.shard("orders").insert([{"order": 5, "status": "e"}])
        with typed(TestClient(create_app(location, ServerSettings()), base_url="http://127.0.0.1")) as http:
            insert = "/v1/shards/orders/insert"
            for form, body in {"ndjson": b'{"order": 6, "state": "f"}', "csv": b"order,state\n6,f\n"}.items():
                refused = http.post(f"{insert}?format={form}", content=body)
                assert (refused.status_code, refused.json()["detail"]) == (
                    400, "column 'state' is called 'status' now; use that name",
                )  # fmt: skip
            for number, (form, body) in enumerate({"ndjson": b'{"order": 6}', "csv": b"order\n7\n"}.items()):
                assert http.post(f"{insert}?format={form}", content=body).status_code == 200, number
        found = [(row["n"], row["order"], row["status"]) for row in there(shard)]
        assert found == [
            ("none", 1, "a"), ("none", 2, "b"), ("none", 3, "c"), ("four", 4, "d"), ("none", 5, "e"), ("none", 6, None),
            ("none", 7, None),
        ]  # fmt: skip
        with pytest.raises(InvalidUsage, match="column 'state' is called 'status' now"):
            client.shard("orders").insert([{"order": 8, "state": "x"}])
        with pytest.raises(InvalidUsage, match="'id' is called 'order' now"):
            shard.snapshot(where="id = 1")


def test_a_null_that_is_written_stays_null_and_what_is_left_out_has_the_default(shard: Shard) -> None:
    shard.add_column("at", pa.list_(pa.int8()), default=[1, None])
    shard.insert([{"id": 3, "n": 0, "at": None}, {"id": 4, "n": 0}])
    shard.upsert([{"id": 5, "n": 0}, {"id": 1, "n": 9}])
    assert [(row["id"], row["n"], row["at"]) for row in there(shard)] == [
        (1, 9, [1, None]), (2, 2, [1, None]), (3, 0, None), (4, 0, [1, None]), (5, 0, [1, None]),
    ]  # fmt: skip


def test_a_listener_goes_on_over_a_change_with_the_columns_of_then(shard: Shard) -> None:
    shard.insert([{"id": 3, "state": "c", "n": 3}])
    heard = []
    for event in shard.listen(as_of=0, until=4):
        heard += event.updates.to_pylist()
        if len(heard) == 1:
            shard.alter(RenameColumn("state", "status"), DropColumn("n"))
            shard.insert([{"id": 4, "status": "d"}])
            shard.add_column("n", pa.string())
            shard.insert([{"id": 5, "status": "e", "n": "new"}])
    assert [{name: row[name] for name in row if name[0] != "_"} for row in heard] == [
        {"id": 3, "state": "c", "n": 3}, {"id": 4, "status": "d", "n": None}, {"id": 5, "status": "e", "n": "new"},
    ]  # fmt: skip


def test_a_listener_that_names_a_column_which_goes_is_told_so(shard: Shard) -> None:
    listener = shard.listen(as_of=0, columns=["n"], until=3)
    shard.drop_column("n")
    shard.insert([{"id": 3}])
    with pytest.raises(InvalidUsage, match="column 'n' was dropped; leave it out"):
        list(listener)


NAME_TAKEN: dict[str, list[Change]] = {
    "two names are swapped": [RenameColumn("n", "x"), RenameColumn("m", "n"), RenameColumn("x", "m")],
    "renamed, and another one has the name": [RenameColumn("n", "x"), AddColumn("n", pa.int32())],
    "dropped, and another one has the name": [DropColumn("n"), AddColumn("n", pa.int32())],
}


SELECTING = [
    # the stream, after which time it begins, by what it selects, how many rows it has given (none: it was not asked)
    ("listen", -1, {"where": "n >= 1"}, 2), ("subscribe", 0, {"columns": ["n"]}, 2),
    ("listen", 0, {"columns": ["n"]}, 0), ("listen", 0, {"where": "n >= 1"}, None),
]  # fmt: skip


@pytest.mark.parametrize(("stream", "as_of", "chosen", "given"), SELECTING)
@pytest.mark.parametrize("change", NAME_TAKEN)
def test_a_listener_ends_where_a_name_by_which_it_selects_means_another_column(
    shard: Shard, change: str, stream: str, as_of: int, chosen: dict[str, Any], given: int | None
) -> None:
    """It went on by the name, so rows that it had given were never taken away."""
    shard.alter(AddColumn("m", pa.int32(), default=0))
    with getattr(shard, stream)(as_of, **chosen) as listener:
        if given is not None:
            assert sum(len(event.updates) for event in listener.next_events(0.0)) == given
        shard.alter(*NAME_TAKEN[change])
        shard.delete("id = 1")
        with pytest.raises(InvalidUsage, match="column 'n'"):
            list(listener.next_events(1.0))
        assert listener.frontier.element == 1


IN_THE_MIDDLE: dict[str, Callable[[Shard], Any]] = {
    "insert": lambda shard: shard.insert([{"id": 3, "n": 3}]),
    "upsert": lambda shard: shard.upsert([{"id": 3, "n": 3}]),
    "update": lambda shard: shard.update({"n": 3}, "id = 1"),
    "delete": lambda shard: shard.delete("n = 1"),
    "replace_where": lambda shard: shard.replace_where("id = 1", [{"id": 1, "n": 3}]),
    "merge": lambda shard: shard.merge([{"id": 1, "n": 3}]).when_matched_update().execute(),
    "overwrite": lambda shard: shard.overwrite([{"id": 1, "n": 3}]),
}


@pytest.mark.parametrize(("verb", "unique"), [*((verb, False) for verb in IN_THE_MIDDLE), ("insert", True)])
def test_a_column_in_the_middle_takes_the_name_of_no_other(client: Client, verb: str, unique: bool) -> None:
    """Columns of plain schemas were compared by their places."""
    shard = client.create_shard("plain", COLUMNS, ["id"], unique=unique)
    shard.insert(HISTORY)
    old = client.shard("plain")
    listener = old.listen(0, where="n >= 3", columns=["n"])
    shard.add_column("new", pa.int64(), after="id")
    IN_THE_MIDDLE[verb](old)
    heard = [row["n"] for event in listener.next_events(1.0) for row in event.updates.to_pylist()]
    assert heard == ([] if verb == "delete" else [3])


def test_a_stream_over_http_ends_there_too() -> None:
    location = memory_location(small_merges=False)
    shard = client_of(location).create_shard("orders", COLUMNS, ["id"])
    shard.insert(HISTORY)
    with served(location) as url:
        asked = Request(f"{url}/v1/shards/orders/listen?where=n%3E%3D1", headers={"accept": "text/event-stream"})
        with urlopen(asked, timeout=WAIT_S) as stream:
            heard = iter(stream.readline, b"")
            assert any(b'"rows"' in line for line in heard)
            shard.alter(AddColumn("m", pa.int32()), *NAME_TAKEN["dropped, and another one has the name"])
            shard.delete("id = 1")
            rest = b"".join(heard).decode()
    assert "event: error" in rest
    assert "another column has its name" in rest
    assert '"rows"' not in rest


def test_a_plain_schema_goes_on_by_names_after_columns_have_ids(shard: Shard) -> None:
    shard.rename_column("state", "status")
    wider = pa.schema([("first", pa.int8()), *shard.schema.arrow])
    found = shard.evolve_schema(wider)
    assert (found.arrow.names, found.ids) == (["first", "id", "status", "n"], (4, 1, 2, 3))
    with pytest.raises(InvalidUsage, match="column 'n' is missing; keep it"):
        shard.evolve_schema(pa.schema([field for field in wider if field.name != "n"]))


# --- HTTP and the command line

CHANGES = [
    {"add": "currency", "type": "string", "default": "EUR", "nullable": False, "after": "state"},
    {"rename": "state", "to": "status"},
    {"widen": "n", "type": "int64"},
    {"allow_nulls": "n"},
    {"move": "n", "after": None},
    {"add": "price", "type": "decimal128(10, 2)", "default": "1.50"},
]
BAD_BODIES: dict[str, tuple[Any, str]] = {
    "no object": ([], "Expected `object`"),
    "another setting": ({"changes": CHANGES, "x": 1}, "unknown field `x`"),
    "no changes": ({"changes": []}, "between 1 and 1000 changes"),
    "no verb": ({"changes": [{"type": "int8"}]}, "an object with one of add, rename"),
    "two verbs": ({"changes": [{"drop": "n", "add": "x", "type": "int8"}]}, "an object with one of"),
    "an unknown setting": ({"changes": [{"drop": "n", "if_exists": True}]}, "has the unknown setting 'if_exists'"),
    "no type": ({"changes": [{"add": "x"}]}, "lacks 'type'"),
    "an unknown type": ({"changes": [{"add": "x", "type": "integer?"}]}, "is not a known column type"),
    "a name that is a number": ({"changes": [{"drop": 1}]}, "'drop' of a change is a text"),
    "nullable that is a number": ({"changes": [{"add": "x", "type": "int8", "nullable": 1}]}, "is true or false"),
    "a default of another type": ({"changes": [{"add": "x", "type": "int8", "default": "y"}]}, "does not fit int8"),
    "what the shard refuses": ({"changes": [{"drop": "id"}]}, "is a key column"),
}


@pytest.fixture
def http() -> Iterator[Any]:
    location = memory_location()
    client_of(location).create_shard("orders", COLUMNS, ["id"]).insert(HISTORY)
    with typed(TestClient(create_app(location, ServerSettings()), base_url="http://127.0.0.1")) as found:
        yield found


def test_columns_are_changed_over_http(http: Any) -> None:
    done = http.post("/v1/shards/orders/schema", json={"changes": CHANGES})
    assert done.status_code == 200
    assert [field["name"] for field in done.json()["fields"]] == ["n", "id", "status", "currency", "price"]
    rows = http.get("/v1/shards/orders/snapshot?format=ndjson").text.splitlines()
    assert json.loads(rows[0]) == {
        "n": 1, "id": 1, "status": "a", "currency": "EUR", "price": "1.50", "__diff": 1,
    }  # fmt: skip


def test_a_bad_body_is_refused_and_changes_nothing(http: Any) -> None:
    for what, (body, says) in BAD_BODIES.items():
        refused = http.post("/v1/shards/orders/schema", json=body)
        assert (refused.status_code, refused.json()["kind"]) == (400, "invalid_usage"), what
        assert says in refused.json()["detail"]
    assert http.get("/v1/shards/orders").json()["schema_id"] == 1


def test_the_command_shows_and_changes_columns(
    tmp_path: Path, shard: Shard, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*arguments: str) -> list[str]:
        do, *more = arguments
        assert main(["schema", do, "orders", *more, "--dir", str(tmp_path)]) == 0
        return [f"{name} {kind}" for name, kind in json.loads(capsys.readouterr().out)["columns"].items()]

    assert told("show") == ["id int32 not null", "state string", "n int32 not null"]
    told("add", "currency", "--type", "string", "--default", '"EUR"', "--not-null", "--after", "id")
    told("rename", "state", "--to", "status")
    told("widen", "n", "--type", "int64")
    told("allow-nulls", "n")
    told("move", "n")
    assert told("drop", "status") == ["n int64", "id int32 not null", "currency string not null"]
    assert told("alter", '[{"drop": "n"}, {"add": "n", "type": "int8"}]')[-1] == "n int8"
    for column, kind, zero in (("f", "double", "-0.0"), ("g", "int64", "0")):
        told("add", column, "--type", kind, "--default=-0")
        assert str(shard.refresh_schema().defaults[column].as_py()) == zero, "a float keeps its sign"


BAD_COMMANDS: dict[str, tuple[list[str], str, int]] = {
    "no column": (["drop", "orders"], "required: column", 2),
    "a setting of another verb": (["drop", "orders", "n", "--to", "m"], "unrecognized arguments", 2),
    "no new name": (["rename", "orders", "n"], "required: --to", 2),
    "a default that is no JSON": (["add", "orders", "x", "--type", "string", "--default", "EUR"], "double quotes", 1),
    "changes that are no JSON": (["alter", "orders", "drop n"], "not valid JSON", 1),
}


def test_a_bad_command_is_refused(tmp_path: Path, shard: Shard, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says, code in BAD_COMMANDS.values():
        try:
            ended = main(["schema", *arguments, "--dir", str(tmp_path)])
        except SystemExit as error:
            ended = int(str(error.code))
        assert ended == code, says
        assert says in capsys.readouterr().err
    assert shard.view().schema_id == 1
