"""Quotas at every door of a server: JSON and rows, commands of rich clients, parts; and the file that changes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist import Token
from persist.commit.clocks_and_ids import SystemClock
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.blob_keys import part_key
from persist.core.ids import PartId, WriterId, shard_id_of
from persist.formats.records import encoded
from rpc.app import create_app
from rpc.quotas import COUNTS, RATES
from rpc.settings import ServerSettings
from rpc.tls import LOOK_AGAIN_S
from tests.support.location import InlineBackground
from tests.support.token_file import bearer, write_tokens

FIELDS = {"fields": [{"name": "id", "type": "int64", "key": True}]}
WRITER, TOKEN = WriterId("w" + "1" * 32), Token("i" + "1" * 32)
FIVE = b"".join(b'{"id": %d}\n' % n for n in range(5))
ROW = b'{"id": 1}\n'
MERGED = {"rows": [{"id": n} for n in range(10)], "clauses": [{"when": "not matched", "then": "insert"}]}


class Clock(SystemClock):
    """The machine's, and what is added to it: time for a file to be looked at again."""

    more_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.more_s


class House:
    def __init__(self, directory: Path) -> None:
        tokens, self.path = directory / "tokens.json", directory / "quotas.json"
        granted = {"admin": ("admin",), "etl": ("admin", "eu/"), "other": ("admin", "us/"), "upkeep": ("maintain",)}
        self.tokens = write_tokens(tokens, granted)
        tokens.chmod(0o600)
        self.path.write_text("{}")
        self.clock = Clock()
        self.location = Location(MemoryBlob(), MemoryConsensus(), background=InlineBackground(), clock=self.clock)
        settings = ServerSettings(tokens_file=str(tokens), quotas=str(self.path))
        self.client = TestClient(create_app(self.location, settings))

    def says(self, **rules: Any) -> None:
        self.path.write_text(json.dumps({**rules, "ask": f"ops-{time.monotonic_ns()}"}))
        self.clock.more_s += LOOK_AGAIN_S + 0.1
        assert self.ask("admin", "GET", "/v1/location").status_code == 200

    def ask(self, token: str, method: str, path: str, body: Any = None) -> Any:
        header = bearer(self.tokens[token])
        if isinstance(body, (bytes, c.Command)):
            data = encoded(body) if isinstance(body, c.Command) else body
            kind = "application/vnd.persist.record" if isinstance(body, c.Command) else "application/x-ndjson"
            return self.client.request(method, path, content=data, headers={**header, "content-type": kind})
        return self.client.request(method, path, json=body, headers=header)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    found = House(tmp_path_factory.mktemp("quotas"))
    with found.client:
        for name in ("eu/a", "us/a"):
            assert found.ask("admin", "PUT", f"/v1/shards/{name}", FIELDS).status_code == 200
            # A clone of an empty shard holds no byte: nothing would be counted.
            assert found.ask("admin", "POST", f"/v1/shards/{name}/insert", ROW).status_code == 200
        yield found
    found.location.close()


@pytest.fixture
def house(one: House) -> House:
    one.says()
    return one


def blob(number: int) -> str:
    return f"/v1/blobs/{part_key(shard_id_of('eu/a'), WRITER, PartId(f'p{number:032x}'))}"


# what is asked for (a number makes it another one each time), by quota: every door by which it is used up
DOORS: list[tuple[str, str, str, str, Any]] = [
    ("requests_per_s", "a view", "GET", "/v1/shards/eu/a", None),
    ("requests_per_s", "a snapshot", "GET", "/v1/shards/eu/a/snapshot", None),
    ("requests_per_s", "a stream", "GET", "/v1/shards/eu/a/listen?until=0", None),
    ("requests_per_s", "a list", "GET", "/v1/shards?prefix=eu/", None),
    ("requests_per_s", "figures", "GET", "/metrics", None),
    ("requests_per_s", "a command", "POST", "/v1/shards/eu/a/commands", c.ReadRetention()),
    ("requests_per_s", "a part", "HEAD", blob(1), None),
    ("rows_per_s", "rows", "POST", "/v1/shards/eu/a/insert", ROW * 10),
    ("rows_per_s", "a verb", "POST", "/v1/shards/eu/a/overwrite", FIVE),
    ("rows_per_s", "a merge", "POST", "/v1/shards/eu/a/merge", MERGED),
    ("bytes", "a part", "PUT", "blob", b"part of a part"),
    ("bytes", "rows", "POST", "/v1/shards/eu/a/insert", ROW),
    ("bytes", "a verb", "POST", "/v1/shards/eu/a/upsert", ROW),
    ("bytes", "a restore", "POST", "/v1/shards/eu/a/restore?as_of=0", None),
    ("bytes", "a clone", "POST", "/v1/clones", {"source": "eu/a", "name": "eu/new-{}"}),
    ("shards", "a shard", "PUT", "/v1/shards/eu/new-{}", FIELDS),
    ("shards", "a clone", "POST", "/v1/clones", {"source": "eu/a", "name": "eu/new-{}"}),
]  # fmt: skip


def test_every_quota_has_a_door() -> None:
    assert {door[0] for door in DOORS} == {*RATES, *COUNTS}


def made(body: Any, number: int) -> Any:
    return json.loads(json.dumps(body).replace("{}", str(number))) if isinstance(body, dict) else body


@pytest.mark.parametrize(("quota", "door", "method", "path", "body"), DOORS)
def test_every_door_counts(quota: str, door: str, method: str, path: str, body: Any, house: House) -> None:
    by = "token" if quota in RATES else "prefix"
    most = 1 if quota in RATES else 0
    limits = {quota: most}
    house.says(**({"tokens": {"etl": limits}} if by == "token" else {"prefixes": {"eu/": limits}}))
    found = None
    first = time.monotonic_ns()
    for number in range(20):
        where = blob(first + number) if path == "blob" else path.replace("{}", str(first + number))
        found = house.ask("etl", method, where, made(body, first + number))
        if found.status_code == 429:
            break
        assert found.status_code in (200, 204, 404), found.text
    assert found is not None
    assert found.status_code == 429, f"{door} is not counted"
    assert int(found.headers["retry-after"]) >= 1
    if method != "HEAD":
        told = found.json()
        assert told["kind"] == "overloaded"
        assert (told["details"]["quota"], told["details"]["most"]) == (quota, most)
        assert "ask ops-" in told["detail"]
    if method != "HEAD" and by == "token":
        other = house.ask("other", "POST", "/v1/shards/us/a/insert", ROW)
        assert other.status_code == 200, other.text
