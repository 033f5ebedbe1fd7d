"""Every door is tried: without a token, with the wrong one, with one for something else."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

import persist
from blob.interface import SignedPut
from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.batch import Run
from persist.core.blob_keys import part_key
from persist.core.errors import Forbidden, InvalidUsage, Unauthorized, Unavailable
from persist.core.ids import PartId, ReaderId, Token, WriterId, shard_id_of
from persist.formats.records import encoded
from rpc import app_state
from rpc.app import create_app
from rpc.auth import mint
from rpc.http_protocol import CONNECTION
from rpc.settings import ServerSettings
from rpc.tls import Peer
from tests.support.asking import typed
from tests.support.location import InlineBackground, memory_location
from tests.support.served import Served
from tests.support.server import Server
from tests.support.shard import make_part
from tests.support.token_file import bearer, write_tokens

FIELDS = {"fields": [{"name": "id", "type": "string", "key": True}]}
SCHEMA = pa.schema([("id", pa.string())])


def key(shard: str) -> str:
    return part_key(shard_id_of(shard), WriterId("w" + "0" * 32), PartId("p" + "0" * 32))


class Tokens:
    """A tokens file with one token of each kind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        scopes = {"reader": "read", "writer": "write", "manager": "manage"}
        of_eu = {f"eu-{name}": (scope, "eu/") for name, scope in scopes.items()}
        granted: dict[str, tuple[str, ...]] = {name: (scope,) for name, scope in scopes.items()}
        self.by_name = write_tokens(path, {**granted, "admin": ("admin",), **of_eu})

    def header(self, name: str) -> dict[str, str]:
        return bearer(self.by_name[name])


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path / "tokens.json")


@pytest.fixture
def http(tokens: Tokens) -> Iterator[TestClient]:
    location = Location(MemoryBlob(), MemoryConsensus(), background=InlineBackground())
    with TestClient(create_app(location, ServerSettings(tokens_file=str(tokens.path)))) as client:
        for name in ("eu/orders", "us/orders"):
            client.put(f"/v1/shards/{name}", json=FIELDS, headers=tokens.header("admin"))
            client.put(f"/v1/blobs/{key(name)}", content=b"part", headers=tokens.header("admin"))
        yield client
    location.close()


def test_parts_are_behind_their_shards_prefix(http: TestClient, tokens: Tokens) -> None:
    for name, status in (("eu/orders", 200), ("us/orders", 403)):
        got = http.get(f"/v1/blobs/{key(name)}", headers=tokens.header("eu-reader"))
        assert got.status_code == status
    assert http.get(f"/v1/blobs/{key('unheard')}", headers=tokens.header("eu-reader")).status_code == 403


@pytest.mark.parametrize(
    "path",
    [
        "/v1/shards/eu%2F..%2Fus%2Forders",
        "/v1/shards/eu/../us/orders",
        "/v1/shards/eu//us/orders",
        "/v1/shards/eu:orders/../../us/orders",
        "/v1/shards/us%252Forders",
    ],
)
def test_no_spelling_of_a_name_leads_elsewhere(http: TestClient, tokens: Tokens, path: str) -> None:
    assert http.get(path, headers=tokens.header("eu-reader")).status_code >= 400


def test_a_commit_cannot_name_another_shards_parts(http: TestClient, tokens: Tokens) -> None:
    writer = WriterId("w" + "0" * 32)
    headers = tokens.header("eu-writer")
    part = make_part(1, shard="us/orders")
    insert = encoded(c.Insert(writer, Token("i" + "1" * 32), (Run((part,)),)))
    response = http.post("/v1/shards/eu/orders/commands", content=insert, headers=headers)
    assert (response.status_code, response.json()["kind"]) == (400, "invalid_usage")


def test_the_client_sends_its_token_and_keeps_it_to_itself(tokens: Tokens, tmp_path: Path) -> None:
    with Server(tmp_path / "data", "--tokens", str(tokens.path), "--access-log") as server:
        with pytest.raises(Unauthorized):
            persist.connect(server.url)
        with persist.connect(server.url, token=tokens.by_name["writer"]) as client:
            shard = client.create_shard("eu/orders", SCHEMA, ["id"])
            shard.insert([{"id": "a"}])
            with pytest.raises(Forbidden, match="'admin'"):
                shard.drop()
            assert tokens.by_name["writer"] not in repr(vars(client.transport))
        command_line = Path(f"/proc/{server.process.pid}/cmdline").read_text()
        server.stop()
        said = server.said()
    for name, token in tokens.by_name.items():
        assert token not in command_line
        assert token.removeprefix(f"pt_{name}_") not in said
    lines = [json.loads(line) for line in said.splitlines()]
    logged = [line for line in lines if line.get("verb") == "commands"]
    assert {line["principal"] for line in logged} == {"writer"}
    assert {line["shard"] for line in logged} == {"eu/orders"}


