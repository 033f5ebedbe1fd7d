"""Scopes: every request and every command with a token of each scope, as docs/settings.md says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

import persist
from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist import Antichain, AttributeUpdate, NotReadable
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.frontier import EMPTY
from persist.core.results import snake
from persist.core.state import State
from persist.formats.http_messages import decode_result
from persist.formats.records import encoded
from rpc.app import create_app
from rpc.settings import ServerSettings
from tests.support.each_command import CRITICAL, FAR, KEY, OTHER, READER, TOKEN, WRITER, each_command
from tests.support.location import InlineBackground
from tests.support.scopes_page import BY_COMMAND, OPEN, REWRITES, SCOPES_OF_ROUTES, UPPER, name_of, section
from tests.support.shard import first_write
from tests.support.token_file import bearer, write_tokens

SHARD = "eu/orders"
FIELDS = {"fields": [{"name": "id", "type": "string", "key": True}]}
_ITEM = re.compile(r"^- \*\*([a-z, ]+)\*\*: ((?:.|\n  )+)", re.MULTILINE)


def said() -> dict[str, dict[str, bool]]:
    """Of each request and command of the page: by which scopes it is opened."""
    found: dict[str, dict[str, bool]] = {}
    for scopes, names in _ITEM.findall(section()):
        allowed = c.SCOPES if scopes == "any scope" else scopes.split(", ")
        for name in re.findall(r"`([^`]+)`", re.sub(r"\s+", " ", names)):
            found[name.replace("…", "/v1/shards/{name}")] = {scope: scope in allowed for scope in c.SCOPES}
    return found


SAID = said()


class Doors:
    """An app, and a token of each scope on all shards and on those of `us/`."""

    def __init__(self, directory: Path) -> None:
        file = directory / "tokens.json"
        self.tokens = write_tokens(
            file, {scope: (scope,) for scope in c.SCOPES} | {f"{s}-us": (s, "us/") for s in c.SCOPES}
        )
        self.location = Location(MemoryBlob(), MemoryConsensus(), background=InlineBackground())
        self.app: FastAPI = create_app(self.location, ServerSettings(tokens_file=str(file)))
        self.http = TestClient(self.app)

    def __enter__(self) -> Self:
        self.http.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self.http.__exit__()
        self.location.close()

    def call(self, scope: str, method: str, path: str, **more: Any) -> Any:
        headers = {**bearer(self.tokens[scope]), **more.pop("headers", {})}
        return self.http.request(method, path, headers=headers, **more)

    def knock(self, token: str | None, door: str) -> tuple[int, str]:
        """Ask without parameters and without a body, so that who is let in is told what is missing."""
        method, _, path = door.partition(" ")
        shown = path.replace("{name}", SHARD).replace("{what}", "state").replace("{key}", "a").replace("{tag}", "eom")
        if shown.endswith("/listen"):
            shown += "?until=0"  # it ends at once
        headers = {} if token is None else bearer(self.tokens[token])
        answer = self.http.request(method, shown.replace("{erasure}", "e1"), headers=headers)
        is_json = answer.headers.get("content-type", "").endswith("problem+json") and method != "HEAD"
        return answer.status_code, answer.json()["kind"] if is_json else ""


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    with Doors(tmp_path_factory.mktemp("scopes")) as found:
        yield found


def create(doors: Doors) -> None:
    """A shard for each question: one of the doors drops it."""
    answer = doors.call("admin", "PUT", f"/v1/shards/{SHARD}", json=FIELDS)
    assert answer.status_code == 200, answer.text


def test_the_page_has_every_request_and_every_command() -> None:
    kinds = {snake(kind.__name__) for kind in c.kinds(c.Command) if kind is not c.Rewrite}
    assert set(SAID) == {*SCOPES_OF_ROUTES, *kinds, *REWRITES} - {BY_COMMAND}


def test_every_route_is_in_the_table(doors: Doors) -> None:
    """One that is not would be open to nobody."""
    paths = doors.app.openapi()["paths"]
    found = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert found | {"GET /openapi.json"} == {*SCOPES_OF_ROUTES, *OPEN}


@pytest.mark.parametrize("door", [door for door in SAID if "/" in door])
def test_a_request_is_open_to_the_scopes_that_the_page_says(doors: Doors, door: str) -> None:
    for scope in c.SCOPES:
        create(doors)
        status, kind = doors.knock(scope, door)
        assert (status not in (401, 403)) if SAID[door][scope] else ((status, kind) == (403, "forbidden")), scope


@pytest.mark.parametrize("door", [door for door in (*SAID, BY_COMMAND) if "/shards/{name}" in door])
def test_a_request_for_a_shard_beyond_the_prefixes_is_open_to_no_scope(doors: Doors, door: str) -> None:
    create(doors)
    for scope in ("read", "admin"):
        assert doors.knock(f"{scope}-us", door) == (403, "forbidden"), scope
    assert doors.knock(None, door)[0] == 401


@pytest.mark.parametrize("scope", c.SCOPES)
def test_a_command_is_open_to_the_scopes_that_the_page_says(tmp_path: Path, scope: str) -> None:
    with Place(tmp_path) as place:
        for command in commands(place):
            answer = place.call(scope, "POST", f"/v1/shards/{NAME}/commands", content=encoded(command))
            refused = answer.status_code == 403 and answer.json()["kind"] == "forbidden"
            assert refused != SAID[name_of(command)][scope], (command, answer.text)


# --- who may only read changes nothing for anybody: every command and every route, with a token of the scope `read`


NAME = "orders"
SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
EVENTS = {"accept": "text/event-stream"}


class Place(Doors):
    """A shard with ten times."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        shard = persist.Client(self.app.state.service.transport).create_shard(NAME, SCHEMA, ["id"])
        for number in range(UPPER):
            shard.insert([{"id": number, "v": "x"}])
        shard.attributes.update(AttributeUpdate.replace(KEY, 7))

    @property
    def state(self) -> State:
        return self.location.machine(NAME).refresh()

    def told(self) -> tuple[Any, ...]:
        """All that others notice of a shard."""
        state = self.state
        held = state.critical_readers, state.tombstone
        return state.since, state.upper, dict(state.attributes), dict(state.schemas), state.trace.batches, held

    def send(self, scope: str, command: c.Command) -> Any:
        return self.call(scope, "POST", f"/v1/shards/{NAME}/commands", content=encoded(command))

    def sent(self, scope: str, command: c.Command) -> c.Result:
        answer = self.send(scope, command)
        assert answer.status_code == 200, answer.text
        return decode_result(answer.content)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path) as found:
        yield found


