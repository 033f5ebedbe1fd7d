"""Logs in etcd: one transaction per compare-and-set, several endpoints, and watches as the push channel.

Below `/<prefix>/`, entry n of a key is `e/<key>\\0<2**63 - 1 - n, big-endian>`, so the newest entry is first and the
head is a range read of one. `k/<key>` marks that the key exists, `u/<key>` that its log has ended for now. Live entries
are contiguous: "the head is n - 1" is "n - 1 exists and n does not", which one transaction checks and acts on.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import grpc

from blob import ESCAPES, describe_option, is_ambiguous, without_secrets
from blob.interface import check_process
from consensus.etcd_protobuf import load_etcd3
from consensus.interface import (
    ENDED,
    HIDDEN,
    SEQNO_MAX,
    Consensus,
    ConsensusDamaged,
    ConsensusError,
    ConsensusIndeterminate,
    ConsensusMisconfigured,
    ConsensusNotWritable,
    ConsensusUnavailable,
    ConsensusUsage,
    Entry,
    Wanted,
    check_append,
    check_key,
    check_listing,
    check_scan,
    check_seqno,
)
from consensus.notify import Notifier

GRPC_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", -1),
)
"""etcd requires at least 5 s between keepalives. The length of replies is bounded by the paging of the reads."""

# A connection may take this part of a call's timeout, so that a write to a silent endpoint is known not to be sent.
# gRPC calls this bound the minimal backoff: "grpc.min_reconnect_backoff_ms".
CONNECTS_PER_TIMEOUT = 2
ROUNDS_MAX = 2  # how often a call that may be repeated tries all endpoints before it gives up
# Messages of gRPC for an address without a connection: the request was not sent.
_NEVER_CONNECTED = ("failed to connect", "errors resolving", "dns resolution failed")

_log = logging.getLogger(__name__)


class CallNotSent(ConsensusUnavailable):
    """The request was not sent, so even a write may be sent to another endpoint."""


class Endpoints:
    """Addresses `host:port` of one cluster, with one etcd3 client each. Thread-safe; clients are created on demand.

    gRPC's own balancing over a list of addresses stays on a frozen or leaderless node for many seconds; with a client
    per endpoint an outage takes one call's timeout. `login`: user and password, and paths of TLS files (PEM), by the
    names of etcd3's arguments.
    """

    def __init__(self, addresses: Sequence[str], login: Mapping[str, str | None], *, timeout_s: float) -> None:
        self._addresses = tuple(addresses)
        self._login = login
        self._timeout_s = timeout_s
        self._connect_ms = max(1, int(timeout_s * 1000 / CONNECTS_PER_TIMEOUT))
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._clients: dict[int, Any] = {}
        self._current = 0

    @property
    def messages(self) -> Any:
        """The request classes of etcd's API."""
        return load_etcd3().etcdrpc

    def read(self, call: Callable[[Any, float], Any]) -> Any:
        """Run `call(client, timeout_s)` on one endpoint after another until one answers."""
        return self._call(call, "read", ConsensusUnavailable)

    def write(self, call: Callable[[Any, float], Any]) -> Any:
        """As `read`, but tries another endpoint only if the request was not sent to the last one."""
        return self._call(call, "write", CallNotSent)

    def client(self) -> tuple[int, Any]:
        """The endpoint in use and its client. ConsensusUnavailable or ConsensusMisconfigured if it has none."""
        check_process(self._pid, f"etcd at {self._addresses[self._current]}", ConsensusUsage)
        with self._lock:
            index = self._current
            client = self._clients.get(index)
            if client is None:
                client = self._clients[index] = self._make(self._addresses[index])
            return index, client

    def rotate(self, failed: int) -> None:
        """Leave endpoint `failed`, unless another thread has done so already."""
        with self._lock:
            if self._current == failed:
                self._current = (failed + 1) % len(self._addresses)

    def close(self) -> None:
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()

    def _call(self, call: Callable[[Any, float], Any], kind: str, retryable: type[ConsensusError]) -> Any:
        attempts = ROUNDS_MAX * len(self._addresses)
        for attempt in range(1, attempts + 1):
            index = self._current
            try:
                index, client = self.client()
                return call(client, self._timeout_s)
            except grpc.RpcError as error:
                failure = self._translate(error, index, kind)
                cause: Exception = error
            except ConsensusUnavailable as error:
                failure, cause = error, error
            self.rotate(index)
            if attempt == attempts or not isinstance(failure, retryable):
                raise failure from cause
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _make(self, address: str) -> Any:
        host, _, port = address.rpartition(":")
        try:
            # The token is sent with each call as metadata (for call credentials gRPC would require TLS).
            return load_etcd3().client(
                host=host,
                port=int(port),
                timeout=self._timeout_s,
                **self._login,
                grpc_options=(*GRPC_OPTIONS, ("grpc.min_reconnect_backoff_ms", self._connect_ms)),
            )
        except grpc.RpcError as error:
            # Only the login contacts the server here; the caller's request was not sent.
            failure = _translate(error, f"etcd at {address}", "setup")
            if isinstance(failure, ConsensusIndeterminate | ConsensusUnavailable):
                failure = CallNotSent(str(failure))
            raise failure from error
        except (OSError, ValueError) as error:
            raise ConsensusMisconfigured(f"the TLS files for etcd at {address} cannot be used: {error}") from error

    def _translate(self, error: grpc.RpcError, index: int, kind: str) -> ConsensusError:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED and self._login.get("user"):
            # The token has expired (after minutes without calls): the next client logs in again.
            with self._lock:
                client = self._clients.pop(index, None)
            if client is not None:
                client.close()
            return CallNotSent(f"the login to etcd at {self._addresses[index]} has expired: {error.details()}")
        return _translate(error, f"etcd at {self._addresses[index]}", kind)


