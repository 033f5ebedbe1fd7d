"""One namespace over regions: clients read near, and write home, by the index of the server that they know."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import persist
from blob import private_files
from persist import Corruption, InvalidUsage, ReadOnly, Unavailable, UpgradeNeeded
from persist.client.client import AT_HOME
from persist.regions import region_index
from persist.regions.failover import record_new_home
from persist.regions.region_index import (
    IndexFile,
    IndexUrl,
    RegionEntry,
    RegionIndex,
    RegionServer,
    decode_index,
    encode_index,
    index_json,
    probe_server,
    read_index,
    write_index,
)
from rpc.cli.program import main
from tests.integration.test_regions import WRITES
from tests.support.answers import Answers
from tests.support.location import TestClock
from tests.support.server import Server
from tests.support.two_regions import SCHEMA, TwoCentres


@pytest.fixture(scope="module")
def centres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoCentres]:
    made = TwoCentres(tmp_path_factory.mktemp("regions"))
    yield made
    made.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An index with the region eu."""
    write_index(tmp_path / "regions.json", RegionIndex({"eu": RegionEntry(("http://eu:1",))}))
    return tmp_path / "regions.json"


def ids(shard: persist.Shard, as_of: int | None = None) -> list[int]:
    return sorted(shard.snapshot(as_of).to_arrow().column("id").to_pylist())


def test_the_example_of_the_founding_paper(centres: TwoCentres) -> None:
    """S11 and S12 are ingested in DC1. In DC2 a job reads S11 and writes S2, and one reader follows S12 and S2."""
    with persist.connect(centres.dc1.url) as ingest:
        s11 = ingest.create_shard("dc1/s11", SCHEMA, ["id"])
        s12 = ingest.create_shard("dc1/s12", SCHEMA, ["id"])
        for number in range(5):
            s11.insert([{"id": number, "v": f"s11 {number}"}])
            s12.insert([{"id": 100 + number, "v": f"s12 {number}"}])
    centres.arrived("dc1/s11", 5)
    centres.arrived("dc1/s12", 5)
    with persist.connect(centres.dc2.url) as client:
        batch = client.shard("dc1/s11").snapshot(4).to_arrow()
        assert centres.copy.url in repr(client.shard("dc1/s11")._transport)
        result = client.create_shard("dc2/s2", SCHEMA, ["id"])
        result.insert([{"id": 1000 + row["id"], "v": row["v"]} for row in batch.to_pylist()])
        assert ids(client.shard("dc2/s2")) == [1000, 1001, 1002, 1003, 1004]
        seen: list[int] = []
        for name, until in (("dc1/s12", 5), ("dc2/s2", 1)):
            with closing(client.shard(name).listen(None, until=until)) as events:
                seen += [row["id"] for event in events for row in event.updates.to_pylist()]
        assert sorted(seen) == [100, 101, 102, 103, 104, 1000, 1001, 1002, 1003, 1004]
    with persist.connect(centres.dc2.url) as client:
        assert client.shards("dc2/s") == ["dc2/s2"]  # other tests make shards of that region too


def test_a_write_goes_home_and_is_read_near_a_little_later(centres: TwoCentres) -> None:
    with persist.connect(centres.dc2.url) as client:
        made = client.create_shard("dc1/far", SCHEMA, ["id"])
        made.insert([{"id": 1, "v": "made"}])
        centres.arrived("dc1/far", 1)
        far = client.shard("dc1/far")
        far.insert([{"id": 2, "v": "from dc2"}])
        assert ids(far.at_home) == [1, 2]  # type: ignore[attr-defined]
        centres.arrived("dc1/far", 2)
        assert ids(far, 1) == [1, 2]
        far.tag("here", 0)
        with closing(far.open_writer()) as writer:
            writer.insert([{"id": 3, "v": "by a writer"}])
        copy = client.clone("dc1/far", "dc1/far-clone")
        assert ids(copy) == [1, 2, 3]
        far.close()
    with persist.connect(centres.dc1.url) as home:
        assert ids(home.shard("dc1/far")) == [1, 2, 3]
        assert list(home.shard("dc1/far").tags()) == ["here"]


