"""Maintenance beside a server: it commits through the server, and writers that are ahead of it are slowed by 429."""

from __future__ import annotations

import json
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa

from blob.memory_blobs import MemoryBlob
from compactor.worker import Worker, through_server
from consensus.memory_logs import MemoryConsensus
from persist import Client, Connection, LocationSettings, Token, connect
from persist.commit.location import Location, open_location
from persist.core import commands as c
from persist.core.state import Policy
from persist.formats.records import encoded
from rpc.client.http_transport import open_transport
from tests.support.forked import ran
from tests.support.served import Served
from tests.support.server import Server
from tests.support.token_file import write_tokens
from tests.support.waiting import wait_until

SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])


def rows(number: int, count: int = 50) -> pa.Table:
    return pa.table({"k": [f"k{(number * 31 + n) % 500}" for n in range(count)], "v": [number] * count})


def compactor(directory: Path, url: str, token: str = "") -> subprocess.CompletedProcess[str]:
    """`persist maintain run --once` over the directory, committing through the server."""
    return ran("maintain", "run", "--dir", str(directory), "--url", url, "--once", PERSIST_TOKEN=token)


def counted(url: str, name: str) -> float:
    """A counter of the server."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"persist_{name}"))


@contextmanager
def served(location: Location) -> Iterator[str]:
    """The service in this process, on a socket of its own."""
    with closing(location), Served(location) as found:
        yield found.url


def refused_insert(url: str, client: Client) -> tuple[int, str | None]:
    """Status and Retry-After of an insert that is sent once."""
    writer = client.shard("orders").open_writer()
    command = c.Insert(writer.writer_id, Token("i" + "7" * 32), writer.stage(rows(0), 0))
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port)
    headers = {"content-type": "application/vnd.persist.record"}
    connection.request("POST", "/v1/shards/orders/commands", encoded(command), headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status, answer.getheader("retry-after")


def test_maintenance_through_a_server_merges_collects_and_never_races_it(tmp_path: Path) -> None:
    with Server(tmp_path / "x") as server, connect(server.url) as client:
        shard = client.create_shard("orders", SCHEMA, ["k"])
        for number in range(40):
            shard.insert(rows(number))
        before = shard.snapshot().to_arrow()
        done = compactor(tmp_path / "x", server.url)
        assert done.returncode == 0, done.stderr
        figures = json.loads(done.stdout)
        assert figures["merges_applied"] >= 1
        assert figures["merges_refused"] == 0
        assert figures["gc_runs"] >= 1
        for number in range(40, 60):  # the server's cached State is the newest: it has made every commit itself
            shard.insert(rows(number))
        assert counted(server.url, "races_lost_total") == 0
        assert shard.snapshot(39).to_arrow().equals(before)


def test_a_server_maintains_itself_with_a_token_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    token = write_tokens(file, {"etl": ("write",)})["etl"]
    with (
        Server(tmp_path / "x", "--tokens", str(file), maintenance="own") as server,
        connect(server.url, token=token) as client,
    ):
        shard = client.create_shard("orders", SCHEMA, ["k"])
        for number in range(80):
            shard.insert(rows(number))
        location = open_location(f"persist://{tmp_path}/x")
        # Only a collector shortens the log.
        wait_until(lambda: location.consensus.scan("orders", 1, 1)[0].seqno > 1, "the log was truncated")
        location.close()
        table = shard.snapshot().to_arrow()
        assert pa.compute.sum(table.column("__diff")).as_py() == 80 * 50
        assert server.stop() == 0
    lines = [json.loads(line) for line in server.said().splitlines() if line.startswith("{")]
    assert all({"at", "level", "logger", "message"} <= set(line) for line in lines)
    figures = lines[-1]
    assert (figures["gc_failed"], figures["merges_failed"]) == (0, 0)


def test_a_merge_is_applied_though_the_server_has_gone(tmp_path: Path) -> None:
    with Server(tmp_path / "x") as server:
        with connect(server.url) as client:
            shard = client.create_shard("orders", SCHEMA, ["k"])
            for number in range(10):
                shard.insert(rows(number))
        transport = open_transport(Connection(server.url, timeout_s=10.0))
        assert server.stop() == 0
    location = open_location(f"persist://{tmp_path}/x")
    worker = Worker(location, committer_of=through_server(location, transport))
    assert worker.run("orders", idle=True) == 1
    assert len(location.machine("orders").refresh().trace.batches) == 1
    transport.close()
    location.close()


def test_a_server_of_other_shards_is_refused(tmp_path: Path) -> None:
    open_location(f"persist://{tmp_path}/other").close()
    with Server(tmp_path / "x") as server:
        done = compactor(tmp_path / "other", server.url)
    assert done.returncode == 1
    assert "serves other shards" in done.stderr


def test_a_writer_ahead_of_maintenance_gets_429_with_retry_after_and_its_client_waits() -> None:
    """More batches than the policy allows: nothing fails, everything gets through once a worker has made room."""
    policy = Policy(batches_max=6, inline_part_bytes_max=0)
    settings = LocationSettings(policy=policy, small_merges=False)
    location = Location(MemoryBlob(), MemoryConsensus(), settings=settings)
    with served(location) as url, connect(url) as client:
        shard = client.create_shard("orders", SCHEMA, ["k"])
        for number in range(policy.batches_max):
            shard.insert(rows(number))
        assert refused_insert(url, client) == (429, "1")
        writing = threading.Thread(target=lambda: [shard.insert(rows(number)) for number in range(6, 30)])
        writing.start()
        worker = Worker(location)
        while writing.is_alive():
            assert len(location.machine("orders").state().trace.batches) <= policy.batches_max
            worker.run("orders", idle=True)
            writing.join(0.01)
        table = shard.snapshot().to_arrow()
        assert pa.compute.sum(table.column("__diff")).as_py() == 30 * 50
        assert counted(url, 'errors_total{kind="overloaded"') >= 1
