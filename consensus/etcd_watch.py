"""etcd's watch as the push channel, on a thread of its own that outlives servers.

etcd3's own watcher loses its watches when a stream breaks and then spins; this one simply opens the next.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from consensus.errors import ConsensusError
from consensus.etcd_endpoints import Endpoints

RECONNECT_S = 0.2
"""Pause before a broken watch is opened again, on the next endpoint."""

_log = logging.getLogger(__name__)


class Watcher:
    """Calls `publish` with the raw keys put in `[start, end)`, until it is closed.

    A new watch begins where the last one broke off; what etcd has compacted since is lost, as hints may be.
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
                    _log.info("watching etcd for moved keys failed, trying again: %s", error)
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
