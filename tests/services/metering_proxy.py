"""A proxy before an S3 server that counts requests by the kind in which S3 bills them, and bytes each way.

Bytes are passed on as they are, so that signatures hold. Requests are told apart by their heads alone; a connection has
one request after the other, as HTTP/1.1 clients send them.

    put       PUT and POST: objects, copies, begins, pieces and ends of uploads
    get       GET of an object
    head      HEAD
    list      GET of a bucket
    delete    DELETE, and POST of many keys to delete
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

from tests.services.fault_proxy import FaultProxy

KINDS = ("put", "get", "head", "list", "delete")
HEAD_BYTES_MAX = 64 * 1024
_END = b"\r\n\r\n"


@dataclass(frozen=True)
class Counts:
    """Requests, bytes of their heads and bodies, and bytes of answers, by kind."""

    requests: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)

    def __sub__(self, earlier: Counts) -> Counts:
        return Counts(self.requests - earlier.requests, self.sent - earlier.sent, self.received - earlier.received)

    def __str__(self) -> str:
        told = [f"{kind} {self.requests[kind]:,}" for kind in KINDS if self.requests[kind]]
        return f"{', '.join(told) or 'no request'}; {sum(self.sent.values()):,} B up, {self.bytes_down:,} B down"

    @property
    def bytes_down(self) -> int:
        return sum(self.received.values())


class MeteringProxy(FaultProxy):
    """Listens on a loopback port of its own. Thread-safe. Use it in a `with`, or close it."""

    def __init__(self, target: int, *, host: str = "127.0.0.1") -> None:
        self._lock = threading.Lock()
        self._counts = Counts()
        super().__init__(target, host=host, watch=self.connection)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def counts(self) -> Counts:
        """What was seen so far."""
        with self._lock:
            found = self._counts
            return Counts(Counter(found.requests), Counter(found.sent), Counter(found.received))

    def connection(self) -> MeteringConnection:
        """What hears a connection that begins."""
        return MeteringConnection(self)

    def add(self, kind: str, *, requests: int = 0, sent: int = 0, received: int = 0) -> None:
        with self._lock:
            self._counts.requests[kind] += requests
            self._counts.sent[kind] += sent
            self._counts.received[kind] += received

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MeteringConnection:
    """Reads the requests of one connection as they pass. `requests`: how many have begun."""

    def __init__(self, proxy: MeteringProxy) -> None:
        self.requests = 0
        self._proxy = proxy
        self._head = b""
        self._left = 0  # bytes of the body that are still to come
        self._kind = "put"

    def sent(self, data: bytes) -> None:
        while data:
            if self._left:
                body, data = data[: self._left], data[self._left :]
                self._left -= len(body)
                self._proxy.add(self._kind, sent=len(body))
                continue
            self._head += data
            head, end, rest = self._head.partition(_END)
            if not end:
                assert len(self._head) <= HEAD_BYTES_MAX, "a head that does not end"
                return
            self._kind, self._left = request_of(head)
            self.requests += 1
            self._proxy.add(self._kind, requests=1, sent=len(head) + len(end))
            self._head, data = b"", rest

    def received(self, data: bytes) -> None:
        self._proxy.add(self._kind, received=len(data))


def request_of(head: bytes) -> tuple[str, int]:
    """The kind of a request, and how many bytes its body has."""
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    assert "chunked" not in headers.get("transfer-encoding", ""), "the end of such a body is not told by its head"
    return kind_of(method, target), int(headers.get("content-length", 0))


def kind_of(method: str, target: str) -> str:
    """The kind in which S3 bills a request; the bucket is the first part of the path."""
    parts = urlsplit(target)
    _, _, key = parts.path.lstrip("/").partition("/")
    if method == "GET":
        return "get" if key else "list"
    if method == "HEAD":
        return "head"
    if method == "DELETE" or (method == "POST" and "delete" in parts.query.split("&")[0]):
        return "delete"
    return "put"