def commands(place: Place) -> list[c.Command]:
    return each_command(place.state)


def may(scope: str, command: c.Command) -> bool:
    return all(not c.INCLUDED[scope].isdisjoint(scopes) for scopes in c.scopes_of(command))


def test_no_command_changes_anything_for_others(place: Place) -> None:
    """A token for reading could make a shard forget its history, and close it to reads for ever."""
    tried = commands(place)
    assert {type(command) for command in tried} == set(c.kinds(c.Command)), "every command is in the table"
    before = place.told()
    for command in tried:
        answer = place.send("read", command)
        assert (answer.status_code == 403) == (not may("read", command)), (command, answer.text)
        assert place.told() == before, command
    place.sent("read", c.ExpireReader(READER))
    assert place.told() == before


def test_who_may_write_moves_no_since_and_no_cursor_changes_no_schema_and_closes_nothing(place: Place) -> None:
    def told() -> tuple[Any, ...]:
        state = place.state
        return state.since, state.critical_readers, state.tags, state.settings, dict(state.schemas), state.is_closed

    before = told()
    closing = [
        c.CompareAndAppend(WRITER, TOKEN, Antichain(UPPER), EMPTY, ()),
        c.Append(WRITER, TOKEN, Antichain(UPPER), EMPTY, ()),
    ]
    for command in [*commands(place), *closing]:
        answer = place.send("write", command)
        is_refused = command in closing or not may("write", command)
        assert (answer.status_code == 403) == is_refused, (command, answer.text)
        assert told() == before, command
    for path in (f"append?lower={UPPER}&upper=[]", f"compare-and-append?expected_upper={UPPER}&new_upper=[]"):
        answer = place.call("write", "POST", f"/v1/shards/{NAME}/{path}&format=csv", content=b"id,v\n")
        assert (answer.status_code, answer.json()["kind"]) == (403, "forbidden")
    assert not place.state.upper.is_empty


QUERIES: list[dict[str, Any]] = [
    {}, {"upper": 50}, {"since": 9}, {"since": 9, "cursor": "mine", "force": True}, {"force": True}, {"start": 0},
    {"as_of": 0},
]  # fmt: skip


def test_no_route_changes_anything_for_others(place: Place) -> None:
    before = place.told()
    tried = 0
    for path, verbs in place.app.openapi()["paths"].items():
        for verb in verbs:
            full = path.replace("{name}", NAME).replace("{key}", "a").replace("{tag}", "eom").replace("{erasure}", "e1")
            if full.endswith("/listen"):
                continue  # it never ends; below
            taken = {parameter["name"] for parameter in verbs[verb].get("parameters", ())}
            for query in QUERIES:
                if query.keys() <= taken:  # others are refused as unknown
                    place.call("read", verb.upper(), full, params=query, content=b"")
                    tried += 1
            assert place.told() == before, (verb, path)
    assert tried > 50


def test_a_listener_that_may_only_read_moves_nothing(place: Place) -> None:
    before = place.told()
    answer = place.call("read", "GET", f"/v1/shards/{NAME}/listen?until=9", headers=EVENTS)
    assert "data:" in answer.text
    assert place.told() == before


@pytest.mark.parametrize("scope", ["read", "write", "maintain"])
def test_only_a_reader_that_may_manage_moves_since(place: Place, scope: str) -> None:
    place.sent(scope, c.RegisterReader(READER, Antichain(0), 60_000))
    told = place.sent(scope, c.DowngradeSince(READER, Antichain(9), FAR))
    assert told == c.SinceDowngraded(Antichain(9), Antichain(0))
    assert place.state.since == Antichain(0)
    told = place.sent("manage", c.DowngradeSince(READER, Antichain(9), FAR))
    assert told == c.SinceDowngraded(Antichain(9), Antichain(9))
    assert place.state.since == Antichain(9)


