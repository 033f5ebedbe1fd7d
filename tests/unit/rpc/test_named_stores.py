"""The blob store that a server names, as a client opens it: where it is, and for no longer than the client waits."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast

import pytest

from persist.client import deadlines
from persist.client.deadlines import Deadline
from persist.commit.system import SystemClock
from rpc.client.http_blob import HttpBlob
from rpc.client.transport import _as_a_client_has_it, _open_blob


@pytest.mark.parametrize(
    ("named", "opened"),
    [
        ("s3://bucket/p", "s3://bucket/p"),
        ("s3://bucket/p?endpoint=http://h:1&region=eu", "s3://bucket/p?endpoint=http://h:1&region=eu"),
        ("s3://bucket/p?connect_timeout=3000&region=eu&attempts=100&read_timeout=9", "s3://bucket/p?region=eu"),
        ("s3://bucket/p?profile=root&connections=9999", "s3://bucket/p"),
        ("file:///data", "file:///data"),
        ("gs://bucket/p?retry_limit_seconds=3", "gs://bucket/p?retry_limit_seconds=3"),
    ],
)
def test_a_server_says_where_its_blobs_are_and_nothing_else(named: str, opened: str) -> None:
    assert _as_a_client_has_it(named) == opened


@pytest.fixture
def hanging() -> Iterator[int]:
    """The port of a server that takes connections, and never answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        yield listener.getsockname()[1]


def test_a_store_that_hangs_held_a_client_up_for_as_long_as_its_server_said(
    hanging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    url = f"s3://bucket/p?endpoint=http://127.0.0.1:{hanging}&region=x&read_timeout=3000&attempts=100"
    found: list[Any] = []

    def opens() -> None:
        with deadlines.within(Deadline(0.2, SystemClock())):
            found.append(_open_blob(cast("Any", None), url, "proof"))

    thread = threading.Thread(target=opens, daemon=True)
    thread.start()
    thread.join(60)
    assert [type(one) for one in found] == [HttpBlob], "the server is asked for the blobs"
