"""HTTP payloads: commands, results and views as records, results and views also as JSON, errors as problem+json.

In JSON frontiers are `[7]` or `[]`, bytes are base64, and ids have their type letter.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any, TypeVar, Union, cast

import msgspec

from persist.core.audit_log import NOBODY, Caller, HistoryPage
from persist.core.batch import Run
from persist.core.commands import Command, Result, kinds
from persist.core.errors import Corruption, InvalidUsage, PersistError, UpgradeNeeded, from_kind
from persist.core.frontier import MINIMUM, Antichain
from persist.core.record import Record, asdict
from persist.core.shard_view import ShardView
from persist.formats.records import decoded, encoded

ARROW_STREAM = "application/vnd.apache.arrow.stream"
PROBLEM_JSON = "application/problem+json"
RECORD = "application/vnd.persist.record"  # MessagePack
_NOT_IN_JSON = frozenset({"batches", "drops", "truncations", "erased", "reader", "tagged", "details", "schema_times"})
PROTOCOL_VERSION = 3  # of the records in HTTP payloads


class BlobMissing(InvalidUsage):
    """There is no blob with that key, or it ends before the range does."""

    kind = "blob_missing"


class StagedRuns(Record, frozen=True):
    """Staged runs, with or without receipts."""

    runs: tuple[Run, ...]


_AnyCommand = TypeVar("_AnyCommand", bound=Command)
_STAGED = msgspec.msgpack.Decoder(StagedRuns)
_COMMAND: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Union[tuple(kinds(Command))])  # noqa: UP007
_CALLER = msgspec.msgpack.Decoder(Caller)
_RESULT: msgspec.msgpack.Decoder[Result] = msgspec.msgpack.Decoder(Union[tuple(kinds(Result))])  # noqa: UP007
_PAGE = msgspec.msgpack.Decoder(HistoryPage)
_VIEW = msgspec.msgpack.Decoder(ShardView)


def decode_command(data: bytes) -> Command:
    """Raises InvalidUsage for invalid bytes, and UpgradeNeeded for an unknown command."""
    return decoded(_COMMAND, data, "command", InvalidUsage)


def validate_command(command: _AnyCommand) -> _AnyCommand:
    """The command as a server decodes it from a request, for programs that commit directly.

    Raises InvalidUsage if a value has a wrong type or is out of range: it would make the log unreadable.
    """
    try:
        return cast(_AnyCommand, decode_command(encoded(command)))
    except UpgradeNeeded as error:
        raise InvalidUsage(f"a command is not valid: {error.__cause__}") from error


def validate_caller(caller: Caller) -> Caller:
    """The caller as decoded from the log. Raises InvalidUsage if a value has a wrong type."""
    return caller if caller is NOBODY else decoded(_CALLER, encoded(caller), "caller", InvalidUsage)


def decode_result(data: bytes) -> Result:
    """Raises Corruption for invalid bytes, and UpgradeNeeded for an unknown result."""
    return decoded(_RESULT, data, "result", Corruption)


def encode_view(view: ShardView) -> bytes:
    """The bytes of a view, without trailing empty fields, so that clients that do not know them can decode it."""
    values = [getattr(view, name) for name in view.__struct_fields__]
    while values[-1] in ((), 0, None, MINIMUM):
        values.pop()
    return msgspec.msgpack.encode(values)


def decode_view(data: bytes) -> ShardView:
    """Raises Corruption for invalid bytes, and UpgradeNeeded for a view of a newer version."""
    return decoded(_VIEW, data, "view", Corruption)


def decode_history(data: bytes) -> HistoryPage:
    """Raises Corruption for invalid bytes, and UpgradeNeeded for a page of a newer version."""
    return decoded(_PAGE, data, "page of a commit history", Corruption)


def decode_staged(data: bytes, bad: type[PersistError]) -> tuple[Run, ...]:
    """Raises `bad` for invalid bytes, and UpgradeNeeded for staged runs of a newer version."""
    return decoded(_STAGED, data, "list of staged parts", bad).runs


def result_to_json(result: Result) -> dict[str, Any]:
    return {"result": result.__struct_config__.tag, **_fields_to_json(result)}


def view_to_json(view: ShardView) -> dict[str, Any]:
    """The view without its batches, and without the fields that only readers of batches need."""
    schemas = {
        str(number): {"arrow": b64encode(schema.arrow).decode(), "key": schema.key}
        for number, schema in view.schemas.items()
    }
    hidden = _NOT_IN_JSON if view.service_times else _NOT_IN_JSON | {"service_times"}
    return {name: value for name, value in _fields_to_json(view).items() if name not in hidden} | {"schemas": schemas}


def _fields_to_json(record: Result | ShardView) -> dict[str, Any]:
    return {name: value.to_json() if isinstance(value, Antichain) else value for name, value in asdict(record).items()}


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
    """The error of a problem+json body."""
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        return PersistError(f"the server responded with an unknown error: {value!r:.200}")
    details = value.get("details")
    return from_kind(value["kind"], str(value.get("detail", "")), details if isinstance(details, dict) else {})


def named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` that raises ValueError for a duplicate name, of which only one value would be used."""
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("an object has two values for one name")
    return members
