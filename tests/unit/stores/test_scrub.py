"""What stores keep of entries that they have deleted."""

from __future__ import annotations

import queue
import random
from pathlib import Path

import pytest

from consensus import sqlite
from consensus.memory_logs import MemoryConsensus
from consensus.metrics import MeteredConsensus
from consensus.sqlite import SqliteConsensus
from tests.support.markers import in_files, marker, where
from tests.support.waiting import WAIT_S


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


@pytest.mark.parametrize("seed", [0, 3, 11, 12, 21])
def test_sqlite_keeps_no_copy_that_a_balanced_page_left_behind(tmp_path: Path, seed: int) -> None:
    """`secure_delete` overwrites what is deleted, and not the copies that lie in gaps of its pages since."""
    chosen, store = random.Random(seed), SqliteConsensus(str(tmp_path / "log.db"))
    firsts, heads, secrets = dict.fromkeys("abc", 1), dict.fromkeys("abc", 0), {}
    for _ in range(150):
        key = chosen.choice("abc")
        if chosen.random() < 0.85 or heads[key] - firsts[key] < 2:
            heads[key] += 1
            secrets[key, heads[key]] = secret = b"%032x" % chosen.getrandbits(128)
            assert store.compare_and_set(key, heads[key], secret + b"q" * chosen.randint(0, 900))
        else:
            firsts[key] = chosen.randint(firsts[key] + 1, heads[key])
            store.truncate(key, firsts[key])
    assert store.scrub() == ""
    data = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    left = {place for place, secret in secrets.items() if secret in data}
    assert left == {(key, seqno) for key in "abc" for seqno in range(firsts[key], heads[key] + 1)}
    assert [store.head(key).seqno for key in "abc"] == list(heads.values())  # type: ignore[union-attr]
    store.close()


def test_others_hear_of_commits_after_the_file_was_written_anew(tmp_path: Path) -> None:
    store, other = SqliteConsensus(str(tmp_path / "log.db")), SqliteConsensus(str(tmp_path / "log.db"))
    heard: queue.Queue[str] = queue.Queue()
    unsubscribe = other.subscribe(heard.put)
    seqno = 0
    while seqno < 30 or heard.empty():  # until the other one has begun to look
        seqno += 1
        assert store.compare_and_set("a", seqno, b"1")
    store.truncate("a", seqno)
    assert store.scrub() == ""
    assert store.compare_and_set("b", 1, b"1")
    while heard.get(timeout=WAIT_S) != "b":
        pass
    unsubscribe()
    other.close()
    store.close()


def test_sqlite_tells_of_a_file_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteConsensus(str(tmp_path / "log.db"))
    monkeypatch.setattr(sqlite, "VACUUM_BYTES_MAX", 100)
    assert "run VACUUM" in store.scrub()
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
