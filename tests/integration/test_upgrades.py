"""Upgrades as docs/operations.md has them: servers of two builds side by side under load, forth and back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from blob import open_blob
from persist import Client, PersistError, UpgradeNeeded
from persist.commit.location import open_location
from persist.commit.location_identity import raise_format
from persist.formats.state_frames import format_of
from tests.services.process import free_ports
from tests.support.older import NEXT, OLD, newer, older, ran_older
from tests.support.server import Process, Server
from tests.support.waiting import WAIT_S, wait_until

SCHEMA = pa.schema([("id", pa.int64())])
WRITERS, FEW = 3, 5
FIRST, LAST = -2, -1  # the ids of the first row, and of the last one
Begin = Callable[[Sequence[str], Mapping[str, str]], Process]
NEW = NEXT.newest


class Load:
    """Programs that write rows, and one that follows them, until they are told to end. Nobody may be refused."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.written: list[list[int]] = [[] for _ in range(WRITERS)]
        self.followed: list[int] = []
        self.refused: list[PersistError] = []
        self._ending = threading.Event()
        self._follower = threading.Thread(target=self._told, args=(self._follow,))
        self._writers = [threading.Thread(target=self._told, args=(self._write, n)) for n in range(WRITERS)]

    def __enter__(self) -> Load:
        with persist.connect(self.url) as client:
            client.create_shard("orders", SCHEMA, key=["id"]).insert([{"id": FIRST}])
        for thread in (self._follower, *self._writers):
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._writers:
            thread.join(WAIT_S)
        with persist.connect(self.url) as client:
            client.shard("orders").insert([{"id": LAST}])
        self._follower.join(WAIT_S)

    def goes_on(self) -> None:
        """Wait until every program has written some more."""
        before = [len(ids) for ids in self.written]
        wait_until(
            lambda: self.refused or all(len(ids) >= had + FEW for ids, had in zip(self.written, before, strict=True)),
            "everybody writes on",
        )
        assert self.refused == []

    def _told(self, work: Callable[..., None], *given: int) -> None:
        try:
            work(*given)
        except PersistError as error:
            self.refused.append(error)

    def _write(self, number: int) -> None:
        with persist.connect(self.url) as client:
            shard, ids = client.shard("orders"), self.written[number]
            while not self._ending.is_set():
                row = number * 1_000_000 + len(ids)
                shard.insert([{"id": row}])
                ids.append(row)

    def _follow(self) -> None:
        with persist.connect(self.url) as client:
            for event in client.shard("orders").listen(as_of=0):
                table = event.updates.to_pydict()
                self.followed += table["id"]
                assert set(table["__diff"]) <= {1}
                if LAST in table["id"]:
                    return


class Servers:
    """Two servers of one directory, each at a port that stays. One of them is replaced at a time."""

    def __init__(self, directory: Path, builds: Sequence[Begin]) -> None:
        self.directory = directory
        self._ports = free_ports(len(builds))
        self._running = [self._start(number, begin) for number, begin in enumerate(builds)]
        self.urls = [server.url for server in self._running]

    def replace(self, number: int, begin: Begin) -> None:
        assert self._running[number].stop() == 0
        self._running[number] = self._start(number, begin)

    def _start(self, number: int, begin: Begin) -> Server:
        return Server(self.directory, "--port", str(self._ports[number]), begin=begin)

    def stop(self) -> None:
        for server in self._running:
            server.__exit__()


@contextmanager
def servers(directory: Path, *builds: Begin) -> Iterator[Servers]:
    started = Servers(directory, builds)
    try:
        yield started
    finally:
        started.stop()


def format_version(directory: Path, name: str = "orders") -> int:
    """The format version of the last commit of a shard."""
    location = open_location(f"persist://{directory}")
    try:
        head = location.consensus.head(name)
        assert head is not None
        return format_of(head.data)
    finally:
        location.close()


def upgrade(directory: Path) -> None:
    """Switch the format version of the newer build on, as an operator does once no older build is left."""
    assert raise_format(open_blob(f"file://{directory}/blob"), NEXT) == (OLD, NEW)


