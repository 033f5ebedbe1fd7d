"""`persist inspect --url`: through a server the answers are the same, and only a token of the scope admin gets them."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from persist.formats.http_messages import PROBLEM_JSON
from rpc.app import create_app
from rpc.cli.program import main
from rpc.settings import ServerSettings
from tests.support.answers import Answers
from tests.support.inspected import COMMANDS, copied
from tests.support.location import memory_location
from tests.support.server import Server
from tests.support.token_file import write_tokens


class Served:
    """A server of a copy of the frozen location, which asks for tokens."""

    def __init__(self, place: Path, server: Server, tokens: dict[str, str]) -> None:
        self.place = place
        self.server = server
        self.tokens = tokens


@contextmanager
def served(directory: Path) -> Iterator[Served]:
    place, file = copied(directory / "location"), directory / "tokens.json"
    tokens = write_tokens(file, {"admin": ("admin",), "write": ("write",), "eu": ("admin", "eu/")})
    with Server(place, "--tokens", str(file), environment={"PERSIST_PUBLISH_EVERY": "0"}) as server:
        yield Served(place, server, tokens)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served")) as found:
        yield found


@pytest.fixture
def token(here: Served, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("PERSIST_TOKEN", here.tokens["admin"])
    return monkeypatch


@pytest.mark.parametrize("name", [name for name, words in COMMANDS.items() if words[0] != "usage"])
def test_a_server_answers_what_the_stores_tell(
    name: str, here: Served, token: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", *COMMANDS[name], "--json", "--dir", str(here.place)]) == 0
    near = capsys.readouterr().out
    assert main(["inspect", *COMMANDS[name], "--json", "--url", here.server.url]) == 0
    assert capsys.readouterr().out == near


def test_a_server_tells_what_takes_room(here: Served, token: object, capsys: pytest.CaptureFixture[str]) -> None:
    """The ages of orphans are counted from now on: the sums are the same."""
    told = []
    for where in (["--dir", str(here.place)], ["--url", here.server.url]):
        assert main(["inspect", "usage", "--json", *where]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0]["about"]["of_shards"] == told[1]["about"]["of_shards"]
    assert [row["total"] for row in told[0]["rows"]] == [row["total"] for row in told[1]["rows"]]


def test_a_server_counts_the_requests_under_one_name(here: Served, token: object) -> None:
    assert main(["inspect", "holds", "orders", "--url", here.server.url]) == 0
    asked = urllib.request.Request(
        f"{here.server.url}/metrics", headers={"authorization": f"Bearer {here.tokens['admin']}"}
    )
    with urllib.request.urlopen(asked) as answer:
        text = answer.read().decode()
    assert 'verb="inspect"' in text
    assert 'verb="inspect/' not in text


def test_what_cannot_be_inspected_is_refused() -> None:
    location = memory_location()
    with TestClient(create_app(location, ServerSettings(insecure=True))) as http:
        for path in (
            "/v1/inspect/rows",
            "/v1/inspect/state",
            "/v1/shards/a/inspect/rows",
            "/v1/shards/a/inspect/usage",
        ):
            assert http.get(path).status_code == 400, path
        assert http.get("/v1/shards/a/inspect/state").status_code == 404
        assert http.get("/v1/shards/a/inspect/state?more=1").status_code in (400, 422)
        assert http.post("/v1/shards/a/inspect/state").status_code == 405
    location.close()


# --- what is not a server of persist


@pytest.mark.parametrize(
    ("body", "status", "headers", "said"),
    [
        (b"<html>", 200, {}, "does not answer as a server of persist"),
        (b'{"persist": "inspect", "version": 1', 200, {"content-length": "1000"}, "closed the connection"),
        (b'{"kind": "unavailable", "detail": "later"}', 503, {"content-type": PROBLEM_JSON}, "later"),
        (b'{"kind": "overloaded", "detail": "slow down"}', 429, {"content-type": PROBLEM_JSON}, "slow down"),
    ],
)
def test_an_answer_that_is_none_is_told(
    body: bytes, status: int, headers: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(Answers(status, body, **headers)) as server:
        assert main(["inspect", "parts", "orders", "--url", server.url]) == 3
    assert said in capsys.readouterr().err
