"""Following a listen stream: every update once and in order, whatever becomes of servers and connections."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pytest

from persist.client.listen import ListenEvent
from persist.core.errors import NotReadable, Unavailable
from persist.core.frontier import Antichain
from persist.core.ids import SeqNo, shard_id_of
from persist.core.shard_view import SeenVersion
from persist.formats.http_messages import PROBLEM_JSON, error_to_json
from persist.http_client.http_calls import HttpCalls, Servers, rendezvous
from rpc.client.http_transport import follow
from rpc.listen_frames import FRAMES, HEADER_BYTES_MAX, FrameSource, frame, frames, heartbeat
from tests.support.answering import CLOSE, Answering, answer, chunked
from tests.support.location import TestClock

COLUMNS = pa.schema([("id", pa.string()), ("__time", pa.int64()), ("__diff", pa.int64())])


def event(lower: int, upper: int, *ids: str) -> ListenEvent:
    rows = [{"id": one, "__time": lower, "__diff": 1} for one in ids]
    return ListenEvent(Antichain(lower), Antichain(upper), pa.Table.from_pylist(rows, schema=COLUMNS))


SOURCE = FrameSource(SeenVersion(SeqNo(7), "c" * 32), shard_id_of("eu/orders"))
FIRST, SECOND, THIRD = (frame(event(n, n + 1, name), SOURCE) for n, name in enumerate("abc"))
QUIET = heartbeat(Antichain(1), FRAMES, SOURCE)


@contextmanager
def following(*urls: str, until: int = 3, after: int | None = None) -> Iterator[Iterator[ListenEvent]]:
    clock = TestClock()
    calls = HttpCalls(Servers(urls, clock), clock, token=None, timeout_s=5.0)
    try:
        yield follow(calls, "eu/orders", after, Antichain(until))
    finally:
        calls.close()


def ids(events: Iterator[ListenEvent]) -> list[str]:
    return [one for each in events for one in each.updates["id"].to_pylist()]


@pytest.mark.parametrize(
    ("says", "asked_from"),
    [
        ([chunked(FIRST, QUIET, SECOND, THIRD)], [0]),
        ([chunked(FIRST[:5], FIRST[5:] + SECOND[:3], SECOND[3:] + THIRD)], [0]),
        ([chunked(FIRST), chunked(SECOND), chunked(THIRD)], [0, 1, 2]),
        ([chunked(FIRST, SECOND[:40], is_whole=False), chunked(SECOND, THIRD)], [0, 1]),
        ([chunked(FIRST, SECOND[:40]), chunked(SECOND, THIRD)], [0, 1]),
        ([CLOSE, chunked(FIRST, SECOND, THIRD)], [0, 0]),
        ([chunked(QUIET, is_whole=False), chunked(FIRST, SECOND, THIRD)], [0, 0]),
        ([chunked(FIRST) + b"more", chunked(FIRST, SECOND, THIRD)], [0, 0]),
        ([chunked(FIRST, b"\x00\x00\x00\x02{]"), chunked(SECOND, THIRD)], [0, 1]),
        ([chunked(FIRST, b"\xff\xff\xff\xff"), chunked(SECOND, THIRD)], [0, 1]),
    ],
)
def test_every_update_comes_once_and_in_order(says: list[bytes], asked_from: list[int]) -> None:
    with Answering(*says) as server, following(server.url) as events:
        assert ids(events) == ["a", "b", "c"]
        afters = [f"&after={start - 1}" if start else "" for start in asked_from]
        assert server.targets == [f"GET /v1/shards/eu%2Forders/listen?until=3{after}" for after in afters]


def test_it_goes_on_at_another_server_from_where_it_was() -> None:
    with Answering(CLOSE) as one, Answering(CLOSE) as two, following(one.url, two.url) as events:
        is_one = rendezvous([one.url, two.url], "eu/orders")[0] == one.url
        home, other = (one, two) if is_one else (two, one)
        home.say(chunked(FIRST, is_whole=False), CLOSE)
        other.say(chunked(SECOND, THIRD))
        assert ids(events) == ["a", "b", "c"]
        assert other.targets == ["GET /v1/shards/eu%2Forders/listen?until=3&after=0"]


def test_it_goes_on_by_the_id_of_the_last_frame_also_of_a_heartbeat() -> None:
    """By the time alone a server cannot tell that the name belongs to another shard by now, or the log is another."""
    with (
        Answering(chunked(QUIET), chunked(FIRST), CLOSE, chunked(SECOND, THIRD)) as server,
        following(server.url) as events,
    ):
        assert ids(events) == ["a", "b", "c"]
        sent = [re.findall(r"(?im)^last-event-id: (\S+)", text.decode()) for text in server.requests]
        assert sent == [[], [SOURCE.id_at(Antichain(1))], [SOURCE.id_at(Antichain(1))], [SOURCE.id_at(Antichain(1))]]


def test_a_step_of_several_events_counts_only_when_the_frontier_has_moved() -> None:
    part = frame(ListenEvent(Antichain(0), Antichain(0), event(0, 1, "a").updates), SOURCE)
    with Answering(chunked(part), chunked(part, FIRST, SECOND, THIRD)) as server, following(server.url) as events:
        found = list(events)
        assert [each.upper.element for each in found] == [0, 0, 1, 2, 3]


def test_a_frontier_that_is_reached_already_asks_nobody() -> None:
    with Answering(CLOSE) as server, following(server.url, until=3, after=2) as events:
        assert list(events) == []
        assert server.requests == []


def test_what_cannot_be_listened_to_is_told_at_once() -> None:
    gone = json.dumps(error_to_json(NotReadable("since is 9"), 410)).encode()
    with Answering(answer(410, gone, PROBLEM_JSON)) as server, following(server.url) as events:
        with pytest.raises(NotReadable, match="since is 9"):
            list(events)
        assert len(server.requests) == 1


def test_when_nobody_answers_any_more_it_is_told_and_can_be_resumed() -> None:
    with Answering(chunked(FIRST), CLOSE) as server, following(server.url) as events:
        assert next(events).upper == Antichain(1)
        with pytest.raises(Unavailable, match="resume later"):
            list(events)


def cut(data: bytes, size: int) -> Iterator[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


@pytest.mark.parametrize("size", [1, 3, 1_000_000])
def test_frames_are_read_however_they_arrive(size: int) -> None:
    found = list(frames(cut(FIRST + QUIET + SECOND, size)))
    assert [each.event and each.event.updates["id"].to_pylist() for each in found] == [["a"], None, ["b"]]
    assert [each.id for each in found] == [SOURCE.id_at(Antichain(time)) for time in (1, 1, 2)]


def test_a_frame_that_is_cut_is_not_given() -> None:
    for size in range(len(FIRST)):
        assert list(frames(iter([FIRST[:size]]))) == []


def header(**changed: object) -> bytes:
    data = json.dumps({"lower": [0], "upper": [1], "rows": 0, "bytes": 0, **changed}).encode()
    return len(data).to_bytes(4, "big") + data


BAD: Sequence[bytes] = [
    (HEADER_BYTES_MAX + 1).to_bytes(4, "big"),
    (2).to_bytes(4, "big") + b"{]",
    (2).to_bytes(4, "big") + b"[]",
    header(bytes=-1),
    header(bytes=float("inf")),
    (200_000).to_bytes(4, "big") + b"[" * 200_000,
    header(bytes=10**18),
    header(bytes="many"),
    header(upper=7),
    header(upper=[1, 2]),
    header(id=7),
    header(id="1.7.0\r\nx: y"),
    header(id="x" * 201),
    header(bytes=3) + b"xyz",
]


@pytest.mark.parametrize("data", BAD)
def test_what_is_no_frame_is_one_error_after_which_it_can_be_resumed(data: bytes) -> None:
    found = frames(iter([FIRST + data + bytes(100)]))
    assert next(found).event is not None
    with pytest.raises(Unavailable):
        next(found)
