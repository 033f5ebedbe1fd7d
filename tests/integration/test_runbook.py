"""Every disaster of docs/backup.md, end to end: the loss, the commands as the page has them, and what is there again.

Writers go on all the time until it happens. What was acknowledged before the backup began is there to the row; of what
was written later, nothing is half there.
"""

from __future__ import annotations

import json
import re
import shlex
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

import persist
from blob import open_blob
from persist import PersistError, UpperMismatch
from tests.support.forked import ran
from tests.support.pages import page
from tests.support.urls import with_path
from tests.support.waiting import wait_until

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
NAMES = ("items", "orders")
SLOW = "cannot be compared"  # clocks, where the stores answer slowly: the command says that it is to be retried
RETRIES_MAX = 20
PAUSE_S = 0.01  # between two rows of the writers, which leaves the processor to the commands
SERVERS = pytest.param("postgres-s3", marks=[pytest.mark.services, pytest.mark.proof])


@dataclass
class Home:
    """A location, with a place for another one and one for backups."""

    root: Path
    stores: tuple[str, str]
    fresh: tuple[str, str]
    backups: str
    written: dict[str, dict[int, float]] = field(default_factory=lambda: {name: {} for name in NAMES})

    def connect(self, stores: tuple[str, str] | None = None) -> persist.Client:
        blob, consensus = stores or self.stores
        return persist.connect(blob=blob, consensus=consensus)

    def create(self) -> None:
        """The shards, without a row."""
        with self.connect() as client:
            for name in NAMES:
                client.create_shard(name, SCHEMA, ["id"])

    def damage(self, check: str) -> list[dict[str, Any]]:
        """The critical findings of a check: writers that a test has left are no damage."""
        [report] = self.run(f"{check} --json --free 0", 0, 1)
        return [one for one in report["findings"] if one["severity"] == "critical"]

    def run(self, line: str, *expected: int) -> list[dict[str, Any]]:
        """Run a command of the page, with this home's places, as a process; what it printed."""
        places = {
            "URL": [self.backups],
            "--dir DIR": ["--blob", self.stores[0], "--consensus", self.stores[1]],
            "--dir NEW": ["--blob", self.fresh[0], "--consensus", self.fresh[1]],
        }
        for name, values in places.items():
            line = re.sub(rf"(?<!\S){name}(?!\S)", " ".join(map(shlex.quote, values)), line)
        command, *arguments = shlex.split(line)
        assert command == "persist"
        for _ in range(RETRIES_MAX):
            done = ran(*arguments)
            if done.returncode in (expected or (0,)) or SLOW not in done.stderr:
                break
        assert done.returncode in (expected or (0,)), done.stderr
        return [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]


@pytest.fixture(params=["directory", SERVERS])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Home:
    if request.param == "directory":
        stores, fresh = (
            (f"file://{tmp_path}/{name}/blob", f"sqlite:///{tmp_path}/{name}/log.db") for name in ("home", "new")
        )
        for name in ("home", "new"):
            (tmp_path / name).mkdir()
        return Home(tmp_path, stores, fresh, f"file://{tmp_path}/backups")
    s3, postgres = request.getfixturevalue("s3_url"), request.getfixturevalue("postgres_url")
    prefixes = [with_path(s3, name) for name in ("home", "new", "backups")]
    logs = [schema_of(postgres, name) for name in ("home", "new")]
    return Home(tmp_path, (prefixes[0], logs[0]), (prefixes[1], logs[1]), prefixes[2])


def schema_of(url: str, name: str) -> str:
    """The same database, with a schema of its own for the table."""
    with psycopg.connect(url) as connection:
        connection.execute(f"CREATE SCHEMA IF NOT EXISTS {name}")
    return f"{url}{'&' if '?' in url else '?'}options=-csearch_path%3D{name}"


@contextmanager
def writers(home: Home) -> Iterator[None]:
    """Both shards are written to, by turns, until this ends. `home.written` tells what was acknowledged."""
    ended = threading.Event()

    def write() -> None:
        with home.connect() as client:
            number = max(home.written["orders"], default=-1)
            while not ended.wait(PAUSE_S):
                number += 1
                for name in NAMES:
                    try:
                        client.shard(name).insert([{"id": number, "v": f"{name} {number}"}])
                    except PersistError:
                        return
                    home.written[name][number] = time.time()

    thread = threading.Thread(target=write)
    before = len(home.written["orders"])
    thread.start()
    try:
        wait_until(lambda: len(home.written["orders"]) > before + 5, "the writers have begun")
        yield
    finally:
        ended.set()
        thread.join()


def backed_up(home: Home) -> tuple[set[int], dict[str, Any]]:
    """Make a backup beside the writers: what was acknowledged before it began, and what it said."""
    acknowledged = set(home.written["orders"])
    [made] = home.run("persist backup create --to URL --dir DIR")
    return acknowledged, made


