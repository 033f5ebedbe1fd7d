"""A TCP proxy that fails at will, between a store and its server, on loopback.

    pass      bytes go both ways
    refuse    the port is closed; open connections are reset
    reset     connections are accepted and reset at once; open ones are reset
    hang      nothing moves any more, nothing is closed
    swallow   requests reach the server, its replies are thrown away
    delay     every piece arrives `delay_s` later

`half_close` ends one direction of every open connection; the other goes on. `hang` and then `cut` is a connection
reset before the server saw the request; `swallow` and then `cut` is one reset after the server carried it out.
`upload_limit` resets a connection that has sent more bytes than that. `rewrite` changes what the server says.
`watch` hears what is passed on (`metering_proxy` counts requests by it).
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Protocol

from tests.services.process import free_ports

MODES = ("pass", "refuse", "reset", "hang", "swallow", "delay")
ENDS = ("client", "server")
CHUNK = 64 * 1024
LOOK_S = 0.02
CUT_S = 60.0
DELAY_S = 0.05


class Watch(Protocol):
    """Hears the bytes of one connection, before they are passed on."""

    def sent(self, data: bytes) -> None:
        """By the client."""
        ...

    def received(self, data: bytes) -> None:
        """By the client."""
        ...


class FaultProxy:
    """Listens on `port` and forwards to the port `target` of `host`. All threads end at `close`.

    `watch` makes what hears one connection.
    """

    def __init__(self, target: int, *, host: str = "127.0.0.1", watch: Callable[[], Watch] | None = None) -> None:
        self.target = target
        self.host = host
        self._watch = watch
        self.port = free_ports(1)[0]
        self.upload_limit: int | None = None
        self.delay_s = DELAY_S
        self.held = False  # whether something came since it hangs, and was not passed on
        self.rewrite: Callable[[bytes], bytes] | None = None
        self._mode = "pass"
        self._cuts = 0
        self._half_closes: list[str] = []
        self._live: dict[int, int] = {}
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self._listen()

    def mode(self, mode: str) -> None:
        """Behave as `mode` from now on."""
        assert mode in MODES, mode
        self.held = self.held and mode != "hang"
        self._mode = mode
        if mode == "refuse":
            self._stop_listening()
        elif self._listener is None:
            self._listen()
        if mode in ("refuse", "reset"):
            self.cut()

    def cut(self) -> None:
        """Reset every connection that is open now, and wait until they are."""
        with self._changed:
            self._cuts += 1
            cuts = self._cuts
            self._changed.wait_for(lambda: all(born >= cuts for born in self._live.values()), CUT_S)

    def half_close(self, end: str) -> None:
        """On every connection that is open now `end` hears that the other will send no more; what it sends arrives."""
        assert end in ENDS, end
        self._half_closes.append(end)

    def close(self) -> None:
        self._stop_listening()
        self.cut()
        for thread in self._threads:
            thread.join(5)

    def _listen(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self._listener = listener
        self._threads.append(threading.Thread(target=self._accept, args=(listener,), daemon=True))
        self._threads[-1].start()

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            # Closing alone does not wake the thread that accepts.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client, self._cuts), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket, born: int) -> None:
        """One connection, forwarded by the thread that alone may close its sockets: only so is a reset a reset."""
        me = threading.get_ident()
        with self._changed:
            self._live[me] = born
        server: socket.socket | None = None
        is_in_order = False
        try:
            if self._mode != "reset":
                server = socket.create_connection((self.host, self.target), timeout=CUT_S)
                for each in (client, server):
                    each.settimeout(None)
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                is_in_order = self._forward(client, server, born)
        except OSError:
            pass
        finally:
            for each in (client, server):
                if each is not None and is_in_order:
                    each.close()  # what was forwarded still arrives
                elif each is not None:
                    _reset(each)
            with self._changed:
                del self._live[me]
                self._changed.notify_all()

    def _forward(self, client: socket.socket, server: socket.socket, born: int) -> bool:
        """Whether one of the two has ended the connection in order."""
        sent = 0
        watch = None if self._watch is None else self._watch()
        half_closes = len(self._half_closes)
        ended: set[socket.socket] = set()  # what would go to these is thrown away
        while self._cuts == born:
            for end in self._half_closes[half_closes:]:
                half_closes += 1
                ended.add(client if end == "client" else server)
                (client if end == "client" else server).shutdown(socket.SHUT_WR)
            if self._mode == "hang":
                self.held = self.held or bool(select.select([client], [], [], 0)[0])
                self._pause(LOOK_S)
                continue
            for source in select.select([client, server], [], [], LOOK_S)[0]:
                if self._mode == "hang":
                    break
                data = source.recv(CHUNK)
                if not data:
                    return True
                if self._mode == "delay":
                    self._pause(self.delay_s)
                if watch is not None:
                    (watch.sent if source is client else watch.received)(data)
                if source is client:
                    sent += len(data)
                    if self.upload_limit is not None and sent > self.upload_limit:
                        return False
                    if server not in ended:
                        server.sendall(data)
                elif self._mode != "swallow" and client not in ended:
                    client.sendall(self.rewrite(data) if self.rewrite is not None else data)
        return False

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait(seconds)


def _reset(each: socket.socket) -> None:
    """Close so that the peer sees a reset, not an orderly end."""
    with contextlib.suppress(OSError):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        each.close()
