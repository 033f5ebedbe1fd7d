"""Columns of bindings, routes and ingested shards that somebody gives other names: values were taken for others."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from persist.bindings import Binding, Bindings, Ingester
from persist.client.client import Client
from persist.core.errors import InvalidUsage, ShardExists
from persist.parts.schema_changes import AddColumn, Change, DropColumn, RenameColumn
from persist.sources.partition_map import Routes
from persist.sources.routed import RoutedWriter
from tests.support.bound import SmallBindings
from tests.support.location import client_of, memory_location

COLUMNS = pa.schema([("id", pa.int64()), ("a", pa.int64()), ("b", pa.int64())])


def swap(one: str, other: str) -> tuple[Change, ...]:
    return RenameColumn(one, "x"), RenameColumn(other, one), RenameColumn("x", other)


SWAP = swap("position", "time")
REFUSED = "column 'position' of shard 'bindings' of bindings is now named 'time'"


@pytest.fixture
def client() -> Iterator[Client]:
    with client_of(memory_location()) as client:
        yield client


@pytest.fixture
def bindings(client: Client) -> Bindings:
    found = SmallBindings.open(client, "bindings")
    for position in range(100, 1000, 100):
        found.get_binding(position)
    return found


def test_what_a_rival_bound_was_read_with_positions_for_times(client: Client, bindings: Bindings) -> None:
    """Once the names are back, all goes on, and nothing was lost or mixed up."""
    rival = SmallBindings.open(client, "bindings")
    assert rival.get_binding(1000) == Binding({"": 1000}, 9)
    client.shard("bindings").alter(*SWAP)
    for _ in range(2):
        with pytest.raises(InvalidUsage, match=REFUSED):
            bindings.refresh()
    assert (bindings.upper, bindings.heads) == (9, {"": 900})
    client.shard("bindings").alter(*SWAP)
    bindings.refresh()
    assert (bindings.upper, bindings.heads) == (10, {"": 1000})
    assert bindings.get_binding(1001) == Binding({"": 1001}, 10)


def test_a_mint_put_positions_into_the_column_of_times(client: Client, bindings: Bindings) -> None:
    """A thread that shares the handle refreshes it; the mint is written by the columns with which the shard began."""
    client.shard("bindings").alter(*SWAP)
    bindings.shard.refresh_schema()
    assert bindings.get_binding(1000) == Binding({"": 1000}, 9)
    client.shard("bindings").alter(*SWAP)
    found = Bindings.open(client, "bindings")
    assert (found.upper, found.heads) == (10, {"": 1000})
    assert found.times_of("", [100, 1000]).to_pylist() == [0, 9]


def test_what_is_known_no_more_is_read_by_no_other_names(client: Client, bindings: Bindings) -> None:
    client.shard("bindings").alter(*SWAP)
    with pytest.raises(InvalidUsage, match=REFUSED):
        bindings.times_of("", [100])
    with pytest.raises(InvalidUsage, match=REFUSED):
        bindings.upto(1)
    with pytest.raises(InvalidUsage, match=REFUSED):
        Bindings.open(client, "bindings")


def test_a_listener_of_bindings_ends_where_they_have_other_names(client: Client, bindings: Bindings) -> None:
    listen = bindings.listen(-1)
    client.shard("bindings").alter(*SWAP)
    with listen, pytest.raises(InvalidUsage, match="column 'position'"):
        next(iter(listen))


def test_a_column_that_has_no_successor_is_named(client: Client, bindings: Bindings) -> None:
    client.shard("bindings").rename_column("time", "at")
    rule = "column 'time' of shard 'bindings' of bindings is now named 'at'; rename it to 'time'"
    with pytest.raises(InvalidUsage, match=rule):
        bindings.times_of("", [100])
    client.shard("bindings").drop_column("at")
    with pytest.raises(InvalidUsage, match="column 'time' of shard 'bindings' of bindings was dropped"):
        bindings.upto(1)


def test_bindings_with_a_column_more_are_opened(client: Client, bindings: Bindings) -> None:
    client.shard("bindings").alter(AddColumn("note", pa.string(), after="partition"))
    found = SmallBindings.open(client, "bindings")
    assert found.get_binding(1000) == Binding({"": 1000}, 9)
    bindings.refresh()
    assert bindings.heads == {"": 1000}
    client.create_shard("other", COLUMNS, ["id"]).rename_column("a", "partition")
    with pytest.raises(ShardExists):
        Bindings.open(client, "other")


class Numbers:
    """A source that names its columns as ever."""

    def watermarks(self) -> dict[str, int]:
        return {"": 1}

    def read(self, partition: str, after: int, upto: int) -> Iterator[pa.Table]:
        positions = range(after + 1, upto + 1)
        yield pa.table(
            {"id": list(positions), "position": list(positions), "a": [10] * len(positions), "b": [20] * len(positions)}
        )


def test_records_went_into_the_columns_that_had_got_their_names(client: Client) -> None:
    bindings = Bindings.open(client, "bindings")
    shard = client.create_shard("records", COLUMNS, ["id"])
    ingester = Ingester(bindings, Numbers(), shard)
    bindings.get_binding(0)
    ingester.step()
    client.shard("records").alter(*swap("a", "b"))
    bindings.get_binding(1)
    shard.refresh_schema()
    with pytest.raises(InvalidUsage, match=r"column 'a' of shard 'records' is called 'b' now, .* another ingester"):
        ingester.step()
    client.shard("records").alter(*swap("a", "b"), AddColumn("more", pa.int64()))
    shard.refresh_schema()
    ingester.step()
    rows = shard.snapshot().to_arrow(expand=True).to_pylist()
    assert rows == [{"id": number, "a": 10, "b": 20, "more": None} for number in range(2)]


def test_records_follow_stricter_constraints(client: Client) -> None:
    """An ingester was refused for ever: its writer went on by the columns as they were before."""
    bindings = Bindings.open(client, "bindings")
    shard = client.create_shard("records", COLUMNS, ["id"])
    ingester = Ingester(bindings, Numbers(), shard)
    bindings.get_binding(0)
    known = shard.schema
    client.shard("records").set_constraints(checks={"few": "a < 15"})
    ingester.step()
    assert shard.schema == known, "the handle of the caller learns nothing by it"
    assert shard.get(0) == [{"id": 0, "a": 10, "b": 20}]


def test_routes_were_read_by_other_names(client: Client) -> None:
    for name in ("one", "two"):
        client.create_shard(name, COLUMNS, ["id"])
    routes = Routes.open(client, "routes", ["one"], ["id"])
    client.shard("routes").alter(*swap("epoch", "slot"))
    rule = "column 'epoch' of shard 'routes' of routes is now named 'slot'"
    with pytest.raises(InvalidUsage, match=rule):
        Routes.open(client, "routes").current()
    client.shard("routes").alter(*swap("epoch", "slot"))
    routes.shard.refresh_schema()
    assert routes.change(["one", "two"]).shards == ("one", "two")
    assert Routes.open(client, "routes", ["one", "two"], ["id"]).current().number == 1
    assert RoutedWriter(routes, "w").append([{"id": 1, "a": 1, "b": 1}]) == 1
    client.shard("routes").alter(DropColumn("at"))
    with pytest.raises(InvalidUsage, match="column 'at' of shard 'routes' of routes was dropped"):
        Routes.open(client, "routes").current()
