"""Calls to an etcd cluster: one etcd3 client per endpoint, the next endpoint after a failure, sorted errors.

gRPC's own balancing over a list of addresses sticks to a frozen or leaderless node for many seconds; with a
client per endpoint an outage lasts as long as one call's timeout.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from consensus.errors import (
    ConsensusDamaged,
    ConsensusError,
    ConsensusIndeterminate,
    ConsensusMisconfigured,
    ConsensusNotWritable,
    ConsensusUnavailable,
    ConsensusUsage,
)
from consensus.etcd_protobuf import load_etcd3
from consensus.interface import check_process

GRPC_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", -1),
)
"""etcd asks for at least 5 s between keepalives. The length of replies is bounded by the paging of the reads."""

ROUNDS_MAX = 2
"""How often a call that may be repeated goes round all endpoints before it gives up."""

_NEVER_CONNECTED = ("failed to connect", "errors resolving", "dns resolution failed")
"""What gRPC says of an address it has no connection to: then the request was not sent."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EtcdSecurity:
    """Who we are and whom we trust: user and password, and the paths of TLS files (PEM)."""

    user: str | None = None
    password: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None


class NotSent(ConsensusUnavailable):
    """The request never left this process, so another endpoint may be asked even for a write."""


class Endpoints:
    """Addresses `host:port` of one cluster. Thread-safe; clients are made when first needed."""

    def __init__(self, addresses: Sequence[str], security: EtcdSecurity, *, timeout_s: float) -> None:
        self._addresses = tuple(addresses)
        self._security = security
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._clients: dict[int, Any] = {}
        self._current = 0

    @property
    def messages(self) -> Any:
        """The request classes of etcd's API."""
        return load_etcd3().etcdrpc

    def read(self, call: Callable[[Any, float], Any]) -> Any:
        """`call(client, timeout_s)`, on one endpoint after another until one answers."""
        return self._call(call, "read", ConsensusUnavailable)

    def write(self, call: Callable[[Any, float], Any]) -> Any:
        """As `read`, but goes on to another endpoint only if nothing was sent to the last one."""
        return self._call(call, "write", NotSent)

    def client(self) -> tuple[int, Any]:
        """The endpoint in use and its client. ConsensusUnavailable or ConsensusMisconfigured if it has none."""
        check_process(self._pid, f"etcd at {self._addresses[self._current]}")
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

    def _call(self, call: Callable[[Any, float], Any], kind: str, again: type[ConsensusError]) -> Any:
        attempts = ROUNDS_MAX * len(self._addresses)
        for attempt in range(1, attempts + 1):
            index = self._current
            try:
                index, client = self.client()
                return call(client, self._timeout_s)
            except grpc.RpcError as error:
                failure = self._sorted(error, index, kind)
                cause: Exception = error
            except ConsensusUnavailable as error:
                failure, cause = error, error
            self.rotate(index)
            if attempt == attempts or not isinstance(failure, again):
                raise failure from cause
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _make(self, address: str) -> Any:
        host, _, port = address.rpartition(":")
        security = self._security
        try:
            # Its log-in token goes with each call as metadata (as call credentials, gRPC would insist on TLS).
            return load_etcd3().client(
                host=host,
                port=int(port),
                timeout=self._timeout_s,
                user=security.user,
                password=security.password,
                ca_cert=security.ca,
                cert_cert=security.cert,
                cert_key=security.key,
                grpc_options=GRPC_OPTIONS,
            )
        except grpc.RpcError as error:
            # Only the log-in talks to the server here; nothing of the caller's was sent.
            failure = _sort(error, f"etcd at {address}", "setup")
            if isinstance(failure, ConsensusIndeterminate | ConsensusUnavailable):
                failure = NotSent(str(failure))
            raise failure from error
        except (OSError, ValueError) as error:
            raise ConsensusMisconfigured(f"the TLS files for etcd at {address} cannot be used: {error}") from error

    def _sorted(self, error: grpc.RpcError, index: int, kind: str) -> ConsensusError:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED and self._security.user:
            # The log-in has lapsed (etcd forgets it after minutes of silence): log in anew next time.
            with self._lock:
                client = self._clients.pop(index, None)
            if client is not None:
                client.close()
            return NotSent(f"etcd at {self._addresses[index]} has forgotten the log-in: {error.details()}")
        return _sort(error, f"etcd at {self._addresses[index]}", kind)


def _sort(error: grpc.RpcError, where: str, kind: str) -> ConsensusError:
    """What a failed call tells: nothing sent, refused, misconfigured, too large, or nobody knows."""
    code, said = error.code(), str(error.details())
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return ConsensusMisconfigured(f"{where} refuses the user or password, or the user's role lacks rights: {said}")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        if "authentication" in said or "user name is empty" in said:
            return ConsensusMisconfigured(f"{where} refuses the user or password: {said}")
        if "too large" in said:
            return ConsensusUsage(f"{where} refuses a value this long; raise its --max-request-bytes: {said}")
        return ConsensusUnavailable(f"{where} did not carry out a {kind}: {said}")
    if code is grpc.StatusCode.FAILED_PRECONDITION and "authentication" in said:
        return ConsensusMisconfigured(f"{where} has authentication disabled; leave user and password out: {said}")
    if code is grpc.StatusCode.DATA_LOSS:
        return ConsensusDamaged(f"{where} says that its data is damaged; restore a backup: {said}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "space exceeded" in said:
        return ConsensusNotWritable(f"{where} is full, nothing was written: {said}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return ConsensusUnavailable(f"{where} is overloaded, nothing was written: {said}")
    if code is grpc.StatusCode.UNAVAILABLE and any(words in said.lower() for words in _NEVER_CONNECTED):
        return NotSent(f"{where} cannot be reached: {said}")
    if kind == "write":
        return ConsensusIndeterminate(f"{where} failed while writing ({code.name}): {said}")
    return ConsensusUnavailable(f"{where} did not answer ({code.name}): {said}")
