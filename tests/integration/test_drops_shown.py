"""A shard that was truncated by a drop is shown over HTTP as any other."""

from __future__ import annotations

import pyarrow as pa
from fastapi.testclient import TestClient

from rpc.app import create_app
from rpc.settings import ServerSettings
from tests.support.clocks import World

SCHEMA = pa.schema([("id", pa.int64())])


def test_a_shard_with_drops_is_shown_in_json_and_created_again() -> None:
    machine = World().machine()
    shard = machine.client.create_shard("orders", SCHEMA, ["id"], history="forever")
    for number in range(4):
        shard.insert([{"id": number}])
    shard.truncate(2, mode="drop")
    shard.truncate(3)
    state = machine.location.machine("orders").refresh()
    assert state.drops
    with TestClient(create_app(machine.location, ServerSettings()), base_url="http://127.0.0.1") as http:
        shown = http.get("/v1/shards/orders")
        assert (shown.status_code, shown.json()["upper"]) == (200, shard.upper().to_json())
        assert not shown.json().keys() & {"batches", "drops", "truncations"}
        assert http.get("/v1/shards/orders?past=2").status_code == 200
        again = http.put("/v1/shards/orders", json={"fields": shown.json()["fields"], "key": ["id"]})
        assert again.status_code == 200, again.text
        assert http.get("/v1/shards?details=true").status_code == 200
