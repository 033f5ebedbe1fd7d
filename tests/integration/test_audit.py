"""The audit of a server: who did what is told, shown to admins alone, and changed by nobody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from starlette.testclient import TestClient

import persist
from blob.memory import MemoryBlob
from consensus.memory import MemoryConsensus
from persist.cli.__main__ import main
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import HandleSettings
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.antichain import Antichain
from persist.core.errors import Forbidden, InvalidUsage
from persist.core.ids import AUDIT_SHARD, PartId, ReaderId, SeqNo, WriterId, shard_id_of
from persist.core.keys import part_key
from persist.formats.records import encoded
from rpc.app import create_app
from rpc.auth import mint
from rpc.commanding import check_reserved
from rpc.settings import ServerSettings
from tests.support.location import InlineBackground
from tests.support.server import Server
from tests.support.waiting import wait_until

FIELDS = {"fields": [{"name": "id", "type": "int64", "key": True}]}
SCHEMA = pa.schema([("id", pa.int64())])
AUDIT = "/v1/shards/_persist%2Faudit"
BLOB = f"/v1/blobs/{part_key(shard_id_of(AUDIT_SHARD), WriterId('w' + '1' * 32), PartId('p' + '1' * 32))}"
READER = ReaderId("r" + "1" * 32)


class House:
    def __init__(self, directory: Path) -> None:
        self.tokens: dict[str, str] = {}
        entries = []
        for name, scope, prefixes in (
            ("admin", "admin", []),
            ("eu-admin", "admin", ["eu/"]),
            ("sly-admin", "admin", ["_persist/"]),
            ("writer", "write", []),
            ("reader", "read", []),
        ):
            self.tokens[name], digest = mint(name)
            entries.append({"id": name, "sha256": digest, "scopes": [scope], "prefixes": prefixes})
        self.file = directory / "tokens.json"
        self.file.write_text(json.dumps({"tokens": entries}))
        self.file.chmod(0o600)
        self.location = Location(MemoryBlob(), MemoryConsensus(), background=InlineBackground())
        app = create_app(self.location, ServerSettings(tokens_file=str(self.file)))
        self.client = TestClient(app)

    def ask(self, token: str, method: str, path: str, body: Any = None) -> Any:
        header = {"authorization": f"Bearer {self.tokens[token]}"}
        if isinstance(body, c.Command):
            kind = {"content-type": "application/vnd.persist.record"}
            return self.client.request(method, path, content=encoded(body), headers={**header, **kind})
        return self.client.request(method, path, json=body, headers=header)

    def entries(self) -> list[dict[str, Any]]:
        found = self.ask("admin", "GET", f"{AUDIT}/snapshot?format=ndjson")
        return [json.loads(line) for line in found.text.splitlines()] if found.status_code == 200 else []

    def told(self, what: str, shard: str | None, request_id: str = "") -> dict[str, Any]:
        """The last entry of those, once it is there."""

        def found() -> list[dict[str, Any]]:
            asked = [one for one in self.entries() if request_id in ("", one["request_id"])]
            return [one for one in asked if (one["what"], one["shard"]) == (what, shard)]

        wait_until(lambda: bool(found()), f"the audit tells of {what} {shard}")
        return found()[-1]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    found = House(tmp_path_factory.mktemp("audited"))
    with found.client:
        for name in ("eu/a", "eu/b", "eu/c", "eu/d", "eu/gone", "us/a"):
            assert found.ask("admin", "PUT", f"/v1/shards/{name}", FIELDS).status_code == 200
        assert found.ask("admin", "POST", "/v1/shards/eu/a/advance-upper?upper=3").status_code == 200
        found.told("create", "us/a")
        yield found
    found.location.close()


DONE: list[tuple[str, str, Any, str, str | None, int]] = [
    # method, path, body -> what it is called, the shard, the status
    ("PUT", "/v1/shards/eu/new", FIELDS, "create", "eu/new", 200),
    ("POST", "/v1/clones", {"source": "eu/a", "name": "eu/clone"}, "clone", None, 200),
    ("POST", "/v1/shards/eu/a/downgrade-since?since=0", None, "move cursor", "eu/a", 200),
    ("POST", "/v1/shards/eu/a/advance-upper?upper=4", None, "move upper", "eu/a", 200),
    ("POST", "/v1/shards/eu/a/forget?before=1", None, "forget history", "eu/a", 200),
    ("PUT", "/v1/shards/eu/a/tags/nightly?at=2", None, "set tag", "eu/a", 200),
    ("DELETE", "/v1/shards/eu/a/tags/nightly", None, "remove tag", "eu/a", 200),
    ("POST", "/v1/shards/eu/a/truncate?before=1", None, "truncate", "eu/a", 200),
    ("POST", "/v1/shards/eu/a/restore?as_of=1", None, "restore", "eu/a", 200),
    ("POST", "/v1/shards/eu/c/append?lower=0&upper=[]&format=ndjson", None, "close", "eu/c", 200),
    (
        "POST",
        "/v1/shards/eu/d/compare-and-append?expected_upper=0&new_upper=closed&format=ndjson",
        None,
        "close",
        "eu/d",
        200,
    ),
    ("POST", "/v1/shards/eu/b/commands", c.Drop(), "drop", "eu/b", 200),
    ("POST", "/v1/shards:delete", {"prefix": "eu/gone", "confirm": 1}, "drop", None, 200),
    ("DELETE", "/v1/shards/us/a", None, "drop", "us/a", 403),
]


@pytest.fixture(scope="module")
def answers(house: House) -> list[Any]:
    """What was answered to each of them, one after the other: their entries are written together."""
    return [house.ask("eu-admin", method, path, body) for method, path, body, *_ in DONE]


@pytest.mark.parametrize(("number", "case"), list(enumerate(DONE)))
def test_who_did_what(number: int, case: Any, answers: list[Any], house: House) -> None:
    (_, _, body, what, shard, status), answer = case, answers[number]
    assert answer.status_code == status, answer.text
    told = house.told(what, shard, answer.headers["x-request-id"])
    assert (told["token"], told["status"]) == ("eu-admin", status)
    assert told["address"] == "testclient"
    if isinstance(body, dict):
        assert json.loads(json.loads(told["detail"])["body"]) == body


def test_each_of_many_shards_has_an_entry_of_its_own(house: House) -> None:
    names = [f"eu/{'many' * 20}{number:02d}" for number in range(40)]  # so that the body is too long to be told
    for name in names:
        assert house.ask("admin", "PUT", f"/v1/shards/{name}", FIELDS).status_code == 200
    cut = house.ask("admin", "POST", "/v1/cuts", {"prefix": "eu/many"}).json()
    asked = [
        house.ask("admin", "POST", "/v1/truncate?dry_run=true", cut),
        house.ask("admin", "POST", "/v1/truncate", cut),
        house.ask("admin", "POST", "/v1/shards:delete", {"prefix": "eu/many"}),
        house.ask("admin", "POST", "/v1/shards:delete", {"shards": names, "confirm": len(names)}),
    ]
    assert [answer.status_code for answer in asked] == [200] * 4
    ids = [answer.headers["x-request-id"] for answer in asked]
    house.told("drop", names[-1], ids[3])
    told = [(one["request_id"], one["shard"]) for one in house.entries() if one["shard"] in names]
    assert sorted(one for one in told if one[0] in ids) == sorted(
        (request_id, name) for request_id in (ids[1], ids[3]) for name in names
    )


def test_the_hold_of_a_reader_is_no_move_of_since(house: House) -> None:
    body = c.DowngradeSince(READER, Antichain(1), SeqNo(1))
    refused = house.ask("reader", "POST", "/v1/shards/eu/a/commands", body)
    assert house.ask("admin", "POST", "/v1/shards/eu/a/commands", body).status_code == refused.status_code
    house.told("move since", "eu/a")
    assert ("reader", "move since") not in {(one["token"], one["what"]) for one in house.entries()}


def test_which_token_was_used_is_told(house: House) -> None:
    house.ask("reader", "GET", "/v1/location")
    wait_until(
        lambda: ("reader", "token use") in {(one["token"], one["what"]) for one in house.entries()}, "it is told"
    )
    secrets = [token.split("_", 2)[2] for token in house.tokens.values()]
    assert not any(secret in json.dumps(house.entries()) for secret in secrets)


@pytest.mark.parametrize("token", ["eu-admin", "sly-admin", "writer", "reader"])
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", AUDIT, None),
        ("GET", f"{AUDIT}/snapshot", None),
        ("GET", f"{AUDIT}/listen?until=0", None),
        ("GET", f"{AUDIT}/history", None),
        ("GET", "/v1/shards?prefix=_persist/", None),
        ("POST", "/v1/cuts", {"shards": [AUDIT_SHARD]}),
        ("POST", "/v1/cuts", {"prefix": "_persist/"}),
        ("POST", f"{AUDIT}/commands", c.ReadTags()),
        ("GET", BLOB, None),
        ("GET", f"{BLOB}?presign=true", None),
    ],
)
def test_only_an_admin_of_every_shard_sees_it(token: str, method: str, path: str, body: Any, house: House) -> None:
    assert house.ask(token, method, path, body).status_code == 403
    assert house.ask("admin", method, path, body).status_code in (200, 404, 503)
    assert AUDIT_SHARD not in house.ask(token, "GET", "/metrics").text


def test_a_list_of_shards_has_it_only_where_it_is_asked_for(house: House) -> None:
    assert AUDIT_SHARD not in house.ask("admin", "GET", "/v1/shards?limit=1000").text
    assert AUDIT_SHARD not in house.ask("admin", "GET", "/v1/shards?details=true").text
    assert house.ask("admin", "GET", "/v1/shards?prefix=_persist/").json()["shards"] == [AUDIT_SHARD]


def routes(house: House) -> list[tuple[str, str]]:
    """Every way in to a shard that could change it."""
    found = []
    for path, methods in house.client.get("/openapi.json").json()["paths"].items():
        for method in methods:
            if "{name}" in path and method not in ("get", "head"):
                found.append((method.upper(), path))
    return found


def test_no_route_changes_it(house: House) -> None:
    tried = routes(house)
    assert len(tried) > 20
    for method, path in tried:
        where = path.replace("{name}", "_persist%2Faudit").replace("{tag}", "x").replace("{what}", "x")
        body: Any = c.Drop(force=True) if where.endswith("/commands") else {}
        answer = house.ask("admin", method, where, body)
        assert answer.status_code == 403, (method, where, answer.text)
        assert "is persist's own: it is read only" in answer.json()["detail"]


def test_no_request_that_names_shards_in_its_body_changes_it(house: House) -> None:
    cut = house.ask("admin", "POST", "/v1/cuts", {"shards": [AUDIT_SHARD]}).json()
    asked: list[tuple[str, str, Any]] = [
        ("POST", "/v1/truncate", cut),
        ("POST", "/v1/shards:delete", {"shards": [AUDIT_SHARD], "confirm": 1, "force": True}),
        ("POST", "/v1/shards:delete", {"prefix": "_persist/", "confirm": 1, "force": True}),
        ("POST", "/v1/clones", {"source": AUDIT_SHARD, "name": "mine"}),
        ("POST", "/v1/clones", {"source": "eu/a", "name": "_persist/mine"}),
        ("PUT", "/v1/shards/_persist%2Fmine", FIELDS),
        ("PUT", BLOB, None),
    ]
    for method, path, body in asked:
        answer = house.ask("admin", method, path, body)
        assert answer.status_code in (400, 403), (path, answer.text)
        assert "persist's own" in answer.json()["detail"]
    # A prefix that is only the beginning of its name means the shards that a list shows.
    told = house.ask("admin", "POST", "/v1/shards:delete", {"prefix": "_pers"})
    assert told.json()["shards"] == []


def test_no_command_but_those_that_read_is_for_it() -> None:
    changing = [kind for kind in c.kinds(c.Command) if not issubclass(kind, c.ReadCommand)]
    assert len(changing) > 40
    for kind in changing:
        with pytest.raises(Forbidden, match="it is read only"):
            check_reserved(kind, AUDIT_SHARD)
    check_reserved(c.RegisterReader, AUDIT_SHARD)


def test_a_reader_of_it_lets_no_history_go(house: House) -> None:
    path = f"{AUDIT}/commands"
    house.ask("admin", "POST", path, c.RegisterReader(READER, Antichain(0), 60_000, "test"))
    moved = c.DowngradeSince(READER, Antichain(None), SeqNo(1))
    house.ask("admin", "POST", path, moved)
    assert house.ask("admin", "GET", AUDIT).json()["since"] == [0]


def test_callers_without_a_server_make_and_drop_no_such_shards(house: House) -> None:
    client = Client(EmbeddedTransport(house.location), HandleSettings())
    for ask in (
        lambda: client.create_shard("_persist/mine", SCHEMA, key=["id"]),
        lambda: client.drop_shards([AUDIT_SHARD], confirm=1),
        lambda: client.clone("eu/a", "_persist/mine"),
    ):
        with pytest.raises(InvalidUsage, match="persist's own"):
            ask()
    assert AUDIT_SHARD not in client.shards()


BAD = [
    ({"audit": "7"}, "audit is '7'; it must be an age such as '7d'"),
    ({"audit": "0d"}, "audit is '0d'; it must be an age"),
    ({"audit": "90d", "tokens_file": None}, "an audit tells what each token did, at home"),
    ({"audit": "90d", "read_only": True, "blob": "mem:"}, "an audit tells what each token did, at home"),
]


@pytest.mark.parametrize(("given", "said"), BAD)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidUsage, match=said):
        ServerSettings(**{"tokens_file": "t.json", **given}).check()


@pytest.mark.parametrize(("given", "kept"), [("", "90d"), ("none", None), ("7d", "7d"), ("forever", "forever")])
def test_there_is_an_audit_where_there_are_tokens(given: str, kept: str | None) -> None:
    assert ServerSettings(audit=given).audit_kept is None
    assert ServerSettings(audit=given, tokens_file="t.json").audit_kept == kept


def test_the_command_shows_it_of_a_server_and_of_the_stores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(tmp_path)
    house.location.close()
    with Server(tmp_path / "d", "--tokens", str(house.file), "--audit", "30d", maintenance=True) as server:
        with closing(persist.connect(server.url, token=house.tokens["admin"])) as client:
            client.create_shard("eu/a", SCHEMA, key=["id"])
        monkeypatch.setenv("PERSIST_TOKEN", house.tokens["admin"])
        chosen = ["--where", "what = 'create'", "--columns", "token,shard,status", "--format", "ndjson"]

        def shown(*where: str) -> list[dict[str, Any]]:
            code = main(["audit", *where, *chosen])
            told = capsys.readouterr().out
            return [json.loads(line) for line in told.splitlines()] if code == 0 else []

        expected = [{"shard": "eu/a", "status": 200, "token": "admin"}]

        def without_diff(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [{name: row[name] for name in expected[0]} for row in rows]

        wait_until(lambda: without_diff(shown("--url", server.url)) == expected, "the server shows it")
        assert server.stop() == 0
    monkeypatch.delenv("PERSIST_TOKEN")
    assert without_diff(shown("--dir", str(tmp_path / "d"))) == expected
    assert "forbidden" not in server.said()


def test_a_file_of_quotas_that_is_bad_is_told_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "quotas.json").write_text("{")
    assert main(["serve", "--dir", str(tmp_path / "d"), "--quotas", str(tmp_path / "quotas.json")]) == 1
    assert "is not JSON" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("rules", [{"default": {"shards": 1}}, {"tokens": {"etl": {"shards": 1}}}])
def test_quotas_of_tokens_bound_nobody_where_there_are_none(
    rules: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "quotas.json").write_text(json.dumps(rules))
    assert main(["serve", "--dir", str(tmp_path / "d"), "--quotas", str(tmp_path / "quotas.json")]) == 1
    assert "this server knows no token" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()
