"""The commit history of a shard: each commit that changed it is told once, in order, for as long as history is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from starlette.datastructures import Headers
from starlette.testclient import TestClient

import persist
from blob import BlobUnavailable
from blob.memory_blobs import MemoryBlob
from blob.metrics import ForwardingBlob
from persist.client.commit_info import HistoryEntry
from persist.client.shard import Shard
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.attribute import AttributeUpdate, named_key
from persist.core.audit_log import INFO_BYTES_MAX
from persist.core.errors import Corruption, InvalidUsage, Overloaded, PersistError, UnknownShard
from persist.core.frontier import Antichain
from persist.core.spill import ENTRIES
from persist.core.state import Policy, State
from persist.maintenance.collector import Collector
from persist.maintenance.expiry import forget_outlived
from rpc.app import create_app
from rpc.auth import ANONYMOUS
from rpc.cli.program import main
from rpc.listen_frames import read_caller as headers_said
from rpc.settings import ServerSettings
from tests.support.clocks import DAY_MS, HOUR_MS, START_MS, Machine, World
from tests.support.server import Server
from tests.support.token_file import bearer, write_tokens

NAME = "orders"
SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("v", pa.string())])
SMALL = Policy(overlay_flush_at=8, rollup_every=4, inline_batches=16)  # 4 commits, or 2 in the place of a rollup


@pytest.fixture
def world() -> World:
    return World(policy=SMALL)


@pytest.fixture
def shard(machine: Machine) -> Shard:
    return created(machine)


def created(machine: Machine, history: str = "7d") -> Shard:
    return machine.client.create_shard(NAME, SCHEMA, ["id"], history=history)


def row(number: int, diff: int = 1) -> dict[str, Any]:
    return {"id": number, "v": "x", "__diff": diff}


def insert(shard: Shard, *numbers: int) -> None:
    for number in numbers:
        shard.insert([row(number)], info={"n": number})


def said(shard: Shard) -> list[int]:
    """What the inserts said, newest first."""
    return [entry.info["n"] for entry in everything(shard) if entry.info]


def everything(shard: Shard, maintenance: bool = False, limit: int = 3) -> list[HistoryEntry]:
    """All entries, in small pages."""
    found: list[HistoryEntry] = []
    while page := shard.history(limit, maintenance=maintenance, before=found[-1] if found else None):
        found += page
    return found


def operations(shard: Shard) -> list[str]:
    return [entry.operation for entry in everything(shard)]


def state_of(machine: Machine) -> State:
    return machine.location.machine(NAME).refresh()


def collect(machine: Machine) -> int:
    """Run epochs until nothing is left; how many log entries went."""
    collector, cut = Collector(machine.location), 0
    while not (report := collector.run(NAME)).done:
        cut += report.truncated
    return cut


# --- what an entry holds


def test_an_entry_tells_when_what_who_and_why(world: World, machine: Machine, shard: Shard) -> None:
    world.pass_ms(5_000)
    with closing(shard.open_writer(purpose="nightly load")) as writer:
        writer.insert([row(1), row(2), row(3, -1)], info={"ticket": 4711})
    entry, first = shard.history()
    assert (entry.operation, entry.lower, entry.upper) == ("insert", 0, 1)
    assert (entry.rows, entry.retractions) == (3, 1)
    assert entry.size == machine.location.machine(NAME).state().byte_count
    assert entry.timestamp == datetime.fromtimestamp(START_MS / 1000 + 5, UTC)
    assert (entry.purpose, entry.who, entry.info) == ("nightly load", None, {"ticket": 4711})
    assert (first.operation, first.seqno, first.lower, first.upper) == ("create", 1, 0, 0)


def test_each_kind_of_change_has_its_operation(shard: Shard) -> None:
    shard.insert([row(1)])
    shard.compare_and_append([row(2)], 1, 3)
    shard.append([row(3)], 3, 5)
    shard.advance_upper(7)
    shard.attributes.update(AttributeUpdate.replace(named_key("a"), 1))
    shard.evolve_schema(SCHEMA.append(pa.field("more", pa.int64())))
    shard.set_constraints(checks={"some": "id > 0"})
    shard.rename_column("more", "much")
    shard.set_constraints(checks={})
    shard.configure(history="30d")
    shard.forget(4)
    shard.insert([row(4)])
    shard.restore(4)
    told = [(entry.operation, entry.lower, entry.upper) for entry in reversed(everything(shard))]
    assert told == [
        ("create", 0, 0),
        ("insert", 0, 1),
        ("compare_and_append", 1, 3),
        ("append", 3, 5),
        ("advance_upper", 5, 7),
        ("update_attributes", 7, 7),
        ("evolve_schema", 7, 7),
        ("set_constraints", 7, 7),
        ("evolve_schema", 7, 7),
        ("set_constraints", 7, 7),
        ("set_settings", 7, 7),
        ("forget", 0, 4),
        ("insert", 7, 8),
        ("restore", 8, 9),
    ]
    assert shard.history(1)[0].purpose == "restore to 4"


def test_of_an_append_only_what_was_not_there_is_told(shard: Shard) -> None:
    shard.append([{**row(n), "__time": n} for n in range(4)], 0, 4)
    shard.append([{**row(n), "__time": n} for n in range(4)], 0, 4)
    shard.append([{**row(n), "__time": n} for n in range(6)], 0, 6)
    told = [(entry.lower, entry.upper, entry.rows) for entry in shard.history() if entry.operation == "append"]
    assert told == [(4, 6, 2), (0, 4, 4)]


def test_what_changes_nothing_leaves_no_entry(shard: Shard) -> None:
    shard.insert([])
    shard.compare_and_append([], 0, 0)
    shard.advance_upper(0)
    with closing(shard.open_reader()):
        pass
    with shard.snapshot(0, wait_s=0) if shard.upper().element else suppress(PersistError):
        pass
    assert operations(shard) == ["create"]


def test_merges_and_collections_are_told_on_demand_only(machine: Machine, shard: Shard) -> None:
    insert(shard, *range(40))
    collect(machine)
    assert "collect" in {entry.operation for entry in everything(shard, maintenance=True)}
    assert set(operations(shard)) == {"create", "insert"}
    merges = [entry for entry in everything(shard, maintenance=True) if entry.operation == "merge"]
    assert merges
    assert all(entry.rows > 1 and entry.upper > entry.lower for entry in merges)


# --- once, in order


def test_pages_of_any_size_tell_the_same(machine: Machine, shard: Shard) -> None:
    insert(shard, *range(50))
    assert state_of(machine).files_of(ENTRIES)
    whole = shard.history(1_000)
    for limit in (1, 2, 7, 50):
        assert everything(shard, limit=limit) == whole
    assert said(shard) == list(range(49, -1, -1))


# --- it outlives the log


def test_files_stay_few_and_what_they_replace_is_collected(world: World, machine: Machine, shard: Shard) -> None:
    insert(shard, *range(200))
    collect(machine)
    insert(shard, 200)
    collect(machine)
    files = state_of(machine).files_of(ENTRIES)
    assert len(files) < 6
    there = {stat.key for stat in world.blob.list("") if stat.key.endswith(".spill")}
    assert {file.key for file in files} <= there
    assert len(there) <= len(files) + 3, "what was merged is deleted"
    assert said(shard) == list(range(200, -1, -1))


def test_it_is_kept_for_the_age_of_the_history(world: World, machine: Machine) -> None:
    shard = created(machine, "1d")
    for number in range(48):
        insert(shard, number)
        world.pass_ms(HOUR_MS)
        forget_outlived(machine.location.machine(NAME), machine.clock)
    kept = said(shard)
    assert kept == list(range(47, 47 - len(kept), -1))
    assert 24 <= len(kept) < 36, "a day, and what a file holds more"


def test_without_history_it_is_as_short_as_the_log(world: World, machine: Machine) -> None:
    shard = created(machine, "none")
    insert(shard, 0, 1)
    assert said(shard) == [1, 0]
    insert(shard, *range(2, 40))
    collect(machine)
    state = state_of(machine)
    assert len(state.entries) <= SMALL.overlay_flush_at
    assert not state.files_of(ENTRIES)
    assert said(shard) == [39, 38, 37, 36][: len(said(shard))]
    insert(shard, 40)
    assert said(shard)[0] == 40


def test_a_file_that_no_checked_clock_has_seen_is_kept_from_then_on(world: World, machine: Machine) -> None:
    shard = created(machine, "1d")
    world.store_off_ms = HOUR_MS
    world.pass_ms(2 * DAY_MS)
    unchecked = world.machine()
    insert(unchecked.shard(NAME), *range(9))
    assert not any(file.until_ms for file in state_of(unchecked).files_of(ENTRIES))
    world.store_off_ms = 0
    checked = world.machine()
    checked.shard(NAME).insert([row(1)])
    committer = checked.location.machine(NAME)
    forget_outlived(committer, checked.clock)
    assert all(file.until_ms for file in committer.state().files_of(ENTRIES))
    assert said(shard) == list(range(8, -1, -1))
    world.pass_ms(2 * DAY_MS)
    forget_outlived(committer, checked.clock)
    assert not committer.state().files_of(ENTRIES)


# --- lives, and what goes wrong


def test_a_new_life_of_the_name_begins_anew(world: World, machine: Machine, shard: Shard) -> None:
    insert(shard, *range(20))
    shard.drop()
    with pytest.raises(UnknownShard):
        shard.history()
    again = created(machine)
    assert operations(again) == ["create"]
    insert(again, 7)
    assert said(again) == [7]
    with pytest.raises(UnknownShard):
        shard.history()
    for _ in range(5):
        collect(machine)
    there = {stat.key for stat in world.blob.list("") if stat.key.endswith(".spill")}
    assert there <= {file.key for file in state_of(machine).files_of(ENTRIES)}, "of the life before nothing is left"


def test_a_repair_is_told_and_keeps_what_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with persist.connect(f"persist://{tmp_path / 'data'}") as client:
        shard = client.create_shard(NAME, SCHEMA, ["id"])
        insert(shard, 1)
        shard.insert([{"id": n, "v": "x" * 100 + str(n * 7919 % 10007)} for n in range(20_000)], info={"n": 2})
        [part] = [p for b in client.transport.location.machine(NAME).state().trace.batches for p in b.parts() if p.key]
    damaged = next((tmp_path / "data" / "blob").rglob(part.key.rpartition("/")[2]))
    damaged.unlink()
    assert main(["check", NAME, "--repair", "--dir", str(tmp_path / "data"), "--excise", part.id, "--yes"]) == 0
    capsys.readouterr()
    with persist.connect(f"persist://{tmp_path / 'data'}") as client:
        assert operations(client.shard(NAME)) == ["repair", "insert", "insert", "create"]


class _Failing(ForwardingBlob):
    """Refuses to take entry files."""

    away = False

    def put(self, key: str, data: bytes) -> None:
        if self.away and key.endswith(".spill"):
            raise BlobUnavailable("the disk is full")
        super().put(key, data)


def test_while_its_blobs_cannot_be_written_it_waits_in_the_state_and_then_writers_slow_down() -> None:
    world = World(policy=Policy(overlay_flush_at=4, rollup_every=1_000))
    world.blob = failing = _Failing(MemoryBlob("mem:", now_ms=lambda: world.true_ms))  # type: ignore[assignment]
    machine = world.machine()
    shard = created(machine)
    failing.away = True
    insert(shard, *range(9))
    with pytest.raises(Overloaded, match="wait to be written to a blob"):
        machine.location.machine(NAME).apply(c.AdvanceUpper(Antichain(50)))
    failing.away = False
    machine.location.machine(NAME).apply(c.ForgetLapsed())  # any commit asks for upkeep
    insert(shard, 9)
    assert said(shard) == list(range(9, -1, -1))


def test_a_file_that_is_gone_is_told_and_stops_no_writer(world: World, machine: Machine, shard: Shard) -> None:
    insert(shard, *range(12))
    [gone, *_] = state_of(machine).files_of(ENTRIES)
    world.blob.delete([gone.key])
    with pytest.raises(Corruption, match="lost a blob of its commit history"):
        everything(shard)
    assert len(shard.history(1)) == 1, "what is newer can be read"
    insert(shard, *range(12, 30))
    assert said_until_lost(shard)[0] == 29


def said_until_lost(shard: Shard) -> list[int]:
    found: list[int] = []
    before = None
    with suppress(Corruption):
        while page := shard.history(1, before=before):
            before = page[-1]
            found += [before.info["n"]] if before.info else []
    return found


# --- over HTTP, and by the command line


class Place:
    """A server that asks for tokens."""

    def __init__(self, directory: Path) -> None:
        machine = World().machine()
        self.location: Location = machine.location
        file = directory / "tokens.json"
        self.tokens = write_tokens(file, {f"{scope}r": (scope,) for scope in ("read", "write", "admin")})
        self.http = TestClient(create_app(self.location, ServerSettings(tokens_file=str(file))))

    def call(self, scope: str, method: str, path: str, **more: Any) -> Any:
        headers = {**bearer(self.tokens[f"{scope}r"]), **more.pop("headers", {})}
        return self.http.request(method, path, headers=headers, **more)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path)
    with found.http:
        schema = {"fields": [{"name": "id", "type": "int64", "key": True}, {"name": "v", "type": "string"}]}
        assert found.call("write", "PUT", f"/v1/shards/{NAME}", json=schema).status_code == 200
        yield found
    found.location.close()


INSERT = f"/v1/shards/{NAME}/insert?format=ndjson"
HISTORY = f"/v1/shards/{NAME}/history"


def test_over_http_the_token_says_who(place: Place) -> None:
    told = {"persist-info": '{"ticket": "ü"}'.encode(), "persist-purpose": "nightly%20load"}
    assert place.call("write", "POST", INSERT, content=b'{"id": 1}\n', headers=told).status_code == 200
    assert place.call("admin", "POST", INSERT, content=b'{"id": 2}\n').status_code == 200
    assert place.call("admin", "POST", f"/v1/shards/{NAME}/advance-upper?upper=9").status_code == 200
    page = place.call("read", "GET", f"{HISTORY}?limit=3").json()
    assert [(e["operation"], e["who"], e["purpose"], e["info"]) for e in page["entries"]] == [
        ("advance_upper", "adminr", None, None),
        ("insert", "adminr", None, None),
        ("insert", "writer", "nightly load", {"ticket": "ü"}),
    ]
    rest = place.call("read", "GET", HISTORY, params={"before": page["following"]}).json()
    assert [(e["operation"], e["who"]) for e in rest["entries"]] == [("create", "writer")]
    assert rest["following"] is None
    assert rest["entries"][0].keys() == {
        *("place", "seqno", "timestamp", "operation", "lower", "upper", "rows", "bytes", "retractions"),
        *("purpose", "who", "info", "point"),
    }


def test_tags_by_their_own_routes_say_who(place: Place) -> None:
    """Taking a tag away lets history go, so who did that has to be told."""
    told = {"persist-purpose": "audit"}
    assert place.call("write", "POST", INSERT, content=b'{"id": 1}\n').status_code == 200
    assert place.call("admin", "PUT", f"/v1/shards/{NAME}/tags/eom?at=0", headers=told).status_code == 200
    assert place.call("admin", "DELETE", f"/v1/shards/{NAME}/tags/eom", headers=told).status_code == 200
    entries = place.call("read", "GET", f"{HISTORY}?limit=2").json()["entries"]
    assert [(e["operation"], e["who"], e["purpose"]) for e in entries] == [
        ("untag", "adminr", "audit"),
        ("tag", "adminr", "audit"),
    ]


def test_rich_clients_say_the_same_over_http(tmp_path: Path) -> None:
    with Server(tmp_path / "data") as server, persist.connect(server.url) as client:
        shard = client.create_shard(NAME, SCHEMA, ["id"])
        with closing(shard.open_writer(purpose="nächtlich: 100%")) as writer:
            writer.insert([row(1)], info={"ticket": "ü\n"})
        for number in range(10):
            shard.insert([row(number)])
        assert len(shard.history(5)) == 5
        entry = everything(shard)[-2]
        assert (entry.purpose, entry.who, entry.info) == ("nächtlich: 100%", None, {"ticket": "ü\n"})
        assert client.shard(NAME).history(1, before=entry)[0].operation == "create"


def test_the_command_line_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with persist.connect(f"persist://{tmp_path / 'data'}") as client:
        shard = client.create_shard(NAME, SCHEMA, ["id"])
        insert(shard, 1, 2)
    at = ["history", NAME, "--dir", str(tmp_path / "data")]
    assert main([*at, "--commits", "2"]) == 0
    newest, older, _ = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (newest["info"], older["info"]) == ({"n": 2}, {"n": 1})
    assert main([*at, "--commits", "9", "--before", older["place"], "--maintenance"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-2])["operation"] == "create"
    for wrong in (["--commits", "0"], ["--commits", "3", "--before", "x"], ["--maintenance"]):
        assert main([*at, *wrong]) == 1


# --- bad input


DEEP: dict[str, Any] = {}
for _ in range(40):
    DEEP = {"a": DEEP}


def test_what_history_refuses(shard: Shard) -> None:
    befores = ({"before": before} for before in ("yesterday", 7, "9" * 30 + ".0"))
    for given in ({"limit": 0}, {"limit": True}, {"maintenance": "yes"}, *befores):
        with pytest.raises(InvalidUsage):
            shard.history(**given)  # type: ignore[arg-type]


BAD_INFO: list[Any] = ["text", *({"a": value} for value in (object(), float("nan"), "\ud800", {1: "x", "1": "y"}))]
BAD_INFO += [{"a": "x" * INFO_BYTES_MAX}, DEEP]


def test_info_that_is_refused_writes_nothing(machine: Machine, shard: Shard) -> None:
    before = state_of(machine)
    for info in BAD_INFO:
        for write in (
            lambda info=info: shard.insert([row(1)], info=info),
            lambda info=info: shard.append([row(1)], 0, 1, info=info),
            lambda info=info: shard.compare_and_append([row(1)], 0, 1, info=info),
        ):
            with pytest.raises(InvalidUsage):
                write()
    assert state_of(machine) == before


@pytest.mark.parametrize("purpose", ["x" * 257, 7, "\ud800"])
def test_a_purpose_that_is_refused(shard: Shard, purpose: Any) -> None:
    with pytest.raises(InvalidUsage, match="purpose"):
        shard.open_writer(purpose=purpose)


BAD_REQUESTS = [
    ("GET", f"{HISTORY}?limit=0", {}, 422),
    ("GET", "/v1/shards/unknown/history", {}, 404),
    ("POST", INSERT, {"persist-info": '{"a": 1, "a": 2}'}, 400),
    ("POST", f"/v1/shards/{NAME}/commands", {"persist-info": '{"a": 1, "a": 2}'}, 400),
    ("POST", INSERT, {"persist-purpose": "%ed%a0%80"}, 400),
]


@pytest.mark.parametrize(("method", "path", "headers", "status"), BAD_REQUESTS, ids=str)
def test_requests_that_are_refused_write_nothing(
    place: Place, method: str, path: str, headers: dict[str, Any], status: int
) -> None:
    before = place.location.machine(NAME).refresh()
    more = {"content": b'{"id": 1}\n'} if method == "POST" else {}
    answer = place.call("admin", method, path, headers=headers, **more)
    assert answer.status_code == status, answer.text
    assert answer.json()["kind"] == ("unknown_shard" if status == 404 else "invalid_usage")
    assert place.location.machine(NAME).refresh() == before


def test_headers_that_are_no_text_are_refused() -> None:
    for headers in ([(b"persist-info", b'{"a": "\xff"}')], [(b"persist-info", b"{}"), (b"persist-info", b"{}")]):
        with pytest.raises(InvalidUsage, match="Persist-Info"):
            headers_said(ANONYMOUS, Headers(raw=headers))
