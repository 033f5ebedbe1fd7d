"""A client of listen streams: frames as events, resumed at another server if one fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import quote

import pyarrow as pa
from msgspec import Meta, Struct
from msgspec.json import decode as json_decode

from persist.client.client import Client
from persist.client.listen import ListenEvent
from persist.core.errors import InvalidUsage, Unavailable
from persist.core.frontier import Antichain
from persist.http_client.http_calls import BACKOFF_MAX_S, HttpCalls, error_of
from persist.http_client.http_connection import ERROR_BYTES_MAX, Answer, Broken, NotSent, _Connection
from rpc.client.http_transport import HttpTransport
from rpc.listen_frames import FRAMES, HEARTBEAT_S, ID_LENGTH_MAX

HEADER_BYTES_MAX = 1024 * 1024
FRAME_BYTES_MAX = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class Frame:
    """A decoded frame: its event (None: a heartbeat), and the id by which to resume after it, if any."""

    event: ListenEvent | None
    id: str | None


class _Header(Struct):
    lower: list[int]
    upper: list[int]
    bytes: int
    id: Annotated[str, Meta(max_length=ID_LENGTH_MAX, pattern=r"^[ -~]*\Z")] | None = None


def frames(pieces: Iterator[bytes]) -> Iterator[Frame]:
    """The complete frames of a stream.

    Raises Unavailable if the stream cannot be decoded: resume after the frames that were yielded.
    """
    buffer = bytearray()

    def ready(size: int) -> bool:
        while len(buffer) < size:
            piece = next(pieces, None)
            if piece is None:
                return False
            buffer.extend(piece)
        return True

    while ready(4):
        size = int.from_bytes(buffer[:4], "big")
        if size > HEADER_BYTES_MAX:
            raise Unavailable("the stream does not consist of frames")
        if not ready(4 + size):
            return
        try:
            header = json_decode(bytes(buffer[4 : 4 + size]), type=_Header)
            lower, upper = Antichain.from_json(header.lower), Antichain.from_json(header.upper)
            total = 4 + size + header.bytes
            if not 4 + size <= total <= FRAME_BYTES_MAX:
                raise ValueError(f"a frame of {total} bytes")
            if not ready(total):
                return
            body = bytes(buffer[4 + size : total])
            event = ListenEvent(lower, upper, pa.ipc.open_stream(body).read_all()) if body else None
            frame = Frame(event, header.id)
        except (
            ValueError,
            TypeError,
            ArithmeticError,
            OSError,
            RecursionError,
            pa.ArrowException,
            InvalidUsage,
        ) as error:
            raise Unavailable(f"the stream contains an invalid frame: {error}") from error
        del buffer[:total]
        yield frame


SILENCE_S = 3 * HEARTBEAT_S  # without even a heartbeat for so long, the server counts as failed


def follow(
    calls: HttpCalls, name: str, after: int | None = None, until: Antichain | None = None
) -> Iterator[ListenEvent]:
    """Every update after a time, once and in order, until `until` or the shard's end, without heartbeats.

    Resumes at any server that is found within the connection's timeout, by the id of the last frame. A step of several
    events that was interrupted is repeated; while more events of it follow, `lower == upper`, so treat a step as
    received only when its frontier has moved. Raises UnknownShard (the name belongs to another shard now), HistoryLost
    (what was read is no longer in the log).
    """
    frontier = Antichain(0 if after is None else after + 1)
    end = until or Antichain(None)
    deadline: float | None = None
    place: str | None = None  # the id at `frontier`
    while frontier.element is not None and frontier < end:
        for server in calls.servers.order(name):
            try:
                for frame in _frames(calls, server, name, (frontier, end), place):
                    deadline = None
                    if frame.event is not None:
                        yield frame.event
                        frontier = frame.event.upper
                    place = frame.id
                break
            except (NotSent, Broken, Unavailable):
                calls.servers.failed(server)
        if frontier.element is not None and frontier < end:
            deadline = _pause_before_retry(calls, deadline, name)


def _frames(
    calls: HttpCalls, server: str, name: str, interval: tuple[Antichain, Antichain], place: str | None
) -> Iterator[Frame]:
    frontier, until = interval
    assert frontier.element is not None
    query = f"until={'[]' if until.element is None else until.element}"
    if frontier.element > 0:
        query += f"&after={frontier.element - 1}"
    path = f"/v1/shards/{quote(name, safe='')}/listen?{query}"
    headers = {"accept": FRAMES} if place is None else {"accept": FRAMES, "last-event-id": place}
    pool = calls._pools[server]
    connection = pool._take(SILENCE_S)
    try:
        connection.send(pool._head("GET", path, {**calls._headers, **headers}, None), None, SILENCE_S)
        answer, reply = connection.begin(False)
        calls.servers.worked(server)
        if reply.status >= 400:
            reply.data = connection.body(answer, ERROR_BYTES_MAX)
            raise error_of(server, reply, safe=True)
        yield from frames(_not_silent(connection, answer))
    finally:
        connection.close()


def _not_silent(connection: _Connection, answer: Answer) -> Iterator[bytes]:
    """The body in pieces, each of which comes within SILENCE_S."""
    for piece in connection.pieces(answer):
        yield piece
        connection.ends = time.monotonic() + SILENCE_S


def _pause_before_retry(calls: HttpCalls, deadline: float | None, name: str) -> float:
    """Pause, and return the deadline of the retries. Raises Unavailable once it has passed."""
    now = calls._clock.monotonic()
    if deadline is not None and now > deadline:
        raise Unavailable(f"no server answers for shard {name!r}; resume later")
    calls._clock.sleep(BACKOFF_MAX_S / 2)
    return now + calls.timeout_s if deadline is None else deadline


def follow_with(
    client: Client, name: str, after: int | None = None, until: Antichain | None = None
) -> Iterator[ListenEvent]:
    """As `follow`, by the servers of a client."""
    assert isinstance(client.transport, HttpTransport)
    return follow(client.transport._calls, name, after, until)