def test_a_region_that_is_not_in_the_index_is_refused_by_name(centres: TwoCentres) -> None:
    with persist.connect(centres.dc2.url) as client:
        with pytest.raises(InvalidUsage, match="knows no region 'dc9', of shard 'dc9/x'; its index has dc1, dc2"):
            client.shard("dc9/x")
        with pytest.raises(InvalidUsage, match="knows no region 'dc9'"):
            client.create_shard("dc9/x", SCHEMA, ["id"])


def test_a_region_that_no_server_near_reads_is_refused(centres: TwoCentres) -> None:
    known = read_index(centres.indexes["dc2"])
    try:
        write_index(centres.indexes["dc2"], RegionIndex({**known.regions, "dc3": RegionEntry(("http://dc3:1",), ())}))
        with (
            persist.connect(centres.dc2.url) as client,
            pytest.raises(InvalidUsage, match="names no nearby server that reads region 'dc3'"),
        ):
            client.shard("dc3/x")
    finally:
        write_index(centres.indexes["dc2"], known)


def test_a_shard_is_made_at_its_home_only(centres: TwoCentres) -> None:
    from rpc.client.http_transport import open_transport

    opened = open_transport(persist.Connection(centres.dc2.url))  # a client that follows no index
    with closing(opened) as transport:
        client = persist.Client(transport)
        with pytest.raises(ReadOnly, match="belongs to region 'dc1': create it there"):
            client.create_shard("dc1/wrong", SCHEMA, ["id"])
        client.create_shard("dc2/own", SCHEMA, ["id"])
        with pytest.raises(ReadOnly, match="belongs to region 'dc1'"):
            client.clone("dc2/own", "dc1/wrong")
        assert "dc1/wrong" not in client.shards()


def test_a_home_makes_no_shard_of_another_region_where_it_has_no_index(tmp_path: Path) -> None:
    """It knows its own region, and so by the name whether a shard is its own."""
    server = Server(tmp_path / "home", "--region", "eu")
    try:
        with persist.connect(server.url) as client:
            client.create_shard("eu/own", SCHEMA, ["id"])
            client.create_shard("plain", SCHEMA, ["id"])
            with pytest.raises(ReadOnly, match="'us/x' belongs to region 'us': create it there"):
                client.create_shard("us/x", SCHEMA, ["id"])
            with pytest.raises(ReadOnly, match="'us/x' belongs to region 'us'"):
                client.clone("eu/own", "us/x")
            assert client.shards() == ["eu/own", "plain"]
        request = urllib.request.Request(f"{server.url}/v1/shards/us/x", data=b"{}", method="PUT")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        assert (refused.value.code, json.load(refused.value)["kind"]) == (403, "read_only")
    finally:
        server.stop()


def test_every_verb_that_writes_goes_home() -> None:
    """Those that a copy refuses, by their tests, and those whose names differ."""
    others = {"create", "create again", "clone", "insert large", "attributes", "drop by force"}
    assert {verb for verb in WRITES if verb not in others} <= set(AT_HOME)


def test_an_index_that_turns_bad_is_told_and_the_last_one_stays(path: Path) -> None:
    file = IndexFile(str(path))
    path.write_text(path.read_text().replace("eu:1", "eu:2"))
    assert file.now().regions["eu"].write == ("http://eu:1",)
    assert "checksum" in file.failed
    write_index(path, RegionIndex({"us": RegionEntry(("http://us:1",), ())}))
    assert list(file.now().regions) == ["us"]
    assert file.failed == ""


def test_an_index_that_was_away_for_a_moment_counts_again(tmp_path: Path, path: Path) -> None:
    """It comes back as it was, with the stamps that it had."""
    file = IndexFile(str(path))
    file.fetch()
    path.rename(tmp_path / "away")
    with pytest.raises(Unavailable, match="No such file"):
        file.fetch()
    (tmp_path / "away").rename(path)
    assert list(file.fetch().regions) == ["eu"]
    assert file.failed == ""


