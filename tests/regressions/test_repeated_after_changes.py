"""A write that comes again by its token after the columns were changed was refused, though it is the same write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.commit.location import Location
from persist.core.errors import InvalidUsage, TokenReused
from persist.parts.altering import AddColumn, Change, DropColumn, RenameColumn, WidenColumn
from rpc.app import create_app
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
}


@pytest.fixture
def location() -> Iterator[Location]:
    found = memory_location(small_merges=False)
    yield found
    found.close()


@pytest.fixture
def client(location: Location) -> Client:
    return Client(EmbeddedTransport(location))


@pytest.mark.parametrize(
    ("verb", "what"), [*[("insert", what) for what in CHANGES], *[(verb, "all") for verb in VERBS]]
)
def test_a_write_was_repeated_by_a_handle_of_now(client: Client, verb: str, what: str) -> None:
    write, token = VERBS[verb], client.new_token()
    first = write(client.create_shard("s", COLUMNS, ["id"]), ROWS, token)
    shard = client.shard("s")
    shard.alter(*CHANGES[what])
    assert write(shard, ROWS, token) == first
    assert write(client.shard("s"), pa.Table.from_pylist(ROWS, schema=COLUMNS), token) == first
    other = [{**ROWS[0], "b": 21}, ROWS[1]]
    with pytest.raises(InvalidUsage):  # other rows
        write(shard, other, token)
    assert shard.count() == 2


def test_the_same_rows_by_the_names_of_now_are_the_same_write(client: Client) -> None:
    token = client.new_token()
    first = client.create_shard("s", COLUMNS, ["id"]).insert(ROWS, token=token)
    shard = client.shard("s")
    shard.alter(RenameColumn("a", "x"), WidenColumn("x", pa.int64()), AddColumn("c", pa.string(), default="EUR"))
    assert shard.insert([{"id": 1, "x": 10, "b": 20}, {"id": 2, "x": 30}], token=token) == first
    with pytest.raises(TokenReused, match="has landed, so look at the shard's history"):
        shard.insert([{"id": 1, "x": 10, "b": 20}, {"id": 2, "x": 31}], token=token)
    with pytest.raises(TokenReused):
        shard.insert([{"id": 1, "x": 10, "b": 20}, {"id": 2, "x": 30, "c": "USD"}], token=token)
    with pytest.raises(TokenReused):
        shard.append([{"id": 1, "x": 10, "b": 20}, {"id": 2, "x": 30}], 0, 5, token=token)
    assert shard.count() == 2


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
    *[("insert?token=once", "application/x-ndjson", NDJSON, what) for what in CHANGES],
    ("insert?token=once", "text/csv", b"id,a,b\n1,10,20\n2,30,\n", "all"),
    ("append?lower=0&upper=5&token=once", "application/x-ndjson", NDJSON, "all"),
    ("compare-and-append?expected_upper=0&new_upper=5&token=once", "application/x-ndjson", NDJSON, "all"),
]


@pytest.mark.parametrize(("verb", "form", "body", "what"), POSTS)
def test_a_post_was_repeated(client: Client, location: Location, verb: str, form: str, body: bytes, what: str) -> None:
    shard = client.create_shard("s", COLUMNS, ["id"])
    with TestClient(create_app(location), base_url="http://127.0.0.1") as http:

        def post(data: bytes) -> Any:
            return http.post(f"/v1/shards/s/{verb}", content=data, headers={"content-type": form})

        first = post(body)
        assert first.status_code == 200, first.text
        shard.alter(*CHANGES[what])
        again = post(body)
        assert (again.status_code, again.json()["lower"], again.json()["upper"]) == (
            200,
            first.json()["lower"],
            first.json()["upper"],
        ), again.text
        assert post(body.replace(b"20", b"21")).status_code in (400, 422)
        assert shard.count() == 2