@pytest.fixture
def kept(home: Home) -> Kept:
    """A backup that was made while writers went on, and that they went on after."""
    home.create()
    with writers(home):
        first = backed_up(home)
        wait_until(lambda: len(home.written["orders"]) > max(first[0]) + 20, "the writers go on")
    return first


def ids(client: persist.Client, name: str, as_of: int | datetime | None = None) -> Counter[int]:
    return Counter(client.shard(name).snapshot(as_of).to_arrow().column("id").to_pylist())


def check(home: Home, client: persist.Client, kept: tuple[set[int], dict[str, Any]]) -> None:
    """To the row: all from before the backup, nothing from after its wall clock, no row twice, no pair torn."""
    acknowledged, made = kept
    items, orders = (ids(client, name) for name in NAMES)
    assert set(items.values()) | set(orders.values()) == {1}
    assert acknowledged <= set(orders) <= set(items)
    at = datetime.fromisoformat(made["at"]).timestamp()
    began = {number: home.written["items"].get(number - 1, 0.0) for number in orders}
    assert all(stamp <= at for stamp in began.values())
    assert set(items) == set(range(len(items)))  # a prefix of what was written
    assert set(orders) == set(range(len(orders)))


def commands(heading: str) -> list[str]:
    """The commands that the page has under this heading."""
    [section] = re.findall(rf"^### {re.escape(heading)}\n(.*?)(?=^##)", page("docs/backup.md"), re.M | re.S)
    return [line for block in re.findall(r"^```\n(.*?)^```", section, re.M | re.S) for line in block.splitlines()]


def lose_blobs(home: Home) -> None:
    store = open_blob(home.stores[0])
    store.delete([stat.key for stat in store.list("")])
    store.close()


def lose_log(home: Home) -> None:
    url = home.stores[1]
    if url.startswith("sqlite"):
        for file in (home.root / "home").glob("log.db*"):
            file.unlink()
        return
    with psycopg.connect(url) as connection:
        connection.execute("DROP TABLE consensus_log")


Kept = tuple[set[int], dict[str, Any]]
TESTED = [
    "The blob store is lost", "The consensus store is lost or stale",
    "A faulty deployment wrote wrong rows", "Rows were corrupted before the history begins",
    "A shard was dropped by mistake", "A blob is missing or damaged", "A backup is damaged",
]  # fmt: skip


def test_each_disaster_of_the_page_is_here() -> None:
    section = page("docs/backup.md").partition("## Disaster recovery")[2].partition("\n## ")[0]
    assert re.findall(r"^### (.+)$", section, re.M) == TESTED


@pytest.mark.smoke
@pytest.mark.proof
def test_the_log_is_lost(home: Home) -> None:
    home.create()
    with writers(home):
        home.run("persist maintain run --once --dir DIR")
        wait_until(lambda: len(home.written["orders"]) > 40, "the writers go on")
        acknowledged = {name: set(home.written[name]) for name in NAMES}
        home.run("persist maintain run --once --dir DIR")
        wait_until(lambda: len(home.written["orders"]) > 50, "the writers go on")
    lose_log(home)
    dry, real, check = commands("The consensus store is lost or stale")
    [items, orders, told] = home.run(dry)
    assert (told["not_whole"], told["shards"], items["shard"]) == (0, 2, "items")
    assert home.run(real)[-1] == {**told, "dry_run": False}
    assert home.damage(check) == []
    with home.connect() as client:
        for name in NAMES:
            found = ids(client, name)
            assert set(found.values()) == {1}
            assert acknowledged[name] <= set(found) <= set(home.written[name])
            assert set(found) == set(range(len(found))), "a prefix of what was written"
            upper = (items if name == "items" else orders)["upper"][0]
            with pytest.raises(UpperMismatch):
                client.shard(name).compare_and_append([], upper, upper + 1)
    with writers(home):
        pass


@pytest.mark.parametrize("lose", [lose_blobs, lose_log])
def test_a_store_is_lost(home: Home, kept: Kept, lose: Any) -> None:
    lose(home)
    with pytest.raises(PersistError), home.connect() as client:
        client.shard("orders").insert([{"id": 1, "v": "nothing is made anew"}])
    for line in commands("The blob store is lost"):
        home.run(line)
    with home.connect(home.fresh) as client:
        check(home, client, kept)
        client.shard("orders").insert([{"id": -1, "v": "life goes on"}])