def test_an_index_of_the_same_size_and_second_is_another_one(tmp_path: Path) -> None:
    path = tmp_path / "regions.json"
    write_index(path, RegionIndex({"eu": RegionEntry(("http://eu:1",), (), epoch=1)}))
    file = IndexFile(str(path))
    file.fetch()
    stat = path.stat()
    write_index(path, RegionIndex({"eu": RegionEntry(("http://eu:1",), (), epoch=2)}))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.fetch().regions["eu"].epoch == 2


def test_an_index_that_its_server_cannot_read_now_tells_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """That server goes on with its last good one. A home that counts on it does not know who is home now."""
    answer = {"index": index_json(RegionIndex({"eu": RegionEntry(("http://eu:1",))})), "index_failed": "it is gone"}
    monkeypatch.setattr(RegionServer, "ask", lambda self, timeout_s: answer)
    index = IndexUrl("http://us:1", None, TestClock())
    with pytest.raises(Unavailable, match="has only an older index of regions: it is gone"):
        index.fetch()
    assert list(index.now().regions) == ["eu"]
    assert index.failed
    answer["index_failed"] = None  # type: ignore[assignment]
    index.fetch()
    assert not index.failed


@pytest.mark.parametrize("status", [301, 302, 307])
def test_a_redirect_does_not_get_the_token(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """urllib sends the Authorization header along to whatever host a redirect names."""
    with (
        closing(Answers(200, b'{"region": "us", "index": {}}')) as elsewhere,
        closing(Answers(status, b"", location=f"{elsewhere.url}/v1/regions")) as server,
    ):
        monkeypatch.setenv("http_proxy", elsewhere.url)  # nor does a proxy that other programs use
        index = IndexUrl(server.url, "pt_secret", TestClock())
        with pytest.raises(Unavailable, match="redirects elsewhere"):
            index.fetch()
        with pytest.raises(Unavailable, match="redirects elsewhere"):
            RegionServer(server.url, "pt_secret").ask()
        assert not probe_server(server.url).is_silent, "who redirects is there"
        assert server.tokens == ["Bearer pt_secret", "Bearer pt_secret", None]
        assert elsewhere.tokens == []


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o646])
def test_an_index_that_others_may_write_is_refused(mode: int, path: Path) -> None:
    """Who writes it tells clients where to send their tokens."""
    file = IndexFile(str(path))
    path.write_text(encode_index(RegionIndex({"eu": RegionEntry(("http://evil:1",), ())})).decode())
    path.chmod(mode)
    for read in (read_index, IndexFile, lambda path: region_index.change_index(path, lambda one: one)):
        with pytest.raises(InvalidUsage, match=f"has the mode {mode:04o}"):
            read(str(path))
    assert file.now().regions["eu"].write == ("http://eu:1",)
    assert "has the mode" in file.failed
    path.chmod(0o644)
    assert file.now().regions["eu"].write == ("http://evil:1",)


def test_an_index_is_written_so_that_others_may_not_write_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_index(tmp_path / "regions.json", RegionIndex({"eu": RegionEntry(("http://eu:1",), ())}))
    finally:
        os.umask(before)
    assert list(read_index(tmp_path / "regions.json").regions) == ["eu"]


