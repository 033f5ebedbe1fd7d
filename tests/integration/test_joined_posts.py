"""Posts that wait for one shard are prepared together, and answered, refused and given up one by one."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx2 as httpx
import pyarrow as pa
import pytest

from persist.client.server_writer import Names
from persist.commit.location import Location
from rpc import command_endpoint, post_batching
from rpc.app import create_app
from rpc.concurrency_limits import CALLER
from rpc.post_batching import PostGroups
from tests.support.embedded import client_of
from tests.support.location import memory_location

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())])
HOG, OTHER = "192.0.2.1", "192.0.2.2"
GOOD = b'{"id": %d, "text": "a"}\n{"id": %d}\n'
BAD = [
    b'{"id": null}', b'{"id": "no number"}', b'{"nowhere": 1}', b'{"id": 1, "id": 2}', b'{"id": 1}\n{',
    b'{"id": 1, "__time": 7}', b'{"id": 99999999999999999999}',
]  # fmt: skip
NDJSON = {"content-type": "application/x-ndjson"}


class House:
    """A server in this process, whose requests are tasks of one event loop."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self.app = create_app(location)
        self.client = client_of(location)
        self.client.create_shard("orders", SCHEMA, ["id"])

    async def post(self, body: bytes, address: str = "127.0.0.1") -> tuple[int, Any]:
        """Status and answer."""
        asgi = httpx.ASGITransport(self.app, client=(address, 1))
        async with httpx.AsyncClient(transport=asgi, base_url="http://127.0.0.1") as http:
            answer = await http.post("/v1/shards/orders/insert", content=body, headers=NDJSON)
        return answer.status_code, answer.json()

    def ids(self) -> Counter[int]:
        """How often each id is there."""
        table = self.client.shard("orders").snapshot().to_arrow()
        return Counter(dict(zip(table["id"].to_pylist(), table["__diff"].to_pylist(), strict=True)))

    @property
    def groups(self) -> PostGroups:
        groups: PostGroups = self.app.state.service.posts
        return groups


@pytest.fixture
def house() -> Iterator[House]:
    with closing(memory_location()) as location:
        yield House(location)


def test_each_is_answered_as_if_it_had_come_alone(house: House) -> None:
    async def story() -> None:
        pick = random.Random(7)
        numbers = iter(range(10**6))
        alone = {body: await house.post(body) for body in BAD}
        assert {status for status, _ in alone.values()} == {400}
        before = house.location.machine("orders").refresh().seqno
        bodies = [
            pick.choice([*BAD]) if pick.random() < 0.2 else GOOD % (next(numbers), next(numbers)) for _ in range(90)
        ]
        answers = await asyncio.gather(*map(house.post, bodies))
        expected: Counter[int] = Counter()
        for body, (status, told) in zip(bodies, answers, strict=True):
            if body in BAD:
                assert (status, told["detail"]) == (alone[body][0], alone[body][1]["detail"])
            else:
                assert status == 200, told
                expected.update(json.loads(line)["id"] for line in body.splitlines())
        assert house.ids() == expected
        commits = house.location.machine("orders").refresh().seqno - before
        assert commits < len(bodies) / 3, "they were prepared, and committed, together"

    asyncio.run(story())


@pytest.mark.parametrize("seed", range(8))
def test_who_goes_away_holds_up_nobody(house: House, seed: int) -> None:
    async def story() -> None:
        pick = random.Random(seed)
        acknowledged: set[int] = set()
        given: set[int] = set()
        for turn in range(12):
            numbers = [100 * turn + number for number in range(pick.randrange(1, 9))]
            given.update(numbers)
            posts = {number: asyncio.ensure_future(house.post(b'{"id": %d}' % number)) for number in numbers}
            for _ in range(pick.randrange(12)):
                await asyncio.sleep(0)
            for post in posts.values():
                if pick.random() < 0.5:
                    post.cancel()
            answers = await asyncio.gather(*posts.values(), return_exceptions=True)
            for number, answer in zip(posts, answers, strict=True):
                if not isinstance(answer, BaseException):
                    assert answer[0] == 200
                    acknowledged.add(number)
        assert (await house.post(b'{"id": -1}'))[0] == 200
        found = house.ids()
        assert set(found) <= given | {-1}
        assert acknowledged <= set(found)
        assert set(found.values()) == {1}
        await asyncio.sleep(0.01)  # for the task of the group to end
        assert not house.groups._waiting

    asyncio.run(story())


def test_what_fails_together_is_tried_one_by_one(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that is a fault of ours: each is told by its own try."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(PostGroups, "_stage", broken)
    answers = asyncio.run(_all(house, 20))
    assert [status for status, _ in answers] == [200] * 20
    assert house.ids() == Counter(range(20))


@pytest.fixture
def prepared_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the rows of each group take in memory."""
    found: list[int] = []
    together = PostGroups._stage

    def watched(self: PostGroups, name: str, names: Names, bodies: list[bytes]) -> list[Any]:
        found.append(sum(body.count(b"{") for body in bodies) * names.schema.row_bytes)
        return together(self, name, names, bodies)

    monkeypatch.setattr(PostGroups, "_stage", watched)
    return found


def test_a_group_holds_no_more_rows_than_are_prepared_in_a_moment(
    house: House, prepared_bytes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is answered meanwhile, and rows of two bytes may take hundreds in memory."""
    most = 200_000
    monkeypatch.setattr(post_batching, "GROUP_ROWS_BYTES_MAX", most)

    async def story() -> None:
        answers = await asyncio.gather(*(house.post(b'{"id":1}\n' * 900) for _ in range(30)))
        assert [status for status, _ in answers] == [200] * 30

    asyncio.run(story())
    assert house.ids() == {1: 27_000}
    assert 0 < max(prepared_bytes) <= most < sum(prepared_bytes)


def test_rows_on_one_line_are_counted(house: House, prepared_bytes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_endpoint, "AT_ONCE_ROWS_BYTES_MAX", 3_200)
    assert asyncio.run(house.post(b'{"id":1}' * 200))[0] == 200
    assert not prepared_bytes, "it is left to a thread"
    assert asyncio.run(house.post(b'{"id":1}' * 50))[0] == 200
    assert len(prepared_bytes) == 1
    assert house.ids() == {1: 250}


def test_the_share_of_the_one_who_came_first_bounds_no_other_one(house: House, prepared_bytes: list[int]) -> None:
    """Of what a caller may decode at once: a group is prepared by the server, for all of them."""
    service, rows = house.app.state.service, 2_000
    CALLER.set(HOG)
    service.work.decoded.take(service.limits.decoded_bytes_max)
    CALLER.set("")

    async def story() -> list[tuple[int, Any]]:
        first = house.post(b'{"id":1}' * rows, HOG)
        return await asyncio.gather(first, *(house.post(b'{"id":1}' * rows, OTHER) for _ in range(3)))

    answers = asyncio.run(story())
    assert [status for status, _ in answers] == [200] * 4
    assert len(prepared_bytes) == 1
    assert house.ids() == {1: 4 * rows}


async def _all(house: House, count: int) -> list[tuple[int, Any]]:
    return await asyncio.gather(*(house.post(b'{"id": %d}' % number) for number in range(count)))
