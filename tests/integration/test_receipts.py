"""A client of a server has its staged parts compared with their rows when it asks for receipts, not at the commit."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

import persist
from blob.memory_blobs import MemoryBlob
from blob.metrics import ForwardingBlob
from persist import Client, InvalidUsage
from persist.commit.location import Location
from persist.core.batch import Part, Run
from persist.core.record import replace
from persist.core.state import Policy
from tests.integration.test_maintenance_http import served
from tests.support.embedded import client_of
from tests.support.location import AscendingIds, memory_location

SCHEMA = pa.schema([("id", pa.int64())])


class Counting(ForwardingBlob):
    """Counts the reads of parts."""

    def __init__(self) -> None:
        super().__init__(MemoryBlob("mem:"))
        self.reads: list[str] = []

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.reads.append(key)
        return super().get_range(key, start, length)

    def stat(self, key: str) -> object:
        self.reads += [key] if key.endswith(".parquet") else []
        return super().stat(key)


class Recalling(Counting):
    """Knows the sizes of what was put by it, as a far store does for a minute."""

    def __init__(self) -> None:
        super().__init__()
        self.put_sizes: dict[str, int] = {}

    def put(self, key: str, data: bytes | memoryview) -> None:
        super().put(key, data)
        self.put_sizes[key] = len(data)

    def put_here(self, key: str) -> int | None:
        return self.put_sizes.get(key)


@pytest.fixture
def location() -> Location:
    policy = Policy(inline_part_bytes_max=0)
    return memory_location(blob=Counting(), policy=policy, small_merges=False)


@pytest.fixture
def client(location: Location) -> Iterator[Client]:
    with served(location) as url, persist.connect(url) as client:
        client.create_shard("orders", SCHEMA, ["id"])
        yield client


def staged(client: Client, count: int) -> tuple[Run, ...]:
    writer = client.shard("orders").open_writer()
    return tuple(run for number in range(count) for run in writer.stage(pa.table({"id": [number]}), None))


def changed(run: Run, **changes: object) -> Run:
    return Run(tuple(replace(part, **changes) for part in run.parts))


def parts(runs: tuple[Run, ...]) -> list[Part]:
    return [part for run in runs for part in run.parts]


def test_parts_with_receipts_are_committed_without_another_look(location: Location, client: Client) -> None:
    runs = staged(client, 40)
    assert not any(part.receipt for part in parts(runs))
    writer = client.shard("orders").open_writer()
    receipted = writer.receipted(runs)
    assert [replace(part, receipt=b"") for part in parts(receipted)] == parts(runs)
    assert all(part.receipt for part in parts(receipted))
    location.blob.reads.clear()
    writer.commit_insert(receipted)
    assert location.blob.reads == []
    assert len(client.shard("orders").snapshot().to_arrow()) == 40
    assert writer.receipted(receipted) is receipted, "nobody is asked twice"


def test_a_commit_does_not_ask_for_what_its_own_process_has_just_put() -> None:
    blob = Recalling()
    location = memory_location(blob=blob, policy=Policy(inline_part_bytes_max=0), small_merges=False)
    with client_of(location) as client:
        client.create_shard("orders", SCHEMA, ["id"])
        writer = client.shard("orders").open_writer()
        writer.insert(pa.table({"id": [1]}))
        assert blob.reads == []
        [gone, there] = staged(client, 2)
        blob.put_sizes.clear()  # a minute later
        writer.commit_insert((there,))
        assert blob.reads == [part.key for part in there.parts]
        blob.inner.delete([part.key or "" for part in gone.parts])
        with pytest.raises(InvalidUsage, match="is not there"):
            writer.commit_insert((gone,))
        assert client.shard("orders").count() == 2


def test_without_receipts_every_part_is_looked_at(location: Location, client: Client) -> None:
    runs = staged(client, 3)
    location.blob.reads.clear()
    client.shard("orders").open_writer().commit_insert(runs)
    assert {part.key for part in parts(runs)} == set(location.blob.reads)


def test_a_part_that_is_not_what_it_says_gets_no_receipt_and_is_not_committed(client: Client) -> None:
    [first, second] = staged(client, 2)
    writer = client.shard("orders").open_writer()
    for bad in (changed(second, rows=5), changed(second, key=first.parts[0].key), changed(second, diff_sum=7)):
        with pytest.raises(InvalidUsage):
            writer.receipted((first, bad))
        with pytest.raises(InvalidUsage):
            writer.commit_insert((first, bad))
    assert client.shard("orders").upper().element == 0


def test_a_receipt_is_good_for_one_shard_and_for_what_it_was_given_for(client: Client) -> None:
    client.create_shard("other", SCHEMA, ["id"])
    [run] = staged(client, 1)
    writer = client.shard("orders").open_writer()
    [good] = writer.receipted((run,))
    with pytest.raises(InvalidUsage, match="9 rows"):
        writer.commit_insert((changed(good, rows=9),))
    with pytest.raises(InvalidUsage, match="does not belong to shard 'other'"):
        client.shard("other").open_writer().commit_insert((good,))
    writer.commit_insert((good,))
    with pytest.raises(InvalidUsage, match="is in shard 'orders' already"):
        client.shard("orders").open_writer().commit_insert((good,))


def test_a_receipt_is_good_at_every_server_of_the_location(location: Location, client: Client) -> None:
    [run] = staged(client, 1)
    [good] = client.shard("orders").open_writer().receipted((run,))
    another = memory_location(
        blob=location.blob, consensus=location.consensus, policy=Policy(inline_part_bytes_max=0), ids=AscendingIds(7)
    )
    with served(another) as url, persist.connect(url) as other:
        writer = other.shard("orders").open_writer()
        location.blob.reads.clear()
        writer.commit_insert((good,))
        assert location.blob.reads == [part.key for part in good.parts], "it is there: nothing else is asked"
        assert other.shard("orders").snapshot().to_arrow().to_pylist() == [{"id": 0, "__diff": 1}]
