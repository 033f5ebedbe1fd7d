"""Listen events as bytes, both ways: frames for clients, server-sent events for browsers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from persist.client.listen import ListenEvent
from persist.codecs.json_rows import encode, plain_rows
from persist.core.antichain import Antichain
from persist.core.errors import InvalidUsage, PersistError, Unavailable
from persist.core.ids import ShardId
from persist.core.view import Seen
from persist.formats.http_messages import error_to_json

FRAMES = "application/vnd.persist.listen"
EVENTS = "text/event-stream"
HEARTBEAT_S = 15.0
HEADER_BYTES_MAX = 1024 * 1024
FRAME_BYTES_MAX = 2 * 1024**3
ID_LENGTH_MAX = 200


@dataclass(frozen=True, slots=True)
class Source:
    """What an event was made from: the version that was read, and which shard of its name that is."""

    seen: Seen
    shard: ShardId

    def id_at(self, frontier: Antichain) -> str:
        """By which a listener that has everything before `frontier` goes on, at this server or at another one."""
        time = "closed" if frontier.element is None else frontier.element
        return f"{time}.{int(self.seen.seqno)}.{self.seen.commit_id}.{self.shard}"


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that was read: its event (None: a heartbeat), and the id by which to go on after it, if it has one."""

    event: ListenEvent | None
    id: str | None


def frame(event: ListenEvent, source: Source) -> bytes:
    """Four bytes (big-endian) that give the length of a JSON header, the header, then `bytes` bytes of Arrow IPC.

    A heartbeat has no bytes; progress without rows has the columns.
    """
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, event.updates.schema) as writer:
        writer.write_table(event.updates)
    data = sink.getvalue()
    counts = {"rows": event.updates.num_rows, "bytes": data.size}
    header = _framed({**_progress(event.lower, event.upper), **counts, "id": source.id_at(event.upper)})
    return b"".join((header, data))


def sse(event: ListenEvent, source: Source) -> bytes:
    """A server-sent event: progress and the rows as JSON, and the id by which a browser resumes by itself."""
    data = encode({**_progress(event.lower, event.upper), "rows": plain_rows(event.updates)}).decode()
    return f"event: updates\nid: {source.id_at(event.upper)}\ndata: {data}\n\n".encode()


def sse_error(error: PersistError, status: int) -> bytes:
    """The last server-sent event of a stream that fails: the error, as a problem in JSON."""
    return f"event: error\ndata: {json.dumps(error_to_json(error, status))}\n\n".encode()


def heartbeat(frontier: Antichain, form: str, source: Source) -> bytes:
    """What is sent when nothing happens, so that both sides notice when the other is gone.

    It has an id too: who has been given nothing yet must not go on in another shard of the name either.
    """
    if form == EVENTS:
        return f": nothing yet\nid: {source.id_at(frontier)}\n\n".encode()
    return _framed({**_progress(frontier, frontier), "rows": 0, "bytes": 0, "id": source.id_at(frontier)})


def _framed(header: dict[str, Any]) -> bytes:
    data = json.dumps(header, separators=(",", ":")).encode()
    return len(data).to_bytes(4, "big") + data


def _progress(lower: Antichain, upper: Antichain) -> dict[str, Any]:
    return {"lower": lower.to_json(), "upper": upper.to_json()}


def _id_in(header: dict[str, Any]) -> str | None:
    found = header.get("id")
    if found is None:
        return None
    if not isinstance(found, str) or len(found) > ID_LENGTH_MAX or not (found.isascii() and found.isprintable()):
        raise ValueError("an id that is none")
    return found


def frames(pieces: Iterator[bytes]) -> Iterator[Frame]:
    """The frames of a stream. One that is cut is not given.

    Raises Unavailable where no frame comes: what was given before is good, so go on from there.
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
            total = 4 + size + int(header["bytes"])
            if not 4 + size <= total <= FRAME_BYTES_MAX:
                raise ValueError(f"a frame of {total} bytes")
            if not ready(total):
                return
            body = bytes(buffer[4 + size : total])
            event = ListenEvent(lower, upper, pa.ipc.open_stream(body).read_all()) if body else None
            found = Frame(event, _id_in(header))
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
        yield found
