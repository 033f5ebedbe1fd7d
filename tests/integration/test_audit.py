"""The audit of a server: one log line for each request of a token that changes something, and none for the others."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from starlette.testclient import TestClient

import persist
from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist.cli.long_running import JsonFormatter
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.errors import PersistError
from persist.core.frontier import Antichain
from persist.core.ids import CriticalReaderId, ReaderId, SeqNo, Token, WriterId
from persist.core.shard_settings import RowPolicy
from persist.core.state import SchemaRecord
from persist.formats.records import encoded
from persist.parts import ShardSchema
from persist.parts.schema_changes import RenameColumn, apply_changes
from rpc.app import create_app
from rpc.audit import VALUE_CHARS_MAX, describe_command, describe_query, describe_request
from rpc.cli.program import main
from rpc.route import ROUTE, SHARD
from rpc.routes.table import TABLE
from rpc.settings import ServerSettings
from tests.support.location import InlineBackground
from tests.support.server import Server
from tests.support.token_file import bearer, write_tokens

FIELDS = {"fields": [{"name": "id", "type": "int64", "key": True}]}
ROW = b'{"id": 7654321}\n'
READER = ReaderId("r" + "1" * 32)
WRITER, TOKEN = WriterId("w" + "1" * 32), Token("i" + "1" * 32)

REQUESTS = [
    # method, what is after the shard's name (or a path without a shard), query -> what it is called
    ("PUT", "", "", "create"),
    ("DELETE", "", "force=true", "drop"),
    ("GET", "", "", None),
    ("POST", "insert", "", "insert"),
    ("POST", "append", "lower=0&upper=[]", "close"),
    ("POST", "delete", "", "delete"),
    ("POST", "advance-upper", "upper=[]", "close"),
    ("POST", "downgrade-since", "since=7", "move cursor"),
    ("GET", "settings", "", None),
    ("PUT", "retention", "", "retention"),
    ("PUT", "tags/x", "", "set tag"),
    ("POST", "restore", "to=7", "restore"),
    ("POST", "erasures", "", "erase"),
    ("POST", "/v1/clones", "", "clone"),
    ("POST", "/v1/shards:delete", "", "drop"),
    ("PUT", "/nowhere", "", None),
]


@pytest.mark.parametrize(("method", "rest", "query", "what"), REQUESTS)
def test_requests_that_have_a_line(method: str, rest: str, query: str, what: str | None) -> None:
    path, shard = (rest, None) if rest.startswith("/") else (f"/v1/shards/a/{rest}", ("a", rest))
    pattern = path if shard is None else f"{SHARD}/{rest}".rstrip("/")
    scope = {"method": method, "query_string": query.encode(), ROUTE: TABLE.find(method, pattern)}
    found = describe_request(scope, shard)
    assert (None if found is None else found[0]) == what


def rewrite(operation: str, **parts: Any) -> c.Rewrite:
    return c.Rewrite(WRITER, TOKEN, Antichain(9), 8, operation, **parts)


COMMANDS: list[tuple[c.Command, tuple[str, dict[str, Any]] | None]] = [
    (c.Drop(True), ("drop", {"force": True})),
    (c.AdvanceUpper(Antichain(7)), ("move upper", {"force": False, "upper": [7]})),
    (c.AdvanceUpper(Antichain(None)), ("close", {})),
    (c.SetTag("x", 7), ("set tag", {"tag": "x", "time": 7})),
    (
        c.SetSettings(1, 0, 1_000, RowPolicy(age_ms=1_000)),
        ("settings", {"expected_version": 1, "history_ms": 0, "mark_every_ms": 1_000, "rows": str}),
    ),
    (
        c.CompareAndDowngradeSince(CriticalReaderId("c" + "1" * 32), "", "", Antichain(7)),
        ("move cursor", {"force": False, "reader": "c" + "1" * 32, "since": [7]}),
    ),
    (c.DowngradeSince(READER, Antichain(7), SeqNo(1)), ("move since", {"reader": READER, "since": [7]})),
    (c.DowngradeSince(READER, Antichain(7), SeqNo(1), False), None),
    (c.ReadRetention(), None),
    (c.Insert(WRITER, TOKEN, ()), ("insert", {})),
    (c.Append(WRITER, TOKEN, Antichain(0), Antichain(7), ()), ("append", {"upper": [7]})),
    (c.Append(WRITER, TOKEN, Antichain(0), Antichain(None), ()), ("close", {})),
    (rewrite("upsert"), ("upsert", {"as_of": 8})),
    (rewrite("replace_where"), ("replace-where", {"as_of": 8})),
    (rewrite("overwrite", schema=c.SchemaChange(1, SchemaRecord(b"", ()))), ("overwrite", {"as_of": 8})),
    (rewrite(c.INSERT, cut=0), ("insert", {"as_of": 8})),
    (rewrite(c.RESTORE, undoes=3), ("restore", {"as_of": 3})),
    (rewrite(c.TRUNCATE, truncates=3), ("truncate", {"as_of": 2})),
    (rewrite(c.DROP_BEFORE, tombstone=Antichain(3)), ("truncate", {"as_of": 2})),
    (rewrite(c.TRUNCATE, settings_version=1), ("run retention", {"as_of": 8})),
    (
        rewrite(c.ERASE, erasure=c.NewErasure("e" + "1" * 32, reason="dsr-7")),
        ("erase", {"as_of": 8, "erasure": "e" + "1" * 32, "force": False, "reason": "dsr-7", "tags": False}),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("command", "line"), COMMANDS)
def test_commands_that_have_a_line(command: c.Command, line: tuple[str, dict[str, Any]] | None) -> None:
    found = describe_command(command)
    if found is not None and "rows" in found[1]:
        assert "'age_ms': 1000" in found[1]["rows"]
        found[1]["rows"] = str
    assert found == line


def test_every_command_that_changes_rows_has_a_line() -> None:
    writing = [kind for kind in c.kinds(c.WriteCommand) if kind is not c.ExpireWriter]
    assert len(writing) > 8
    for kind in writing:
        assert kind in describe_command.__globals__["OF_COMMANDS"], kind


def test_parameters_have_a_bound_and_no_values_of_rows() -> None:
    assert describe_query("tags/nightly", b"token=load-7&keep=1d&where=id+%3D+7") == {"tag": "nightly", "keep": "1d"}
    many = "&".join(f"n{n}={'x' * 1000}&upper={'y' * 1000}" for n in range(100)).encode()
    assert describe_query("", many) == {"upper": "y" * VALUE_CHARS_MAX}


class House:
    """A server in this process, and what it has written into its log."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "tokens.json"
        granted = {"admin": ("admin",), "eu-admin": ("admin", "eu/"), "reader": ("read",)}
        self.tokens = write_tokens(self.file, granted)
        self.location = Location(MemoryBlob(), MemoryConsensus(), background=InlineBackground())
        app = create_app(self.location, ServerSettings(tokens_file=str(self.file)))
        self.client = TestClient(app)

    def ask(self, token: str, method: str, path: str, body: Any = None) -> Any:
        header = bearer(self.tokens[token])
        if isinstance(body, c.Command):
            kind = {"content-type": "application/vnd.persist.record"}
            return self.client.request(method, path, content=encoded(body), headers={**header, **kind})
        if isinstance(body, bytes):
            kind = {"content-type": "application/x-ndjson"}
            return self.client.request(method, path, content=body, headers={**header, **kind})
        return self.client.request(method, path, json=body, headers=header)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    found = House(tmp_path_factory.mktemp("audited"))
    with found.client:
        for name in ("eu/a", "eu/b", "eu/c", "eu/d", "eu/gone", "us/a"):
            assert found.ask("admin", "PUT", f"/v1/shards/{name}", FIELDS).status_code == 200
        assert found.ask("admin", "POST", "/v1/shards/eu/a/advance-upper?upper=3").status_code == 200
        yield found
    found.location.close()


