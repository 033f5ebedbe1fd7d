"""A server of raw bytes: it answers each request with the next thing that it was told to say."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self

from tests.support.waiting import WAIT_S

CLOSE = b""
ROOM = 64 * 1024


def answer(status: int, body: bytes = b"", media_type: str = "application/json") -> bytes:
    """A whole answer."""
    head = f"HTTP/1.1 {status} Said\r\ncontent-type: {media_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def chunked(*pieces: bytes, is_whole: bool = True) -> bytes:
    """An answer of 200 in chunks; without its end it goes on."""
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + (b"0\r\n\r\n" if is_whole else b"")


class Answering:
    """Listens on loopback. `says[n]` answers the n-th request; the last one answers all that come after.

    CLOSE ends the connection without an answer. Any other answer that is not whole is followed by the end, too.
    With `drip_s` every byte of an answer comes so much later than the one before it, but /healthz is answered at once.
    """

    def __init__(self, *says: bytes, then_close: bool = False, drip_s: float | None = None) -> None:
        self._drip_s = drip_s
        self._ended = threading.Event()
        self._says = list(says)
        self._then_close = then_close
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(16)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests: list[bytes] = []
        self._closing = threading.Condition()
        self._closed = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def targets(self) -> list[str]:
        """Method and target of each request."""
        return [" ".join(request.decode().split(" ", 2)[:2]) for request in self.requests]

    def say(self, *says: bytes) -> None:
        """Answer so from now on."""
        self._says = list(says)

    def wait_closed(self, count: int) -> None:
        """Wait until it has closed so many connections."""
        with self._closing:
            assert self._closing.wait_for(lambda: self._closed >= count, WAIT_S)

    def close(self) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve_and_close, args=(client,), daemon=True))
            self._threads[-1].start()

    def _serve_and_close(self, client: socket.socket) -> None:
        self._serve(client)
        with self._closing:
            self._closed += 1
            self._closing.notify_all()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            data = b""
            while piece := client.recv(ROOM):
                data += piece
                head, mark, body = data.partition(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                if not mark or len(body) < int(length[0].split(b":")[1] if length else 0):
                    continue
                if self._drip_s is not None and b" /healthz " in data:
                    client.sendall(answer(200, b"ok"))
                    return
                self.requests.append(data)
                data = b""
                said = self._says.pop(0) if len(self._says) > 1 else self._says[0]
                self._send(client, said)
                if self._then_close or not said or b"\r\n\r\n" not in said or b"chunked" in said:
                    return

    def _send(self, client: socket.socket, said: bytes) -> None:
        if self._drip_s is None:
            client.sendall(said)
            return
        for byte in said:
            if self._ended.wait(self._drip_s):
                return
            client.sendall(bytes([byte]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
