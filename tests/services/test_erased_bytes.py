"""What a database keeps of rows that were erased: after the command that the receipt names, nothing in its data files.

Its own write-ahead log is left out, as the receipt says.
"""

from __future__ import annotations

from pathlib import Path

import psycopg
import pyarrow as pa
import pytest

from blob import open_blob
from compactor.tasks import Eraser
from compactor.worker import Worker
from consensus import open_consensus
from persist.commit.location import Location
from persist.maintenance.collector import Collector
from tests.services.etcd import EtcdCluster, start_etcd
from tests.services.postgres import Postgres
from tests.services.process import ServerMissing
from tests.support.location import InlineBackground, client_of
from tests.support.markers import in_files, marker, uncompressed, where

NAME = "orders"
STEPS_MAX = 10


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    uncompressed(monkeypatch)


def erased(directory: Path, url: str, secret: str) -> str:
    """Erase a row with the marker, with its receipt: what that says of the database."""
    blobs = open_blob(f"file:{directory}/blobs")
    location = Location(blobs, open_consensus(url), background=InlineBackground())
    try:
        shard = client_of(location).create_shard(NAME, pa.schema([("id", pa.string())]), ["id"])
        shard.insert([{"id": secret}, {"id": "b"}])
        told = shard.erase(keys=[secret])
        collector = Collector(location)
        for _ in range(STEPS_MAX):
            Worker(location).run(NAME)
            Eraser(location, collector).run(NAME)
            collector.run(NAME)
        receipt = shard.erased(told.id)
        assert (receipt.done, shard.snapshot().to_arrow().num_rows) == (True, 1)
        assert receipt.proof is not None
        return receipt.proof.left
    finally:
        location.close()


def shown(data: Path, log: str, secret: str) -> list[str]:
    """The files with the marker, but for those of the write-ahead log."""
    return [path for path in where(in_files(data), secret) if log not in Path(path).relative_to(data).parts]


def test_postgres_keeps_nothing_after_vacuum_full(postgres_server: Postgres, tmp_path: Path) -> None:
    secret, data = marker(), postgres_server.directory / "data"
    url = postgres_server.create_database(f"erased_{secret[:16]}")
    with psycopg.connect(url, autocommit=True) as connection:
        with psycopg.connect(url) as reader:  # while its snapshot is open PostgreSQL prunes no page
            reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            reader.execute("SELECT 1")
            assert "VACUUM FULL consensus_log" in erased(tmp_path, url, secret)
            connection.execute("CHECKPOINT")
            assert shown(data, "pg_wal", secret) != [], "so the search finds dead rows"
        connection.execute("VACUUM FULL consensus_log")
        connection.execute("CHECKPOINT")
    assert shown(data, "pg_wal", secret) == []
    assert where(in_files(tmp_path / "blobs"), secret) == []


def test_etcd_keeps_nothing_after_compaction_and_defragmentation(tmp_path: Path) -> None:
    """A node of its own, as its revisions are compacted."""
    try:
        cluster: EtcdCluster = start_etcd(tmp_path / "etcd", 1)
    except ServerMissing as error:
        pytest.skip(f"real server missing: {error}")
    try:
        secret, data = marker(), tmp_path / "etcd" / "node0"
        left = erased(tmp_path, cluster.url("erased"), secret)
        assert "etcdctl compact REVISION, then etcdctl defrag" in left
        assert shown(data, "wal", secret) != [], "so the search finds old revisions"
        cluster.compact()
        assert shown(data, "wal", secret) == []
        assert where(in_files(tmp_path / "blobs"), secret) == []
    finally:
        cluster.stop()
