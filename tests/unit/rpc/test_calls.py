"""Calls and listen streams of a client: which server is asked, how often, and what the caller is told."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pyarrow as pa
import pytest

import persist
from blob import BlobUnavailable
from persist.client.listen import ListenEvent
from persist.commit.clocks_and_ids import SystemClock
from persist.core.errors import (
    Conflict,
    Corruption,
    Indeterminate,
    InvalidUsage,
    NotReadable,
    Overloaded,
    PersistError,
    Unavailable,
    UpgradeNeeded,
    UpperMismatch,
)
from persist.core.frontier import Antichain
from persist.core.ids import SeqNo, shard_id_of
from persist.core.shard_view import SeenVersion
from persist.core.state import Policy
from persist.formats.http_messages import PROBLEM_JSON, PROTOCOL_VERSION, error_to_json
from persist.http_client.http_calls import Call, HttpCalls, Servers, rendezvous
from persist.http_client.http_connection import Broken, ConnectionPool, Reply
from rpc.client.http_stores import HttpBlob
from rpc.client.http_transport import HttpTransport
from rpc.listen_frames import FRAMES, FrameSource, frame, heartbeat
from tests.support.answering import CLOSE, Answering, answer, chunked
from tests.support.followed import HEADER_BYTES_MAX, follow, frames
from tests.support.location import AscendingIds, TestClock

TIMEOUT_S = 5.0
GOOD = answer(200, b"{}")
HALF = answer(200, b'{"upper": [1]}')[:-3]


def problem(error: PersistError, status: int) -> bytes:
    return answer(status, json.dumps(error_to_json(error, status)).encode(), PROBLEM_JSON)


BUSY = problem(Overloaded("slow down"), 429)
AWAY = problem(Unavailable("it did not happen"), 503)


def nobody() -> str:
    """The URL of a port where nobody listens."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@contextmanager
def calls_to(*urls: str, token: str | None = None) -> Iterator[HttpCalls]:
    clock = TestClock()
    calls = HttpCalls(Servers(urls, clock), clock, token=token, timeout_s=TIMEOUT_S)
    try:
        yield calls
    finally:
        calls.close()


@pytest.mark.parametrize("broken", [CLOSE, HALF, b"220 mail ready\r\n"])
def test_a_safe_call_that_breaks_is_asked_again(broken: bytes) -> None:
    with Answering(broken, GOOD, then_close=True) as server, calls_to(server.url) as calls:
        assert calls.call(Call("GET", "/x", shard="s")).data == b"{}"
        assert server.targets == ["GET /x", "GET /x"]


@pytest.mark.parametrize("broken", [CLOSE, HALF, b"220 mail ready\r\n"])
def test_an_unsafe_call_that_breaks_may_have_happened_and_is_not_asked_again(broken: bytes) -> None:
    with Answering(broken, GOOD, then_close=True) as server, calls_to(server.url) as calls:
        with pytest.raises(Indeterminate, match="same token"):
            calls.call(Call("POST", "/x", shard="s", body=b"insert", safe=False))
        assert server.targets == ["POST /x"]


@pytest.mark.parametrize("is_safe", [True, False])
def test_a_server_that_is_not_there_is_passed_over(is_safe: bool) -> None:
    with Answering(GOOD) as server, calls_to(server.url, gone := nobody()) as calls:
        shard = next(name for name in map(str, range(99)) if rendezvous([server.url, gone], name)[0] == gone)
        assert calls.call(Call("POST", "/x", shard=shard, safe=is_safe)).status == 200


def test_an_unsafe_call_that_reaches_nobody_did_not_happen() -> None:
    with calls_to(nobody(), nobody()) as calls, pytest.raises(Unavailable, match="cannot be reached"):
        calls.call(Call("POST", "/x", shard="s", safe=False))


def test_an_unsafe_call_is_made_elsewhere_where_a_server_says_that_it_did_not_happen() -> None:
    with Answering(AWAY) as first, Answering(GOOD) as second, calls_to(first.url, second.url) as calls:
        assert calls.call(Call("POST", "/x", shard="s", safe=False)).status == 200
        assert len(second.requests) == 1


def test_an_overloaded_server_is_not_passed_over() -> None:
    with Answering(BUSY) as first, Answering(BUSY) as second, calls_to(first.url, second.url) as calls:
        with pytest.raises(Overloaded):
            calls.call(Call("POST", "/x", shard="s", safe=False))
        assert len(first.requests) + len(second.requests) == 1, "the other would only fight over the shard"


def test_a_safe_call_is_repeated_until_the_timeout_and_no_longer() -> None:
    with Answering(AWAY) as server, calls_to(server.url) as calls:
        with pytest.raises(Unavailable):
            calls.call(Call("GET", "/x", shard="s"))
        assert len(server.requests) >= TIMEOUT_S / 0.5


