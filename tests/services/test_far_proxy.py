"""The proxy that makes a server far: every request waits, every connection has its rate, no byte is changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from urllib.parse import parse_qsl, urlsplit

import pytest

from blob import Blob, BlobNotFound, open_blob
from tests.services.far_proxy import BURST_S, FarProxy, Pace

PIECES = "multipart_bytes=5242880&part_bytes=5242880&range_bytes=1048576"
MiB = 2**20


def test_bytes_pass_at_the_rate() -> None:
    pace = Pace(1_000.0)
    first = pace.after(500, 10.0)
    assert first == pytest.approx(0.5 - BURST_S)
    assert pace.after(500, 10.0) == pytest.approx(first + 0.5)
    assert pace.after(100, 10.5) == pytest.approx(first + 0.1)  # the others are still on their way
    assert pace.after(100, 99.0) == pytest.approx(0.1 - BURST_S)  # what was idle is not made up
    assert Pace(None).after(10**12, 0.0) == 0.0


def _far(s3_url: str, slept: list[float], **pace: float) -> tuple[FarProxy, Callable[[], Blob]]:
    bucket, _, query = s3_url.partition("?")
    server = urlsplit(dict(parse_qsl(query))["endpoint"])
    assert server.hostname is not None
    assert server.port is not None
    proxy = FarProxy(server.port, host=server.hostname, sleep=slept.append, **pace)
    return proxy, lambda: open_blob(f"{bucket}/far?endpoint={proxy.endpoint}&{PIECES}")


@pytest.mark.services
def test_every_request_waits(s3_url: str) -> None:
    slept: list[float] = []
    proxy, opened = _far(s3_url, slept, request_s=0.25)
    with proxy:
        blob = opened()
        blob.put("a", b"abc")
        assert slept == [0.25]
        assert blob.get("a") == b"abc"
        assert blob.stat("b") is None
        assert slept == [0.25] * 3
        assert proxy.counts().requests == {"put": 1, "get": 1, "head": 1}
        blob.close()


@pytest.mark.services
def test_a_long_range_comes_by_several_requests(s3_url: str) -> None:
    slept: list[float] = []
    proxy, opened = _far(s3_url, slept, bytes_per_s=1e6)
    data = os.urandom(4 * MiB + 5)
    with proxy:
        blob = opened()
        blob.put("long", data)
        assert sum(slept) > 1
        before = proxy.counts()
        assert blob.get_range("long", 3, 4 * MiB) == data[3 : 3 + 4 * MiB]
        assert (proxy.counts() - before).requests == {"get": 4}
        before = proxy.counts()
        assert blob.get_range("long", 3, MiB) == data[3 : 3 + MiB]
        assert (proxy.counts() - before).requests == {"get": 1}
        for start, length in ((5 * MiB, 4 * MiB), (6, 4 * MiB)):  # beyond the end, and by one byte
            with pytest.raises(BlobNotFound):
                blob.get_range("long", start, length)
        with pytest.raises(BlobNotFound):
            blob.get_range("never-put", 0, 4 * MiB)
        blob.close()


@pytest.mark.services
def test_what_was_just_put_is_known_until_it_is_deleted(s3_url: str) -> None:
    proxy, opened = _far(s3_url, [])
    with proxy:
        blob, other = opened(), opened()
        blob.put("a", b"abc")
        blob.put("a", b"abc")
        before = proxy.counts()
        assert (blob.put_here("a"), blob.put_here("b"), other.put_here("a")) == (3, None, None)
        assert not (proxy.counts() - before).requests
        blob.delete(["a"])
        assert blob.put_here("a") is None
        blob.close()
        other.close()
