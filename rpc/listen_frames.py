"""Listen events as bytes, and headers with commit information."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import pyarrow as pa

from persist.client.commit_info import checked_purpose, read_info
from persist.client.listen import ListenEvent
from persist.codecs.json_rows import encode, to_json_rows
from persist.core.audit_log import Caller
from persist.core.errors import InvalidUsage, PersistError
from persist.core.frontier import Antichain
from persist.core.ids import ShardId
from persist.core.shard_view import SeenVersion
from persist.formats.http_messages import error_to_json
from rpc.auth import ANONYMOUS, Principal

if TYPE_CHECKING:
    from starlette.datastructures import Headers


# Listen events: frames for clients, server-sent events for browsers.

FRAMES = "application/vnd.persist.listen"
EVENTS = "text/event-stream"
HEARTBEAT_S = 15.0
ID_LENGTH_MAX = 200


@dataclass(frozen=True, slots=True)
class FrameSource:
    """The origin of an event: the version that was read, and the incarnation of the shard.

    `names` is the id of the schema whose column names select the updates of a stream of server-sent events; 0: none do.
    """

    seen: SeenVersion
    shard: ShardId
    names: int = 0

    def id_at(self, frontier: Antichain) -> str:
        """The id by which a listener that has everything before `frontier` resumes, at any server."""
        time = "closed" if frontier.element is None else frontier.element
        names = f".{self.names}" if self.names else ""
        return f"{time}.{int(self.seen.seqno)}.{self.seen.commit_id}.{self.shard}{names}"


def frame(event: ListenEvent, source: FrameSource) -> bytes:
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


def sse(event: ListenEvent, source: FrameSource) -> bytes:
    """A server-sent event: progress, the rows as JSON, and the id by which a browser resumes."""
    data = encode({**_progress(event.lower, event.upper), "rows": to_json_rows(event.updates)}).decode()
    return f"event: updates\nid: {source.id_at(event.upper)}\ndata: {data}\n\n".encode()


def sse_error(error: PersistError, status: int) -> bytes:
    """The last server-sent event of a failed stream: the error as a JSON problem."""
    return f"event: error\ndata: {json.dumps(error_to_json(error, status))}\n\n".encode()


def heartbeat(frontier: Antichain, form: str, source: FrameSource) -> bytes:
    """A frame without rows, which lets both sides detect a lost connection.

    It has an id, so that a listener without events yet does not resume in another incarnation of the shard.
    """
    if form == EVENTS:
        return f": nothing yet\nid: {source.id_at(frontier)}\n\n".encode()
    return _framed({**_progress(frontier, frontier), "rows": 0, "bytes": 0, "id": source.id_at(frontier)})


def _framed(header: dict[str, Any]) -> bytes:
    data = json.dumps(header, separators=(",", ":")).encode()
    return len(data).to_bytes(4, "big") + data


def _progress(lower: Antichain, upper: Antichain) -> dict[str, Any]:
    return {"lower": lower.to_json(), "upper": upper.to_json()}


# Commit information in two request headers:
#
#     Persist-Info: {"ticket": 4711}
#     Persist-Purpose: nightly load
#
# The first is a JSON object of at most 4 KiB, in UTF-8 or escaped; the second is percent-encoded. The token identifies
# the caller.

INFO = "Persist-Info"
PURPOSE = "Persist-Purpose"


def caller_headers(caller: Caller) -> Mapping[str, str]:
    headers = {}
    if caller.info:
        headers[INFO] = json.dumps(json.loads(caller.info), separators=(",", ":"))
    if caller.purpose:
        headers[PURPOSE] = quote(caller.purpose, safe="/:")
    return headers


def read_caller(principal: Principal, headers: Headers) -> Caller:
    """The principal with the commit information in the headers. Raises InvalidUsage naming the header."""
    name = "" if principal is ANONYMOUS else principal.name
    info, purpose = _single(headers, INFO), _single(headers, PURPOSE)
    if info is None and purpose is None:
        return Caller(name)
    data = b"" if info is None else read_info(f"the header {INFO}", info)
    try:
        plain = unquote(purpose or "", errors="strict")
    except UnicodeDecodeError as error:
        raise InvalidUsage(f"the header {PURPOSE} is not percent-encoded UTF-8") from error
    return Caller(name, checked_purpose(f"the header {PURPOSE}", plain), data)


def _single(headers: Headers, name: str) -> str | None:
    values = headers.getlist(name)
    if len(values) > 1:
        raise InvalidUsage(f"the header {name} occurs more than once; send it once")
    if not values:
        return None
    try:
        return values[0].encode("latin-1").decode()
    except UnicodeDecodeError as error:
        raise InvalidUsage(f"the header {name} is not UTF-8") from error