def test_a_move(home: Home) -> None:
    """As docs/backup.md has it. With the writers stopped before the second backup, nothing is left behind."""
    section = page("docs/backup.md").partition("## Move to other stores\n")[2].partition("\n## ")[0]
    lines = [line.strip().partition("  #")[0] for line in section.splitlines() if line.startswith("    persist")]
    lines = [
        line.replace("file:///mnt/move", "URL").replace("--blob URL --consensus URL", "--dir NEW") for line in lines
    ]
    first, ahead, second, last = lines
    home.create()
    with writers(home):
        home.run(first)
        home.run(ahead)
    home.run(second)
    home.run(last)
    with home.connect() as old, home.connect(home.fresh) as new:
        for name in NAMES:
            assert ids(new, name) == ids(old, name) == Counter(home.written[name].keys())
    home.stores = home.fresh
    with writers(home):
        pass


def test_a_wrong_deploy(home: Home, kept: Kept) -> None:
    with home.connect() as client:
        time.sleep(1.1)  # a wall clock names times to the second
        at = datetime.now(UTC)
        expected = ids(client, "orders")
        client.shard("orders").insert([{"id": 10**6 + n, "v": "wrong"} for n in range(50)])
        wait_until(lambda: datetime.now(UTC).timestamp() > at.timestamp() + 1, "the instant is over")
    [line] = commands("A faulty deployment wrote wrong rows")
    home.run(line.replace("TIME", at.isoformat()))
    with home.connect() as client:
        assert ids(client, "orders") == expected


def test_rows_that_were_poisoned(home: Home, kept: Kept) -> None:
    _, made = kept
    with home.connect() as client:
        client.shard("orders").insert([{"id": 1, "v": "poison"}])
        client.shard("orders").forget(client.shard("orders").upper().element - 1)
    listed, line = commands("Rows were corrupted before the history begins")
    assert home.run(listed) == [made]
    home.run(line.replace("TIME", made["at"]))
    with home.connect() as client:
        found = ids(client, "orders-before")
        assert set(found.values()) == {1}
        assert kept[0] <= set(found)
        assert ids(client, "orders")[1] == 2


def test_a_drop_by_mistake(home: Home, kept: Kept) -> None:
    with home.connect() as client:
        client.shard("orders").drop()
    [line] = commands("A shard was dropped by mistake")
    home.run("persist maintain gc --once --dir DIR")
    home.run(line)
    with home.connect() as client:
        assert kept[0] <= set(ids(client, "orders-again"))
        assert client.shards() == ["items", "orders-again"]
    home.run("persist maintain gc --once --dir DIR")
    assert home.damage("persist check --dir DIR --deep") == []


def test_a_blob_is_lost(home: Home) -> None:
    rows = pa.table({"id": range(20_000), "v": [f"{n * 7919 % 100_003 * 6007}" for n in range(20_000)]})
    with home.connect() as client:
        client.create_shard("orders", SCHEMA, ["id"]).insert(rows)
    home.run("persist backup create --to URL --dir DIR")
    store, kept = open_blob(home.stores[0]), open_blob(home.backups)
    [key] = [stat.key for stat in store.list("s") if stat.key.endswith(".parquet")]
    store.delete([key])
    check, repair, meant = commands("A blob is missing or damaged")
    [found] = home.damage(check)
    assert found["key"] == key
    assert home.run(repair, 1)[-1]["put_back"] == 1
    assert store.stat(key) is None
    home.run(meant)
    assert home.damage(check) == []
    store.delete([key])
    copy = home.root / "copy.parquet"
    copy.write_bytes(kept.get(f"blobs/{key}"))
    part = Path(key).stem
    home.run(f"persist check orders --repair --replace {part} {copy} --yes --dir DIR")
    assert home.damage(check) == []
    with home.connect() as client:
        assert client.shard("orders").snapshot().to_arrow().num_rows == rows.num_rows


def test_a_backup_is_damaged(home: Home, kept: Kept) -> None:
    rows = pa.table({"id": range(10**6, 10**6 + 20_000), "v": [f"{n * 7919 % 100_003 * 6007}" for n in range(20_000)]})
    with home.connect() as client:
        client.shard("orders").insert(rows)
    home.run("persist backup create --to URL --dir DIR")
    store = open_blob(home.backups)
    key = max((stat for stat in store.list("blobs/")), key=lambda stat: stat.size).key
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    store.delete([key])
    store.put(key, bytes(data))
    fault, _ = home.run("persist backup verify --from URL --deep", 1)
    assert (fault["shard"], f"blobs/{fault['key']}") == ("orders", key)
    home.run("persist backup restore items --from URL --dir NEW")
    store.delete([key])
    home.run("persist backup create --to URL --dir DIR")
    home.run("persist backup verify --from URL --deep")
    home.run("persist backup restore orders --from URL --dir NEW")
    with home.connect(home.fresh) as client:
        assert client.shard("orders").snapshot().to_arrow().num_rows >= rows.num_rows
