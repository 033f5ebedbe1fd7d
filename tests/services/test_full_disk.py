"""On a full or read-only disk everything starts that need not write; what must write says what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import HandleSettings
from persist.client.snapshot import ReadSettings
from persist.client.write import WriteSettings
from persist.commit import committer
from persist.commit.location import LocationSettings
from persist.core.errors import Expired, NotComplete, NotReadable, PersistError, Unavailable
from persist.core.state import Policy
from tests.services.process import run
from tests.support.server import Server
from tests.support.waiting import WAIT_S, wait_until

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.binary())])
INSERTS = 40
pytestmark = pytest.mark.services


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer, "RETRY_S", 0.5)


def connected(directory: Path) -> Client:
    """Impatient, and with every row in the blob store."""
    return persist.connect(
        f"persist://{directory}",
        handles=HandleSettings(WriteSettings(retry_s=0.5), ReadSettings(retry_s=0.5)),
        location=LocationSettings(policy=Policy(inline_part_bytes_max=0)),
        collect=False,
    )


@pytest.fixture
def location(tiny_disk: Path) -> Path:
    """A shard with much to collect, on a disk with room left."""
    run(["mount", "-o", "remount,size=16m", str(tiny_disk)])
    directory = tiny_disk / "x"
    with connected(directory) as client:
        shard = client.create_shard("orders", SCHEMA, ["id"], history="none")
        for number in range(INSERTS):
            shard.insert([{"id": number, "v": os.urandom(2_000)}])
            if number == 4:
                shard.tag("kept", number)
        shard.downgrade_since(INSERTS - 1)
        wait_until(
            lambda: has_rollup(client), "the background has made a rollup, up to which there is something to collect"
        )
    return directory


def has_rollup(client: Client) -> bool:
    """Whether there is one beyond the first version. If not, another commit gives the background its turn."""
    transport = client.transport
    assert isinstance(transport, EmbeddedTransport)
    if max(transport.location.machine("orders").refresh().rollups) > 1:
        return True
    client.shard("orders").attributes.update(persist.AttributeUpdate.replace("ab" * 16, 1))
    return False


def fill(disk: Path) -> None:
    with open(disk / "fill", "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)


@pytest.fixture
def full(location: Path) -> Path:
    fill(location.parent)
    return location


@pytest.fixture
def read_only(location: Path) -> Iterator[Path]:
    run(["mount", "-o", "remount,ro", str(location.parent)])
    yield location
    run(["mount", "-o", "remount,rw", str(location.parent)])


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rpc.cli", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.smoke
@pytest.mark.proof
def test_the_collector_frees_space_on_a_full_disk(full: Path) -> None:
    """It did not start: its probe writes, and SQLite wanted room for its index."""
    before = len(list((full / "blob").rglob("*.parquet")))
    done = command("maintain", "gc", "--dir", str(full), "--once")
    assert done.returncode == 0, done.stderr
    assert "full" in done.stderr
    assert len(list((full / "blob").rglob("*.parquet"))) < before
    with connected(full) as client:
        assert client.shard("orders").insert([{"id": -1, "v": b"there is room again"}]).lower.element == INSERTS


ROWS = list(range(INSERTS))


def ids(table: pa.Table) -> list[int]:
    return sorted(table.column("id").to_pylist())


def check_reads(client: Client) -> None:
    """Every way to read one time."""
    shard = client.shard("orders")
    at = INSERTS - 1
    assert shard.count() == INSERTS
    assert shard.count(as_of=at) == INSERTS
    assert ids(shard.snapshot().to_arrow()) == ROWS
    assert ids(shard.snapshot(tag="kept").to_arrow()) == ROWS[:5]
    assert ids(shard.snapshot(4).to_arrow()) == ROWS[:5], "a tag keeps that time"
    assert (
        ids(
            pa.concat_tables(
                one for split in shard.snapshot(num_splits=3).splits for one in split.read(client.transport)
            )
        )
        == ROWS
    )
    assert ids(pa.table(shard.scan())) == ROWS
    assert [row["id"] for row in shard.head(3)] == [0, 1, 2]
    assert shard.count() == INSERTS, "a second read would share a lease"
    with pytest.raises(NotReadable):
        shard.snapshot(7)
    with pytest.raises(NotReadable):
        shard.snapshot(tag="other")
    with pytest.raises(NotComplete):
        shard.snapshot(INSERTS, wait_s=0)


@pytest.mark.parametrize("state", ["full", "read_only"])
def test_a_disk_that_cannot_be_written_is_read_without_holds(state: str, request: pytest.FixtureRequest) -> None:
    """Each read wanted to commit a hold first: it failed after its retries, on a disk that "can be read"."""
    directory = request.getfixturevalue(state)
    with connected(directory) as client:
        check_reads(client)
        shard = client.shard("orders")
        at = INSERTS - 1
        for holding in (shard.open_reader, lambda: next(shard.listen(at)), lambda: next(iter(shard.subscribe(at)))):
            with pytest.raises(Unavailable) as refused:
                holding()
            assert refused.value.is_unwritable


@pytest.mark.smoke
@pytest.mark.proof
def test_a_server_reads_a_full_disk(full: Path) -> None:
    with Server(full) as server:
        counted = json.loads(urllib.request.urlopen(f"{server.url}/v1/shards/orders/count").read())
        assert counted == {"as_of": INSERTS - 1, "count": INSERTS}
        rows = urllib.request.urlopen(f"{server.url}/v1/shards/orders/snapshot?columns=id").read()
        assert ids(pa.ipc.open_stream(rows).read_all()) == ROWS
        with persist.connect(server.url) as client:
            check_reads(client)


def test_a_read_without_a_hold_ends_where_a_blob_goes(full: Path) -> None:
    with connected(full) as client:
        snapshot = client.shard("orders").snapshot()
        [lease] = snapshot._lease.leases
        assert not lease.is_held
        for part in (full / "blob").rglob("*.parquet"):
            part.unlink()
        with pytest.raises(Expired):
            snapshot.to_arrow()


def test_a_read_that_holds_goes_on_when_the_disk_gets_full(location: Path) -> None:
    with connected(location) as client:
        snapshot = client.shard("orders").snapshot()
        [lease] = snapshot._lease.leases
        assert lease.is_held
        fill(location.parent)
        assert ids(snapshot.to_arrow()) == ROWS


def test_threads_that_read_a_full_disk_do_not_wait_for_one_another(full: Path) -> None:
    """Each had half of the locks that SQLite takes to have the file alone, and kept it."""
    with connected(full) as client:
        shard = client.shard("orders")
        with ThreadPoolExecutor(4) as pool:
            uppers = list(pool.map(lambda _: shard.upper().element, range(40), timeout=WAIT_S))
    assert uppers == [INSERTS] * 40


def test_a_server_starts_on_a_full_disk_and_says_so(full: Path) -> None:
    with Server(full) as server:
        ready = json.loads(urllib.request.urlopen(f"{server.url}/readyz").read())
        assert ready["status"] == "read-only"
        assert "full" in ready["why"][0]
        shown = json.loads(urllib.request.urlopen(f"{server.url}/v1/shards/orders").read())
        assert shown["upper"] == [INSERTS]
        assert server.stop() == 0
    assert "a store cannot be written" in server.said()


def test_a_read_only_disk_is_read(read_only: Path) -> None:
    listed = command("shards", "--dir", str(read_only))
    assert (listed.returncode, "orders" in listed.stdout) == (0, True), listed.stderr
    with connected(read_only) as client:
        shard = client.shard("orders")
        assert shard.upper().element == INSERTS
        with pytest.raises(PersistError, match="read-only"):
            shard.insert([{"id": 1, "v": b"x"}])


def test_what_another_process_left_in_the_log_is_read_on_a_full_disk(location: Path) -> None:
    """A writer that was killed leaves its last commits in SQLite's write-ahead log."""
    program = (
        "import os, sys, persist\n"
        "shard = persist.connect(sys.argv[1]).shard('orders')\n"
        "shard.insert([{'id': -1, 'v': b'x'}])\n"
        "os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", program, f"persist://{location}"], check=False)
    (location / "consensus.db-shm").unlink()
    fill(location.parent)
    with connected(location) as client:
        assert client.shard("orders").upper().element == INSERTS + 1


@pytest.mark.parametrize("fresh", [("lost+found",), ("blob",), ("blob/lost+found", "lost+found")])
def test_a_fresh_file_system_is_a_location(tmp_path: Path, fresh: tuple[str, ...]) -> None:
    """`lost+found` was taken for somebody's files."""
    for name in fresh:
        (tmp_path / name).mkdir(parents=True)
    with connected(tmp_path) as client:
        client.create_shard("orders", SCHEMA, ["id"]).insert([{"id": 1, "v": b"x"}])
        assert client.shard("orders").snapshot().to_arrow().num_rows == 1
        assert not any("lost" in found.key for found in client.transport.blob.list(""))
    (tmp_path / "persist.json").unlink()
    with pytest.raises(PersistError, match="use an empty one"):
        connected(tmp_path)
