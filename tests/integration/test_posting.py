"""Posts of rows: a few go past the routes and without a thread, and are answered as all others are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, cast

import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from blob import Blob
from blob.memory_blobs import MemoryBlob
from consensus import Consensus
from consensus.memory_logs import MemoryConsensus
from persist.commit.location import Location
from rpc.app import create_app
from rpc.app_state import THIN_WRITER_LEASE_MS
from rpc.command_endpoint import AT_ONCE_BYTES_MAX, AT_ONCE_COLUMNS_MAX
from rpc.route import Route
from tests.support.asking import typed
from tests.support.blob_faults import FaultPlan
from tests.support.consensus_faults import FaultyConsensus
from tests.support.embedded import client_of
from tests.support.location import TestClock, memory_location

FIELDS = {"fields": [{"name": "id", "type": "int64", "key": True}, {"name": "text", "type": "string"}]}
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
NDJSON = {"content-type": "application/x-ndjson"}
ROW = b'{"id": 1, "text": "a"}\n'
MANY = b"".join(b'{"id": %d, "text": "%s"}\n' % (n, b"x" * 100) for n in range(AT_ONCE_BYTES_MAX // 50))


class House:
    """A server in this process over stores in memory, and what it did with its threads and its routes."""

    def __init__(self, blob: Blob | None = None, consensus: Consensus | None = None) -> None:
        self.clock = TestClock()
        self.blob, self.consensus = blob or MemoryBlob("mem:"), consensus or MemoryConsensus("mem:")
        self.location = memory_location(blob=self.blob, consensus=self.consensus, clock=self.clock)
        self.app = cast("Any", create_app(self.location))
        self.http = typed(TestClient(self.app, base_url="http://127.0.0.1"))
        self.threads = self.routed = 0
        work, routes = self.app.state.service.work, self.app.outermost._app
        run: Callable[..., Any] = work.run

        async def counted(*given: Any) -> Any:
            self.threads += 1
            return await run(*given)

        async def routing(*given: Any) -> None:
            self.routed += 1
            await routes(*given)

        work.run = counted
        self.app.outermost._app = routing

    def post(self, rest: str, body: bytes = ROW, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and answer, without what is another each time."""
        self.threads = self.routed = 0
        answer = self.http.post(f"/v1/shards/{rest}", content=body, headers={**NDJSON, **(headers or {})})
        told = answer.json()
        told.pop("request_id", None)
        return answer.status_code, told

    def rows(self, name: str = "eu/a") -> list[dict[str, Any]]:
        with client_of(self.location).shard(name).snapshot() as snapshot:
            found: list[dict[str, Any]] = snapshot.to_arrow().to_pylist()
            return found


@contextmanager
def opened(**stores: Any) -> Iterator[House]:
    house = House(**stores)
    with closing(house.location), house.http:
        assert house.http.put("/v1/shards/eu/a", json=FIELDS).status_code == 200
        assert house.post("eu/a/insert")[0] == 200  # its writer is registered
        yield house


@pytest.fixture
def house() -> Iterator[House]:
    with opened() as found:
        yield found


OTHERS = [
    # what the routes look at, or a thread: rest of the path, where `{upper}` is that of the shard, body, headers
    ("eu/a/insert?format=csv", b"id,text\n1,a\n", {}),
    ("eu/a/insert", MANY, {}),
    ("eu/a/insert?colour=red", ROW, {}),
    ("eu/a/insert?format=ndjson&format=ndjson", ROW, {}),
    ("eu/a/insert?format=", ROW, {}),
    ("eu/a/insert?format=xml", ROW, {}),
    ("eu/a/insert?token=", ROW, {}),
    ("eu/a/insert?token=" + "x" * 201, ROW, {}),
    ("eu/a/insert?token=a", ROW, {"idempotency-key": "b"}),
    ("eu/a/insert", b"{", {}),
    ("eu/a/insert", b'{"id": "x"}', {}),
    ("eu/a/insert", b'{"id": 1, "colour": 1}', {}),
    ("eu/a/insert", b'{"id": 1, "text": "a", "__time": 5}', {}),
    ("eu/a/insert", ROW, {"persist-info": "7"}),
    ("eu/a/insert", ROW, {"content-type": "image/png"}),
    ("eu/a/append?lower={upper}", ROW, {}),
    ("eu/a/append?lower=x&upper=2", ROW, {}),
    ("eu/a/append?lower=900&upper=1200", ROW, {}),
    ("eu/a/append?lower=2&upper=1", ROW, {}),
    ("eu/a/append?lower={upper}&upper=900&upper=901", ROW, {}),
    ("eu/a/append?lower=" + "1" * 40 + "&upper=2", ROW, {}),
    ("eu/none/insert", ROW, {}),
    ("a//b/insert", ROW, {}),
]
PLAIN = [
    # what needs neither routes nor a thread; the last one closes the shard
    ("eu/a/insert", ROW, {}),
    ("eu/a/insert?format=ndjson", ROW, {}),
    ("eu/a/insert?token=load-7", ROW, {}),
    ("eu/a/insert", ROW, {"idempotency-key": "load-8"}),
    ("eu/a/insert", b"", {}),
    ("eu/a/insert", ROW + b'{"id": 1, "text": "a", "__diff": -1}\n', {}),
    ("eu/a/insert", ROW, {"persist-info": '{"ticket": 7}'}),
    ("eu%2Fa/insert", ROW, {}),
    ("eu/a/append?lower={upper}&upper=500", ROW, {}),
    ("eu/a/append?lower=[0]&upper=[600]", ROW, {}),
    ("eu/a/compare-and-append?expected_upper=0&new_upper=700", ROW, {}),
    ("eu/a/compare-and-append?expected_upper={upper}&new_upper=700", ROW, {}),
    ("eu/a/compare-and-append?expected_upper={upper}&new_upper=[]", ROW, {}),
]


