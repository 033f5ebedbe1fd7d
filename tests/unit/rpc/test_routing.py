"""Which servers a client asks about a shard, by what the server that it knows tells of regions."""

from __future__ import annotations

from typing import Any

import pytest

from persist.client.connect import Connection
from persist.core.errors import InvalidUsage
from rpc.client import http_transport

OLD, NEW, NEAR, FAR = "http://old-eu:8787", "http://us:8787", "http://near-eu:8787", "http://asia:8787"


def asked(monkeypatch: pytest.MonkeyPatch, read: list[str], index_epoch: int = 2, **told: Any) -> tuple[str, str]:
    """Where writes and reads of eu/orders go, by the server OLD, that is home of eu at epoch 1 unless it says else."""
    index = {
        "eu": {"write": [NEW], "read": read, "epoch": index_epoch},
        "asia": {"write": [FAR], "read": [FAR], "epoch": 7},
    }
    told = {"role": "home", "region": "eu", "epoch": 1, "index": index, **told}
    monkeypatch.setattr(http_transport, "_told", lambda connection: told)
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
    monkeypatch.setattr(http_transport, "_told", lambda connection: {})
    assert http_transport.routed(Connection(url=OLD), "eu/orders", writes=True).url == OLD


def test_an_old_home_that_is_a_copy_now_reads_and_sends_writes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, [OLD], role="copy", of="eu", epoch=2) == (NEW, OLD)


def test_shards_of_other_regions_go_where_the_index_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked(monkeypatch, [NEAR])
    assert http_transport.routed(Connection(url=OLD), "asia/x", writes=True).url == FAR
    assert http_transport.routed(Connection(url=OLD), "orders", writes=True).url == OLD
    with pytest.raises(InvalidUsage, match="knows no region 'mars'"):
        http_transport.routed(Connection(url=OLD), "mars/x", writes=True)
