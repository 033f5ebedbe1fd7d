"""Two regions as processes: a home, `persist region replicate`, and a server that only reads; no other link."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist
from blob import open_blob
from persist import InvalidUsage, ReadOnly, Shard, Unavailable
from rpc.cli.program import main
from tests.support.forked import Forked
from tests.support.server import Server
from tests.support.urls import with_path
from tests.support.waiting import wait_until

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])


def large(number: int) -> pa.Table:
    """Rows that a State does not hold inline."""
    ids = range(number * 20_000, (number + 1) * 20_000)
    return pa.table({"id": ids, "v": [f"{n * 7919 % 100_003}" for n in ids]})


SERVERS = pytest.param("postgres-s3", marks=[pytest.mark.services, pytest.mark.proof])
Stores = tuple[str, str | None, str]  # the blob store at home, the consensus store, the copy


class Two:
    """Home, and a region to which its blob store is copied."""

    def __init__(self, root: Path, stores: Stores | None = None) -> None:
        self.root, self.data = root, root / "home"
        self.blobs, self.consensus, self.copied = stores or (f"file://{self.data}/blob", None, f"file://{root}/copy")
        self.home = self.serve()
        with persist.connect(self.home.url) as client:
            shard = client.create_shard("orders", SCHEMA, ["id"])
            shard.insert(large(0))
        self.replicating = self.replicate()
        wait_until(lambda: self.has_come("location-id"), "the copy begins")
        wait_until(lambda: self.has_come("cat/"), "the names have come")
        self.region = self.server()

    def has_come(self, prefix: str) -> bool:
        with closing(open_blob(self.copied)) as blob:
            return next(iter(blob.list(prefix)), None) is not None

    def serve(self) -> Server:
        """A server at home, with maintenance."""
        where = () if self.consensus is None else ("--blob", self.blobs, "--consensus", self.consensus)
        return Server(self.data, *where, environment={"PERSIST_PUBLISH_EVERY": "1"}, maintenance="beside")

    def replicate(self) -> Forked:
        command = ["region", "replicate", "--every", "100ms", "--keep", "2s", "--whole", "2s"]
        stores = ["--from", self.blobs, "--to", self.copied]
        return Forked([*command, *stores], os.environ, unread=True)

    def server(self) -> Server:
        where = ("--blob", self.copied, "--region", "us", "--of", "eu", "--home", self.home.url)
        return Server(self.root, "--read-only", *where)

    def close(self) -> None:
        self.replicating.end()
        for server in (self.home, self.region):
            if server.process.poll() is None:
                server.stop()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    made.close()


@pytest.fixture(params=["directory", SERVERS])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Two]:
    """As `two`, also with PostgreSQL and two prefixes of a bucket."""
    stores = None
    if request.param != "directory":
        s3, postgres = request.getfixturevalue("s3_url"), request.getfixturevalue("postgres_url")
        stores = with_path(s3, "home"), postgres, with_path(s3, "copy")
    made = Two(tmp_path, stores)
    yield made
    made.close()


def arrived(there: Shard, upper: int) -> None:
    wait_until(lambda: (there.upper().element or 0) >= upper, f"{upper} has come")


def digest(shard: Shard, as_of: int) -> tuple[int, int]:
    table = shard.snapshot(as_of).to_arrow()
    return table.num_rows, sum(map(hash, zip(*(table.column(n).to_pylist() for n in ("id", "v")), strict=True)))


def parts(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*.parquet")}


def get(url: str) -> tuple[dict[str, Any], dict[str, str]]:
    with urllib.request.urlopen(url) as answer:
        return json.load(answer), dict(answer.headers)


def test_a_region_follows_home_and_shows_the_same(anywhere: Two) -> None:
    two = anywhere
    with persist.connect(two.home.url) as home, persist.connect(two.region.url) as region:
        shard = home.shard("orders")
        wait_until(lambda: region.shards() == ["orders"], "the name has come")
        there = region.shard("orders")
        with closing(there.listen(0)) as listen:
            events, heard = iter(listen), Counter[int]()
            for number in range(1, 5):
                shard.insert(large(number))
                shard.insert([{"id": -number, "v": "inline"}])
                seen = next(event for event in events if event.updates.num_rows)
                heard.update(seen.updates["__time"].to_pylist())
                if seen.lower != seen.upper:  # whole commits, as many as have come
                    assert heard == {time: 20_000 if time % 2 else 1 for time in range(1, seen.upper.element)}
        arrived(there, 9)
        for as_of in range(9):
            assert digest(there, as_of) == digest(shard, as_of)
        told, headers = get(f"{two.region.url}/v1/shards/orders")
        assert told["upper"] == [9]
        assert float(headers["persist-lag-seconds"]) < 3_600
        told, _ = get(f"{two.region.url}/v1/regions")
        assert (told["region"], told["role"], told["of"], told["home"]) == ("us", "copy", "eu", [two.home.url])
        assert [one["shard"] for one in told["shards"]] == ["orders"]
        told, headers = get(f"{two.home.url}/v1/shards/orders")
        assert "persist-lag-seconds" not in headers
        told, _ = get(f"{two.home.url}/v1/regions")
        assert told["role"] == "home"
        with urllib.request.urlopen(f"{two.region.url}/metrics") as answer:
            metrics = answer.read().decode()
        assert 'persist_region_lag_seconds{shard="orders"}' in metrics
        assert "persist_region_link_up 1.0" in metrics
        with urllib.request.urlopen(f"{two.region.url}/v1/shards/orders/snapshot?as_of=0&format=csv") as answer:
            assert len(answer.read().splitlines()) == 20_001


def test_a_write_to_a_region_is_refused_with_the_address_of_home(two: Two) -> None:
    with persist.connect(two.region.url) as region:
        with pytest.raises(ReadOnly) as told:
            region.shard("orders").insert([{"id": 1, "v": "x"}])
        assert told.value.details["home"] == [two.home.url]
        with pytest.raises(ReadOnly):
            region.create_shard("new", SCHEMA, ["id"])
        before = parts(two.root / "copy")
        with pytest.raises(ReadOnly, match="region 'eu', at http") as told:
            region.shard("orders").insert(large(7))  # this client has opened the directory itself
        assert told.value.details["home"] == [two.home.url]
        assert parts(two.root / "copy") - before <= parts(two.data / "blob")
    url, headers = f"{two.region.url}/v1/shards/orders/insert", {"content-type": "application/json"}
    request = urllib.request.Request(url, data=b'{"id": 1, "v": "x"}', headers=headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    body = json.load(refused.value)
    assert (refused.value.code, body["kind"], body["details"]["home"]) == (403, "read_only", [two.home.url])


@pytest.mark.smoke
@pytest.mark.proof
def test_a_link_that_is_cut_stops_nothing_but_progress(anywhere: Two) -> None:
    two = anywhere
    with persist.connect(two.region.url) as region:
        there = region.shard("orders")
        before = digest(there, 0)
        two.replicating.end(signal.SIGKILL)
        two.home.kill()
        assert digest(there, 0) == before
        with pytest.raises(Unavailable):
            there.snapshot(1, wait_s=0.0)
        two.region.stop()
        two.region = two.server()
        with persist.connect(two.region.url) as again:
            assert digest(again.shard("orders"), 0) == before
        two.home = two.serve()
        with persist.connect(two.home.url) as home:
            home.shard("orders").insert(large(1))
            two.replicating = two.replicate()
            with persist.connect(two.region.url) as again:
                arrived(again.shard("orders"), 2)
                assert digest(again.shard("orders"), 1) == digest(home.shard("orders"), 1)


@pytest.mark.smoke
@pytest.mark.proof
def test_a_program_reads_a_copy_by_itself(two: Two) -> None:
    with persist.connect(two.region.url) as region:
        expected = digest(region.shard("orders"), 0)
    for where in ({"blob": two.copied}, {"url": f"persist://{two.data}"}):
        with persist.connect(**where, read_only=True) as client:
            assert digest(client.shard("orders"), 0) == expected
            shard = client.shard("orders")
            for write in (partial(shard.insert, [{"id": 1, "v": "x"}]), shard.optimize, shard.vacuum):
                with pytest.raises(ReadOnly):
                    write()


WRONG = [
    (["serve", "--read-only", "--blob", "file:///x", "--consensus", "sqlite:////y"], "uses the blob store alone"),
    (["serve", "--read-only", "--dir", "x", "--blob", "file:///x"], "give either"),
    (["serve", "--of", "eu"], "of and home are for a read-only server"),
    (["serve", "--region", "EU"], "is not a valid region name"),
    (["serve", "--region", ""], "--region is empty"),
    (["region", "set", "", "--write", "http://eu:1", "--index", "i"], "is not a valid region name"),
    (["region", "replicate", "--from", "", "--to", "mem:b"], "blob location ''"),
    (["serve", "--read-only", "--blob", "file:///nothing/there"], "does not exist"),
    (["region", "replicate", "--from", "file:///nothing/there", "--to", "file:///x"], "does not exist"),
    (["region", "replicate", "--from", "mem:a", "--to", "mem:b", "--once"], "has no location"),
    (["region", "replicate", "--from", "mem:a", "--to", "mem:b", "--every", "0s"], "every_s is 0.0"),
    (["region", "replicate", "--from", "mem:a", "--to", "mem:b", "--keep", "nan"], "--keep is 'nan'"),
    (["region", "replicate", "--from", "mem:a", "--to", "mem:b", "--rate", "x"], "--rate is 'x'"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=[" ".join(row[0])[:60] for row in WRONG])
def test_what_is_wrong_is_told_in_a_sentence(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, *(["--port", "0"] if arguments[0] == "serve" else [])]) == 1
    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_with_read_only_is_refused(tmp_path: Path) -> None:
    here, there = f"persist://{tmp_path}", f"persist://{tmp_path}/no"
    stores = {"blob": "mem:a", "consensus": "mem:b"}
    for wrong in (*({"url": url} for url in ("http://localhost:1", there, "")), stores, {"blob": ""}, {}):
        with pytest.raises(InvalidUsage):
            persist.connect(**wrong, read_only=True)
    with pytest.raises(InvalidUsage):
        persist.connect(here, blob="mem:a", read_only=True)
