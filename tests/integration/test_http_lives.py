"""Who resumes a stream goes on in the shard where it began, or is told that its name belongs to another one now."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist.commit.location import Location
from persist.core.ids import shard_id_of
from rpc.app import create_app
from tests.support.asking import typed
from tests.support.location import InlineBackground

FIELDS = {"fields": [{"name": "id", "type": "string", "key": True}]}
EVENTS = {"accept": "text/event-stream"}
LISTEN = "/v1/shards/orders/listen"


class Stores:
    """Two stores that several servers share."""

    def __init__(self) -> None:
        self.blob, self.consensus = MemoryBlob(), MemoryConsensus()

    def server(self) -> TestClient:
        location = Location(self.blob, self.consensus, background=InlineBackground())
        return typed(TestClient(create_app(location), base_url="http://127.0.0.1"))


@pytest.fixture
def stores() -> Stores:
    return Stores()


@pytest.fixture
def http(stores: Stores) -> Iterator[TestClient]:
    with stores.server() as client:
        yield client


def begin(http: TestClient, *ids: str) -> None:
    assert http.put("/v1/shards/orders", json=FIELDS).status_code == 200
    for text in ids:
        sent = http.post("/v1/shards/orders/insert?format=csv", content=f"id\n{text}\n")
        assert sent.status_code == 200


def drop(http: TestClient) -> None:
    assert http.delete("/v1/shards/orders?force=true").status_code == 200


def last_id(http: TestClient, query: str) -> str:
    """The id of the last event of a stream that ends by itself."""
    told = http.get(f"{LISTEN}{query}", headers=EVENTS).text
    return [line.removeprefix("id: ") for line in told.splitlines() if line.startswith("id: ")][-1]


def resume(http: TestClient, given: str, query: str = "?until=6") -> tuple[int, str]:
    """The status, and the kind of an error or the rows."""
    answer = http.get(f"{LISTEN}{query}", headers={**EVENTS, "last-event-id": given})
    is_problem = answer.headers.get("content-type") == "application/problem+json"
    return answer.status_code, answer.json()["kind"] if is_problem else answer.text


GONE = (404, "unknown_shard")


def test_an_id_of_an_earlier_shard_is_refused_and_skips_no_rows_of_the_new_one(http: TestClient) -> None:
    """Both lives share one log, so the commit in the id was found, and the stream went on at time 3 of the new one."""
    begin(http, "old0", "old1", "old2")
    given = last_id(http, "?until=3")
    assert resume(http, given, "?until=3") == (200, "")
    drop(http)
    assert resume(http, given) == GONE
    begin(http, *(f"new{n}" for n in range(6)))
    assert resume(http, given) == GONE
    told = http.get(LISTEN, headers={"last-event-id": given}).json()["detail"]
    assert "of an earlier shard 'orders'" in told
    assert "belongs to another one now" in told
    status, rows = resume(http, last_id(http, "?until=3"))
    assert (status, [f"new{n}" in rows for n in range(6)]) == (200, [False] * 3 + [True] * 3)


def test_the_end_of_an_earlier_shard_is_not_the_end_of_the_new_one(http: TestClient) -> None:
    """It was answered with 204, no more will come; on a dropped shard too."""
    begin(http, "old0")
    http.post("/v1/shards/orders/advance-upper?upper=[]")
    given = last_id(http, "")
    assert given.startswith("closed.")
    assert resume(http, given, "") == (204, "")
    drop(http)
    for text in (given, "closed"):
        assert resume(http, text, "") == GONE
    begin(http, "new0")
    for text in (given, "closed"):
        assert resume(http, text, "") == GONE


def test_an_id_without_a_shard_is_of_the_first_one(http: TestClient) -> None:
    """Ids had this form before names could be used again."""
    begin(http, "old0", "old1")
    for given in ("1", last_id(http, "?until=1").rpartition(".")[0]):
        assert resume(http, given, "?until=2")[0] == 200
        assert "old1" in resume(http, given, "?until=2")[1]
    before = last_id(http, "?until=1").rpartition(".")[0]
    drop(http)
    begin(http, "new0", "new1")
    for given in ("1", before):
        assert resume(http, given, "?until=2") == GONE


def test_an_id_that_names_the_end_of_a_shard_which_goes_on_is_refused(http: TestClient) -> None:
    begin(http, "a")
    assert resume(http, "closed", "") == (400, "invalid_usage")
    given = last_id(http, "?until=1")
    others = (f"{given}.more", f"{given[:-1]}x", given.replace(".s", ".w"), f"1..{shard_id_of('orders')}")
    for text in ("9" * 5_000, "9" * 19, "-1", "soon", *others):
        assert resume(http, text, "?until=1") == (400, "invalid_usage")


def test_a_server_that_has_not_heard_of_the_new_shard_asks_before_it_refuses(stores: Stores, http: TestClient) -> None:
    begin(http, "old0")
    with stores.server() as late:
        assert resume(late, last_id(http, "?until=1"), "?until=1") == (200, "")
        drop(http)
        begin(http, "new0", "new1")
        status, rows = resume(late, last_id(http, "?until=1"), "?until=2")
        assert (status, "new1" in rows) == (200, True)
