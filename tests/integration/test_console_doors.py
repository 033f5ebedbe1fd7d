"""What the console asks for: its files, the trace of a shard, and the activity of many; who is told what."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from starlette.testclient import TestClient

import rpc.routes.inspection_routes
from blob.memory_blobs import MemoryBlob
from compactor.on_demand import maintain
from consensus.memory_logs import MemoryConsensus
from consensus.metrics import MeteredConsensus
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.location import Location
from persist.core.commands import ADMIN, MANAGE, READ, SCOPES
from persist.core.errors import UnknownShard
from persist.core.state import State
from rpc.app import create_app
from rpc.csrf import SAFE_HEADERS
from rpc.routes.inspection_routes import trace_json
from rpc.routes.server_routes import PATHS, POLICY, console_files
from rpc.routes.shard_routes import BATCHES_ON_THE_LOOP_MAX
from rpc.settings import ServerSettings
from tests.support.location import InlineBackground
from tests.support.served import Served
from tests.support.server import Server
from tests.support.token_file import bearer, write_tokens

SCHEMA = pa.schema([("id", pa.int64())])


@pytest.fixture(scope="module")
def location() -> Iterator[Location]:
    with closing(located([])) as opened:
        yield opened


def located(calls: list[str]) -> Location:
    """A location with a few shards; `calls` gets what the log store is asked."""
    log = MeteredConsensus(MemoryConsensus(), lambda verb, *_: calls.append(verb))
    opened = Location(MemoryBlob(), log, background=InlineBackground())
    client = Client(EmbeddedTransport(opened, maintain))
    for name in ("eu/orders", "eu/other", "us/orders"):
        shard = client.create_shard(name, SCHEMA, ["id"])
        for number in range(3):
            shard.insert([{"id": number}])
    client.shard("eu/orders").critical_reader("billing")
    client.create_shard("us/dropped", SCHEMA, ["id"]).drop()
    return opened


class Place:
    """An app, and a token of each scope on all shards, and one that reads those of `eu/`."""

    def __init__(self, location: Location, directory: Path) -> None:
        file = directory / "tokens.json"
        self.tokens = write_tokens(file, {**{scope: (scope,) for scope in SCOPES}, "eu": (READ, "eu/")})
        self.http = TestClient(create_app(location, ServerSettings(tokens_file=str(file))))

    def get(self, path: str, token: str | None = READ, **headers: str):  # type: ignore[no-untyped-def]
        given = {} if token is None else bearer(self.tokens[token])
        return self.http.get(path, headers={**given, **headers})


@pytest.fixture(scope="module")
def place(location: Location, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    found = Place(location, tmp_path_factory.mktemp("console"))
    with found.http:
        yield found


# --- its files


@pytest.mark.parametrize("path", sorted(PATHS))
def test_a_file_is_open_to_everybody_and_may_run_only_what_is_ours(place: Place, path: str) -> None:
    answer = place.get(path, token=None)
    assert answer.status_code == 200
    assert answer.headers.get_list("content-security-policy") == [POLICY.decode()]
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = place.get(path, token=None, **{"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert place.get(path, token=None, **{"if-none-match": '"another"'}).content == answer.content


def test_the_policy_lets_nothing_in_from_elsewhere_and_nothing_inline() -> None:
    rules = dict(rule.strip().split(" ", 1) for rule in POLICY.decode().split(";"))
    assert rules["default-src"] == "'none'"
    assert {rules[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert "unsafe" not in POLICY.decode()
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"


def test_a_slash_at_the_end_leads_to_the_page_below_whatever_path_a_proxy_serves_it(place: Place) -> None:
    answer = place.http.get("/console/", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "../console")


def test_what_is_no_file_of_it_is_not_there_and_needs_a_token(place: Place) -> None:
    for path in ("/console/nothing.js", "/console/..%2Fapp.py", "/console/README.md"):
        assert place.get(path, token=None).status_code == 401
        answer = place.get(path)
        assert answer.status_code == 404
        assert dict(SAFE_HEADERS)[b"content-security-policy"].decode() == answer.headers["content-security-policy"]


@pytest.mark.parametrize("one", console_files().values(), ids=lambda one: one.name)
def test_no_file_names_another_place_or_makes_html_of_text(one) -> None:  # type: ignore[no-untyped-def]
    text = one.data.decode()
    for place in ("http://www.w3.org/2000/svg", "http://127.0.0.1:8787"):
        text = text.replace(place, "")
    for forbidden in ("http://", "https://", "//cdn", "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write",
                      "eval(", "new Function", " style=", "onclick=", "@import", "url("):  # fmt: skip
        assert forbidden not in text, forbidden


@pytest.mark.parametrize("one", console_files().values(), ids=lambda one: one.name)
def test_a_line_of_a_file_is_no_longer_than_those_of_other_code(one) -> None:  # type: ignore[no-untyped-def]
    assert [line for line in one.data.decode().splitlines() if len(line) > 120] == []


def test_the_map_names_every_file() -> None:
    text = (Path(__file__).resolve().parents[2] / "rpc" / "console" / "README.md").read_text()
    assert [name for name in console_files() if name not in text] == []


# --- the trace


def test_the_trace_of_a_shard_is_told_to_who_may_read_it(place: Place) -> None:
    told = place.get("/v1/shards/eu/orders/trace", "eu").json()
    assert (told["shard"], told["since"], told["upper"], told["rows"]) == ("eu/orders", [0], [3], 3)
    assert sum(one["rows"] for one in told["batches"]) == 3
    assert [one["operation"] for one in told["recent"] if one["rows"]] == ["insert"] * 3
    assert place.get("/v1/shards/us/orders/trace", "eu").status_code == 403


@pytest.mark.parametrize("scope", SCOPES)
def test_names_of_cursors_are_told_to_who_keeps_them(place: Place, scope: str) -> None:
    holds = place.get("/v1/shards/eu/orders/trace", scope).json()["holds"]
    [cursor] = [one for one in holds if one["kind"] == "cursor"]
    assert cursor["names"] == (["billing"] if scope in (MANAGE, ADMIN) else [])


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/v1/shards/nowhere/trace", 404, "unknown_shard"),
        ("/v1/shards/us/dropped/trace", 404, "unknown_shard"),
        ("/v1/shards/no%20name/trace", 400, "invalid_usage"),
        ("/v1/activity?limit=0", 422, "invalid_usage"),
        ("/v1/activity?limit=101", 422, "invalid_usage"),
        ("/v1/activity?nonsense=1", 400, "invalid_usage"),
    ],
)
@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
def test_what_makes_no_sense_is_refused(place: Place, path: str, status: int, kind: str, accept: str) -> None:
    answer = place.get(path, accept=accept)
    assert (answer.status_code, answer.json()["kind"]) == (status, kind)


def test_to_look_at_a_trace_changes_nothing(place: Place, location: Location) -> None:
    before = location.machine("eu/orders").refresh()
    for _ in range(3):
        assert place.get("/v1/shards/eu/orders/trace").status_code == 200
    assert location.machine("eu/orders").refresh().seqno == before.seqno


def test_a_trace_with_many_holds_is_written_beside_the_event_loop(
    place: Place, location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard may have 1,000 cursors and 1,000 tags: all requests would wait for the one that tells of them."""
    threads = []

    def told(state: State, *, with_names: bool) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        return trace_json(state, with_names=with_names)

    monkeypatch.setattr(rpc.routes.inspection_routes, "trace_json", told)
    shard = Client(EmbeddedTransport(location, maintain)).shard("eu/other")
    for number in range(BATCHES_ON_THE_LOOP_MAX):
        shard.tag(f"t{number}", at=0)
    assert place.get("/v1/shards/eu/other/trace").json()["tags"] == BATCHES_ON_THE_LOOP_MAX
    assert [name.startswith("persist-io") for name in threads] == [True]