def test_beyond_loopback_only_with_tokens_or_on_purpose() -> None:
    for host in ("0.0.0.0", "127.evil.example", "localhost.evil.example", "127.0.0.1.nip.io"):
        with pytest.raises(InvalidUsage, match="loopback only"):
            ServerSettings(host=host).check()
    for on_purpose in (ServerSettings(host="0.0.0.0", insecure=True), ServerSettings(host="0.0.0.0", tokens_file="x")):
        on_purpose.check()


HERE = ["127.0.0.1", "127.0.0.1:8787", "127.1.2.3", "localhost:3000", "LOCALHOST", "localhost.", "[::1]:80", "[::1]"]
ELSEWHERE = [
    "", "null", "0.0.0.0", "1270.0.0.1", "[::2]", "[::1", "localhost.evil", "localhost.evil.example",
    "127.evil.example", "127.0.0.1.nip.io", "127.0.0.1.evil.example:8787", "127.0.0.1@evil.example",
    "evil.example#127.0.0.1",
]  # fmt: skip


@pytest.mark.parametrize("header", ["host", "origin"])
def test_host_and_origin_are_compared_as_addresses(header: str) -> None:
    """They were compared by the prefix "127.", which `127.evil.example` has, whoever owns that."""
    scheme = "http://" if header == "origin" else ""
    with (
        closing(memory_location()) as location,
        typed(TestClient(create_app(location), base_url="http://127.0.0.1")) as http,
    ):
        for text in HERE:
            own = {"host": text, "origin": f"http://{text}"} if header == "origin" else {"host": text}
            assert http.get("/v1/shards", headers=own).status_code == 200, text
        for text in ELSEWHERE:
            assert http.get("/v1/shards", headers={header: scheme + text}).status_code == 403, text
        twice = [(header, f"{scheme}evil.example"), (header, f"{scheme}127.0.0.1")]
        for headers in (twice, twice[::-1]):
            assert http.get("/v1/shards", headers=headers).status_code == 403, "any of them tells on the page"


