"""Listen events as bytes, both ways: frames for clients, server-sent events for browsers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from persist.client.listen import ListenEvent
from persist.core.antichain import Antichain
from persist.core.errors import InvalidUsage, PersistError, Unavailable
from persist.core.view import Seen
from persist.formats.http_messages import error_to_json
from rpc.json_rows import encode, plain_rows

FRAMES = "application/vnd.persist.listen"
EVENTS = "text/event-stream"
HEARTBEAT_S = 15.0
SEEN = r"([0-9]{1,18}\.[0-9a-f]{32})?"
HEADER_BYTES_MAX = 1024 * 1024
FRAME_BYTES_MAX = 2 * 1024**3


def frame(event: ListenEvent, seen: Seen) -> bytes:
    """Four bytes (big-endian) that give the length of a JSON header, the header, then `bytes` bytes of Arrow IPC.

    A heartbeat has no bytes; progress without rows has the columns. `seen` is as in `sse`.
    """
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, event.updates.schema) as writer:
        writer.write_table(event.updates)
    data = sink.getvalue()
    header = _framed(
        {**_progress(event.lower, event.upper), "rows": event.updates.num_rows, "bytes": data.size, "seen": _seen(seen)}
    )
    return b"".join((header, data))


def sse(event: ListenEvent, seen: Seen) -> bytes:
    """A server-sent event: progress and the rows as JSON.

    Its id is the frontier, from which to resume, and what was `seen` to make it, so that another server can compare.
    """
    data = encode({**_progress(event.lower, event.upper), "rows": plain_rows(event.updates)}).decode()
    number = "" if event.lower == event.upper else f"id: {_id(event.upper, seen)}\n"
    return f"event: updates\n{number}data: {data}\n\n".encode()


def sse_error(error: PersistError, status: int) -> bytes:
    """The last server-sent event of a stream that fails: the error, as a problem in JSON."""
    return f"event: error\ndata: {json.dumps(error_to_json(error, status))}\n\n".encode()


def heartbeat(frontier: Antichain, form: str) -> bytes:
    """What is sent when nothing happens, so that both sides notice when the other is gone."""
    if form == EVENTS:
        return b": nothing yet\n\n"
    return _framed({**_progress(frontier, frontier), "rows": 0, "bytes": 0})


def _framed(header: dict[str, Any]) -> bytes:
    data = json.dumps(header, separators=(",", ":")).encode()
    return len(data).to_bytes(4, "big") + data


def _progress(lower: Antichain, upper: Antichain) -> dict[str, Any]:
    return {"lower": lower.to_json(), "upper": upper.to_json()}


def _id(frontier: Antichain, seen: Seen) -> str:
    if frontier.element is None:
        return "closed"
    return f"{frontier.element}.{_seen(seen)}"


def _seen(seen: Seen) -> str:
    return f"{int(seen.seqno)}.{seen.commit_id}"


def frames(pieces: Iterator[bytes]) -> Iterator[tuple[ListenEvent | None, str]]:
    """The events of a stream, None for a heartbeat, and what was seen to make them ("": the server does not tell).

    A frame that is cut is not given. Raises Unavailable where no frame comes: what was given before is good, so go on
    from there.
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
            raise Unavailable("the stream is not a stream of frames")
        if not ready(4 + size):
            return
        try:
            header: dict[str, Any] = json.loads(bytes(buffer[4 : 4 + size]))
            lower, upper = Antichain.from_json(header["lower"]), Antichain.from_json(header["upper"])
            seen = header.get("seen", "")
            if not re.fullmatch(SEEN, seen):
                raise ValueError(f"seen is {seen!r:.100}")
            total = 4 + size + int(header["bytes"])
            if not 4 + size <= total <= FRAME_BYTES_MAX:
                raise ValueError(f"a frame of {total} bytes")
            if not ready(total):
                return
            body = bytes(buffer[4 + size : total])
            event = ListenEvent(lower, upper, pa.ipc.open_stream(body).read_all()) if body else None
        except (
            ValueError,
            LookupError,
            TypeError,
            ArithmeticError,
            OSError,
            RecursionError,
            pa.ArrowException,
            InvalidUsage,
        ) as error:
            raise Unavailable(f"the stream holds a frame that cannot be read: {error}") from error
        del buffer[:total]
        yield event, seen
