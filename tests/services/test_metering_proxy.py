"""The proxy that counts requests: what it counts is what was asked, by the kinds that S3 bills."""

from __future__ import annotations

import os
from urllib.parse import parse_qsl, urlsplit

import pytest

from blob import open_blob
from tests.services.metering_proxy import Counts, MeteringProxy, kind_of, request_of

PIECES = "multipart_bytes=5242880&part_bytes=5242880"


@pytest.mark.parametrize(
    ("method", "target", "kind"),
    [
        ("PUT", "/bucket/a/b", "put"),
        ("PUT", "/bucket/a?partNumber=1&uploadId=x", "put"),
        ("POST", "/bucket/a?uploads", "put"),
        ("POST", "/bucket/a?uploadId=x", "put"),
        ("POST", "/bucket?delete", "delete"),
        ("POST", "/bucket/?delete=", "delete"),
        ("DELETE", "/bucket/a?uploadId=x", "delete"),
        ("GET", "/bucket/a?versionId=1", "get"),
        ("GET", "/bucket?list-type=2&prefix=a%2F", "list"),
        ("GET", "/bucket/?uploads", "list"),
        ("HEAD", "/bucket/a", "head"),
    ],
)
def test_a_request_has_the_kind_in_which_it_is_billed(method: str, target: str, kind: str) -> None:
    assert kind_of(method, target) == kind


def test_the_head_tells_how_long_the_body_is() -> None:
    assert request_of(b"PUT /b/k HTTP/1.1\r\nHost: a\r\nContent-Length: 17") == ("put", 17)
    assert request_of(b"GET /b/k HTTP/1.1\r\nHost: a") == ("get", 0)


@pytest.mark.services
def test_what_is_counted_is_what_was_asked(s3_url: str) -> None:
    bucket, _, query = s3_url.partition("?")
    server = urlsplit(dict(parse_qsl(query))["endpoint"])
    assert server.hostname is not None
    assert server.port is not None
    with MeteringProxy(server.port, host=server.hostname) as proxy:
        blob = open_blob(f"{bucket}/metered?endpoint={proxy.endpoint}&{PIECES}")
        small, large = b"x" * 1_000, os.urandom(12 * 2**20)
        before = proxy.counts()
        for number in range(5):
            blob.put(f"small/{number}", small)
        puts = proxy.counts() - before
        assert puts.requests == {"put": 5}
        assert 5_000 <= puts.sent["put"] < 5_000 + 5 * 4_000
        before = proxy.counts()
        blob.put("large", large)
        pieces = proxy.counts() - before
        assert pieces.requests["put"] == 1 + 3 + 1
        assert pieces.sent["put"] >= len(large)
        before = proxy.counts()
        assert blob.get("large") == large
        assert blob.stat("small/1") is not None
        assert len(list(blob.list("small/"))) == 5
        blob.delete([f"small/{number}" for number in range(5)])
        blob.close()
        rest = proxy.counts() - before
    assert rest.requests == {"get": 1, "head": 1, "list": 1, "delete": 1}
    assert rest.received["get"] >= len(large)
    assert str(Counts()) == "no request; 0 B up, 0 B down"
