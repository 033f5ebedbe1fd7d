"""Every failure of this store in docs/troubleshooting.md, provoked."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

import consensus.sqlite
from consensus import (
    ConsensusDamaged,
    ConsensusMisconfigured,
    ConsensusNotWritable,
    ConsensusUnavailable,
    open_consensus,
)
from consensus.sqlite import SqliteConsensus


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "consensus.db"


def test_a_file_that_was_truncated_under_another_process_is_told_within_one_timeout(path: Path) -> None:
    """Each of 100 tries waited for the lock that the other process keeps: `connect` hung for an hour."""
    with closing(SqliteConsensus(str(path))) as other:
        stop = other.subscribe(lambda _keys: None)
        assert other.compare_and_set("k", 1, b"x")
        os.truncate(path, 0)
        pragmas: list[str] = []
        connection = consensus.sqlite._connect(str(path), 0.2)
        connection.set_trace_callback(pragmas.append)
        with closing(connection), pytest.raises(sqlite3.OperationalError, match="locked"):
            consensus.sqlite._use_wal(connection, 0.2)
        assert pragmas.count("PRAGMA journal_mode = WAL") <= 10
        with (
            closing(SqliteConsensus(str(path), busy_timeout_ms=100)) as store,
            pytest.raises(ConsensusUnavailable, match="is empty and locked by another process"),
        ):
            store.check()
        stop()


@pytest.fixture
def store(path: Path) -> Iterator[SqliteConsensus]:
    opened = SqliteConsensus(str(path), busy_timeout_ms=200)
    opened.check()
    yield opened
    opened.close()


def test_another_process_keeps_the_write_lock(store: SqliteConsensus, path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(ConsensusUnavailable, match="locked"):
            store.compare_and_set("k", 1, b"x")
        assert store.head("k") is None, "readers are not held up by writers"
        other.execute("ROLLBACK")
    assert store.compare_and_set("k", 1, b"x")


@pytest.mark.parametrize("then", ["nothing", "a copy"])
def test_a_file_that_was_moved_is_neither_written_nor_made_anew(store: SqliteConsensus, path: Path, then: str) -> None:
    """SQLite goes on with the file that it has open: what was acknowledged so would be lost for all others."""
    assert store.compare_and_set("k", 1, b"x")
    moved = path.with_name("moved.db")
    path.rename(moved)
    if then == "a copy":
        path.write_bytes(moved.read_bytes())
    for call in (lambda: store.compare_and_set("k", 2, b"y"), lambda: store.head("k"), store.check):
        with pytest.raises(ConsensusUnavailable, match=r"moved, deleted or replaced .* move it back, or restart"):
            call()
    assert path.exists() == (then == "a copy")
    moved.rename(path)
    head = store.head("k")
    assert head is not None
    assert (head.seqno, head.data) == (1, b"x")
    assert store.compare_and_set("k", 2, b"y")


def test_the_disk_is_full(tiny_disk: Path) -> None:
    with closing(SqliteConsensus(str(tiny_disk / "consensus.db"))) as store:
        with pytest.raises(ConsensusUnavailable, match="full"):
            _fill(store)
        last = len(store.scan("k", 0, 1000))
        assert last > 0
        (tiny_disk / "ballast").unlink()
        assert store.compare_and_set("k", last + 1, b"what failed did not happen, and there is room again")


def test_every_connection_waits_for_the_disk(path: Path) -> None:
    connections: list[sqlite3.Connection] = []

    def given(connection: sqlite3.Connection, *_: object) -> None:
        connections.append(connection)

    sa.event.listen(sa.pool.Pool, "checkout", given)
    try:
        with closing(SqliteConsensus(str(path))) as store:
            store.check()
            assert store.compare_and_set("k", 1, b"x")
            assert store.head("k") is not None
            modes = {connection.execute("PRAGMA synchronous").fetchone()[0] for connection in connections}
            logs = {connection.execute("PRAGMA journal_mode").fetchone()[0] for connection in connections}
    finally:
        sa.event.remove(sa.pool.Pool, "checkout", given)
    assert (modes, logs) == ({2}, {"wal"}), "FULL: in WAL mode NORMAL loses commits when the power fails"


def _fill(store: SqliteConsensus) -> None:
    for seqno in range(1, 1000):
        assert store.compare_and_set("k", seqno, os.urandom(16_384))


def test_the_directory_is_missing(tmp_path: Path) -> None:
    with (
        closing(open_consensus(f"sqlite:///{tmp_path}/missing/consensus.db")) as store,
        pytest.raises(ConsensusMisconfigured, match="database file"),
    ):
        store.check()


def test_the_file_is_not_a_database(path: Path) -> None:
    path.write_bytes(b"this is not a database, it is a letter to the editor" * 100)
    with closing(open_consensus(f"sqlite:///{path}")) as store, pytest.raises(ConsensusDamaged, match=r"\.db"):
        store.check()


def test_the_file_is_damaged(path: Path, store: SqliteConsensus) -> None:
    """It was Unavailable for reads and Indeterminate for writes, which clients repeat for minutes."""
    assert all(store.compare_and_set("k", seqno, os.urandom(16_384)) for seqno in range(1, 20))
    store.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:8192] + bytes(len(whole) - 8192))
    with closing(open_consensus(f"sqlite:///{path}")) as opened:
        for call in (lambda: opened.scan("k", 0, 100), lambda: opened.compare_and_set("k", 20, b"x")):
            with pytest.raises(ConsensusDamaged, match="backup"):
                call()


def test_the_table_is_not_ours(path: Path, store: SqliteConsensus) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("ALTER TABLE consensus_log RENAME COLUMN data TO datum")
    with pytest.raises(ConsensusDamaged, match="no such column"):
        store.head("k")


def test_a_value_has_changed_its_type(path: Path, store: SqliteConsensus) -> None:
    assert store.compare_and_set("k", 1, b"x")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("UPDATE consensus_log SET data = 'text'")
    with pytest.raises(ConsensusDamaged, match="damaged"):
        store.head("k")


def test_the_file_is_read_only(path: Path, store: SqliteConsensus) -> None:
    store.check()
    with store._engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA query_only = ON")
    # The pool hands out the same connection again: the first write on it is refused.
    with pytest.raises(ConsensusNotWritable, match="readonly") as refused:
        store.compare_and_set("k", 1, b"x")
    assert refused.value.is_read_only
    assert store.compare_and_set("k", 1, b"x")  # the connection was dropped, and the next one can write


def test_a_disk_that_turned_read_only_without_its_flag_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since Linux 6.14 ext4 refuses writes after an error without showing it in `statvfs`."""
    with closing(SqliteConsensus(str(path))) as store:
        assert store.compare_and_set("k", 1, b"x")

    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with closing(SqliteConsensus(str(path))) as store:
        entry = store.head("k")
        assert entry is not None
        assert entry.data == b"x"
        with pytest.raises(ConsensusNotWritable) as refused:
            store.compare_and_set("k", 2, b"y")
        assert refused.value.is_read_only


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///:memory:", "sqlite:////tmp/x.db?mode=ro", "sqlite://host/x.db"]
)
def test_a_url_that_cannot_be_meant(url: str) -> None:
    with pytest.raises(ConsensusMisconfigured, match="sqlite"):
        open_consensus(url)


def _append_for_ever(url: str, acknowledged: str) -> None:
    store = open_consensus(url)
    with open(acknowledged, "a", buffering=1) as log:
        for seqno in range(1, 1_000_000):
            assert store.compare_and_set("k", seqno, str(seqno).encode())
            log.write(f"{seqno}\n")


@pytest.mark.parametrize("appends", [1, 25, 60])
def test_a_writer_is_killed_in_the_middle(path: Path, tmp_path: Path, appends: int) -> None:
    acknowledged = tmp_path / "acknowledged"
    acknowledged.touch()
    url = f"sqlite:///{path}"
    context = multiprocessing.get_context("spawn")
    writer = context.Process(target=_append_for_ever, args=(url, str(acknowledged)))
    writer.start()
    while acknowledged.read_text().count("\n") < appends:
        assert writer.is_alive()
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    last = int(acknowledged.read_text().split()[-1])
    with closing(open_consensus(url)) as store:
        found = store.scan("k", 0, 10_000)
        assert [entry.seqno for entry in found] == list(range(1, len(found) + 1))
        assert len(found) - last in (0, 1), "at most the append that nobody heard of"
        assert store.compare_and_set("k", len(found) + 1, b"life goes on")
