"""Calls of a client: which server is asked, how often, and what the caller is told."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from persist.commit.system import SystemClock
from persist.core.errors import Indeterminate, Overloaded, PersistError, Unavailable, UpperMismatch
from persist.formats.http_messages import PROBLEM_JSON, error_to_json
from persist.http_client.http_calls import Call, HttpCalls, Servers, rendezvous
from tests.support.answering import CLOSE, Answering, answer
from tests.support.location import TestClock
from tests.support.waiting import WAIT_S

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


def test_all_servers_together_have_the_time_of_one_call() -> None:
    """Each server had the whole timeout."""
    with (
        Answering(GOOD, drip_s=WAIT_S) as one,
        Answering(GOOD, drip_s=WAIT_S) as two,
        hurried_calls_to(one.url, two.url) as calls,
    ):
        with pytest.raises(Unavailable, match="in time"):
            calls.call(Call("GET", "/x", shard="s"))
        assert len(one.requests) + len(two.requests) <= 1  # none: it has not come to read it yet


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
