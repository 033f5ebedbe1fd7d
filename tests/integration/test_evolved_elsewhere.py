"""Columns that were added through one process are known to all others when they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import polars
import pyarrow as pa
import pytest
from starlette.testclient import TestClient

import persist
from compactor.on_demand import maintain
from persist import InvalidUsage, Shard
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.location import Location
from persist.core.ids import token_of_key
from persist.core.state import Policy
from rpc.app import create_app
from rpc.settings import ServerSettings
from tests.integration.test_http_app import ipc
from tests.integration.test_maintenance_http import served
from tests.support.asking import typed
from tests.support.location import memory_location

ID = pa.field("id", pa.int64(), nullable=False)
SCHEMA, WIDER = pa.schema([ID]), pa.schema([ID, ("w", pa.int64())])
NEW = pa.table({"id": [2], "w": [7]}, WIDER)
BODIES = {
    "ndjson": ("application/x-ndjson", b'{"id": 2, "w": 7}\n'),
    "csv": ("text/csv", b"id,w\n2,7\n"),
    "arrow": ("application/vnd.apache.arrow.stream", ipc(NEW)),
}


@pytest.fixture
def here() -> Location:
    return memory_location(policy=Policy(inline_part_bytes_max=0), small_merges=False)


@pytest.fixture
def there(here: Location) -> Location:
    """Another process over the same stores, which has not heard of what happens here since."""
    shard = Client(EmbeddedTransport(here, maintain)).create_shard("orders", SCHEMA, ["id"])
    shard.insert([{"id": 1}])
    other = memory_location(blob=here.blob, consensus=here.consensus, clock=here.clock, policy=here.settings.policy)
    other.machine("orders").refresh()
    return other


@pytest.fixture
def clients(here: Location, there: Location) -> Iterator[tuple[Client, Client]]:
    with ExitStack() as stack:
        yield (
            Client(EmbeddedTransport(here, maintain)),
            stack.enter_context(persist.connect(stack.enter_context(served(there)))),
        )


def evolve(here: Location) -> None:
    Client(EmbeddedTransport(here, maintain)).shard("orders").evolve_schema(WIDER)


@pytest.mark.parametrize("form", BODIES)
def test_a_post_with_a_new_column_is_taken_by_a_server_that_has_not_heard_of_it(
    here: Location, there: Location, form: str
) -> None:
    """The first one was refused, 400; the same one right after it was taken."""
    media, body = BODIES[form]
    with typed(TestClient(create_app(there, ServerSettings()), base_url="http://127.0.0.1")) as http:
        assert http.post("/v1/shards/orders/insert?format=csv", content=b"id\n3\n").status_code == 200
        evolve(here)
        answer = http.post("/v1/shards/orders/insert", content=body, headers={"content-type": media})
        assert answer.status_code == 200, answer.text
        assert http.get("/v1/shards/orders/snapshot?format=csv&columns=w").status_code == 200
        refused = http.post("/v1/shards/orders/insert?format=csv", content=b"id,x\n2,7\n")
        assert (refused.status_code, refused.json()["kind"]) == (400, "invalid_usage")


def test_staged_parts_with_a_new_column_get_receipts_of_a_server_that_has_not_heard_of_it(
    here: Location, there: Location, clients: tuple[Client, Client]
) -> None:
    evolve(here)
    runs = Client(EmbeddedTransport(here, maintain)).shard("orders").open_writer().stage(NEW, None)
    assert there.machine("orders").state().schema_id == 1
    bare = tuple(type(run)(tuple(part.without_receipt() for part in run.parts)) for run in runs)
    assert all(part.receipt for run in clients[1].transport.receipted("orders", bare) for part in run.parts)


@pytest.mark.parametrize(("where", "form"), [(0, "rows"), (0, "reader"), (0, "polars"), (1, "rows")])
def test_a_handle_that_was_opened_before_takes_a_new_column(
    here: Location, clients: tuple[Client, Client], where: int, form: str
) -> None:
    shard = clients[where].shard("orders")
    evolve(here)
    given = {
        "rows": lambda: NEW.to_pylist(),
        "reader": lambda: NEW.to_reader(),
        "polars": lambda: polars.from_arrow(NEW),
    }[form]()
    shard.insert(given)
    assert shard.snapshot(columns=["w"]).to_arrow().column("w").to_pylist() == [None, 7]
    with pytest.raises(persist.InvalidUsage, match="'x'"):
        shard.insert([{"id": 3, "x": 1}])


LOOSENED: dict[str, tuple[dict[str, Any], Callable[[Shard], Any], dict[str, Any]]] = {
    "unique keys were given up": ({"unique": True}, lambda s: s.set_constraints(unique=False), {"id": 1, "n": 2}),
    "a check was taken away": ({"checks": {"p": "n > 0"}}, lambda s: s.set_constraints(checks={}), {"id": 3, "n": -1}),
    "nulls were allowed": ({}, lambda s: s.allow_nulls("n"), {"id": 3, "n": None}),
    "the column was widened": ({}, lambda s: s.widen_column("n", pa.int64()), {"id": 3, "n": 2**40}),
}
WAYS: dict[str, Callable[[Shard, Any, int], Any]] = {
    "insert": lambda shard, rows, upper: shard.insert(rows),
    "insert by a token": lambda shard, rows, upper: shard.insert(rows, token=token_of_key("once")),
    "append": lambda shard, rows, upper: shard.append(rows, upper, upper + 1),
    "compare_and_append": lambda shard, rows, upper: shard.compare_and_append(rows, upper, upper + 1),
    "stage": lambda shard, rows, upper: staged(shard, rows),
    "pipelined": lambda shard, rows, upper: pipelined(shard, rows),
    "upsert": lambda shard, rows, upper: shard.upsert(rows),
}
CONTAINERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dicts": lambda row: [row],
    "table": lambda row: pa.Table.from_pylist([row]),
    "polars": lambda row: polars.DataFrame([row]),
}


def staged(shard: Shard, rows: Any) -> None:
    writer = shard.open_writer()
    writer.commit_insert(writer.stage(rows, None))


def pipelined(shard: Shard, rows: Any) -> None:
    with shard.pipelined_writer("one") as writer:
        writer.append(rows)


@pytest.mark.parametrize(
    ("change", "way", "form"),
    [
        *[(change, "insert", "dicts") for change in LOOSENED],
        *[("the column was widened", way, "table") for way in WAYS],
        ("nulls were allowed", "insert", "polars"),
    ],
)
def test_what_a_handle_knows_refuses_no_rows_that_the_shard_takes(
    here: Location, change: str, way: str, form: str
) -> None:
    made, loosen, row = LOOSENED[change]
    client = Client(EmbeddedTransport(here, maintain))
    shard = client.create_shard("loosened", pa.schema([ID, pa.field("n", pa.int32(), nullable=False)]), ["id"], **made)
    shard.insert([{"id": 1, "n": 1}])
    old = client.shard("loosened")
    old.insert([{"id": 2, "n": 1}])
    loosen(shard)
    WAYS[way](old, CONTAINERS[form](row), 2)
    assert row in shard.snapshot().to_arrow(expand=True).to_pylist()


def test_rows_that_the_shard_refuses_as_well_are_refused(here: Location) -> None:
    client = Client(EmbeddedTransport(here, maintain))
    columns = pa.schema([ID, pa.field("n", pa.int32(), nullable=False)])
    old = client.create_shard("loosened", columns, ["id"], checks={"p": "n > 0"}, unique=True)
    old.insert([{"id": 1, "n": 1}])
    client.shard("loosened").widen_column("n", pa.int64())
    for row in ({"id": 2, "n": -(2**40)}, {"id": 1, "n": 2**40}, {"id": 2, "n": None}, {"id": 2, "n": "x"}):
        for way in ("insert", "insert by a token", "append", "compare_and_append"):
            with pytest.raises(InvalidUsage):
                WAYS[way](old, [row], 1)
    assert old.count() == 1