def test_the_routes_and_the_way_past_them_answer_the_same(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as other:
        for given in OTHERS + PLAIN:
            rest = given[0].replace("{upper}", str(house.location.machine("eu/a").state().upper.element))
            found = house.post(rest, *given[1:])
            assert given not in PLAIN or (house.routed, house.threads) == (0, 0), given
            with monkeypatch.context() as patched:
                patched.setattr(Route, "arguments", lambda _, query: None)
                assert other.post(rest, *given[1:]) == found, given
            assert other.routed == 1
        assert other.rows() == house.rows()


def test_what_takes_a_moment_goes_to_a_thread(house: House) -> None:
    assert house.post("eu/a/insert", MANY)[0] == 200
    assert (house.routed, house.threads) == (0, 1)
    assert house.post("eu/a/insert?format=csv", b"id,text\n1,a\n")[0] == 200
    assert house.threads == 1


SLOW = [
    # columns besides the key, and a body of a few bytes that takes more than a moment
    ([{"name": f"c{n}", "type": "int64"} for n in range(AT_ONCE_COLUMNS_MAX)], b'{"id": 1}\n'),
    ([{"name": "c", "type": "fixed_size_binary[4096]"}], b'{"id": 1}\n' * 100),
    ([{"name": "c", "type": "list<int64>"}], b'{"id": 1, "c": [1]}\n'),
]


@pytest.mark.parametrize(("columns", "body"), SLOW)
def test_few_bytes_that_stand_for_much_go_to_a_thread(columns: list[dict[str, Any]], body: bytes, house: House) -> None:
    fields = [{"name": "id", "type": "int64", "key": True}, *columns]
    assert house.http.put("/v1/shards/eu/slow", json={"fields": fields}).status_code == 200
    for _ in range(2):
        status, told = house.post("eu/slow/insert", body)
        assert status == 200, told
        assert house.threads == 1


@pytest.mark.parametrize("kind", ["fail_before", "fail_after"])
def test_what_was_not_answered_is_asked_again_and_lands_once(kind: str) -> None:
    plan = FaultPlan(7, {kind: 0.3}, sleep=lambda _: None)
    plan.heal()
    with opened(consensus=FaultyConsensus(MemoryConsensus("mem:"), plan)) as house:
        plan.resume()
        for number in range(1, 60):
            token = f"?token=load-{number}" if number % 2 else ""
            status, told = house.post(f"eu/a/insert{token}", b'{"id": %d, "text": "b"}' % number)
            assert status == 200, told
        plan.heal()
        assert plan.counts[kind] > 5
        found = [row["id"] for row in house.rows() if row["text"] == "b"]
        assert found == list(range(1, 60))


def test_a_writer_that_was_idle_for_long_is_followed_by_another(house: House) -> None:
    house.clock.advance_ms(THIN_WRITER_LEASE_MS * 2)
    house.location.machine("eu/a").refresh()
    assert house.post("eu/a/insert")[0] == 200
    assert house.post("eu/a/insert")[0] == 200
    assert sum(row["__diff"] for row in house.rows()) == 3


def test_another_life_of_the_name_gets_the_rows(house: House) -> None:
    other = Location(house.blob, house.consensus, settings=house.location.settings, clock=house.clock)
    with closing(other):
        client = client_of(other)
        client.shard("eu/a").drop(force=True)
        client.create_shard("eu/a", SCHEMA, ["id"])
        status, told = house.post("eu/a/insert")
        assert status == 200, told
        assert [row["id"] for row in house.rows()] == [1]
