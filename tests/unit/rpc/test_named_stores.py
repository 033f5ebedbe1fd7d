"""The blob store that a server names, as a client opens it: where it is, and for no longer than the client waits."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from blob import BlobError
from persist.client import deadlines
from persist.client.deadlines import Deadline
from persist.commit.clocks_and_ids import SystemClock
from rpc.client.http_stores import HttpBlob, place_of
from rpc.client.http_transport import _open_blob
from tests.support.of_aws import give_credentials
from tests.support.waiting import WAIT_S

AZURE = "account.dfs.core.windows.net"


@pytest.fixture(autouse=True)
def aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A client with credentials, and without an endpoint of its own."""
    give_credentials(monkeypatch, tmp_path)


@pytest.mark.parametrize(("named", "opened"), [
    ("s3://bucket/p", "s3://bucket/p"),
    ("s3://bucket/p?connect_timeout=3000&region=eu&attempts=100&read_timeout=9", "s3://bucket/p?region=eu"),
    ("S3://bucket/p?attempts=100&region=a&region=eu#x", "s3://bucket/p?region=eu"),
    ("s3://bucket/p?profile=root&connections=9999&path_style=true&cache_mb=9999", "s3://bucket/p"),
    ("s3://bucket/p?endpoint=http://h:1&region=eu", None),
    ("s3://bucket/p?endpoint=", "s3://bucket/p"),
    ("s3://bucket/p?endpoint=http://h:1&region=no/region", ValueError),
    (
        "s3://bucket/p?endpoint=https://s3.eu-west-1.amazonaws.com&region=eu-west-1",
        "s3://bucket/p?endpoint=https://s3.eu-west-1.amazonaws.com&region=eu-west-1",
    ),
    ("file:///", "file:///"),
    ("file:///nowhere/at/all", None),
    ("gs://bucket/p?endpoint_override=h:1&scheme=http", "gs://bucket/p"),
    ("hdfs://host:1/p?user=root", "hdfs://host:1/p"),
    (f"abfs://c@{AZURE}/p?blob_storage_authority=h:1", f"abfs://c@{AZURE}/p"),
    ("abfss://c@example.org/p", None),
    (f"abfss://c@{AZURE}:1/p", None),
    (f"abfss://c@{AZURE}.example.org/p", None),
    ("mem:x", None),
    ("http://h:1/p", None),
])  # fmt: skip
def test_a_server_says_where_its_blobs_are_and_nothing_else(named: str, opened: str | type[Exception] | None) -> None:
    if not isinstance(opened, type):
        assert place_of(named) == opened
        return
    with pytest.raises((opened, BlobError)):
        place_of(named)


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.parametrize("own", ["http://h:1", "http://h:1/"])
def test_an_endpoint_is_taken_where_the_client_goes_there_by_itself(
    variable: str, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, own)
    named = "s3://bucket/p?endpoint=http://h:1&region=eu"
    assert place_of(f"{named}&attempts=100") == named
    assert place_of(named.replace(":1", ":2")) is None


@pytest.fixture
def hanging() -> Iterator[int]:
    """The port of a server that takes connections, and never answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        yield listener.getsockname()[1]


def test_a_store_that_hangs_held_a_client_up_for_as_long_as_its_server_said(
    hanging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{hanging}")
    url = f"s3://bucket/p?endpoint=http://127.0.0.1:{hanging}&region=x&read_timeout=3000&attempts=100"
    found: list[Any] = []

    def opens() -> None:
        with deadlines.within(Deadline(0.2, SystemClock())):
            found.append(_open_blob(cast("Any", None), url, "proof"))

    thread = threading.Thread(target=opens, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert [type(one) for one in found] == [HttpBlob], "the server is asked for the blobs"