def test_a_stream_tells_each_move_and_ends_with_an_error_when_the_shard_is_dropped(tmp_path: Path) -> None:
    with Server(tmp_path / "data") as server:
        import persist  # what a user of the server imports

        with persist.connect(server.url) as client:
            shard = client.create_shard("orders", SCHEMA, ["id"])
            shard.insert([{"id": 1}])
            with opened(server, "/v1/shards/orders/trace") as lines:
                assert trace_in(lines)["upper"] == [1]
                shard.insert([{"id": 2}])
                while (told := trace_in(lines))["upper"] != [2]:
                    assert told["upper"] == [1]
                shard.drop(force=True)
                while (found := event_in(lines))[0] == "trace":
                    pass
                assert (found[0], json.loads(found[1])["kind"]) == ("error", UnknownShard.kind)


def test_a_stream_that_rests_still_says_that_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace that took a second to write rests for 100: the page would take the server for gone."""
    monkeypatch.setattr(rpc.routes.inspection_routes, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(rpc.routes.inspection_routes, "PAUSE_S", 1.0)
    path = "/v1/shards/eu/orders/trace"
    with closing(located([])) as location, Served(location) as served, opened(served, path) as lines:
        trace_in(lines)
        assert next(iter(lines)) == b": resting\n"


def opened(server: Server | Served, path: str):  # type: ignore[no-untyped-def]
    from urllib.request import Request, urlopen

    return urlopen(Request(server.url + path, headers={"accept": "text/event-stream"}))


def event_in(lines) -> tuple[str, str]:  # type: ignore[no-untyped-def]
    """The next event that is no heartbeat: what it is called, and its data."""
    name, data = "", ""
    for line in lines:
        field, _, value = line.decode().rstrip("\n").partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            data = value
        elif not field and name:
            return name, data
    raise AssertionError("the stream has ended")


def trace_in(lines):  # type: ignore[no-untyped-def]
    name, data = event_in(lines)
    assert name == "trace"
    return json.loads(data)


# --- activity


def test_activity_tells_shards_in_a_line_each_page_by_page(place: Place) -> None:
    first = place.get("/v1/activity?limit=2").json()
    assert [one["name"] for one in first["shards"]] == ["eu/orders", "eu/other"]
    assert first["following"] == "eu/other"
    second = place.get(f"/v1/activity?limit=2&after={first['following']}").json()
    assert [one["name"] for one in second["shards"]] == ["us/orders"]
    assert second["following"] is None
    assert [rows for _, rows, _ in first["shards"][0]["recent"]] == [1, 1, 1]


def test_activity_of_what_a_token_does_not_see_is_forbidden(place: Place) -> None:
    assert [one["name"] for one in place.get("/v1/activity?prefix=eu/", "eu").json()["shards"]] == [
        "eu/orders",
        "eu/other",
    ]
    for path in ("/v1/activity", "/v1/activity?prefix=us/"):
        assert place.get(path, "eu").status_code == 403


def test_activity_of_what_the_server_knows_asks_the_log_of_no_shard(tmp_path: Path) -> None:
    calls: list[str] = []
    with closing(located(calls)) as location, (place := Place(location, tmp_path)).http:
        place.get("/v1/activity")
        calls.clear()
        assert len(place.get("/v1/activity?cached=true").json()["shards"]) == 3
        assert set(calls) == {"keys"}, "the names are listed, and that is all"
        place.get("/v1/activity")
        assert set(calls) > {"keys"}
