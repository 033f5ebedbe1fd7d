"""What stores keep of entries that they have deleted."""

from __future__ import annotations

from pathlib import Path

from consensus.memory import MemoryConsensus
from consensus.metrics import MeteredConsensus
from consensus.sqlite import SqliteConsensus
from tests.support.markers import in_files, marker, where


def test_sqlite_keeps_no_byte_of_a_deleted_entry_while_it_is_open(tmp_path: Path) -> None:
    store, secret = SqliteConsensus(str(tmp_path / "log.db")), marker()
    for seqno in range(1, 60):  # entries of one page, of several, and pages that are split and freed
        text = secret * (seqno * seqno % 97) if seqno < 50 else "later"
        assert store.compare_and_set("a", seqno, f"{text} ".encode())
    assert store.truncate("a", 50) == 49
    assert any(place.endswith("-wal") for place in where(in_files(tmp_path), secret)), "until it is scrubbed"
    assert store.scrub() == ""
    assert where(in_files(tmp_path), secret) == []
    assert store.scrub() == ""
    head = store.head("a")
    assert head is not None
    assert head.seqno == 59
    store.close()


def test_sqlite_says_what_is_left_where_a_reader_is_at_it(tmp_path: Path) -> None:
    store = SqliteConsensus(str(tmp_path / "log.db"), busy_timeout_ms=10)
    assert store.compare_and_set("a", 1, b"1")
    reading = SqliteConsensus(str(tmp_path / "log.db"))
    with reading._connection("read") as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM consensus_log").fetchall()
        assert store.compare_and_set("a", 2, b"2")
        assert "PRAGMA wal_checkpoint(TRUNCATE)" in store.scrub()
        connection.execute("COMMIT")
    assert store.scrub() == ""
    reading.close()
    store.close()


def test_memory_keeps_nothing_and_decorators_pass_it_on() -> None:
    assert MemoryConsensus("mem:").scrub() == ""

    class Leaves(MemoryConsensus):
        def scrub(self) -> str:
            return "something"

    assert MeteredConsensus(Leaves("mem:"), lambda *_: None).scrub() == "something"
