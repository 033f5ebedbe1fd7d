"""`optimize` and `vacuum`: maintenance of one shard because somebody asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

import compactor.on_demand
import persist
from compactor.worker import Worker
from persist.client.client import connect
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import HandleSettings, Shard
from persist.client.write import WriteSettings
from persist.commit.location import LocationSettings
from persist.copies.shard_facts import first_live
from persist.core.errors import InvalidUsage, UnknownShard
from persist.core.state import Policy
from persist.inspect.readonly_location import open_readonly_directory
from persist.maintenance.collector import Collector
from rpc.app import create_app
from rpc.settings import ServerSettings
from tests.support.clocks import Machine, World
from tests.support.server import url_of

SCHEMA = pa.schema([("id", pa.int64()), ("n", pa.int64())])
PATH = "/v1/shards/orders"
TIMES = 10  # fewer writes than the process that commits merges by itself


BY_BOTH = pytest.mark.parametrize("shard", ["directory", "server"], indirect=True)


@pytest.fixture
def shard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shard]:
    """A shard in `tmp_path / "data"`, written directly, or through a server."""
    with url_of(getattr(request, "param", "directory"), tmp_path) as url, connect(url) as client:
        yield written(client.create_shard("orders", SCHEMA, ["id"]))


def written(shard: Shard) -> Shard:
    for time in range(TIMES):
        shard.upsert([{"id": n, "n": time} for n in range(50)])
    return shard


def contents(shard: Shard, as_of: int | None = None) -> list[dict[str, Any]]:
    return shard.snapshot(as_of).to_arrow(expand=True).to_pylist()


@BY_BOTH
def test_a_shard_is_merged_and_no_row_changes(shard: Shard) -> None:
    before = [contents(shard, time) for time in range(TIMES)]
    done = shard.optimize()
    assert done.complete
    assert done.merges > 0
    assert done.after.batches < done.before.batches
    assert [contents(shard, time) for time in range(TIMES)] == before
    again = shard.optimize()
    assert (again.merges, again.complete, again.before) == (0, True, again.after)


def test_history_that_was_let_go_leaves_the_shard_and_then_the_stores(shard: Shard, tmp_path: Path) -> None:
    latest = contents(shard)
    shard.forget(TIMES - 1)
    assert shard.optimize().after.updates == len(latest)
    assert shard.vacuum().complete
    with closing(open_readonly_directory(tmp_path / "data")) as look:  # the process that commits may have done it first
        assert first_live(look, "orders") > 1
    assert contents(shard) == latest
    assert shard.vacuum().complete


@pytest.mark.parametrize("verb", ["optimize", "vacuum"])
def test_a_shard_that_is_not_there(shard: Shard, verb: str) -> None:
    shard.drop(force=True)
    with pytest.raises(UnknownShard, match="dropped"):
        getattr(shard, verb)()


def test_maintenance_of_another_name_is_refused() -> None:
    machine = World().machine()
    machine.client.create_shard("orders", SCHEMA, ["id"])
    with pytest.raises(InvalidUsage, match="optimize or vacuum"):
        machine.client.transport.maintain("orders", "defragment")


@pytest.fixture
def http(machine: Machine) -> Iterator[TestClient]:
    written(machine.client.create_shard("orders", SCHEMA, ["id"]))
    with TestClient(create_app(machine.location, ServerSettings()), base_url="http://127.0.0.1") as client:
        yield client


def test_pieces_over_http(http: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compactor.on_demand, "MERGES_PER_CALL", 1)
    answers = [http.post(f"{PATH}/optimize").json()]
    while answers[-1]["more"]:
        answers.append(http.post(f"{PATH}/optimize").json())
    assert answers[-1]["complete"]
    assert set(answers[0]) == {"merges", "before", "after", "more", "complete"}
    assert set(http.post(f"{PATH}/vacuum").json()) == {"blobs", "entries", "more", "complete"}


@pytest.mark.parametrize("verb", ["optimize", "vacuum"])
def test_what_is_refused_over_http(http: TestClient, verb: str) -> None:
    assert http.post(f"/v1/shards/other/{verb}").json()["kind"] == "unknown_shard"
    assert http.post(f"{PATH}/{verb}", params={"x": 1}).status_code == 400


# --- a shard that nobody can read any more still takes writes and is still merged: they stopped at `batches_max`


COLUMNS = pa.schema([("k", pa.string())])
BATCHES_MAX = 50
INSERTS = 70


@pytest.mark.parametrize("inline", [0, 64 * 1024], ids=["blob", "inline"])
@pytest.mark.parametrize("small_merges", [True, False], ids=["writer merges", "worker merges"])
def test_writes_go_on(tmp_path: Path, inline: int, small_merges: bool) -> None:
    settings = LocationSettings(
        policy=Policy(inline_part_bytes_max=inline, batches_max=BATCHES_MAX),
        small_merges=small_merges,
    )
    handles = HandleSettings(WriteSettings(retry_s=2.0))
    with persist.connect(f"persist://{tmp_path}/d", location=settings, handles=handles) as client:
        assert isinstance(client.transport, EmbeddedTransport)
        location = client.transport.location
        shard = client.create_shard("orders", COLUMNS, ["k"])
        shard.downgrade_since(None, force=True)
        for number in range(INSERTS):
            shard.insert([{"k": f"k{number}"}])
            if number % 20 == 19:
                Worker(location).run("orders", idle=True)
                Collector(location).run("orders")
        state = location.machine("orders").refresh()
        assert state.upper.element == INSERTS
        assert state.trace.rows == INSERTS
        assert sum(1 for batch in state.trace.batches if batch.runs) < BATCHES_MAX
        assert shard.since().is_empty
