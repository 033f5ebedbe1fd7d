"""What was found by those who attacked quotas, the audit and tokens as callers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import urllib3

from persist.core import commands as c
from persist.core.batch import Run
from persist.core.ids import Token, WriterId
from rpc.auth import mint
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


def test_what_a_command_said_of_its_rows_stopped_all_writes_under_a_prefix(house: House) -> None:
    house.says(prefixes={"eu/": {"rows_per_s": 1_000}})
    assert house.ask("etl", "POST", "/v1/shards/eu/a/commands", insert_of(10**12)).status_code in (400, 404, 410)
    assert house.ask("admin", "POST", "/v1/shards/eu/b/insert", FIVE).status_code == 200


def test_what_the_quota_of_a_token_refused_was_counted_by_that_of_the_prefix(house: House) -> None:
    house.says(tokens={"etl": {"rows_per_s": 1}}, prefixes={"eu/": {"rows_per_s": 100}})
    refused = 0
    for _ in range(300):
        refused += house.ask("etl", "POST", "/v1/shards/eu/a/insert", FIVE).status_code == 429
    assert refused > 200
    assert house.ask("admin", "POST", "/v1/shards/eu/b/insert", FIVE).status_code == 200


REFUSED = [
    # quota, what is refused, what there is room for afterwards
    ("shards", ("POST", "/v1/clones", {"source": "eu/none", "name": "eu/x"}), ("PUT", "/v1/shards/eu/y", FIELDS)),
    (
        "cursors",
        ("POST", "/v1/shards/eu/a/downgrade-since?since=99&cursor=c1", None),
        ("POST", "/v1/shards/eu/a/downgrade-since?since=0&cursor=c2", None),
    ),
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
    house.says(default={quota: {"shards": 3, "cursors": 1, "bytes": 200, "rows_per_s": 10}[quota]})
    service = house.client.app.state.service  # type: ignore[attr-defined]
    service.tally.look()
    for _ in range(12):
        answer = house.ask("etl", *refused)
        assert answer.status_code in (400, 404, 409), answer.text
    found = house.ask("etl", *good)
    assert found.status_code == 200, found.text


def test_what_a_look_has_seen_by_itself_is_not_taken_back(house: House) -> None:
    house.says(default={"bytes": 1_000})
    assert house.ask("etl", "POST", "/v1/shards/eu/a/insert", FIVE).status_code == 200
    tally = house.client.app.state.service.tally  # type: ignore[attr-defined]
    turn = tally.admit("eu/a", "bytes", 500)
    tally.look()
    before = tally.used("eu/", "bytes")
    tally.take_back("eu/a", "bytes", 500, turn)
    assert tally.used("eu/", "bytes") == before > 0


def test_parts_that_were_never_committed_went_past_the_quota_of_a_prefix(house: House) -> None:
    house.says(prefixes={"eu/": {"bytes_per_s": 1_000}})
    codes = []
    for number in range(1, 7):
        part = make_part(number, shard="eu/a")
        codes.append(house.ask("etl", "PUT", f"/v1/blobs/{part.key}", bytes(20_000)).status_code)
    assert codes.count(429) >= 4, codes


# --- streams


@pytest.mark.parametrize("ends", ["taken away", "expired"])
def test_a_stream_went_on_after_its_token_was_no_longer_good(ends: str, tmp_path: Path) -> None:
    reader, of_reader = mint("reader")
    writer, of_writer = mint("writer")
    expires = datetime.now(UTC) + timedelta(seconds=8)
    entry = {"id": "reader", "sha256": of_reader, "scopes": ["read"]}
    entries = [entry, {"id": "writer", "sha256": of_writer, "scopes": ["admin"]}]
    if ends == "expired":
        entry["expires"] = expires.isoformat()
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
        if ends == "taken away":
            write_tokens(tokens, entries[1:])
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