def rows(client: Client) -> list[int]:
    found: list[int] = client.shard("orders").snapshot().to_arrow(expand=True).column("id").to_pylist()
    return sorted(found)


@pytest.mark.smoke
@pytest.mark.proof
def test_servers_are_replaced_one_by_one_there_and_back_and_there_while_everybody_writes(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    with ExitStack() as stack:
        two = stack.enter_context(servers(directory, older, older))
        load = Load(",".join(two.urls))
        with load:
            load.goes_on()
            two.replace(0, newer)
            load.goes_on()
            two.replace(0, older)  # the way back, as long as the format version was not raised
            load.goes_on()
            for number in (0, 1):
                two.replace(number, newer)
                load.goes_on()
            assert format_version(directory) == OLD
            upgrade(directory)
            load.goes_on()
            for number in (0, 1):
                two.replace(number, newer)
                load.goes_on()
        assert load.refused == []
        assert format_version(directory) == NEW
        written = sorted(row for ids in load.written for row in ids)
        with persist.connect(load.url) as client:
            assert rows(client) == [FIRST, LAST, *written]
        assert sorted(load.followed) == [LAST, *written]


@pytest.mark.smoke
@pytest.mark.proof
def test_a_server_that_was_forgotten_refuses_what_it_cannot_read_and_harms_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    with ExitStack() as stack:
        two = stack.enter_context(servers(directory, older, newer))
        old, new = (stack.enter_context(persist.connect(url)) for url in two.urls)
        old.create_shard("orders", SCHEMA, key=["id"])
        old.shard("orders").insert([{"id": 1}])
        new.shard("orders").insert([{"id": 2}])
        assert format_version(directory) == OLD
        upgrade(directory)
        two.replace(1, newer)
        new.shard("orders").insert([{"id": 3}])
        assert format_version(directory) == NEW
        for _ in range(2):
            with pytest.raises(UpgradeNeeded, match="upgrade persist"):
                old.shard("orders").insert([{"id": 4}])
        assert rows(new) == [1, 2, 3]
        two.replace(0, newer)  # the remedy
        old.shard("orders").insert([{"id": 4}])
        assert rows(old) == [1, 2, 3, 4]


@pytest.mark.smoke
@pytest.mark.proof
def test_after_the_format_was_raised_the_way_back_is_a_backup_from_before(tmp_path: Path) -> None:
    directory, copies, again = (str(tmp_path / name) for name in ("data", "copies", "again"))
    with servers(Path(directory), older) as one, persist.connect(one.urls[0]) as client:
        client.create_shard("orders", SCHEMA, key=["id"]).insert([{"id": 1}])
        ran_older("backup", "create", "--dir", directory, "--to", f"file://{copies}")
        upgrade(Path(directory))
        one.replace(0, newer)
        client.shard("orders").insert([{"id": 2}])
    ran_older("backup", "restore", "--from", f"file://{copies}", "--dir", again)
    with servers(Path(again), older) as one, persist.connect(one.urls[0]) as client:
        assert rows(client) == [1]
        client.shard("orders").insert([{"id": 3}])
        assert rows(client) == [1, 3]
    assert format_version(Path(again)) == OLD


@pytest.mark.smoke
@pytest.mark.proof
def test_an_older_client_writes_and_reads_through_a_newer_server(tmp_path: Path) -> None:
    rows_of, directory = tmp_path / "rows.csv", tmp_path / "data"
    rows_of.write_text("id\n2\n3\n")
    with servers(directory, newer) as one, persist.connect(one.urls[0]) as client:
        client.create_shard("orders", SCHEMA, key=["id"]).insert([{"id": 1}])
        assert format_version(directory) == NEW
        ran_older("import", "orders", str(rows_of), "--url", one.urls[0])
        assert rows(client) == [1, 2, 3]
        read = ran_older("cat", "orders", "--url", one.urls[0], "--format", "csv")
        assert read.splitlines()[1:] == ["1", "2", "3"]
