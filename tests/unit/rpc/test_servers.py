"""Which server a client asks: by rendezvous hashing, fail-over, and what servers tell of regions."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest

from persist.client.client import Connection
from persist.core.errors import InvalidUsage
from persist.http_client.http_calls import RETRY_DOWN_S, TRY_S, Servers, normalize_url, rendezvous
from rpc.client import http_transport
from rpc.client.http_transport import open_transport
from tests.support.console_page import server

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
    assert normalize_url(" http://LOCALHOST:8787/ ") == "http://localhost:8787"
    assert normalize_url("https://a") == "https://a:443"


@pytest.mark.parametrize(
    "url", ["ftp://a", "http://", "http://a:99999", "http://a/path", "http://u:secret@a:80", "a:80"]
)
def test_what_is_no_server_is_refused_without_repeating_secrets(url: str) -> None:
    with pytest.raises(InvalidUsage) as caught:
        normalize_url(url)
    assert "secret" not in str(caught.value)


# --- which servers a client asks about a shard, by what the server that it knows tells of regions

OLD, NEW, NEAR, FAR = "http://old-eu:8787", "http://us:8787", "http://near-eu:8787", "http://asia:8787"


def asked(monkeypatch: pytest.MonkeyPatch, read: list[str], index_epoch: int = 2, **told: Any) -> tuple[str, str]:
    """Where writes and reads of eu/orders go, by the server OLD, that is home of eu at epoch 1 unless it says else."""
    index = {
        "eu": {"write": [NEW], "read": read, "epoch": index_epoch},
        "asia": {"write": [FAR], "read": [FAR], "epoch": 7},
    }
    told = {"role": "home", "region": "eu", "epoch": 1, "index": index, **told}
    monkeypatch.setattr(http_transport, "_regions_of", lambda connection: told)
    found = [http_transport.routed(Connection(url=OLD), "eu/orders", writes=writes).url for writes in (True, False)]
    return str(found[0]), str(found[1])


def test_a_home_of_before_sends_clients_to_the_home_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, [NEAR]) == (NEW, NEAR)


def test_it_does_not_send_readers_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its index names it as near, from the time when it was home. It shows no more than it had then."""
    assert asked(monkeypatch, [OLD]) == (NEW, NEW)
    assert asked(monkeypatch, [OLD, NEAR]) == (NEW, NEAR)


@pytest.mark.parametrize("index_epoch", [0, 1])
def test_a_home_that_nobody_has_taken_over_is_asked_itself(monkeypatch: pytest.MonkeyPatch, index_epoch: int) -> None:
    assert asked(monkeypatch, [NEAR], index_epoch) == (OLD, OLD)


def test_so_is_a_home_of_that_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, [NEAR], 2, epoch=2) == (OLD, OLD)


def test_so_is_a_server_that_tells_no_epoch_or_whose_index_lacks_its_region(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, [NEAR], index={"us": {"write": [NEW], "read": [NEW]}}) == (OLD, OLD)
    monkeypatch.setattr(http_transport, "_regions_of", lambda connection: {})
    assert http_transport.routed(Connection(url=OLD), "eu/orders", writes=True).url == OLD


def test_an_old_home_that_is_a_copy_now_reads_and_sends_writes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, [OLD], role="copy", of="eu", epoch=2) == (NEW, OLD)


def test_shards_of_other_regions_go_where_the_index_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked(monkeypatch, [NEAR])
    assert http_transport.routed(Connection(url=OLD), "asia/x", writes=True).url == FAR
    assert http_transport.routed(Connection(url=OLD), "orders", writes=True).url == OLD
    with pytest.raises(InvalidUsage, match="knows no region 'mars'"):
        http_transport.routed(Connection(url=OLD), "mars/x", writes=True)


# --- a transport that nobody uses any more, and that nobody closed, leaves no connection open


def test_a_transport_that_made_room_for_another_keeps_no_connection() -> None:
    """Garbage collections closed its sockets, with a warning, in whatever ran then."""
    with server() as running:
        transport = open_transport(Connection(url=running.url))
        pools = list(transport._calls._pools.values())
        assert any(pool._idle for pool in pools)
        del transport
        gc.collect()
        assert not any(pool._idle for pool in pools)