def _translate(error: grpc.RpcError, where: str, kind: str) -> ConsensusError:
    code, reason = error.code(), str(error.details())
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return ConsensusMisconfigured(
            f"{where} rejects the user or password, or the user's role lacks rights: {reason}"
        )
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        if "authentication" in reason or "user name is empty" in reason:
            return ConsensusMisconfigured(f"{where} rejects the user or password: {reason}")
        if "too large" in reason:
            return ConsensusUsage(f"{where} rejects a value of this length; raise its --max-request-bytes: {reason}")
        return ConsensusUnavailable(f"{where} failed a {kind}: {reason}")
    if code is grpc.StatusCode.FAILED_PRECONDITION and "authentication" in reason:
        return ConsensusMisconfigured(f"{where} has authentication disabled; omit user and password: {reason}")
    if code is grpc.StatusCode.DATA_LOSS:
        return ConsensusDamaged(f"{where} reports damaged data; restore a backup: {reason}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "space exceeded" in reason:
        return ConsensusNotWritable(f"{where} is full, nothing was written: {reason}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return ConsensusUnavailable(f"{where} is overloaded, nothing was written: {reason}")
    if code is grpc.StatusCode.UNAVAILABLE and any(words in reason.lower() for words in _NEVER_CONNECTED):
        return CallNotSent(f"{where} cannot be reached: {reason}")
    if kind == "write":
        return ConsensusIndeterminate(f"{where} failed while writing ({code.name}): {reason}")
    return ConsensusUnavailable(f"{where} did not answer ({code.name}): {reason}")


RECONNECT_S = 0.2  # pause before a broken watch is reopened, on the next endpoint


class KeyWatcher:
    """Calls `publish` with the raw keys put in `[start, end)`, on a thread of its own, until it is closed.

    etcd3's own watcher loses its watches when a stream breaks and then spins. Here a new watch starts at the revision
    where the last one ended; events that etcd has compacted meanwhile are lost, which the interface allows.
    """

    def __init__(
        self, endpoints: Endpoints, start: bytes, end: bytes, publish: Callable[[Iterable[bytes]], None]
    ) -> None:
        self._endpoints = endpoints
        self._range = (start, end)
        self._publish = publish
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._call: Any = None
        self._revision = 0
        self._thread = threading.Thread(target=self._run, name="consensus-etcd-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._stop.set()
            if self._call is not None:
                self._call.cancel()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        failed = 0
        while not self._stop.is_set():
            try:
                failed, client = self._endpoints.client()
                self._follow(client)
            except (grpc.RpcError, ConsensusError, ValueError) as error:
                if not self._stop.is_set():
                    _log.info("watching etcd for moved keys failed, retrying: %s", error)
                    self._endpoints.rotate(failed)
            self._stop.wait(RECONNECT_S)

    def _follow(self, client: Any) -> None:
        messages = self._endpoints.messages
        start, end = self._range
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        create = messages.WatchCreateRequest(key=start, range_end=end, start_revision=self._revision)
        requests.put(messages.WatchRequest(create_request=create))
        stub = messages.WatchStub(client.channel)
        with self._lock:
            if self._stop.is_set():
                return
            self._call = stub.Watch(iter(requests.get, None), metadata=client.metadata)
        try:
            for reply in self._call:
                if reply.compact_revision:
                    self._revision = reply.compact_revision
                    return
                self._revision = max(self._revision, reply.header.revision + 1)
                self._publish([event.kv.key for event in reply.events])
        finally:
            requests.put(None)
            self._call.cancel()


VALUE_BYTES_MAX = 3 * 2**19 - 2**14  # etcd's default request limit of 1.5 MiB, less room for keys and envelope
TIMEOUT_S = 5.0  # how long one request may take before another endpoint is tried
SCAN_PAGE = 256  # entries per range read of a scan
SCAN_ATTEMPTS_MAX = 5  # how often a scan restarts when a truncation or compaction overtakes it
TRUNCATE_BATCH = 1_000  # entries that one delete removes

DEFAULT_PORT = 2379

_OPTIONS = ("ca", "cert", "key", "timeout")


class EtcdConsensus(Consensus):
    """A cluster of `host:port` addresses and the prefix of all its keys."""

    def __init__(
        self,
        addresses: Iterable[str],
        prefix: str = "persist",
        *,
        login: Mapping[str, str | None] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._addresses = tuple(addresses)
        self._prefix = prefix
        self._base = f"/{prefix}/".encode() if prefix else b"/"
        self._endpoints = Endpoints(self._addresses, login or {}, timeout_s=timeout_s)
        self._notifier = Notifier("consensus-etcd", self._watch)

    @classmethod
    def from_url(cls, url: str) -> EtcdConsensus:
        """`etcd://[user:password@]host[:2379][,host…]/prefix?ca=…&cert=…&key=…&timeout=5`."""
        if is_ambiguous(url):
            raise ConsensusMisconfigured(f"etcd: {without_secrets(url)!r} is not valid: {ESCAPES}")
        parts = urlsplit(url)
        credentials, _, hosts = parts.netloc.rpartition("@")
        addresses = [_address(host) for host in hosts.split(",")]
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        for option, value in options.items():
            if option not in _OPTIONS:
                raise ConsensusMisconfigured(
                    f"etcd: {describe_option(option, value)} is not one of {', '.join(_OPTIONS)}"
                )
        prefix = unquote(parts.path).strip("/")
        if not re.fullmatch(r"[A-Za-z0-9._/-]*", prefix):
            raise ConsensusMisconfigured(f"etcd: prefix {prefix!r} must be of A-Z a-z 0-9 . _ / -")
        user, _, password = credentials.partition(":")
        login = {
            "user": unquote(user) or None,
            "password": unquote(password) if user else None,
            "ca_cert": options.get("ca"),
            "cert_cert": options.get("cert"),
            "cert_key": options.get("key"),
        }
        try:
            timeout_s = float(options.get("timeout", TIMEOUT_S))
        except ValueError:
            raise ConsensusMisconfigured("etcd: option timeout must be a number of seconds") from None
        return cls(addresses, prefix or "persist", login=login, timeout_s=timeout_s)

    @property
    def url(self) -> str:
        return f"etcd://{','.join(self._addresses)}/{self._prefix}"

    @property
    def value_bytes_max(self) -> int:
        return VALUE_BYTES_MAX

    def head(self, key: str) -> Entry | None:
        start, end = self._entries(check_key(key))
        reply = self._range(key=start, range_end=end, limit=1)
        return _entry(reply.kvs[0]) if reply.kvs else None

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        if seqno == 1:
            return not after and self.begin(key, seqno, data)
        operations = self._append_operations(key, seqno, data)
        if not data.startswith(ENDED) and ENDED.startswith(after[: len(ENDED)]):  # the head may have ended the log
            operations.append(self._delete_operation(self._index_key(b"u", key)))
        compares = [
            self._compare_version("GREATER", self._entry_key(key, seqno - 1)),
            self._compare_version("EQUAL", self._entry_key(key, seqno)),
        ]
        if after:
            compares += self._compare_beginning(self._entry_key(key, seqno - 1), after)
        return self._try_write(key, compares, operations)

    def begin(self, key: str, seqno: int, data: bytes) -> bool:
        operations = self._append_operations(key, seqno, data)
        operations.append(self._put_operation(self._index_key(b"k", key)))
        return self._try_write(key, [self._compare_version("EQUAL", *self._entries(key))], operations)

    def _append_operations(self, key: str, seqno: int, data: bytes) -> list[Any]:
        """The checked operations that write an entry."""
        check_append(key, seqno, data, VALUE_BYTES_MAX)
        operations = [self._put_operation(self._entry_key(key, seqno), bytes(data))]
        if data.startswith(ENDED):
            operations.append(self._put_operation(self._index_key(b"u", key)))
        return operations

    def _put_operation(self, key: bytes, value: bytes = b"") -> Any:
        messages = self._endpoints.messages
        return messages.RequestOp(request_put=messages.PutRequest(key=key, value=value))

    def _delete_operation(self, key: bytes) -> Any:
        messages = self._endpoints.messages
        return messages.RequestOp(request_delete_range=messages.DeleteRangeRequest(key=key))

    def _try_write(self, key: str, compares: list[Any], operations: list[Any]) -> bool:
        request = self._endpoints.messages.TxnRequest(compare=compares, success=operations)
        won = bool(self._write("Txn", request).succeeded)
        if won:
            self._notifier.publish((key,))
        return won

    def scan(self, key: str, from_seqno: int, limit: int) -> list[Entry]:
        check_scan(key, from_seqno, limit)
        following = max(1, from_seqno)
        entries: list[Entry] = []
        for _ in range(SCAN_ATTEMPTS_MAX):
            while len(entries) < limit:
                page_size = min(SCAN_PAGE, limit - len(entries))
                page = self._page(key, following, page_size)
                if not page or page[0].seqno != following:
                    break
                entries.extend(page)
                following += len(page)
                if len(page) < page_size:
                    # Live entries are contiguous, so a short page has reached the head.
                    return entries
            if len(entries) == limit:
                return entries
            first, head = self._live(key)
            if following > head:
                return entries
            if following < first:
                # Truncated meanwhile, or `from_seqno` is before the first live entry.
                entries, following = [], first
        raise ConsensusUnavailable(f"{key} in {self.url} was truncated {SCAN_ATTEMPTS_MAX} times during one scan")

    def truncate(self, key: str, seqno: int) -> int:
        check_key(key)
        check_seqno(seqno)
        first, head = self._live(key)
        if seqno > head:
            raise ConsensusUsage(f"cannot truncate {key} to seqno {seqno}: its head is {head}")
        messages = self._endpoints.messages
        total = 0
        while first < seqno:
            batch_end = min(seqno, first + TRUNCATE_BATCH)
            start, end = self._entry_key(key, batch_end - 1), self._entry_key(key, first) + b"\0"
            total += self._write("DeleteRange", messages.DeleteRangeRequest(key=start, range_end=end)).deleted
            first = batch_end
        return total

    def keys(self, prefix: str = "", after: str = "", limit: int = 1000, with_ended: bool = True) -> list[str]:
        check_listing(prefix, after, limit)
        keys: list[str] = []
        while len(keys) < limit:
            page = self._list_index(b"k", prefix, after, limit)
            ended = frozenset(() if with_ended else self._list_index(b"u", prefix, after, limit))
            keys += [key for key in page if key not in ended]
            if len(page) < limit:
                break
            after = page[-1]
        return keys[:limit]

    def _list_index(self, index: bytes, prefix: str, after: str, limit: int) -> list[str]:
        base = self._base + index + b"/"
        start = max(base + prefix.encode(), base + after.encode() + b"\0" if after else b"")
        end = base + (prefix + HIDDEN).encode()
        if start >= end:
            return []
        reply = self._range(key=start, range_end=end, limit=limit, keys_only=True)
        return [kv.key[len(base) :].decode() for kv in reply.kvs]

    def scrub(self) -> str:
        return (
            "etcd keeps deleted keys until it is compacted: run etcdctl compact REVISION, then etcdctl defrag, and "
            "wait until its write-ahead log is recycled"
        )

    def check(self) -> None:
        """A linearizable read (needs a majority) and a transaction that writes nothing (needs the right to write)."""
        probe = self._base + b"check"
        self._range(key=probe, limit=1)
        self._write("Txn", self._endpoints.messages.TxnRequest(success=[self._delete_operation(probe)]))

    def close(self) -> None:
        self._notifier.close()
        self._endpoints.close()

    def subscribe(self, callback: Callable[[str], None], wanted: Wanted | None = None) -> Callable[[], None] | None:
        return self._notifier.subscribe(callback, wanted)

    def _entry_key(self, key: str, seqno: int) -> bytes:
        return b"%be/%b\0%b" % (self._base, key.encode(), (SEQNO_MAX - seqno).to_bytes(8, "big"))

    def _index_key(self, index: bytes, key: str) -> bytes:
        return b"%b%b/%b" % (self._base, index, key.encode())

    def _entries(self, key: str) -> tuple[bytes, bytes]:
        start = b"%be/%b" % (self._base, key.encode())
        return start + b"\0", start + b"\1"

    def _compare_version(self, result: str, key: bytes, range_end: bytes = b"") -> Any:
        compare = self._endpoints.messages.Compare
        return compare(result=compare.CompareResult.Value(result), target=compare.VERSION, key=key, range_end=range_end)

    def _compare_beginning(self, key: bytes, beginning: bytes) -> list[Any]:
        """Compares that the value is longer than `beginning` and begins with it, as a range of values."""
        compare = self._endpoints.messages.Compare
        bounds = {"GREATER": beginning}
        if following := _next_prefix(beginning):
            bounds["LESS"] = following
        return [
            compare(result=compare.CompareResult.Value(result), target=compare.VALUE, key=key, value=bound)
            for result, bound in bounds.items()
        ]

    def _range(self, **fields: Any) -> Any:
        request = self._endpoints.messages.RangeRequest(**fields)
        return self._endpoints.read(
            lambda client, timeout: client.kvstub.Range(request, timeout, metadata=client.metadata)
        )

    def _write(self, method: str, request: Any) -> Any:
        return self._endpoints.write(
            lambda client, timeout: getattr(client.kvstub, method)(request, timeout, metadata=client.metadata)
        )

    def _page(self, key: str, first: int, length: int) -> list[Entry]:
        """The live entries in `[first, first + length)`, ascending."""
        last = min(first + length - 1, SEQNO_MAX)
        reply = self._range(key=self._entry_key(key, last), range_end=self._entry_key(key, first) + b"\0")
        return [_entry(kv) for kv in reversed(reply.kvs)]

    def _live(self, key: str) -> tuple[int, int]:
        """The first and the last live seqno, as of one moment; (1, 0) if there is none."""
        start, end = self._entries(key)
        reply = self._range(key=start, range_end=end, limit=1, keys_only=True)
        if not reply.kvs:
            return 1, 0
        head = _entry(reply.kvs[0]).seqno
        # `count` is that of the whole range, regardless of the limit; the entries are contiguous.
        return head - reply.count + 1, head

    def _watch(self) -> Callable[[], None]:
        return KeyWatcher(self._endpoints, self._base + b"e/", self._base + b"e0", self._publish_raw).close

    def _publish_raw(self, names: Iterable[bytes]) -> None:
        skip = len(self._base) + 2
        self._notifier.publish({name[skip:-9].decode() for name in names})


def _entry(kv: Any) -> Entry:
    return Entry(SEQNO_MAX - int.from_bytes(kv.key[-8:], "big"), kv.value)


def _next_prefix(prefix: bytes) -> bytes:
    """The first bytes that sort after all values with this prefix; empty if there are none."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b""


def _address(host: str) -> str:
    name, colon, port = host.rpartition(":")
    if not colon:
        name, port = host, str(DEFAULT_PORT)
    if not name or not port.isdigit():
        raise ConsensusMisconfigured(
            f"etcd: address {host!r} must be host or host:port, as in etcd://a:2379,b:2379/prefix"
        )
    return f"{name}:{port}"
