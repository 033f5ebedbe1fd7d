"""Rendezvous hashing and fail-over, as arithmetic."""

from __future__ import annotations

from collections import Counter

import pytest

from persist.core.errors import InvalidUsage
from persist.http_client.http_calls import RETRY_DOWN_S, TRY_S, Servers, normal, rendezvous

URLS = [f"http://s{n}:8787" for n in range(4)]
NAMES = [f"shard-{n}" for n in range(2_000)]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def now_ms(self) -> int:
        return int(self.now * 1000)

    def monotonic(self) -> float:
        return self.now

    def uptime(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_all_clients_agree_whatever_the_order_of_their_list() -> None:
    assert all(rendezvous(URLS, name) == rendezvous(URLS[::-1], name) for name in NAMES)


def test_shards_spread_evenly() -> None:
    counts = Counter(rendezvous(URLS, name)[0] for name in NAMES)
    assert min(counts.values()) > len(NAMES) / len(URLS) / 1.25


def test_losing_a_server_moves_only_its_own_shards() -> None:
    for name in NAMES:
        first, *others = rendezvous(URLS, name)
        if first != URLS[0]:
            assert rendezvous(URLS[1:], name)[0] == first
        else:
            assert rendezvous(URLS[1:], name)[0] == others[0]


def test_a_server_that_does_not_answer_is_passed_over_and_tried_again_by_one_request() -> None:
    clock = Clock()
    servers = Servers(URLS, clock)
    best, second, *_ = servers.order("orders")
    servers.failed(best)
    assert servers.order("orders")[0] == second
    assert servers.order("orders")[-1] == best  # still there, as the last resort
    clock.sleep(RETRY_DOWN_S)
    assert servers.order("orders")[0] == best
    for _ in range(10):  # a try of a server that hangs takes seconds
        assert servers.order("orders")[0] == second
        clock.sleep(RETRY_DOWN_S)
    servers.failed(best)
    assert servers.order("orders")[0] == second
    clock.sleep(RETRY_DOWN_S)
    assert servers.order("orders")[0] == best
    clock.sleep(TRY_S)
    assert servers.order("orders")[0] == best, "the request that tried it never said what came of it"


def test_a_server_is_tried_again_only_by_who_asks_it_first() -> None:
    clock = Clock()
    servers = Servers(URLS, clock)
    best, second, *_ = servers.order("orders")
    servers.failed(second)
    clock.sleep(RETRY_DOWN_S)
    assert servers.order("orders")[0] == best
    servers.failed(best)
    assert servers.order("orders")[0] == second, "the request before did not ask it"


def test_a_server_that_answers_again_gets_its_shards_back() -> None:
    servers = Servers(URLS, Clock())
    best = servers.order("orders")[0]
    servers.failed(best)
    servers.worked(best)
    assert servers.order("orders")[0] == best


def test_urls_have_one_spelling() -> None:
    assert normal(" http://LOCALHOST:8787/ ") == "http://localhost:8787"
    assert normal("https://a") == "https://a:443"


@pytest.mark.parametrize(
    "url", ["ftp://a", "http://", "http://a:99999", "http://a/path", "http://u:secret@a:80", "a:80"]
)
def test_what_is_no_server_is_refused_without_repeating_secrets(url: str) -> None:
    with pytest.raises(InvalidUsage) as caught:
        normal(url)
    assert "secret" not in str(caught.value)