def certificate(directory: Path) -> tuple[str, str]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    paths = str(directory / "cert.pem"), str(directory / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-out", paths[0], "-keyout", paths[1]], check=True, capture_output=True)
    return paths


# --- from a browser


def test_a_request_without_a_host_is_refused() -> None:
    with Served(memory_location()) as server:
        for version, status in (("1.1", 400), ("1.0", 200)):
            with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as asking:
                asking.sendall(f"GET /v1/shards HTTP/{version}\r\nconnection: close\r\n\r\n".encode())
                answer = b"".join(iter(lambda asking=asking: asking.recv(65536), b""))
            assert int(answer.split()[1]) == status
            assert (b'"kind": "invalid_usage"' in answer) == (status == 400)


def test_every_answer_says_that_it_is_no_page(http: TestClient) -> None:
    for answer in (http.get("/healthz"), http.get("/v1/shards"), http.get("/nowhere")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"


# --- what strangers are told


@pytest.mark.parametrize("is_broken", [False, True])
def test_only_who_may_do_all_is_told_where_the_stores_are(
    monkeypatch: pytest.MonkeyPatch, http: TestClient, tokens: Tokens, is_broken: bool
) -> None:
    """Anybody was told the URLs of both stores, without a token."""

    def broken(_: MemoryBlob) -> None:
        raise Unavailable("mem: does not answer")

    if is_broken:
        monkeypatch.setattr(MemoryBlob, "check", broken)
    wrong = {"authorization": "Bearer pt_admin_" + "x" * 43}  # a probe needs no token, so a wrong one does no harm
    for headers in ({}, wrong, *map(tokens.header, ("reader", "eu-writer", "manager"))):
        answer = http.get("/readyz", headers=headers)
        assert answer.status_code == (503 if is_broken else 200)
        assert "mem:" not in answer.text
    assert "mem:" in http.get("/readyz", headers=tokens.header("admin")).text


def test_a_server_with_too_much_to_do_does_not_say_that_a_store_is_away(http: TestClient) -> None:
    """Whoever operates it looked at the stores, which were well."""
    queued = http.app.state.service.work.io_queued  # type: ignore[attr-defined]
    queued.take(queued.most)
    try:
        answer = http.get("/readyz")
    finally:
        queued.give_back(queued.most)
    assert (answer.status_code, answer.json()["kind"]) == (429, "overloaded")
    assert "store" not in answer.text


# --- slips that cannot be undone


def test_an_upper_where_no_clock_counts_needs_the_word_force(http: TestClient, tokens: Tokens) -> None:
    """`upper=2^63-1` closed a shard for ever, and a since beyond the upper made it unreadable."""
    path, last = "/v1/shards/eu/orders", 2**63 - 1
    for verb, name in (
        (f"advance-upper?upper={last}", "manager"),
        (f"compare-and-append?format=csv&expected_upper=0&new_upper={last}", "writer"),
        (f"append?format=csv&lower=0&upper={2**62 + 1}", "writer"),
        ("downgrade-since?since=20300101", "manager"),
    ):
        answer = http.post(f"{path}/{verb}", headers=tokens.header(name))
        assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_usage"), verb
    shown = http.get(path, headers=tokens.header("manager")).json()
    assert (shown["since"], shown["upper"]) == ([0], [0])
    assert http.post(f"{path}/advance-upper?upper={last}&force=true", headers=tokens.header("manager")).is_success


@pytest.mark.parametrize(
    ("verb", "query"),
    [
        ("GET", "?past"), ("GET", "/timestamp-of?time"), ("PUT", "/tags/may?at"), ("POST", "/restore?as_of"),
        ("GET", "/snapshot?as_of"), ("GET", "/count?as_of"), ("GET", "/listen?after"), ("POST", "/upsert?read_time"),
    ],
)  # fmt: skip
def test_a_time_that_none_can_be_has_one_answer(http: TestClient, tokens: Tokens, verb: str, query: str) -> None:
    """It was 400 by most routes, and a view waited for it."""
    answer = http.request(verb, f"/v1/shards/eu/orders{query}={2**63 - 1}", headers=tokens.header("admin"))
    assert (answer.status_code, answer.json()["kind"]) == (422, "invalid_usage")


def test_a_token_takes_so_many_leases_and_no_more(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_state, "TOKEN_SHARD_LEASES_MAX", 2)
    location = Location(MemoryBlob(), MemoryConsensus(), background=InlineBackground())
    settings = ServerSettings(tokens_file=str(tokens.path))
    with TestClient(create_app(location, settings)) as http:
        http.put("/v1/shards/eu/orders", json=FIELDS, headers=tokens.header("admin"))

        def take(number: int, name: str) -> int:
            command = encoded(c.RegisterReader(ReaderId(f"r{number:032x}"), None, 60_000))
            path = "/v1/shards/eu/orders/commands"
            return int(http.post(path, content=command, headers=tokens.header(name)).status_code)

        assert [take(number, "reader") for number in (1, 2, 3, 2)] == [200, 200, 429, 200]
        assert take(4, "eu-reader") == 200
    location.close()


class _Signing(MemoryBlob):
    """A store that tells for how long it signs."""

    def presign_get(self, key: str, expires_s: int) -> str:
        return f"get for {expires_s}"

    def presign_put(self, key: str, expires_s: int) -> SignedPut:
        return SignedPut(f"put for {expires_s}", {"If-None-Match": "*"})


def test_a_signed_url_lives_no_longer_than_its_token(tmp_path: Path) -> None:
    """A14: for an hour more it did what a token that had ended could not."""
    settings = ServerSettings(tokens_file=str(tmp_path / "tokens.json"), presigned_s=600)
    path, headers, entries = f"/v1/blobs/{key('orders')}?presign=true", {}, []
    for name, scope, seconds in (("short", "write", 100), ("long", "write", 10_000), ("reader", "read", 10_000)):
        token, digest = mint(name)
        headers[name] = {"authorization": f"Bearer {token}"}
        until = datetime.fromtimestamp(time.time() + seconds, UTC).isoformat()
        entries.append({"id": name, "sha256": digest, "scopes": [scope], "expires": until})
    (tmp_path / "tokens.json").write_text(json.dumps({"tokens": entries}))
    location = Location(_Signing(), MemoryConsensus(), background=InlineBackground())
    with TestClient(create_app(location, settings)) as http:
        short, long, reader = (http.get(path, headers=headers[name]).json() for name in ("short", "long", "reader"))
    location.close()
    assert 1 <= short["expires_s"] <= 100
    assert short["put"] == f"put for {short['expires_s']}"
    assert long["expires_s"] == 600
    assert long["put_headers"] == {"If-None-Match": "*"}
    assert reader == {"expires_s": 600, "get": "get for 600", "put": None}


@pytest.mark.parametrize(("token_s", "certificate_s", "most_s"), [(None, 100, 100), (100, 50, 50)])
def test_a_signed_url_lives_no_longer_than_its_certificate(
    token_s: int | None, certificate_s: int, most_s: int, tmp_path: Path
) -> None:
    """It was good for ten minutes, though the certificate ended before."""
    settings = ServerSettings(tokens_file=str(tmp_path / "tokens.json"), presigned_s=600)
    entry: dict[str, object] = {"id": "etl", "certificate": "DNS:etl.test", "scopes": ["write"]}
    if token_s is not None:
        entry["expires"] = datetime.fromtimestamp(time.time() + token_s, UTC).isoformat()
    (tmp_path / "tokens.json").write_text(json.dumps({"tokens": [entry]}))
    location = Location(_Signing(), MemoryConsensus(), background=InlineBackground())
    app, peer = create_app(location, settings), Peer(frozenset({"DNS:etl.test"}), time.time() + certificate_s)

    connection = SimpleNamespace(peer=peer, assign_owner=lambda _: None)

    async def with_certificate(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, CONNECTION: connection}, receive, send)

    with TestClient(app):  # for its start and its end
        answer = TestClient(with_certificate).get(f"/v1/blobs/{key('orders')}?presign=true").json()
    location.close()
    assert 1 <= answer["expires_s"] <= most_s
    assert answer["put"] == f"put for {answer['expires_s']}"