@contextmanager
def hurried_calls_to(*urls: str) -> Iterator[HttpCalls]:
    """Calls by the real clock, with little time."""
    clock = SystemClock()
    with closing(HttpCalls(Servers(urls, clock), clock, token=None, timeout_s=0.5)) as calls:
        yield calls


@pytest.mark.parametrize("is_safe", [True, False])
def test_an_answer_that_drips_has_the_time_of_one_call(is_safe: bool) -> None:
    """Each byte had the whole timeout."""
    with (
        Answering(answer(200, bytes(10_000)), drip_s=0.05) as server,
        hurried_calls_to(server.url) as calls,
        pytest.raises(Unavailable if is_safe else Indeterminate),
    ):
        calls.call(Call("POST", "/x", shard="s", safe=is_safe))


def test_all_servers_together_have_the_time_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each server had the whole timeout."""
    clock, given = TestClock(), []

    def hang(_pool: ConnectionPool, *request: Any) -> Reply:
        given.append(request[4])
        clock.sleep(min(given[-1], 0.75 * TIMEOUT_S))
        raise Broken("nothing came in time")

    monkeypatch.setattr(ConnectionPool, "request", hang)
    calls = HttpCalls(Servers((nobody(), nobody()), clock), clock, token=None, timeout_s=TIMEOUT_S)
    with closing(calls), pytest.raises(Unavailable, match="in time"):
        calls.call(Call("GET", "/x", shard="s"))
    assert given == [TIMEOUT_S, TIMEOUT_S / 4]


def test_an_error_of_the_server_is_raised_with_its_details_and_not_repeated() -> None:
    lost = problem(UpperMismatch("lost the race", expected=[1], actual=[7]), 409)
    with Answering(lost) as server, calls_to(server.url) as calls:
        with pytest.raises(UpperMismatch) as caught:
            calls.call(Call("POST", "/x", shard="s", safe=False))
        assert caught.value.details == {"expected": [1], "actual": [7]}
        assert len(server.requests) == 1


def test_what_is_missing_is_an_answer_to_head() -> None:
    missing = b"HTTP/1.1 404 Not Found\r\ncontent-length: 30\r\n\r\n"
    with Answering(missing) as server, calls_to(server.url) as calls:
        assert [calls.call(Call("HEAD", "/x", shard="s")).status for _ in range(3)] == [404] * 3


def test_the_token_goes_with_every_request() -> None:
    with Answering(GOOD) as server, calls_to(server.url, token="secret") as calls:
        calls.call(Call("GET", "/x", shard="s", headers={"accept": "text/csv"}))
        assert b"\r\nauthorization: Bearer secret\r\naccept: text/csv\r\n" in server.requests[0]


def test_a_connection_that_the_server_has_closed_meanwhile_costs_nothing() -> None:
    with Answering(GOOD, then_close=True) as server, calls_to(server.url) as calls:
        for number in range(5):
            calls.call(Call("POST", "/x", shard="s", safe=False))
            server.wait_closed(number + 1)
        assert len(server.requests) == 5


def test_bytes_that_come_after_an_answer_are_not_taken_for_the_next_one() -> None:
    with Answering(GOOD + answer(200, b"stale"), GOOD) as server, calls_to(server.url) as calls:
        with pytest.raises(Indeterminate):
            calls.call(Call("POST", "/x", shard="s", safe=False))
        assert calls.call(Call("POST", "/x", shard="s", safe=False)).data == b"{}"


def test_a_line_break_in_a_header_is_never_sent() -> None:
    with Answering(GOOD) as server, calls_to(server.url) as calls:
        for path, headers in (("/x y\r\nx: 1", {}), ("/x", {"a": "b\r\nc: d"}), ("/x", {"a": "b\nc: d"})):
            with pytest.raises(ValueError, match="line break"):
                calls.call(Call("GET", path, shard="s", headers=headers))
        assert server.requests == []


# --- following a listen stream: every update once and in order, whatever becomes of servers and connectio

COLUMNS = pa.schema([("id", pa.string()), ("__time", pa.int64()), ("__diff", pa.int64())])


def event_of(lower: int, upper: int, *ids: str) -> ListenEvent:
    rows = [{"id": one, "__time": lower, "__diff": 1} for one in ids]
    return ListenEvent(Antichain(lower), Antichain(upper), pa.Table.from_pylist(rows, schema=COLUMNS))


SOURCE = FrameSource(SeenVersion(SeqNo(7), "c" * 32), shard_id_of("eu/orders"))
FIRST, SECOND, THIRD = (frame(event_of(n, n + 1, name), SOURCE) for n, name in enumerate("abc"))
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


@pytest.mark.parametrize(("says", "asked_from"), [
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
])  # fmt: skip
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
    part = frame(ListenEvent(Antichain(0), Antichain(0), event_of(0, 1, "a").updates), SOURCE)
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


BAD_FRAMES: Sequence[bytes] = [
    (HEADER_BYTES_MAX + 1).to_bytes(4, "big"), (2).to_bytes(4, "big") + b"{]", (2).to_bytes(4, "big") + b"[]",
    header(bytes=-1), header(bytes=float("inf")), (200_000).to_bytes(4, "big") + b"[" * 200_000,
    header(bytes=10**18), header(bytes="many"), header(upper=7), header(upper=[1, 2]), header(id=7),
    header(id="1.7.0\r\nx: y"), header(id="x" * 201), header(bytes=3) + b"xyz",
]  # fmt: skip


@pytest.mark.parametrize("data", BAD_FRAMES)
def test_what_is_no_frame_is_one_error_after_which_it_can_be_resumed(data: bytes) -> None:
    found = frames(iter([FIRST + data + bytes(100)]))
    assert next(found).event is not None
    with pytest.raises(Unavailable):
        next(found)


# --- answers of http that are no answers of persist: each is one error of the tree

DEEP = b"[" * 100_000
BLOB = "sx/px"


@contextmanager
def calls_answered(said: bytes) -> Iterator[HttpCalls]:
    """Calls to a server that always says this."""
    clock = TestClock()
    with (
        Answering(said) as server,
        closing(HttpCalls(Servers([server.url], clock), clock, token=None, timeout_s=60.0)) as calls,
    ):
        yield calls


@pytest.mark.parametrize("body", [b"{}", b"[]", b"7", DEEP, b'{"shards": 7}', b'{"shards": [1]}', b"\xff", b""])
def test_names_that_are_none(body: bytes) -> None:
    with calls_answered(answer(200, body)) as calls, pytest.raises(Corruption, match="persist server"):
        HttpTransport(calls, HttpBlob(calls, "mem:"), Policy(), TestClock(), AscendingIds()).names("", "", 10)


@pytest.mark.parametrize(("key", "value"), [
    ("version", "x"), ("version", None), ("blob", ["x"]), ("blob", {"url": "x"}), ("policy", []),
    ("policy", {"batches_max": 1e999}),
])  # fmt: skip
def test_a_location_that_is_none(key: str, value: object) -> None:
    good = {"version": PROTOCOL_VERSION, "blob": {"url": "mem:", "proof": ""}, "policy": {}}
    said = answer(200, json.dumps({**good, key: value}).encode())
    with Answering(said) as server, pytest.raises(InvalidUsage, match="not a persist server"):
        persist.connect(server.url)


@pytest.mark.parametrize("body", [DEEP, b"{}", b"[]", b'{"version": %d}' % PROTOCOL_VERSION])
def test_an_answer_that_is_no_location(body: bytes) -> None:
    with Answering(answer(200, body)) as server, pytest.raises(InvalidUsage, match="not a persist server"):
        persist.connect(server.url)


def test_a_location_of_another_version_may_look_otherwise() -> None:
    with Answering(answer(200, b'{"version": 99}')) as server, pytest.raises(UpgradeNeeded, match="99"):
        persist.connect(server.url)


@pytest.mark.parametrize("name", ["message", "self", "cls"])
def test_a_problem_may_have_details_of_any_name(name: str) -> None:
    body = json.dumps({"kind": "conflict", "detail": "lost", "details": {name: "x"}}).encode()
    with calls_answered(answer(409, body, PROBLEM_JSON)) as calls, pytest.raises(Conflict, match="lost") as told:
        calls.call(Call("GET", "/x"))
    assert told.value.details == {name: "x"}


@pytest.mark.parametrize(("status", "told"), [(500, Unavailable), (404, PersistError)])
def test_a_problem_that_is_nested_too_deep(status: int, told: type[PersistError]) -> None:
    with (
        calls_answered(answer(status, DEEP, PROBLEM_JSON)) as calls,
        pytest.raises(told, match="without an error of persist"),
    ):
        calls.call(Call("GET", "/x"))


def test_a_blob_whose_age_a_proxy_has_dropped() -> None:
    with calls_answered(answer(200)) as calls, pytest.raises(BlobUnavailable, match="persist-modified-ms"):
        HttpBlob(calls, "mem:").stat(BLOB)


@pytest.mark.parametrize("body", [DEEP, b"[]", b'{"get": 7}', b"no"])
def test_a_presigned_url_that_is_none(body: bytes) -> None:
    with calls_answered(answer(200, body)) as calls, pytest.raises(Corruption):
        HttpBlob(calls, "s3:", presigned=True).get(BLOB)
