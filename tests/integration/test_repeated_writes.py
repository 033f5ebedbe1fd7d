"""A write that comes again by its token after the columns were changed: it has landed, whoever sends which rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import polars
import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from persist import Client, InvalidUsage, Shard, TokenReused
from persist.commit.location import Location
from persist.parts.schema_changes import AddColumn, Change, DropColumn, RenameColumn, WidenColumn
from rpc.app import create_app
from tests.support.embedded import client_of
from tests.support.location import memory_location

COLUMNS = pa.schema([("id", pa.int64()), ("a", pa.int32()), ("b", pa.int32())])
ROWS = [{"id": 1, "a": 10, "b": 20}, {"id": 2, "a": 30}]
SWAP: tuple[Change, ...] = RenameColumn("a", "x"), RenameColumn("b", "a"), RenameColumn("x", "b")
CHANGES: dict[str, tuple[Change, ...]] = {
    "rename": (RenameColumn("a", "x"),),
    "rename of the key": (RenameColumn("id", "key"),),
    "swap": SWAP,
    "widen": (WidenColumn("a", pa.int64()),),
    "default": (AddColumn("c", pa.string(), default="EUR"),),
    "drop": (DropColumn("a"),),
    "all": (*SWAP, WidenColumn("b", pa.int64()), AddColumn("c", pa.string(), nullable=False, default="x")),
}
VERBS: dict[str, Callable[[Shard, Any, str], Any]] = {
    "insert": lambda shard, rows, token: shard.insert(rows, token=token),
    "append": lambda shard, rows, token: shard.append(rows, 0, 5, token=token),
    "compare_and_append": lambda shard, rows, token: shard.compare_and_append(rows, 0, 5, token=token),
    "upsert": lambda shard, rows, token: shard.upsert(rows, token=token),
    "overwrite": lambda shard, rows, token: shard.overwrite(rows, token=token),
    "merge": lambda shard, rows, token: shard.merge(rows).when_not_matched_insert().execute(token=token),
}
TABLE = pa.Table.from_pylist(ROWS, schema=COLUMNS)
FORMS: dict[str, Callable[[pa.Table], Any]] = {
    "dicts": lambda table: table.to_pylist(),
    "table": lambda table: table,
    "reader": lambda table: table.to_reader(),
    "batches": lambda table: iter(table.to_batches()),
    "polars": polars.from_arrow,
    "pandas": lambda table: table.to_pandas(types_mapper=pd.ArrowDtype),
}


@pytest.fixture
def location() -> Iterator[Location]:
    found = memory_location(small_merges=False)
    yield found
    found.close()


@pytest.fixture
def client(location: Location) -> Client:
    return client_of(location)


def renamed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The rows with the columns of now, as far as they have them."""
    now = [name for name in schema.names if name in table.schema.names]
    return table.select(now)


@pytest.mark.parametrize(
    ("verb", "what", "form"),
    [
        *[(verb, "all", "dicts") for verb in VERBS],
        *[("insert", what, "table") for what in CHANGES if what != "swap"],
        *[("insert", "drop", form) for form in FORMS],
    ],
)
def test_a_write_that_is_repeated_after_a_change_has_landed(client: Client, verb: str, what: str, form: str) -> None:
    token = client.new_token()
    VERBS[verb](client.create_shard("s", COLUMNS, ["id"]), FORMS[form](TABLE), token)
    shard = client.shard("s")
    shard.alter(*CHANGES[what])
    other = pa.Table.from_pylist([{**ROWS[0], "b": 21}, ROWS[1]], schema=COLUMNS)
    for rows in (TABLE, renamed(TABLE, shard.schema.arrow), other):
        for handle in (shard, client.shard("s")):
            with pytest.raises(TokenReused, match="has landed"):
                VERBS[verb](handle, FORMS[form](rows), token)
    assert shard.count() == 2


def test_the_same_names_and_types_are_the_same_write(client: Client) -> None:
    """Whatever columns they are by now: nothing is written."""
    shard, token = client.create_shard("s", COLUMNS, ["id"]), client.new_token()
    first = shard.insert(TABLE, token=token)
    shard.alter(*SWAP)
    assert client.shard("s").insert(TABLE, token=token) == first
    assert shard.count() == 2


@pytest.mark.parametrize("verb", VERBS)
def test_a_handle_of_before_is_answered_as_the_first_time(client: Client, verb: str) -> None:
    """It reads the rows as it did: a column that was added takes nothing from them."""
    shard, token = client.create_shard("s", COLUMNS, ["id"]), client.new_token()
    first = VERBS[verb](shard, TABLE, token)
    client.shard("s").add_column("more", pa.int8(), after="id")
    again = VERBS[verb](shard, TABLE, token)
    assert (again.lower, again.upper) == (first.lower, first.upper)


def test_a_new_token_lands_once_after_a_change(client: Client) -> None:
    """Asking writes nothing, and leaves nothing of the token."""
    token = client.new_token()
    client.create_shard("s", COLUMNS, ["id"]).insert(ROWS)
    shard = client.shard("s")
    shard.alter(*SWAP)
    with pytest.raises(InvalidUsage, match="no column 'nobody'"):
        shard.insert([{"id": 3, "nobody": 1}], token=token)
    shard.insert([{"id": 3, "a": 1}], token=token)
    assert shard.get(3) == [{"id": 3, "b": None, "a": 1}]
    assert shard.count() == 3


NDJSON = b'{"id": 1, "a": 10, "b": 20}\n{"id": 2, "a": 30}\n'
POSTS = [
    ("insert?token=once", "application/x-ndjson", NDJSON, "rename"),
    ("insert?token=once", "text/csv", b"id,a,b\n1,10,20\n2,30,\n", "all"),
    ("append?lower=0&upper=5&token=once", "application/x-ndjson", NDJSON, "all"),
    ("compare-and-append?expected_upper=0&new_upper=5&token=once", "application/x-ndjson", NDJSON, "all"),
    ("upsert?token=once", "application/x-ndjson", b'{"id": 1, "a": 10, "b": 20}\n{"id": 2, "a": 30, "b": 3}\n', "drop"),
    ("overwrite?token=once", "text/csv", b"id,a,b\n1,10,20\n2,30,\n", "rename"),
]


@pytest.mark.parametrize(("verb", "form", "body", "what"), POSTS)
def test_a_post_that_is_repeated_after_a_change_has_landed(
    client: Client, location: Location, verb: str, form: str, body: bytes, what: str
) -> None:
    shard = client.create_shard("s", COLUMNS, ["id"])
    with TestClient(create_app(location), base_url="http://127.0.0.1") as http:

        def post(data: bytes) -> Any:
            return http.post(f"/v1/shards/s/{verb}", content=data, headers={"content-type": form})

        first = post(body)
        assert first.status_code == 200, first.text
        shard.alter(*CHANGES[what])
        for again in (post(body), post(body.replace(b"20", b"21")), post(b"no rows at all")):
            assert (again.status_code, again.json()["kind"]) == (422, "token_reused"), again.text
        assert shard.count() == 2