# --- who may move frontiers (`manage`) drops no shard, and takes from others no more history than it has itself rea


OTHER_COLUMNS = {"fields": [{"name": "z", "type": "int64", "key": True}]}
BEYOND = 1_700_000_000_000  # the time of day in milliseconds, where times are numbers of inserts
ROWS = b'{"id": 1}\n'
NDJSON = {"content-type": "application/x-ndjson"}

CLOSE_WRITES: list[str | c.Command] = [
    "advance-upper?upper=[]",
    f"append?lower={UPPER}&upper=[]",
    f"compare-and-append?expected_upper={UPPER}&new_upper=[]",
    c.AdvanceUpper(EMPTY),
    c.CompareAndAppend(WRITER, TOKEN, Antichain(UPPER), EMPTY, ()),
    c.Append(WRITER, TOKEN, Antichain(UPPER), EMPTY, ()),
]
CLOSE_READS: list[str | c.Command] = [
    "downgrade-since?since=[]",
    "downgrade-since?since=[]&force=true",
    c.CompareAndDowngradeSince(CRITICAL, "", "", EMPTY),
    c.CompareAndDowngradeSince(CRITICAL, "", "", EMPTY, force=True),
    c.DowngradeSince(READER, EMPTY, FAR),
]


def knock(place: Place, door: str | c.Command) -> int:
    if isinstance(door, c.Command):
        return int(place.send("manage", door).status_code)
    content = b"" if door.startswith(("advance", "downgrade")) else ROWS
    return int(place.call("manage", "POST", f"/v1/shards/{NAME}/{door}", content=content, headers=NDJSON).status_code)


def register(place: Place) -> None:
    place.sent("manage", first_write(WRITER))
    place.sent("manage", c.RegisterReader(READER, None, 60_000))
    place.sent("manage", c.RegisterCriticalReader(CRITICAL, "", "cursor"))


@pytest.mark.parametrize(("first", "second"), [(CLOSE_WRITES, CLOSE_READS), (CLOSE_READS, CLOSE_WRITES)])
def test_the_scope_manage_drops_no_shard(
    place: Place, first: list[str | c.Command], second: list[str | c.Command]
) -> None:
    """Both frontiers were closed one after the other. Then the name could be used anew, with other columns."""
    register(place)
    shard_id = place.state.shard_id
    told = {knock(place, door) for door in first}
    assert 200 in told
    for door in second:
        assert knock(place, door) == (200 if isinstance(door, c.DowngradeSince) else 400), door
    place.sent("manage", c.ExpireReader(READER))
    assert not place.state.is_closed
    assert place.call("manage", "PUT", f"/v1/shards/{NAME}", json=OTHER_COLUMNS).status_code == 422
    assert place.state.shard_id == shard_id
    assert place.call("manage", "DELETE", f"/v1/shards/{NAME}").status_code == 403


def test_a_listener_that_reaches_the_end_of_a_closed_shard_does_not_drop_it(place: Place) -> None:
    knock(place, "advance-upper?upper=[]")
    answer = place.call("manage", "GET", f"/v1/shards/{NAME}/listen", headers=EVENTS)
    assert "id: closed" in answer.text
    assert not place.state.is_closed
    assert place.call("read", "GET", f"/v1/shards/{NAME}/snapshot?format=ndjson").status_code == 200


@pytest.mark.parametrize("scope", ["read", "write", "manage"])
def test_no_leased_reader_closes_a_shard_to_reads(place: Place, scope: str) -> None:
    """One command of the scope `write` did, where nobody else held anything: for everybody, for ever."""
    place.sent(scope, c.RegisterReader(READER, None, 60_000))
    place.sent(scope, c.RegisterReader(OTHER, EMPTY, 60_000))
    for reader in (READER, OTHER, READER):
        for moves_since in (False, True):
            told = place.sent(scope, c.DowngradeSince(reader, EMPTY, FAR, moves_since))
            assert told == c.SinceDowngraded(EMPTY, Antichain(0))
    assert place.call("read", "GET", f"/v1/shards/{NAME}/snapshot?format=ndjson").status_code == 200


def test_a_snapshot_beyond_a_forced_since_says_so_at_once(place: Place) -> None:
    """It waited for a minute, then it said: wait longer."""
    knock(place, f"downgrade-since?since={BEYOND}&force=true")
    shard = persist.Client(place.app.state.service.transport).shard(NAME)
    with pytest.raises(NotReadable, match=f"since .{BEYOND}., beyond its upper .10.: nothing can be read until"):
        shard.snapshot(wait_s=600)
    answer = place.call("read", "GET", f"/v1/shards/{NAME}/snapshot?wait=60")
    assert (answer.status_code, answer.json()["kind"]) == (410, "not_readable")
