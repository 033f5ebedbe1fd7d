"""Routes go by the place of a column in the key, whatever it is called by now."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.core.errors import InvalidUsage
from persist.parts.altering import AddColumn, RenameColumn
from persist.patterns.routed import RoutedWriter
from persist.patterns.routed_read import read_routed
from persist.patterns.routes import Routes
from tests.support.location import memory_location

NAMES = ["v0", "v1", "v2"]
COLUMNS = pa.schema([("user", pa.string()), ("page", pa.int64())])
USERS = [f"u{number}" for number in range(12)]


@pytest.fixture
def client() -> Iterator[Client]:
    with Client(EmbeddedTransport(memory_location())) as client:
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