def told(regions: dict[str, Any]) -> bytes:
    """An index with the right checksum, whatever it says."""
    body = json.dumps(regions, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({"persist": "regions", "version": 1, "regions": regions, "crc32": zlib.crc32(body)}).encode()


NO_URLS = [
    "eu:8787", "ftp://eu", "http://", "http://eu:1/path", "http://eu?x", "http://eu#x", "http://eu:abc", "http://eu:0",
    "http://eu:99999999", "http://[::1", "http://a b:1", "http://a\nb:1", "http://\x01x:1", "http://a\\b:1",
    "http://:8787",
]  # fmt: skip


@pytest.mark.parametrize("url", NO_URLS, ids=repr)
def test_an_address_that_no_client_could_ask_is_refused_where_it_is_given(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = str(tmp_path / "regions.json")
    for option in ("--write", "--read"):
        assert main(["region", "set", "eu", option, url, "--index", index]) == 1
        said = capsys.readouterr().err
        assert "is not a URL of a server: http(s)://host:port" in said
        assert len(said.splitlines()) == 1
    assert os.listdir(tmp_path) == []


def test_an_address_with_a_password_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = str(tmp_path / "regions.json")
    assert main(["region", "set", "eu", "--write", "http://user:hush@eu:1", "--index", index]) == 1
    said = capsys.readouterr().err
    assert "takes no user and password; give a token" in said
    assert "hush" not in said


@pytest.mark.parametrize("url", ["http://eu", "https://eu:8787/", "http://[::1]:8787", "http://127.0.0.1:1"])
def test_an_address_that_a_client_can_ask_is_taken(url: str) -> None:
    RegionEntry((url,)).check()


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"x", InvalidUsage),
        (b"[]", InvalidUsage),
        (b'{"persist": "other"}', InvalidUsage),
        (b'{"persist": "regions"}', UpgradeNeeded),
        (b'{"persist": "regions", "version": 2}', UpgradeNeeded),
        (b'{"persist": "regions", "version": 1, "regions": {}, "crc32": 7}', Corruption),
        (b'{"persist": "regions", "version": 1, "regions": [], "crc32": 7}', Corruption),
        (encode_index(RegionIndex({"eu": RegionEntry(("http://eu:1",))})).replace(b"eu:1", b"eu:2"), Corruption),
        (b"[" * 100_000, InvalidUsage),
        (b"", InvalidUsage),
        (b"\xff\xfe", InvalidUsage),
        (b'{"persist": "regions", "version": 1e400}', UpgradeNeeded),
        (told({"eu": {"write": [5], "read": []}}), InvalidUsage),
        (told({"eu": {"write": ["http://eu:abc"], "read": []}}), InvalidUsage),
        (told({"eu": {"write": ["http://eu:1"], "read": [], "home_blob": 5}}), InvalidUsage),
        (told({"eu": {"write": 5, "read": []}}), Corruption),
        (told({"eu": [5]}), Corruption),
        (told({"eu": {"read": []}}), Corruption),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_a_file_that_is_none_is_refused(data: bytes, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        decode_index(data, "the file")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["set", "eu"], "give --write or --read"),
        (["set", "us", "--home-blob", "s3://us"], "give --write or --read"),
        (["set", "eu", "--write", ""], "would have no server"),
        (["set", "eu", "--epoch", "-1"], "epoch is -1"),
    ],
)
def test_what_is_wrong_with_the_command_is_a_sentence(
    arguments: list[str], said: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = path.read_bytes()
    assert main(["region", *arguments, "--index", str(path)]) == 1
    assert said in capsys.readouterr().err
    assert path.read_bytes() == before


def test_what_is_not_given_of_a_region_stays_and_an_empty_value_takes_it_away(tmp_path: Path) -> None:
    path = str(tmp_path / "regions.json")

    def entry_after(*arguments: str) -> RegionEntry:
        assert main(["region", "set", "eu", *arguments, "--index", path]) == 0
        return read_index(path).regions["eu"]

    blobs = ["--home-blob", "s3://eu", "--copy-blob", "s3://us-eu"]
    entry_after("--write", "http://eu:1", "--read", "http://us:1", *blobs, "--epoch", "3")
    expected = RegionEntry(("http://eu:1",), ("http://us:2",), "s3://eu", "s3://us-eu", 3)
    assert entry_after("--read", "http://us:2") == expected
    assert entry_after("--epoch", "4") == replace(expected, epoch=4)
    assert entry_after("--epoch", "0") == replace(expected, epoch=4), "a fence is not taken away by the way"
    assert entry_after("--home-blob", "", "--write", "") == replace(expected, epoch=4, home_blob="", write=())
    assert entry_after("--write", "http://eu:9").write == ("http://eu:9",)


def test_an_index_is_not_set_ahead_of_the_home_that_it_names(centres: TwoCentres, tmp_path: Path) -> None:
    """It would only read, by its own index, and nobody else is home."""
    index = tmp_path / "regions.json"
    ahead = ["set", "dc1", "--write", f"http://127.0.0.1:9,{centres.dc1.url}", "--epoch", "2", "--index", str(index)]
    assert main(["region", *ahead]) == 1
    assert not index.exists()
    write_index(index, RegionIndex({"dc1": RegionEntry(("http://127.0.0.1:9",), (), epoch=2)}))
    before = index.read_bytes()
    back = ["set", "dc1", "--write", centres.dc1.url, "--index", str(index)]
    assert main(["region", *back]) == 1, "the index has another home's epoch, which would be kept"
    assert index.read_bytes() == before
    assert main(["region", "remove", "dc1", "--index", str(index)]) == 0
    assert main(["region", *back, "--epoch", "1"]) == 0
    assert read_index(index).regions["dc1"].epoch == 1


def test_the_command(centres: TwoCentres, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = str(tmp_path / "regions.json")
    assert main(["region", "set", "dc1", "--write", centres.dc1.url, "--read", centres.copy.url, "--index", index]) == 0
    assert main(["region", "set", "dc2", "--write", centres.dc2.url, "--index", index]) == 0
    capsys.readouterr()
    assert main(["region", "check", "--index", index]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["region"], line["role"], line["wrong"]) for line in lines] == [
        ("dc1", "home", None), ("dc1", "copy", None), ("dc2", "home", None),
    ]  # fmt: skip
    wrong = ["--write", centres.copy.url, "--read", "http://127.0.0.1:9"]
    assert main(["region", "set", "dc2", *wrong, "--index", index]) == 0
    capsys.readouterr()
    assert main(["region", "check", "--index", index]) == 1
    told = [json.loads(line)["wrong"] for line in capsys.readouterr().out.splitlines()]
    assert told[:2] == [None, None]
    assert "read-only" in told[2]
    assert "does not answer" in told[3]
    assert main(["region", "remove", "dc2", "--index", index]) == 0
    capsys.readouterr()
    assert main(["region", "list", "--index", index]) == 0
    assert [json.loads(line)["region"] for line in capsys.readouterr().out.splitlines()] == ["dc1"]


# --- the file, which several change


def test_commands_at_once_change_one_index_and_none_is_lost(tmp_path: Path) -> None:
    """Each reads the file, changes its region, and writes the whole. One that came between was lost."""
    path, names = tmp_path / "regions.json", [f"r{number}" for number in range(8)]
    write_index(path, RegionIndex({"eu": RegionEntry(("http://eu:1",)), "gone": RegionEntry(("http://gone:1",))}))
    begins = threading.Barrier(len(names) + 2)

    def change(*arguments: str) -> int:
        begins.wait()
        return main(["region", *arguments, "--index", str(path)])

    def promoted() -> int:
        begins.wait()
        return record_new_home(str(path), "eu", ("http://us:1",), 7).epoch

    with ThreadPoolExecutor(len(names) + 2) as pool:
        set_them = [pool.submit(change, "set", name, "--write", f"http://{name}:1") for name in names]
        removed, moved = pool.submit(change, "remove", "gone"), pool.submit(promoted)
    assert [one.result() for one in (*set_them, removed, moved)] == [*(0 for _ in names), 0, 7]
    assert sorted(read_index(path).regions) == ["eu", *names]
    assert read_index(path).regions["eu"] == RegionEntry(("http://us:1",), epoch=7)


def test_a_change_waits_for_another_one_for_so_long_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "regions.json"
    assert main(["region", "set", "eu", "--write", "http://eu:1", "--index", str(path)]) == 0
    before = path.read_bytes()
    monkeypatch.setattr(private_files, "LOCK_S", 0.1)
    with open(f"{path}.lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["region", "set", "us", "--write", "http://us:1", "--index", str(path)]) == 1
    assert "another command has locked the index" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert main(["region", "set", "us", "--write", "http://us:1", "--index", str(path)]) == 0


def test_a_change_that_fails_leaves_nothing_beside_the_index(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = path.read_bytes()
    for arguments in (["set", "EU", "--write", "http://a:1"], ["set", "us", "--write", "a:1"], ["remove", "us"]):
        assert main(["region", *arguments, "--index", str(path)]) == 1
    assert os.listdir(tmp_path) == ["regions.json"]

    def full(*paths: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert main(["region", "set", "us", "--write", "http://us:1", "--index", str(path)]) == 1
    assert capsys.readouterr().err.endswith("cannot be written: No space left on device\n")
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["regions.json", "regions.json.lock"]
