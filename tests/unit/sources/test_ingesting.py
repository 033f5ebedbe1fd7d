"""Ingesting: rivals write the records of one source; each is there once, at the time that it is bound to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from persist.bindings import Bindings, Ingester, Minter
from persist.client.client import Client
from persist.core.errors import Conflict, InvalidUsage
from persist.sources.ingest import ends_of_batches
from tests.support.location import client_of, memory_location

RECORDS = pa.schema([("partition", pa.string()), ("position", pa.int64()), ("word", pa.string())])


class Lines:
    """A source in memory: texts by partition. A position is that of a text, times two: not each has a record."""

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {}
        self.read_rows = 0

    def add(self, partition: str, text: str) -> None:
        self.texts.setdefault(partition, []).append(text)

    def watermarks(self) -> dict[str, int]:
        return {partition: 2 * (len(texts) - 1) for partition, texts in self.texts.items()}

    def read(self, partition: str, after: int, upto: int) -> Iterator[pa.Table]:
        texts = self.texts[partition]
        for start in range(0, len(texts), 2):  # in pieces
            rows = [(2 * n, texts[n]) for n in range(start, min(start + 2, len(texts))) if after < 2 * n <= upto]
            self.read_rows += len(rows)
            yield pa.table(
                {
                    "partition": [partition] * len(rows),
                    "position": pa.array([position for position, _ in rows], pa.int64()),
                    "word": pa.array([text for _, text in rows], pa.string()),
                }
            )


# --- parts of it


@pytest.fixture
def client() -> Iterator[Client]:
    with client_of(memory_location()) as client:
        yield client


def ingester(client: Client, source: Any, schema: pa.Schema = RECORDS) -> Ingester:
    shard = client.create_shard("words", schema, [schema.names[0]])
    return Ingester(Bindings.open(client, "bindings"), source, shard)


def test_what_a_rival_has_written_is_not_read_in_the_source(client: Client) -> None:
    source = Lines()
    source.add("a", "one")
    first, second = ingester(client, source), ingester(client, source)
    assert not second.step()
    Minter(second._bindings, source.watermarks).tick()
    assert first.step()
    assert second.step()
    assert source.read_rows == 1


def test_positions_need_not_be_a_column_of_the_shard(client: Client) -> None:
    source = Lines()
    source.add("a", "one")
    found = ingester(client, source, pa.schema([("partition", pa.string()), ("word", pa.string())]))
    Minter(found._bindings, source.watermarks).tick()
    assert found.step()
    assert client.shard("words").snapshot().to_arrow(expand=True).to_pylist() == [{"partition": "a", "word": "one"}]


def test_time_goes_on_where_nothing_is_new(client: Client) -> None:
    found = ingester(client, Lines())
    minter = Minter(found._bindings, found._source.watermarks, advances=True)
    for upper in (1, 2):
        assert minter.tick() == []
        assert found.step()
        assert client.shard("words").upper().element == upper


class Wrong:
    """A source that gives something else than it was asked for."""

    def __init__(self, rows: dict[str, list[Any]]) -> None:
        self.rows = rows

    def watermarks(self) -> dict[str, int]:
        return {"a": 5}

    def read(self, partition: str, after: int, upto: int) -> list[pa.Table]:
        return [pa.table(self.rows)]


@pytest.mark.parametrize(("rows", "said"), [
    ({"partition": ["a"], "position": [6], "word": ["x"]}, "those after -1 up to 5"),
    ({"partition": ["a"], "position": [-1], "word": ["x"]}, "positions are in"),
    ({"partition": ["a"], "position": [1.0], "word": ["x"]}, "must have integers"),
    ({"partition": ["a"], "word": ["x"]}, "no column 'position'"),
    ({"partition": ["a"], "position": [1], "other": ["x"]}, "other"),
])  # fmt: skip
def test_a_source_that_gives_something_else_is_refused_and_nothing_is_written(
    client: Client, rows: dict[str, list[Any]], said: str
) -> None:
    source = Wrong(rows)
    found = ingester(client, source)
    Minter(found._bindings, source.watermarks).tick()
    for _ in range(2):  # and it is told again
        with pytest.raises(InvalidUsage, match=said):
            found.step()
    assert client.shard("words").upper().element == 0


def test_a_closed_shard_takes_no_record(client: Client) -> None:
    found = ingester(client, Lines())
    client.shard("words").advance_upper(None)
    with pytest.raises(Conflict, match="closed"):
        found.step()


def moves(*steps: tuple[int, int]) -> Any:
    return {"a": (np.array([at for at, _ in steps]), np.array([time for _, time in steps]))}


@pytest.mark.parametrize(("found", "most", "expected"), [
    ({}, 5, [99]),
    (moves((4, 10)), 5, [99]),
    (moves((4, 10), (9, 20), (14, 30)), 10, [21, 99]),
    (moves((4, 10), (99, 20), (100, 30)), 10, [11, 21, 99]),
    (moves((0, 10), (1, 20), (2, 30)), 1, [11, 21, 99]),
])  # fmt: skip
def test_a_batch_ends_where_a_binding_does(found: Any, most: int, expected: list[int]) -> None:
    assert ends_of_batches(found, {}, most, 99) == expected