class Lines(logging.Handler):
    """What an operator's log has, by the formatter of the server."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    handler, log = Lines(), logging.getLogger("persist.audit")
    log.addHandler(handler)
    yield handler.lines
    log.removeHandler(handler)


DROPPED = "/v1/shards:delete"
DONE: list[tuple[str, str, Any, str, str | None, int]] = [
    # method, path, body -> what it is called, the shard, the status
    ("PUT", "/v1/shards/eu/new", FIELDS, "create", "eu/new", 200),
    ("POST", "/v1/clones", {"source": "eu/a", "name": "eu/clone"}, "clone", None, 200),
    ("POST", "/v1/shards/eu/a/insert", ROW, "insert", "eu/a", 200),
    ("POST", "/v1/shards/eu/a/delete?where=id+%3D+7654321", None, "delete", "eu/a", 400),
    ("POST", "/v1/shards/eu/a/delete", {"where": "id = 7654321"}, "delete", "eu/a", 200),
    ("PUT", "/v1/shards/eu/a/tags/nightly?at=2", None, "set tag", "eu/a", 200),
    ("POST", "/v1/shards/eu/c/append?lower=0&upper=[]&format=ndjson", None, "close", "eu/c", 200),
    ("POST", "/v1/shards/eu/d/compare-and-append?expected_upper=0&new_upper=closed", b"", "close", "eu/d", 200),
    ("POST", "/v1/shards/eu/b/commands", c.Drop(), "drop", "eu/b", 200),
    ("POST", DROPPED, {"prefix": "eu/gone", "confirm": 1}, "drop", None, 200),
    ("DELETE", "/v1/shards/us/a", None, "drop", "us/a", 403),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body", "what", "shard", "status"), DONE)
def test_who_did_what(
    method: str, path: str, body: Any, what: str, shard: str | None, status: int,
    house: House, lines: list[dict[str, Any]],
) -> None:  # fmt: skip
    answer = house.ask("eu-admin", method, path, body)
    assert answer.status_code == status, answer.text
    [line] = lines
    assert (line["token"], line["what"], line["shard"], line["status"]) == ("eu-admin", what, shard, status)
    assert (line["address"], line["request_id"]) == ("testclient", answer.headers["x-request-id"])
    assert "7654321" not in json.dumps(line), "no values of rows"
    assert house.tokens["eu-admin"].split("_", 2)[2] not in json.dumps(line)
    several = {"clone": ["eu/a", "eu/clone"], "drop": ["eu/gone"] if path == DROPPED else []}
    assert line.get("shards", []) == several.get(what, [])
    if isinstance(body, dict) and "where" not in body:
        assert json.loads(line["detail"]["body"]) == body


def test_a_command_on_a_schema_is_called_by_what_it_changes(house: House, lines: list[dict[str, Any]]) -> None:
    wider = ShardSchema(pa.schema([("id", pa.int64()), ("n", pa.int64())]), ("id",))
    strict = wider.with_details(unique=True)
    changes = [
        ("evolve schema", 200, c.EvolveSchema(1, wider.to_record())),
        ("set constraints", 200, c.EvolveSchema(2, strict.to_record(), Antichain(0))),
        ("set constraints", 409, c.EvolveSchema(3, strict.with_details(unique=False).to_record(), Antichain(7))),
        ("evolve schema", 200, c.EvolveSchema(3, apply_changes(strict, [RenameColumn("n", "m")]).to_record())),
    ]
    assert house.ask("admin", "PUT", "/v1/shards/eu/schemas", FIELDS).status_code == 200
    lines.clear()
    for _, status, command in changes:
        answer = house.ask("admin", "POST", "/v1/shards/eu/schemas/commands", command)
        assert answer.status_code == status, answer.text
    assert [(line["what"], line["status"], line.get("detail")) for line in lines] == [
        (what, status, None) for what, status, _ in changes
    ]


def test_what_only_reads_has_no_line(house: House, lines: list[dict[str, Any]]) -> None:
    for path in ("/v1/location", "/v1/shards", "/v1/shards/eu/a", "/v1/shards/eu/a/snapshot", "/metrics"):
        assert house.ask("admin", "GET", path).status_code == 200
    assert house.ask("admin", "POST", "/v1/shards/eu/a/commands", c.ReadRetention()).status_code == 200
    house.ask("reader", "POST", "/v1/shards/eu/a/commands", c.DowngradeSince(READER, Antichain(1), SeqNo(1)))
    assert lines == [], "the hold of a reader is no move of since"


def test_the_line_is_there_before_the_answer(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Note(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            order.append(f"line {house.location.machine('eu/a').state().upper.element}")

    handler, log = Note(), logging.getLogger("persist.audit")
    log.addHandler(handler)
    before = house.location.machine("eu/a").state().upper.element or 0
    answer = house.ask("admin", "POST", "/v1/shards/eu/a/insert", ROW)
    log.removeHandler(handler)
    assert order == [f"line {before + 1}"], "after the commit"
    assert answer.status_code == 200


def test_a_line_that_fails_is_counted_and_changes_no_answer(house: House) -> None:
    class Full(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("no space left on device")

    handler, log = Full(), logging.getLogger("persist.audit")
    log.addHandler(handler)
    answer = house.ask("admin", "POST", "/v1/shards/eu/a/insert", ROW)
    log.removeHandler(handler)
    assert answer.status_code == 200
    assert "persist_audit_failures_total 1.0" in house.ask("admin", "GET", "/metrics").text


def test_a_request_about_many_shards_names_them(house: House, lines: list[dict[str, Any]]) -> None:
    names = [f"eu/{'many' * 20}{number:02d}" for number in range(40)]  # so that the body is too long to be shown
    for name in names:
        assert house.ask("admin", "PUT", f"/v1/shards/{name}", FIELDS).status_code == 200
    cut = house.ask("admin", "POST", "/v1/cuts", {"prefix": "eu/many"}).json()
    lines.clear()
    for path, body in (
        ("/v1/truncate?dry_run=true", cut),
        ("/v1/truncate", cut),
        ("/v1/shards:delete", {"prefix": "eu/many"}),
        ("/v1/shards:delete", {"shards": names, "confirm": len(names)}),
    ):
        assert house.ask("admin", "POST", path, body).status_code == 200
    assert [(line["what"], line.get("shards", [])) for line in lines] == [
        ("truncate", []),
        ("truncate", names),
        ("drop", []),
        ("drop", names),
    ]


def test_a_server_writes_the_lines_at_every_log_level(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.location.close()
    with Server(tmp_path / "d", "--tokens", str(house.file), "--log-level", "error") as server:
        with persist.connect(server.url, token=house.tokens["admin"]) as client:
            client.create_shard("eu/a", pa.schema([("id", pa.int64())]), key=["id"]).insert([{"id": 1}])
            with pytest.raises(PersistError):
                client.shard("eu/a").tag("", at=1)
        assert server.stop() == 0
    lines = [json.loads(line) for line in server.said().splitlines() if '"persist.audit"' in line]
    assert [(line["what"], line["shard"], line["status"]) for line in lines][:2] == [
        ("create", "eu/a", 200),
        ("insert", "eu/a", 200),
    ]


def test_quotas_of_tokens_bound_nobody_where_there_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "quotas.json").write_text('{"default": {"rows_per_s": 1}}')
    assert main(["serve", "--dir", str(tmp_path / "d"), "--quotas", str(tmp_path / "quotas.json")]) == 1
    assert "give --tokens FILE" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()
