"""A client in a forked child, as `multiprocessing` makes them: one clear error, and no harm to anybody."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from consensus.sqlite import SqliteConsensus
from persist.core.errors import InvalidUsage
from tests.support.server import url_of
from tests.support.waiting import WAIT_S

SCHEMA = pa.schema([("id", pa.int64())])
CHILDREN = 4
INSERTS = 25
ROOT = Path(__file__).parents[2]
FORKS = 100  # of which 4 children hung, with three readers

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(params=["directory", "server"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with url_of(request.param, tmp_path) as url:
        yield url


def forked(work: Callable[[int], object]) -> list[object]:
    """What `work(number)` gives in each of CHILDREN forks of this process; an error as its text."""
    receiving, sending = os.pipe()
    pids = []
    for number in range(CHILDREN):
        pid = os.fork()
        if pid == 0:
            try:
                said = work(number)
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(sending, json.dumps([number, said]).encode() + b"\n")
            os._exit(0)
        pids.append(pid)
    os.close(sending)
    data = b""
    while data.count(b"\n") < CHILDREN:
        assert select.select([receiving], [], [], WAIT_S)[0], f"a child hangs; the others said {data!r}"
        data += os.read(receiving, 1 << 20)
    os.close(receiving)
    for pid in pids:
        os.waitpid(pid, 0)
    return [said for _, said in sorted(json.loads(line) for line in data.splitlines())]


def test_every_use_of_an_inherited_client_says_that_it_was_forked(url: str) -> None:
    """Children read each other's answers: calls were told another's time, and rows were written twice."""
    with persist.connect(url) as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        for number in range(CHILDREN):
            shard.insert([{"id": -number}])
        writer, piped = shard.open_writer(), shard.pipelined_writer("p")
        writer.insert([{"id": -10}])
        piped.append([{"id": -11}])
        piped.flush()
        listen, snapshot = shard.listen(None), shard.snapshot()
        uses: list[Callable[[], object]] = [
            lambda: shard.insert([{"id": 1}]),
            lambda: writer.insert([{"id": 2}]),
            lambda: piped.append([{"id": 3}]),
            lambda: piped.flush(),
            lambda: shard.upper(),
            lambda: shard.snapshot(),
            lambda: snapshot.to_arrow(),
            lambda: next(iter(listen)),
            lambda: client.shards(),
            lambda: writer.close(),
        ]
        spare, hold = shard.listen(None), shard.open_reader()

        def use(_number: int) -> list[str]:
            said = []
            for each in uses:
                with pytest.raises(InvalidUsage) as refused:
                    each()
                said.append(str(refused.value))
            for close in (snapshot.close, listen.close, spare.close, hold.close, client.close):
                close()  # it belongs to the parent: nothing happens
            return said

        for said in forked(use):
            assert isinstance(said, list), said
            assert all("forked from process" in each and "persist.connect" in each for each in said), said
        assert snapshot.to_arrow().num_rows == CHILDREN + 2, "the parent goes on, and so do its leases"
        piped.append([{"id": -12}])
        piped.close()
        listen.close()
        assert shard.snapshot().to_arrow().num_rows == CHILDREN + 3


def test_children_that_connect_anew_write_each_row_once_at_the_time_they_are_told(url: str) -> None:
    with persist.connect(url) as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        shard.insert([{"id": -1}])

        def write(number: int) -> list[list[int]]:
            with persist.connect(url) as own:
                mine = own.shard("orders")
                told = [(id_, mine.insert([{"id": id_}])) for id_ in range(number * 1000, number * 1000 + INSERTS)]
                return [[id_, at.lower.element or 0] for id_, at in told]

        acknowledged = [tuple(pair) for pairs in forked(write) for pair in pairs]  # type: ignore[attr-defined]
        assert len(acknowledged) == CHILDREN * INSERTS
        until = shard.upper().element
        events = list(shard.listen(None, until=until))
    updates = pa.concat_tables([event.updates for event in events])
    at = dict(zip(updates["id"].to_pylist(), updates["__time"].to_pylist(), strict=True))
    assert len(at) == updates.num_rows == 1 + CHILDREN * INSERTS
    assert dict(acknowledged).items() <= at.items()


def fork_while_others_read(path: str) -> None:
    """Fork this process FORKS times while threads read; each child uses a store of its own."""
    ended, store = threading.Event(), SqliteConsensus(path)
    store.begin("k", 1, b"x")

    def read() -> None:
        while not ended.is_set():
            store.scan("k", 1, 1)

    for _ in range(3):
        threading.Thread(target=read, daemon=True).start()
    for number in range(FORKS):
        receiving, sending = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(sending, SqliteConsensus(path).scan("k", 1, 1)[0].data)
            os._exit(0)
        os.close(sending)
        if not select.select([receiving], [], [], WAIT_S)[0]:
            os.kill(pid, signal.SIGKILL)
            raise SystemExit(f"child {number} hangs")
        assert os.read(receiving, 100) == b"x"
        os.close(receiving)
        os.waitpid(pid, 0)
    ended.set()


def test_a_child_does_not_wait_for_what_another_thread_held_inside_sqlite(tmp_path: Path) -> None:
    """SQLite's allocator has a mutex: a child that inherits it locked waits for ever, with a store of its own too."""
    work = f"from {__name__} import fork_while_others_read; fork_while_others_read({str(tmp_path / 'log.db')!r})"
    # In a process of its own, which is smaller than that of all tests: forks copy it.
    subprocess.run([sys.executable, "-W", "ignore", "-c", work], cwd=ROOT, check=True, timeout=FORKS * WAIT_S)
