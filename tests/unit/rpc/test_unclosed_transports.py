"""A transport that nobody uses any more, and that nobody closed, leaves no connection open."""

from __future__ import annotations

import gc

from persist.client.connect import Connection
from rpc.client.http_transport import open_transport
from tests.support.console_page import server


def test_a_transport_that_made_room_for_another_keeps_no_connection() -> None:
    """Garbage collections closed its sockets, with a warning, in whatever ran then."""
    with server() as running:
        transport = open_transport(Connection(url=running.url))
        pools = list(transport._calls._pools.values())
        assert any(pool._idle for pool in pools)
        del transport
        gc.collect()
        assert not any(pool._idle for pool in pools)
