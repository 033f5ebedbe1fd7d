"""Scopes: every request and every command with a token of each scope, as docs/scopes.md says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.results import snake
from persist.formats.records import encoded
from rpc.app import create_app
from rpc.auth import mint
from rpc.settings import ServerSettings
from tests.integration.test_read_scope import NAME, Place, commands
from tests.support.location import InlineBackground
from tests.support.scopes_page import BY_COMMAND, OPEN, PAGE, SCOPES_OF_ROUTES, page

SHARD = "eu/orders"
FIELDS = {"fields": [{"name": "id", "type": "string", "key": True}]}
_ROW = re.compile(r"\| `(.+?)` \|((?: (?:yes|no) \|){5})")


def said() -> dict[str, dict[str, bool]]:
    """Of each request and command of the page: by which scopes it is opened."""
    rows = _ROW.findall(PAGE.read_text(encoding="utf-8"))
    return {
        name: dict(zip(c.SCOPES, ("yes" in cell for cell in cells.split("|")), strict=False)) for name, cells in rows
    }


SAID = said()


class Doors:
    """An app, and a token of each scope on all shards and on those of `us/`."""

    def __init__(self, directory: Path) -> None:
        self.tokens, entries = {}, []
        for scope in c.SCOPES:
            for name, prefixes in ((scope, []), (f"{scope}-us", ["us/"])):
                self.tokens[name], digest = mint(name)
                entries.append({"id": name, "sha256": digest, "scopes": [scope], "prefixes": prefixes})
        file = directory / "tokens.json"
        file.write_text(json.dumps({"tokens": entries}))
        self.location = Location(MemoryBlob(), MemoryConsensus(), background=InlineBackground())
        self.app: FastAPI = create_app(self.location, ServerSettings(tokens_file=str(file)))
        self.http = TestClient(self.app)

    def knock(self, token: str | None, door: str) -> tuple[int, str]:
        """Ask without parameters and without a body, so that who is let in is told what is missing."""
        method, _, path = door.partition(" ")
        shown = path.replace("{name}", SHARD).replace("{what}", "state").replace("{key}", "a").replace("{tag}", "eom")
        if shown.endswith("/listen"):
            shown += "?until=0"  # it ends at once
        headers = {} if token is None else {"authorization": f"Bearer {self.tokens[token]}"}
        answer = self.http.request(method, shown.replace("{erasure}", "e1"), headers=headers)
        is_json = answer.headers.get("content-type", "").endswith("problem+json") and method != "HEAD"
        return answer.status_code, answer.json()["kind"] if is_json else ""


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    found = Doors(tmp_path_factory.mktemp("scopes"))
    with found.http:
        yield found
    found.location.close()


@pytest.fixture
def shard(doors: Doors) -> None:
    """A shard for each test: one of the doors drops it."""
    answer = doors.http.put(
        f"/v1/shards/{SHARD}", json=FIELDS, headers={"authorization": f"Bearer {doors.tokens['admin']}"}
    )
    assert answer.status_code == 200, answer.text


def test_the_page_is_made_from_the_code_as_it_is() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs`"


def test_the_page_has_every_request_and_every_command() -> None:
    told = {*SCOPES_OF_ROUTES, *(snake(kind.__name__) for kind in c.kinds(c.Command))} - {BY_COMMAND}
    assert set(SAID) == told


def test_every_route_is_in_the_table(doors: Doors) -> None:
    """One that is not would be open to nobody."""
    paths = doors.app.openapi()["paths"]
    found = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert found | {"GET /openapi.json"} == {*SCOPES_OF_ROUTES, *OPEN}


@pytest.mark.parametrize("scope", c.SCOPES)
@pytest.mark.parametrize("door", [door for door in SAID if " " in door])
@pytest.mark.usefixtures("shard")
def test_a_request_is_open_to_the_scopes_that_the_page_says(doors: Doors, door: str, scope: str) -> None:
    status, kind = doors.knock(scope, door)
    if SAID[door][scope]:
        assert status not in (401, 403), (status, kind)
    else:
        assert (status, kind) == (403, "forbidden")


@pytest.mark.parametrize("door", [door for door in (*SAID, BY_COMMAND) if "/shards/{name}" in door])
@pytest.mark.usefixtures("shard")
def test_a_request_for_a_shard_beyond_the_prefixes_is_open_to_no_scope(doors: Doors, door: str) -> None:
    for scope in c.SCOPES:
        assert doors.knock(f"{scope}-us", door) == (403, "forbidden"), scope
    assert doors.knock(None, door)[0] == 401


@pytest.mark.parametrize("scope", c.SCOPES)
def test_a_command_is_open_to_the_scopes_that_the_page_says(tmp_path: Path, scope: str) -> None:
    with Place(tmp_path) as place:
        for command in commands(place):
            answer = place.call(scope, "POST", f"/v1/shards/{NAME}/commands", content=encoded(command))
            refused = answer.status_code == 403 and answer.json()["kind"] == "forbidden"
            assert refused != SAID[snake(type(command).__name__)][scope], (command, answer.text)
