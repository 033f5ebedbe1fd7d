"""Answers of HTTP that are no answers of persist: each is one error of the tree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

import persist
from blob import BlobUnavailable
from persist.core.errors import Conflict, Corruption, InvalidUsage, PersistError, Unavailable, UpgradeNeeded
from persist.core.state import Policy
from persist.formats.http_messages import PROBLEM_JSON, PROTOCOL_VERSION
from persist.http_client.http_calls import Call, HttpCalls, Servers
from rpc.client.http_stores import HttpBlob
from rpc.client.http_transport import HttpTransport
from tests.support.answering import Answering, answer
from tests.support.location import AscendingIds, TestClock

DEEP = b"[" * 100_000
BLOB = "sx/px"


@contextmanager
def calls_to(said: bytes) -> Iterator[HttpCalls]:
    """Calls to a server that always says this."""
    clock = TestClock()
    with (
        Answering(said) as server,
        closing(HttpCalls(Servers([server.url], clock), clock, token=None, timeout_s=1.0)) as calls,
    ):
        yield calls


@pytest.mark.parametrize("body", [b"{}", b"[]", b"7", DEEP, b'{"shards": 7}', b'{"shards": [1]}', b"\xff", b""])
def test_names_that_are_none(body: bytes) -> None:
    with calls_to(answer(200, body)) as calls, pytest.raises(Corruption, match="persist server"):
        HttpTransport(calls, HttpBlob(calls, "mem:"), Policy(), TestClock(), AscendingIds()).names("", "", 10)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("version", "x"),
        ("version", None),
        ("blob", ["x"]),
        ("blob", {"url": "x"}),
        ("policy", []),
        ("policy", {"writers_max": 1e999}),
    ],
)
def test_a_location_that_is_none(key: str, value: object) -> None:
    good = {"version": PROTOCOL_VERSION, "blob": {"url": "mem:", "proof": ""}, "policy": {}}
    said = answer(200, json.dumps({**good, key: value}).encode())
    with Answering(said) as server, pytest.raises(InvalidUsage, match="not a persist server"):
        persist.connect(server.url)


@pytest.mark.parametrize("body", [DEEP, b"{}", b"[]", b'{"version": 2}'])
def test_an_answer_that_is_no_location(body: bytes) -> None:
    with Answering(answer(200, body)) as server, pytest.raises(InvalidUsage, match="not a persist server"):
        persist.connect(server.url)


def test_a_location_of_another_version_may_look_otherwise() -> None:
    with Answering(answer(200, b'{"version": 99}')) as server, pytest.raises(UpgradeNeeded, match="99"):
        persist.connect(server.url)


@pytest.mark.parametrize("name", ["message", "self", "cls"])
def test_a_problem_may_have_details_of_any_name(name: str) -> None:
    body = json.dumps({"kind": "conflict", "detail": "lost", "details": {name: "x"}}).encode()
    with calls_to(answer(409, body, PROBLEM_JSON)) as calls, pytest.raises(Conflict, match="lost") as told:
        calls.call(Call("GET", "/x"))
    assert told.value.details == {name: "x"}


@pytest.mark.parametrize(("status", "told"), [(500, Unavailable), (404, PersistError)])
def test_a_problem_that_is_nested_too_deep(status: int, told: type[PersistError]) -> None:
    with calls_to(answer(status, DEEP, PROBLEM_JSON)) as calls, pytest.raises(told, match="no answer of persist"):
        calls.call(Call("GET", "/x"))


def test_a_blob_whose_age_a_proxy_has_dropped() -> None:
    with calls_to(answer(200)) as calls, pytest.raises(BlobUnavailable, match="persist-modified-ms"):
        HttpBlob(calls, "mem:").stat(BLOB)


@pytest.mark.parametrize("body", [DEEP, b"[]", b'{"get": 7}', b"no"])
def test_a_presigned_url_that_is_none(body: bytes) -> None:
    with calls_to(answer(200, body)) as calls, pytest.raises(Corruption):
        HttpBlob(calls, "s3:", presigned=True).get(BLOB)
