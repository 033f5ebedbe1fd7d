"""What was found by those who attacked quotas and tokens as callers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import urllib3

from persist.core import commands as c
from persist.core.batch import Run
from persist.core.blob_keys import part_key
from persist.core.frontier import Antichain
from persist.core.ids import PartId, Token, WriterId, shard_id_of
from persist.parts import DIFF, TIME, ShardSchema
from persist.parts.codec import encode_inline, encode_parquet
from persist.parts.python_values import KEYS_MAX
from rpc.auth import mint
from rpc.quotas import RATES
from tests.integration.test_quotas import FIELDS, FIVE, House
from tests.support.server import Server
from tests.support.shard import make_part
from tests.support.waiting import wait_until

WRITER, TOKEN = WriterId("w" + "1" * 32), Token("i" + "1" * 32)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    found = House(tmp_path)
    with found.client:
        for name in ("eu/a", "eu/b"):
            assert found.ask("admin", "PUT", f"/v1/shards/{name}", FIELDS).status_code == 200
        yield found
    found.location.close()


def insert_of(rows: int, number: int = 1) -> c.Insert:
    return c.Insert(WRITER, TOKEN, (Run((make_part(number, rows=rows, shard="eu/a"),)),))


# --- quotas


def test_what_a_command_said_of_its_rows_stopped_all_writes_of_a_token(house: House) -> None:
    house.says(default={"rows_per_s": 1_000})
    assert house.ask("etl", "POST", "/v1/shards/eu/a/commands", insert_of(10**12)).status_code in (400, 404, 410)
    assert house.ask("etl", "POST", "/v1/shards/eu/b/insert", FIVE).status_code == 200


REFUSED = [
    # quota, what is refused, what there is room for afterwards
    ("shards", ("POST", "/v1/clones", {"source": "eu/none", "name": "eu/x"}), ("PUT", "/v1/shards/eu/y", FIELDS)),
    (
        "bytes",
        ("POST", "/v1/shards/eu/a/compare-and-append?expected_upper=7&new_upper=9", FIVE),
        ("POST", "/v1/shards/eu/a/insert", FIVE),
    ),
    (
        "rows_per_s",
        ("POST", "/v1/shards/eu/a/compare-and-append?expected_upper=7&new_upper=9", FIVE * 20),
        ("POST", "/v1/shards/eu/a/insert", FIVE),
    ),
]


@pytest.mark.parametrize(("quota", "refused", "good"), REFUSED)
def test_what_was_refused_used_up_a_quota(quota: str, refused: Any, good: Any, house: House) -> None:
    limits = {quota: {"shards": 3, "bytes": 200, "rows_per_s": 10}[quota]}
    house.says(**({"default": limits} if quota in RATES else {"prefixes": {"eu/": limits}}))
    service = house.client.app.state.service  # type: ignore[attr-defined]
    service.usage.refresh()
    for _ in range(12):
        answer = house.ask("etl", *refused)
        assert answer.status_code in (400, 404, 409), answer.text
    found = house.ask("etl", *good)
    assert found.status_code == 200, found.text


def test_what_a_look_has_seen_by_itself_is_not_taken_back(house: House) -> None:
    house.says(prefixes={"eu/": {"bytes": 1_000}})
    assert house.ask("etl", "POST", "/v1/shards/eu/a/insert", FIVE).status_code == 200
    tally = house.client.app.state.service.usage  # type: ignore[attr-defined]
    turn = tally.admit("eu/a", "bytes", 500)
    tally.refresh()
    before = tally.used("eu/", "bytes")
    tally.take_back("eu/a", "bytes", 500, turn)
    assert tally.used("eu/", "bytes") == before > 0


# --- streams


@pytest.mark.parametrize("ends", ["taken away", "expired"])
def test_a_stream_went_on_after_its_token_was_no_longer_good(ends: str, tmp_path: Path) -> None:
    reader, of_reader = mint("reader")
    writer, of_writer = mint("writer")
    entry: dict[str, object] = {"id": "reader", "sha256": of_reader, "scopes": ["read"]}
    entries = [entry, {"id": "writer", "sha256": of_writer, "scopes": ["admin"]}]
    tokens = tmp_path / "tokens.json"
    write_tokens(tokens, entries)
    with Server(tmp_path / "d", "--tokens", str(tokens)) as server, urllib3.PoolManager() as http:

        def ask(method: str, path: str, body: bytes = b"") -> int:
            header = {"authorization": f"Bearer {writer}", "content-type": "application/x-ndjson"}
            return http.request(method, f"{server.url}/v1/shards/{path}", body=body, headers=header).status

        assert ask("PUT", "a", json.dumps(FIELDS).encode()) == 200
        header = {"authorization": f"Bearer {reader}", "accept": "text/event-stream"}
        stream = http.request("GET", f"{server.url}/v1/shards/a/listen", headers=header, preload_content=False)
        assert stream.status == 200
        assert ask("POST", "a/insert", b'{"id": 1}') == 200
        heard = stream.read1(1 << 16)
        while b'"id":1' not in heard:
            heard += stream.read1(1 << 16)
        if ends == "expired":
            entry["expires"] = (datetime.now(UTC) + timedelta(seconds=1)).isoformat()
        write_tokens(tokens, entries if ends == "expired" else entries[1:])
        wait_until(
            lambda: http.request("GET", f"{server.url}/v1/location", headers=header).status == 401, "it is good no more"
        )
        assert ask("POST", "a/insert", b'{"id": 2}') == 200
        rest = b""
        with suppress(urllib3.exceptions.ProtocolError):
            while piece := stream.read1(1 << 16):
                rest += piece
    assert b'"id":2' not in rest
    assert b"event: error" in rest
    assert b"unauthorized" in rest


def write_tokens(path: Path, entries: list[dict[str, Any]]) -> None:
    made = path.with_suffix(".new")
    made.write_text(json.dumps({"tokens": entries}))
    made.chmod(0o600)
    made.replace(path)


# --- bytes, leases, rows under another name

RANDOM = random.Random(1)
MANY = b"".join(b'{"id": %d}\n' % RANDOM.getrandbits(62) for _ in range(20_000))  # 160 kB, which nothing compresses


def test_deleting_and_restoring_in_turn_went_past_the_quota_of_bytes(house: House) -> None:
    """84.7 MB at a quota of 20 MB: only what came in was counted, not what the verbs wrote."""
    assert house.ask("admin", "POST", "/v1/shards/eu/a/insert", MANY).status_code == 200
    tally = house.client.app.state.service.usage  # type: ignore[attr-defined]
    house.says(prefixes={"eu/": {"bytes": 300_000}})
    tally.refresh()
    statuses = []
    for _ in range(12):
        deleted = house.ask("etl", "POST", "/v1/shards/eu/a/delete", {"where": "id >= 0"})
        statuses += [deleted.status_code, house.ask("etl", "POST", "/v1/shards/eu/a/restore?as_of=0").status_code]
    assert set(statuses) == {200, 429}
    state = house.location.machine("eu/a").state()
    assert sum(part.size for part in state.trace.parts()) < 3 * 300_000 + (1 << 20)


def test_a_clone_counts_what_it_names_at_once(house: House) -> None:
    assert house.ask("admin", "POST", "/v1/shards/eu/a/insert", MANY).status_code == 200
    house.says(prefixes={"eu/": {"bytes": 200_000}})
    house.client.app.state.service.usage.refresh()  # type: ignore[attr-defined]
    done = [
        house.ask("etl", "POST", "/v1/clones", {"source": "eu/a", "name": f"eu/c{number}"}).status_code
        for number in range(20)
    ]
    assert done.count(200) < 6
    assert set(done) <= {200, 429}


def test_who_may_not_write_added_rows_by_a_truncation(house: House) -> None:
    assert house.ask("admin", "POST", "/v1/shards/eu/a/insert", FIVE).status_code == 200
    schema = ShardSchema(pa.schema([pa.field("id", pa.int64())]), ("id",))
    for diff, status in ((1, 403), (-1, 200)):
        rows = pa.table({"id": [0], TIME: [0], DIFF: [diff]}, schema=schema.updates_schema)
        runs = (Run((encode_inline(rows, schema, 1, PartId(f"p{1:032x}")),)),)
        truncate = c.Rewrite(WRITER, TOKEN, Antichain(1), 0, c.TRUNCATE, runs, truncates=1)
        done = house.ask("upkeep", "POST", "/v1/shards/eu/a/commands", truncate)
        assert done.status_code == status, done.text
    assert house.ask("etl", "GET", "/v1/shards/eu/a/count").json()["count"] == 4


def test_a_part_that_an_append_dropped_counted_no_more(house: House) -> None:
    """Of an interval that the shard has already nothing is committed: the part's blob stays, and counts."""
    assert house.ask("etl", "POST", "/v1/shards/eu/a/advance-upper?upper=1").status_code == 200
    house.says(prefixes={"eu/": {"bytes": 100_000}})
    schema = ShardSchema(pa.schema([pa.field("id", pa.int64())]), ("id",))
    done = []
    for number in range(1, 30):
        part_id = PartId(f"p{number:032x}")
        ids = pa.array(sorted(RANDOM.getrandbits(62) for _ in range(1_000)))
        rows = pa.table({"id": ids, TIME: [0] * 1_000, DIFF: [1] * 1_000}, schema=schema.updates_schema)
        part, data = encode_parquet(rows, schema, 1, part_id, part_key(shard_id_of("eu/a"), WRITER, part_id))
        done.append(house.ask("etl", "PUT", f"/v1/blobs/{part.key}", data).status_code)
        if done[-1] == 204:
            append = c.Append(WRITER, Token(f"i{number:032x}"), Antichain(0), Antichain(1), (Run((part,)),))
            answer = house.ask("etl", "POST", "/v1/shards/eu/a/commands", append)
            assert answer.status_code == 200, answer.text
            house.client.app.state.service.usage.refresh()  # type: ignore[attr-defined]
    assert 5 < done.count(204) < 15
    assert set(done) == {204, 429}


