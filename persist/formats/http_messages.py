"""What crosses HTTP: commands, results, views and errors as JSON values; the names of media types and headers.

Frontiers are `[7]` or `[]`, bytes are base64, ids print their letter. A command is `{"command": "insert", ...fields}`.

A command that carries rows may also be written as a frame, without base64: the length of the JSON (u32, little-endian),
the JSON, then the byte strings, to which the JSON refers as `[offset, length]`.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from typing import Any

from persist.core import commands as c
from persist.core.errors import Corruption, InvalidUsage, PersistError, from_kind
from persist.core.view import ShardView, ViewRequest
from persist.formats import json_records as records

ARROW_STREAM = "application/vnd.apache.arrow.stream"
PROBLEM_JSON = "application/problem+json"
COMMAND_FRAME = "application/vnd.persist.command"
API_VERSION = "v1"
_HEAD_SIZE = struct.Struct("<I")

_COMMANDS: tuple[type[Any], ...] = (
    c.RegisterWriter,
    c.HeartbeatWriter,
    c.ExpireWriter,
    c.CompareAndAppend,
    c.Append,
    c.Insert,
    c.AdvanceUpper,
    c.UpdateAttributes,
    c.ReadAttributes,
    c.ScanAttributes,
    c.FlushAttributes,
    c.RegisterReader,
    c.HeartbeatReader,
    c.DowngradeSince,
    c.ExpireReader,
    c.RegisterCriticalReader,
    c.CompareAndDowngradeSince,
    c.ExpireCriticalReader,
    c.EvolveSchema,
    c.Drop,
    c.Finalise,
    c.AddRollup,
    c.RemoveRollups,
    c.TakeClaim,
    c.SaveMergeProgress,
    c.ReleaseClaim,
    c.MergeResult,
    c.ForgetLapsed,
)
_RESULTS: tuple[type[Any], ...] = (
    c.Done,
    c.WriterRegistered,
    c.Appended,
    c.AttributeValues,
    c.Flushed,
    c.ReaderRegistered,
    c.SinceDowngraded,
    c.CriticalReaderState,
    c.SchemaRegistered,
    c.RollupAdded,
    c.Finalised,
    c.Claimed,
    c.MergeApplied,
)


def _snake(cls: type[Any]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


COMMAND_NAMES: Mapping[type[Any], str] = {cls: _snake(cls) for cls in _COMMANDS}
RESULT_NAMES: Mapping[type[Any], str] = {cls: _snake(cls) for cls in _RESULTS}
_COMMAND_CLASSES = {name: cls for cls, name in COMMAND_NAMES.items()}
_RESULT_CLASSES = {name: cls for cls, name in RESULT_NAMES.items()}


def command_to_json(command: c.Command, bytes_out: records.BytesOut = records.bytes_to_text) -> dict[str, Any]:
    return {"command": COMMAND_NAMES[type(command)], **records.encode(command, type(command), bytes_out)}


def command_from_json(value: Any, bytes_in: records.BytesIn = records.text_to_bytes) -> c.Command:
    """Raises InvalidUsage on anything that is not a command."""
    return _tagged(value, "command", _COMMAND_CLASSES, bytes_in)  # type: ignore[no-any-return]


def command_to_frame(command: c.Command) -> bytes:
    payload = records.Payload()
    head = json.dumps(command_to_json(command, payload.put), separators=(",", ":")).encode()
    return b"".join([_HEAD_SIZE.pack(len(head)), head, *payload.chunks])


def command_from_frame(data: bytes) -> c.Command:
    """Raises InvalidUsage on anything that is not a command."""
    end = _HEAD_SIZE.size + (_HEAD_SIZE.unpack_from(data)[0] if len(data) >= _HEAD_SIZE.size else len(data))
    if end > len(data):
        raise InvalidUsage(f"a command's frame of {len(data)} bytes is cut short")
    try:
        head = json.loads(data[_HEAD_SIZE.size : end])
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"a command's frame holds no JSON: {error}") from error
    return command_from_json(head, records.Payload(data[end:]).take)


def result_to_json(result: c.Result) -> dict[str, Any]:
    return {"result": RESULT_NAMES[type(result)], **records.encode(result, type(result))}


def result_from_json(value: Any) -> c.Result:
    """Raises Corruption on anything that is not a result: the server does not speak this protocol."""
    try:
        return _tagged(value, "result", _RESULT_CLASSES)  # type: ignore[no-any-return]
    except InvalidUsage as error:
        raise Corruption(f"the server's answer is not a result: {error}") from error


def view_to_json(view: ShardView) -> dict[str, Any]:
    return records.encode(view, ShardView)  # type: ignore[no-any-return]


def view_from_json(value: Any) -> ShardView:
    """Raises Corruption on anything that is not a view."""
    try:
        return records.decode(value, ShardView)  # type: ignore[no-any-return]
    except InvalidUsage as error:
        raise Corruption(f"the server's answer is not a shard's view: {error}") from error


def error_to_json(error: PersistError, status: int) -> dict[str, Any]:
    """A problem+json body (RFC 9457)."""
    return {
        "type": f"urn:persist:{error.kind}",
        "title": error.kind.replace("_", " "),
        "status": status,
        "detail": error.message,
        "kind": error.kind,
        "details": error.details,
    }


def error_from_json(value: Any) -> PersistError:
    """The error that a problem+json body tells of."""
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        return PersistError(f"the server answered with an error that is not persist's: {value!r:.200}")
    details = value.get("details")
    return from_kind(value["kind"], str(value.get("detail", "")), details if isinstance(details, dict) else {})


def _tagged(
    value: Any, tag: str, classes: Mapping[str, type[Any]], take: records.BytesIn = records.text_to_bytes
) -> Any:
    if not isinstance(value, dict) or not isinstance(value.get(tag), str) or value[tag] not in classes:
        raise InvalidUsage(f"a JSON object needs the field {tag!r} with one of {', '.join(sorted(classes))}")
    fields = {k: v for k, v in value.items() if k != tag}
    return records.decode(fields, classes[value[tag]], take)


__all__ = [
    "API_VERSION",
    "ARROW_STREAM",
    "COMMAND_FRAME",
    "COMMAND_NAMES",
    "PROBLEM_JSON",
    "ViewRequest",
    "command_from_frame",
    "command_from_json",
    "command_to_frame",
    "command_to_json",
    "error_from_json",
    "error_to_json",
    "result_from_json",
    "result_to_json",
    "view_from_json",
    "view_to_json",
]
