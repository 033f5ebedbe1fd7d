"""Routes go by the place of a column in the key, whatever it is called by now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from persist.client.client import Client
from persist.core.errors import InvalidUsage
from persist.parts.schema_changes import AddColumn, RenameColumn
from persist.sources.partition_map import Routes
from persist.sources.routed import RoutedReader, RoutedWriter, read_routed
from tests.support.location import client_of, memory_location

NAMES = ["v0", "v1", "v2"]
COLUMNS = pa.schema([("user", pa.string()), ("page", pa.int64())])
USERS = [f"u{number}" for number in range(12)]


@pytest.fixture
def client() -> Iterator[Client]:
    with client_of(memory_location()) as client:
        for name in NAMES:
            client.create_shard(name, COLUMNS, ["user"], history="forever")
        yield client


def test_a_key_stays_in_its_shard_when_its_column_is_renamed_and_another_takes_the_name(client: Client) -> None:
    routes = Routes.open(client, "v", NAMES, by=["user"])
    running = RoutedWriter(routes, "running")
    running.append([{"user": user, "page": 1} for user in USERS])
    for name in NAMES:
        client.shard(name).alter(RenameColumn("user", "usr"), AddColumn("user", pa.string()))
    running.append([{"user": user, "page": 2} for user in USERS])  # goes on by what it knows
    again = Routes.open(client, "v", NAMES, by=["usr"])
    RoutedWriter(again, "new").append([{"usr": user, "user": "x", "page": 3} for user in USERS])
    for name in NAMES:
        pages = client.shard(name).snapshot().to_arrow().to_pylist()
        assert [row["page"] for row in pages] == [1, 2, 3] * (len(pages) // 3)
    found = [(row["usr"], row["page"]) for row in read_routed(again).to_pylist()]
    assert found == [(user, page) for user in sorted(USERS) for page in (1, 2, 3)]


def test_shards_of_which_some_are_changed_are_refused_until_all_are(client: Client) -> None:
    """A raw Arrow error, and where names were swapped silently wrong."""
    routes = Routes.open(client, "v", NAMES, by=["user"])
    RoutedWriter(routes, "w").append([{"user": user, "page": 1} for user in USERS])
    client.shard("v1").rename_column("user", "usr")
    fresh = Routes.open(client, "v")
    with pytest.raises(InvalidUsage, match=r"different schemas.*change both alike"):
        read_routed(fresh)
    with pytest.raises(InvalidUsage, match="different schemas"):
        RoutedWriter(fresh, "new")
    for name in ("v0", "v2"):
        client.shard(name).rename_column("user", "usr")
    assert len(read_routed(fresh)) == len(USERS)
    assert RoutedWriter(Routes.open(client, "v"), "new").append([{"usr": "u1", "page": 2}]) == 1


PAID = pa.schema([("user", pa.string()), ("ordered", pa.int64()), ("paid", pa.int64())])
SWAP = (RenameColumn("ordered", "other"), RenameColumn("paid", "ordered"), RenameColumn("other", "paid"))
SELECTIONS = [{"where": "ordered > 0"}, {"columns": ["user", "ordered"]}]


def _routes(client: Client) -> Routes:
    for name in ("a", "b"):
        client.create_shard(name, PAID, ["user"], history="forever")
    return Routes.open(client, "paid", ["a", "b"], by=["user"])


def _append(client: Client, writer: str, users: list[str]) -> None:
    RoutedWriter(Routes.open(client, "paid"), writer).append([{"user": u, "ordered": 0, "paid": 7} for u in users])


def _users(reader: RoutedReader) -> set[str]:
    return {user for event in reader.next_events() for user in event.updates["user"].to_pylist()}


def _swap(client: Client, *names: str) -> None:
    for name in names:
        client.shard(name).alter(*SWAP)


@pytest.mark.parametrize("selected", SELECTIONS)
def test_a_reader_selects_by_names_as_they_were_when_it_began(client: Client, selected: dict[str, Any]) -> None:
    """It had heard nothing before the names changed places, and selected by the other column."""
    with RoutedReader(_routes(client), **selected) as reader:
        _swap(client, "a", "b")
        _append(client, "w", USERS)
        with pytest.raises(InvalidUsage, match=r"'ordered'.*is called 'paid' now"):
            _users(reader)


@pytest.mark.parametrize("selected", SELECTIONS)
def test_names_mean_the_same_columns_in_shards_of_a_later_epoch(client: Client, selected: dict[str, Any]) -> None:
    """The shards of the epoch before were read to their ends, so that none of their listeners is asked again."""
    routes = _routes(client)
    with RoutedReader(routes, **selected) as reader:
        _append(client, "before", USERS)
        assert _users(reader) == (set(USERS) if "columns" in selected else set())
        _swap(client, "a", "b")
        client.create_shard("c", client.shard("a").refresh_schema(), ["user"], history="forever")
        Routes.open(client, "paid").change(["c"])
        _append(client, "after", USERS)
        with pytest.raises(InvalidUsage, match=r"'ordered'.*is called 'paid' now"):
            _users(reader)
    with RoutedReader(Routes.open(client, "paid"), reader.position, **selected) as anew:  # by the names of now
        assert _users(anew) == (set(USERS) if "columns" in selected else set())


@pytest.mark.parametrize("selected", SELECTIONS)
def test_a_shard_whose_columns_are_changed_first_is_not_read_by_other_names(
    client: Client, selected: dict[str, Any]
) -> None:
    routes = _routes(client)
    _append(client, "before", USERS)
    _swap(client, "b")
    with RoutedReader(routes, **selected) as reader:  # which begins by the names of `a`
        with pytest.raises(InvalidUsage, match="another one in shard 'b' than in 'a'"):
            _users(reader)
        _swap(client, "a")
        with pytest.raises(InvalidUsage, match=r"'ordered'.*is called 'paid' now"):
            _users(reader)
    with RoutedReader(Routes.open(client, "paid"), **selected) as anew:
        assert _users(anew) == set(USERS)


def test_a_renamed_column_that_is_not_named_does_not_end_a_reader(client: Client) -> None:
    routes = _routes(client)
    with RoutedReader(routes, where="paid > 0", columns=["user", "paid"]) as reader:
        for name in ("a", "b"):
            client.shard(name).rename_column("ordered", "asked")
        client.create_shard("c", client.shard("a").refresh_schema(), ["user"], history="forever")
        Routes.open(client, "paid").change(["b", "c"])
        writer = RoutedWriter(Routes.open(client, "paid"), "w")
        writer.append([{"user": user, "asked": 0, "paid": 7} for user in USERS])
        assert _users(reader) == set(USERS)
