"""A home is lost and a copy goes on; the old home comes back and is fenced; every acknowledged row is accounted for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import persist
from persist.regions.region_index import read_index
from rpc.client.http_transport import open_transport
from tests.services.postgres import Postgres
from tests.support.disaster import NAMES, PAUSE_S, Disaster, Stores, free_port
from tests.support.urls import with_path
from tests.support.waiting import wait_until

SERVERS = pytest.param("postgres-s3", marks=[pytest.mark.services, pytest.mark.proof])
ADVERSARY_OF_FILES = pytest.param("adversary", marks=pytest.mark.proof)
ADVERSARY = pytest.param("postgres-s3-adversary", marks=[pytest.mark.services, pytest.mark.proof, pytest.mark.smoke])


def files(root: Path) -> Stores:
    for name in ("home", "copy"):
        (root / name).mkdir()
    at = f"{root}/home", f"{root}/copy"
    return Stores(
        f"file://{at[0]}/blob", f"sqlite:///{at[0]}/log.db", f"file://{at[1]}/blob", f"sqlite:///{root}/new.db"
    )


def servers(request: pytest.FixtureRequest, name: str) -> Stores:
    s3: str = request.getfixturevalue("s3_url")
    postgres: str = request.getfixturevalue("postgres_url")
    server: Postgres = request.getfixturevalue("postgres_server")
    return Stores(with_path(s3, "home"), postgres, with_path(s3, "copy"), server.create_database(name))


@pytest.fixture
def disaster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disaster]:
    fresh = tmp_path.name.replace("-", "_")
    stores = servers(request, fresh) if request.param.startswith("postgres") else files(tmp_path)
    made = Disaster(tmp_path, stores, adversary=request.param.endswith("adversary"))
    yield made
    made.close()


def promoted(disaster: Disaster, *more: str) -> tuple[int, str]:
    """Run `promote`, and serve the new home: its epoch, and its URL."""
    stores, port = disaster.stores, free_port()
    url = f"http://127.0.0.1:{port}"
    where = ("--blob", stores.copy, "--consensus", stores.fresh)
    asked = ("--index", str(disaster.index), "--write", url)
    code, lines, said = disaster.command("region", "promote", "us", "--of", "eu", *where, *asked, *more)
    assert code == 0, said
    disaster.serve(stores.copy, stores.fresh, port)
    return lines[-1]["epoch"], url


@pytest.mark.parametrize("disaster", ["files", ADVERSARY_OF_FILES, SERVERS, ADVERSARY], indirect=True)
def test_a_lost_home_comes_back_and_all_rows_are_accounted_for(disaster: Disaster) -> None:
    stores, where = disaster.stores, ("--blob", disaster.stores.copy, "--consensus", disaster.stores.fresh)
    disaster.arrived()
    came = {name: set(ids) for name, ids in disaster.acknowledged.items()}
    disaster.cut()
    disaster.write(disaster.home.url, 3)  # acknowledged, and not copied
    asked = ("--index", str(disaster.index), "--write", "http://us:1")
    code, _, said = disaster.command("region", "promote", "us", "--of", "eu", *where, *asked)
    assert (code, "it answers" in said) == (1, True), said
    disaster.home.kill()
    code, lines, said = disaster.command("region", "promote", "us", "--of", "eu", *where, "--dry-run")
    assert (code, {line.get("shard") for line in lines[:-1]}) == (0, set(NAMES)), said
    epoch, url = promoted(disaster)
    assert epoch == 2

    for name in NAMES:
        assert disaster.ids(url, name) == came[name], "the new home shows what the region has shown"
    lost = {name: disaster.acknowledged[name] - came[name] for name in NAMES}
    disaster.write(url, 2)
    with persist.connect(disaster.region.url) as client:  # by the index, whose write URL is the new home's
        client.shard(NAMES[0]).insert([{"id": 1_000, "v": "by the index"}])
        disaster.acknowledged[NAMES[0]].add(1_000)

    old = disaster.serve(stores.blob, stores.consensus)  # with the index, which the administrator has brought there
    with (
        closing(open_transport(persist.Connection(old.url))) as transport,  # a client that follows no index
        pytest.raises(persist.ReadOnly, match="at home elsewhere since epoch 2") as refused,
    ):
        persist.Client(transport).shard(NAMES[0]).insert([{"id": -1, "v": "late"}])
    assert refused.value.details["home"] == [url]
    with persist.connect(old.url) as client:  # whose own index sends clients on
        client.shard(NAMES[0]).insert([{"id": 1_001, "v": "sent on"}])
        disaster.acknowledged[NAMES[0]].add(1_001)

    ended = ("--blob", stores.blob, "--consensus", stores.consensus, "--of", stores.copy)
    code, lines, said = disaster.command("region", "demote", *ended)
    assert (code, "of 2 shards" in said) == (1, True), said
    code, lines, said = disaster.command("region", "salvage", *ended, "--to", str(disaster.root / "salvaged"))
    assert code == 0, said
    assert {line["shard"]: line["updates"] for line in lines[:-1]} == dict.fromkeys(NAMES, 3)
    assert disaster.in_files(disaster.root / "salvaged") == lost
    old.stop()
    code, _, said = disaster.command("region", "demote", *ended, "--drop-diverged")
    assert code == 0, said
    disaster.replicating = disaster.replicate(stores.copy, stores.blob)
    with persist.connect(url) as client:
        for name in NAMES:
            client.shard(name).insert([{"id": one, "v": name} for one in sorted(lost[name])])
    disaster.region = disaster.read_only(stores.blob)
    disaster.arrived()
    for name in NAMES:
        assert disaster.ids(disaster.region.url, name) == disaster.acknowledged[name] == disaster.ids(url, name)


@pytest.mark.parametrize("disaster", ["files", SERVERS], indirect=True)
def test_a_planned_switch_under_writers_loses_nothing(disaster: Disaster) -> None:
    stores = disaster.stores
    disaster.arrived()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    ends, writers = threading.Event(), Writers(disaster)
    writers.start(ends)
    command = ("--blob", stores.copy, "--consensus", stores.fresh)
    home = ("--home-blob", stores.blob, "--home-consensus", stores.consensus)
    asked = ("--index", str(disaster.index), "--write", url)
    disaster.cut()
    code, lines, said = disaster.command("region", "switch", "us", "--of", "eu", *command, *home, *asked)
    assert code == 0, said
    disaster.serve(stores.copy, stores.fresh, port)
    before = {name: len(disaster.acknowledged[name]) for name in NAMES}  # home takes none any more
    wait_until(
        lambda: all(len(disaster.acknowledged[name]) > before[name] for name in NAMES), "writers go on at the new home"
    )
    ends.set()
    writers.join()
    for name in NAMES:
        assert disaster.ids(url, name) == disaster.acknowledged[name]
    ended = ("--blob", stores.blob, "--consensus", stores.consensus, "--of", stores.copy)
    code, lines, said = disaster.command("region", "salvage", *ended, "--dry-run")
    assert (code, lines[-1]["shards"]) == (0, 0), "nothing was acknowledged that is not there"
    code, _, said = disaster.command("region", "demote", *ended)
    assert code == 0, said


class Writers:
    """One for each shard, which goes on by the index where it is refused. A row is tried until it is acknowledged."""

    def __init__(self, disaster: Disaster) -> None:
        self._disaster = disaster
        self._at: dict[str, str] = dict.fromkeys(NAMES, disaster.home.url)
        self._threads: list[threading.Thread] = []

    def start(self, ends: threading.Event) -> None:
        for number, name in enumerate(NAMES):
            thread = threading.Thread(target=self._run, args=(ends, name, 10_000 * (number + 1)), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run(self, ends: threading.Event, name: str, first: int) -> None:
        one = first
        while not ends.wait(PAUSE_S):
            one += 1
            while not self._lands(name, one):
                time.sleep(0.1)

    def _lands(self, name: str, one: int) -> bool:
        try:
            with closing(open_transport(persist.Connection(self._at[name], timeout_s=5.0))) as transport:
                persist.Client(transport).shard(name).insert([{"id": one, "v": name}])  # it follows no index by itself
        except persist.ReadOnly:
            self._at[name] = read_index(self._disaster.index).regions["eu"].write[0]
            return False
        except persist.PersistError:
            return False
        self._disaster.acknowledged[name].add(one)
        return True

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