DECIMALS = {
    "fields": [
        {"name": "id", "type": "decimal128(10, 2)", "key": True},
        {"name": "l", "type": "list<decimal128(9, 1)>"},
    ]
}
INSERTS = [{"when": "not matched", "then": "insert"}]
FAR = ["1e-999999999", "1E-0999999999", "1e+999999999", "-3.5e-77777"]


@pytest.mark.parametrize("far", FAR)
def test_a_decimal_written_with_a_far_exponent_ended_the_server(far: str, house: House) -> None:
    """A reader could do so by the key with which a snapshot begins."""
    assert house.ask("admin", "PUT", "/v1/shards/eu/d", DECIMALS).status_code == 200
    shard = "/v1/shards/eu/d"
    row = {"id": far, "l": []}
    asked = [
        house.ask("etl", "POST", f"{shard}/insert", json.dumps(row).encode()),
        house.ask("etl", "POST", f"{shard}/insert", json.dumps({"id": "1", "l": [far]}).encode()),
        house.ask("etl", "POST", f"{shard}/insert?format=csv", f"id,l\n{far},[]\n".encode()),
        house.ask("etl", "POST", f"{shard}/delete", {"keys": [[far]]}),
        house.ask("etl", "POST", f"{shard}/delete", {"where": f"id = {far}"}),
        house.ask("etl", "POST", f"{shard}/merge", {"rows": [row], "clauses": INSERTS}),
        house.ask("etl", "POST", f"{shard}/erasures", ('{"keys": [[' + far + "]]}").encode()),
        house.ask("etl", "GET", f"{shard}/snapshot?start_key=" + json.dumps([far])),
        house.ask("etl", "GET", f"{shard}/snapshot?key=" + json.dumps([far])),
    ]
    assert {answer.status_code for answer in asked} <= {400, 503}, [answer.text for answer in asked]


def test_more_keys_than_a_request_may_have_are_refused(house: House) -> None:
    """Two requests with 800,000 keys took 800 MB and a minute."""
    refused = house.ask("etl", "POST", "/v1/shards/eu/a/delete", {"keys": [[number] for number in range(KEYS_MAX + 1)]})
    assert refused.status_code == 400
    assert f"give at most {KEYS_MAX} at once" in refused.json()["detail"]
