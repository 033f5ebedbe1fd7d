"""The service as plain HTTP, without a socket: statuses, problem+json, bodies, limits, doors."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from msgspec.msgpack import encode as packb
from starlette.testclient import TestClient

from blob.memory_blobs import MemoryBlob
from compactor.on_demand import maintain
from consensus import ConsensusUnavailable
from consensus.memory_logs import MemoryConsensus
from persist.client.embedded import EmbeddedTransport
from persist.commit.location import Location, LocationSettings
from persist.core.blob_keys import part_key
from persist.core.ids import PartId, WriterId, shard_id_of
from rpc import command_endpoint
from rpc.app import create_app
from rpc.settings import Limits, ServerSettings
from tests.support.asking import typed
from tests.support.location import InlineBackground

FIELDS = {"fields": [{"name": "id", "type": "string", "key": True}, {"name": "amount", "type": "int64"}]}
LIMITS = Limits(rows_bytes_max=20_000, blob_bytes_max=20_000, rows_max=100)


@pytest.fixture
def location() -> Iterator[Location]:
    settings = LocationSettings(metered=True)
    opened = Location(MemoryBlob(), MemoryConsensus(), settings=settings, background=InlineBackground())
    yield opened
    opened.close()


@pytest.fixture
def http(location: Location, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setattr(command_endpoint, "COMMAND_BYTES_MAX", 10_000)
    app = create_app(location, ServerSettings(limits=LIMITS))
    with typed(TestClient(app, base_url="http://127.0.0.1")) as client:
        client.put("/v1/shards/orders", json=FIELDS)
        yield client


def ipc(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def key(shard: str = "orders", number: int = 1) -> str:
    return part_key(shard_id_of(shard), WriterId("w" + "0" * 32), PartId(f"p{number:032x}"))


def problem(response: Any, status: int, kind: str) -> str:
    """The sentence of a problem+json answer."""
    assert (response.status_code, response.headers["content-type"]) == (status, "application/problem+json")
    body = response.json()
    assert (body["status"], body["kind"], body["type"]) == (status, kind, f"urn:persist:{kind}")
    assert body["detail"]
    assert "\n" not in body["detail"]
    return str(body["detail"])


# --- that it works


def test_health(http: TestClient) -> None:
    assert http.get("/healthz").json() == {"status": "ok"}
    assert http.get("/readyz").json()["status"] == "ok"


def test_not_ready_without_its_stores(http: TestClient, location: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> None:
        raise ConsensusUnavailable("the store does not answer")

    monkeypatch.setattr(location.consensus, "check", away)
    problem(http.get("/readyz"), 503, "unavailable")
    assert http.get("/healthz").status_code == 200


def test_creating_twice_is_fine_and_creating_another_is_not(http: TestClient) -> None:
    again = http.put("/v1/shards/orders", json=FIELDS)
    assert (again.status_code, again.json()["upper"]) == (200, [0])
    other = {"fields": [{"name": "id", "type": "int64", "key": True}]}
    assert "another schema" in problem(http.put("/v1/shards/orders", json=other), 422, "shard_exists")


def test_a_serialized_schema_and_a_list_of_fields_mean_the_same(http: TestClient) -> None:
    arrow = pa.schema([("id", pa.string()), ("amount", pa.int64())])
    body = {"schema": base64.b64encode(arrow.serialize()).decode(), "key": ["id"]}
    assert http.put("/v1/shards/orders", json=body).status_code == 200


def test_rows_after_the_end_of_an_arrow_stream_are_not_lost_in_silence(http: TestClient) -> None:
    stream = ipc(pa.table({"id": ["a"], "amount": [1]}))
    header = {"content-type": "application/vnd.apache.arrow.stream"}
    said = problem(http.post("/v1/shards/orders/insert", content=stream * 2, headers=header), 400, "invalid_usage")
    assert "has data after the end of its Arrow stream" in said
    assert http.get("/v1/shards/orders").json()["upper"] == [0]


def test_a_snapshot_in_columns_and_expanded(http: TestClient) -> None:
    http.post("/v1/shards/orders/insert?format=csv", content=b"id,amount,__diff\na,1,2\nb,2,1\n")
    got = http.get("/v1/shards/orders/snapshot?format=csv&columns=id&expand=true").text
    assert got.splitlines() == ['"id"', '"a"', '"a"', '"b"']


def test_a_token_of_200_characters_is_the_one_that_python_makes(http: TestClient, location: Location) -> None:
    from persist.client.client import Client
    from persist.core.ids import token_of_key

    text = "load-" + "x" * 195
    http.post("/v1/shards/orders/insert?format=csv", content=b"id,amount\na,1\n", headers={"idempotency-key": text})
    shard = Client(EmbeddedTransport(location, maintain)).shard("orders")
    again = shard.insert([{"id": "a", "amount": 1}], token=token_of_key(text))
    assert again.lower.element == 0
    assert http.get("/v1/shards/orders").json()["upper"] == [1]


def test_frontiers_move_by_post(http: TestClient) -> None:
    assert http.post("/v1/shards/orders/advance-upper?upper=9").json()["upper"] == [9]
    moved = http.post("/v1/shards/orders/downgrade-since?since=4").json()
    assert moved["shard_since"] == [4]
    assert http.post("/v1/shards/orders/advance-upper?upper=[]").json()["upper"] == []


def test_request_ids_come_back(http: TestClient) -> None:
    assert http.get("/healthz", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = http.get("/healthz", headers={"x-request-id": "not ok!"}).headers["x-request-id"]
    assert len(made) == 32


def test_the_api_describes_itself_with_examples(http: TestClient) -> None:
    api = http.get("/openapi.json").json()
    assert "/v1/shards/{name}/commands" in api["paths"]
    assert "examples" in api["paths"]["/v1/shards/{name}"]["put"]["requestBody"]["content"]["application/json"]


def test_metrics_count_by_verb(http: TestClient) -> None:
    http.get("/v1/shards/nope")
    text = http.get("/metrics").text
    assert 'persist_requests_total{status="200",verb="put-shard"} 1.0' in text
    assert 'persist_errors_total{kind="unknown_shard",verb="get-shard"} 1.0' in text
    assert 'persist_shard_upper{shard="orders"}' in text


# --- bad input: one sentence, the right status, nothing written


BAD_REQUESTS: list[tuple[str, str, bytes | None, int, str]] = [
    ("GET", "/nowhere", None, 404, "invalid_usage"),
    ("PATCH", "/v1/shards/orders", None, 405, "invalid_usage"),
    ("GET", "/v1/shards/nope", None, 404, "unknown_shard"),
    ("GET", "/v1/shards/..%2F..%2Fetc", None, 400, "invalid_usage"),
    ("GET", "/v1/shards?limit=0", None, 422, "invalid_usage"),
    ("GET", "/v1/shards/orders?past=x", None, 422, "invalid_usage"),
    ("PUT", "/v1/shards/new", b"{", 400, "invalid_usage"),
    ("PUT", "/v1/shards/new", b'{"fields": [{"name": "a", "type": "money"}]}', 400, "invalid_usage"),
    ("PUT", "/v1/shards/new", b'{"schema": "AAAA", "key": ["a"]}', 400, "invalid_usage"),
    ("POST", "/v1/shards/orders/commands", b'{"command": "drop"}', 400, "invalid_usage"),
    ("POST", "/v1/shards/orders/commands", packb(["fly", [9]]), 501, "upgrade_needed"),
    ("POST", "/v1/shards/orders/commands", packb(["advance_upper", [9], None, False, "twice"]), 501, "upgrade_needed"),
    ("POST", "/v1/shards/nope/commands", packb(["drop"]), 404, "unknown_shard"),
    ("POST", "/v1/shards/orders/downgrade-since?since=9&cursor=typo", b"", 400, "invalid_usage"),
    ("POST", f"/v1/shards/orders/downgrade-since?since=1&cursor={'c' * 257}", b"", 422, "invalid_usage"),
    ("POST", "/v1/shards/orders/insert?format=csv", b"id,amount\na,x\n", 400, "invalid_usage"),
    ("POST", "/v1/shards/orders/insert?format=csv", b"id,amount\n" + b"a,1\n" * 101, 400, "invalid_usage"),
    ("POST", "/v1/shards/orders/append?lower=0", b"", 422, "invalid_usage"),
    ("POST", "/v1/shards/orders/insert?writer=me", b"", 400, "invalid_usage"),
    ("GET", "/v1/shards/orders/snapshot?columns=colour", None, 400, "invalid_usage"),
    ("GET", "/v1/shards/orders/snapshot?format=xml", None, 400, "invalid_usage"),
    ("GET", "/v1/shards/orders/snapshot?as_of=5&wait=0", None, 409, "not_complete"),
    ("GET", "/v1/shards/orders/snapshot?as_of=5&as_of=0", None, 400, "invalid_usage"),
    ("DELETE", "/v1/shards/orders?forse=true", None, 400, "invalid_usage"),
    ("POST", "/v1/shards/orders/insert", b'{"id": "a"}', 400, "invalid_usage"),
    ("POST", "/v1/shards/orders/advance-upper?upper=[5", b"", 400, "invalid_usage"),
    ("POST", "/v1/shards/orders/advance-upper?upper=%D9%A3", b"", 400, "invalid_usage"),  # a digit of another script
    ("POST", "/v1/shards/orders/advance-upper?upper=3&upper=9", b"", 400, "invalid_usage"),
    ("PUT", "/v1/shards/x", b'{"fields": [{"name": "\\ud800", "type": "int64"}]}', 400, "invalid_usage"),
    ("GET", "/v1/blobs/location-id", None, 400, "invalid_usage"),
    ("GET", "/v1/blobs/../../etc/passwd", None, 404, "invalid_usage"),
    ("GET", "/v1/blobs/..%2F..%2Fetc%2Fpasswd", None, 400, "invalid_usage"),
    ("PUT", f"/v1/blobs/{key()}x", b"x", 400, "invalid_usage"),
    ("GET", f"/v1/blobs/{key()}", None, 404, "blob_missing"),
]


def test_bad_requests(http: TestClient, location: Location) -> None:
    http.post("/v1/shards/orders/insert?format=csv", content=b"id,amount\nkept,1\n")
    before = location.machine("orders").state()
    for method, path, body, status, kind in BAD_REQUESTS:
        problem(http.request(method, path, content=body), status, kind)
        assert http.get("/v1/shards/orders").json()["upper"] == [1], path
    after = location.machine("orders").refresh()
    assert (after.schemas, after.critical_readers) == (before.schemas, before.critical_readers)
    assert http.get("/v1/shards").json()["shards"] == ["orders"]


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
def test_a_probe_may_carry_a_query(http: TestClient, path: str) -> None:
    """Proxies and monitors append what they like; a server must not look dead for it."""
    assert http.get(f"{path}?probe=17").status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/shards/orders/insert"), ("POST", "/v1/shards/orders/commands"), ("PUT", f"/v1/blobs/{key()}")],
)
def test_an_oversized_body_is_refused_whether_it_says_so_or_not(http: TestClient, method: str, path: str) -> None:
    problem(http.request(method, path, content=b"x" * 30_000), 413, "body_too_large")
    problem(http.request(method, path, content=iter([b"x" * 1_000] * 30)), 413, "body_too_large")


@pytest.mark.parametrize("path", ["snapshot?as_of=99&wait=0", "count?as_of=99&wait=0", "snapshot?as_of=99&wait=0.01"])
def test_a_time_to_come_is_no_failure_of_the_server(http: TestClient, path: str) -> None:
    """It was a 503, which alerts count."""
    response = http.get(f"/v1/shards/orders/{path}")
    problem(response, 409, "not_complete")
    assert response.json()["details"] == {"as_of": 99, "upper": [0]}


def test_the_wrong_expected_upper(http: TestClient) -> None:
    url = "/v1/shards/orders/compare-and-append?format=csv&expected_upper=5&new_upper=6"
    response = http.post(url, content=b"id,amount\na,1\n")
    problem(response, 409, "upper_mismatch")
    assert response.json()["details"] == {"expected": [5], "actual": [0]}


def test_a_bug_is_a_problem_too(http: TestClient, location: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(location, "names", broken)
    assert "secret" not in problem(http.get("/v1/shards"), 500, "persist_error")


def test_a_token_is_given_once_and_has_1_to_200_characters(http: TestClient) -> None:
    """A header of any length was taken, an empty one meant none, and of two that differ one was ignored."""

    def post(query: str = "", key: str | None = None) -> Any:
        headers = {"content-type": "text/csv"} | ({} if key is None else {"idempotency-key": key})
        return http.post(f"/v1/shards/orders/insert{query}", content=b"id,amount\na,1\n", headers=headers)

    for refused in (
        post(key=""),
        post(key="x" * 201),
        post("?token="),
        post("?token=" + "x" * 201),
        post("?token=a", "b"),
    ):
        assert "token" in problem(refused, 400, "invalid_usage")
    assert [post("?token=a", "a").json(), post("?token=a").json(), post(key="a").json()] == [post(key="a").json()] * 3
    assert post(key="x" * 200).json()["lower"] == [1]


def test_a_key_where_nothing_remembers_it_is_refused(http: TestClient) -> None:
    """It was ignored, so the same key was taken with one request after another."""
    for method, path in (
        ("POST", "/v1/shards/orders/advance-upper?upper=5"),
        ("POST", "/v1/shards/orders/downgrade-since?since=0"),
        ("PUT", "/v1/shards/orders"),
        ("DELETE", "/v1/shards/orders"),
    ):
        refused = http.request(method, path, headers={"idempotency-key": "a"})
        assert "omit it" in problem(refused, 400, "invalid_usage")
    assert http.get("/v1/shards/orders", headers={"idempotency-key": "a"}).json()["upper"] == [0]


def test_an_append_is_answered_with_its_interval_the_first_time_and_again(http: TestClient) -> None:
    """The first answer told what was left of it, the retry the whole."""
    http.post("/v1/shards/orders/advance-upper?upper=6")
    rows = b"id,amount,__time\na,1,5\nb,1,6\n"
    for query in ("", "", "&token=x", "&token=x"):
        told = http.post(f"/v1/shards/orders/append?format=csv&lower=4&upper=7{query}", content=rows).json()
        assert (told["lower"], told["upper"]) == ([4], [7])
    told = http.post("/v1/shards/orders/append?format=csv&lower=5&upper=9&token=y", content=rows).json()
    assert (told["lower"], told["upper"]) == ([5], [9])
    assert http.get("/v1/shards/orders/snapshot?format=csv&columns=id").text == '"id","__diff"\n"b",1\n'


def test_a_wait_that_ends_answers_with_the_upper_that_there_is(http: TestClient) -> None:
    answer = http.get("/v1/shards/orders?past=50&timeout=0.01")
    assert (answer.status_code, answer.json()["upper"]) == (200, [0])


def test_what_had_landed_is_answered_until_the_name_is_used_again(http: TestClient) -> None:
    def post(token: str) -> Any:
        return http.post(f"/v1/shards/orders/insert?format=csv&token={token}", content=b"id,amount\na,1\n")

    minted = f"i{http.get('/v1/location').headers['x-request-id']}"
    first = [post(minted).json(), post("free").json()]
    http.delete("/v1/shards/orders?force=true")
    assert [post(minted).json(), post("free").json()] == first
    problem(post("another"), 404, "unknown_shard")
    http.put("/v1/shards/orders", json=FIELDS)
    problem(post(minted), 409, "outcome_forgotten")
    assert post("free").json()["lower"] == [0]


def test_a_refusal_names_the_path_as_it_was_asked_for(http: TestClient) -> None:
    """It named a path that the router had made of it, `/v1/shards/eu:orders`."""
    assert "/v1/shards/eu/orders;" in problem(http.patch("/v1/shards/eu/orders"), 405, "invalid_usage")


# --- the door to blobs


def test_parts_go_in_once_and_out_in_ranges(http: TestClient) -> None:
    url = f"/v1/blobs/{key()}"
    assert http.put(url, content=b"0123456789").status_code == 204
    assert http.put(url, content=b"0123456789").status_code == 204
    problem(http.put(url, content=b"other"), 409, "conflict")
    assert http.get(url).content == b"0123456789"
    part = http.get(url, headers={"range": "bytes=2-4"})
    assert (part.status_code, part.content) == (206, b"234")
    assert http.head(url).headers["content-length"] == "10"
    assert http.head(f"/v1/blobs/{key(number=2)}").status_code == 404
    problem(http.get(url, headers={"range": "bytes=8-12"}), 416, "blob_missing")
    problem(http.get(url, headers={"range": "lines=1-2"}), 400, "invalid_usage")


def test_a_bundle_can_be_read_and_not_written(http: TestClient, location: Location) -> None:
    bundle = key().replace(".parquet", ".bundle")
    location.blob.put(bundle, b"0123")
    assert http.get(f"/v1/blobs/{bundle}").content == b"0123"
    problem(http.put(f"/v1/blobs/{bundle}", content=b"0123"), 400, "invalid_usage")


# --- limits


def test_beyond_the_limit_of_queued_commands_the_answer_is_429(location: Location) -> None:
    settings = ServerSettings(limits=replace(LIMITS, commands_max=0))
    with TestClient(create_app(location, settings), base_url="http://127.0.0.1") as http:
        http.put("/v1/shards/orders", json=FIELDS)
        response = http.post("/v1/shards/orders/advance-upper?upper=1")
        problem(response, 429, "overloaded")
        assert response.headers["retry-after"] == "1"


def test_beyond_the_limit_of_listeners_and_snapshots_the_answer_is_429(location: Location) -> None:
    settings = ServerSettings(limits=replace(LIMITS, listeners_max=0, snapshots_max=0))
    with TestClient(create_app(location, settings), base_url="http://127.0.0.1") as http:
        http.put("/v1/shards/orders", json=FIELDS)
        problem(http.get("/v1/shards/orders/listen"), 429, "overloaded")
        problem(http.get("/v1/shards/orders/snapshot"), 429, "overloaded")


def test_text_that_is_not_utf8_is_refused_in_every_form(http: TestClient) -> None:
    """Whatever is stored can be shown: Arrow itself does not look when it reads Parquet or Arrow."""
    bad = pa.array([b"\xff\xfe"], pa.binary())
    columns = http.get("/v1/shards/orders").json()["fields"]
    text = next(column["name"] for column in columns if column["type"] in ("string", "large_string"))
    table = pa.table({text: bad.view(pa.string())})
    parquet = pa.BufferOutputStream()
    pa.parquet.write_table(table, parquet)
    bodies = {
        "arrow": ipc(table),
        "parquet": bytes(parquet.getvalue()),
        "ndjson": b'{"' + text.encode() + b'":"\xff\xfe"}\n',
        "csv": text.encode() + b"\n\xff\xfe\n",
    }
    for form, body in bodies.items():
        answer = http.post(f"/v1/shards/orders/insert?format={form}", content=body)
        assert answer.status_code == 400, form
        assert answer.json()["kind"] == "invalid_usage"
    assert http.get("/v1/shards/orders").json()["upper"] == [0]
