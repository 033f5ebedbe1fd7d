"""What crosses HTTP: commands, results and views as records, results and views also as JSON, errors as problem+json.

In JSON frontiers are `[7]` or `[]`, bytes are base64, ids print their letter.
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
_OF_RECORDS = frozenset({"batches", "drops", "truncations", "erased", "reader", "tagged", "details", "schema_times"})
PROTOCOL_VERSION = 3  # of the records that cross HTTP


class BlobMissing(InvalidUsage):
    """There is no blob of that key (any more), or it ends before the range does."""

    kind = "blob_missing"


class StagedRuns(Record, frozen=True):
    """Staged runs, for which receipts are asked, or which have them."""

    runs: tuple[Run, ...]


_AnyCommand = TypeVar("_AnyCommand", bound=Command)
_STAGED = msgspec.msgpack.Decoder(StagedRuns)
_COMMAND: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Union[tuple(kinds(Command))])  # noqa: UP007
_CALLER = msgspec.msgpack.Decoder(Caller)
_RESULT: msgspec.msgpack.Decoder[Result] = msgspec.msgpack.Decoder(Union[tuple(kinds(Result))])  # noqa: UP007
_PAGE = msgspec.msgpack.Decoder(HistoryPage)
_VIEW = msgspec.msgpack.Decoder(ShardView)


def decode_command(data: bytes) -> Command:
    """Raises InvalidUsage on anything that is no command, UpgradeNeeded on one that is not known here."""
    return decoded(_COMMAND, data, "command", InvalidUsage)


def validate_command(command: _AnyCommand) -> _AnyCommand:
    """The command as a server reads it from a request, so that what a program commits itself is no other one.

    Raises InvalidUsage where a value has a wrong type, or is out of its range: the log could not be read with it.
    """
    try:
        return cast(_AnyCommand, decode_command(encoded(command)))
    except UpgradeNeeded as error:
        raise InvalidUsage(f"a command does not make sense: {error.__cause__}") from error


def validate_caller(caller: Caller) -> Caller:
    """The caller as the log gives them back. Raises InvalidUsage where a value has a wrong type."""
    return caller if caller is NOBODY else decoded(_CALLER, encoded(caller), "caller", InvalidUsage)


def decode_result(data: bytes) -> Result:
    """Raises Corruption on anything that is no result, UpgradeNeeded on one that is not known here."""
    return decoded(_RESULT, data, "result", Corruption)


def encode_view(view: ShardView) -> bytes:
    """The bytes of a view, without empty fields at its end, so that clients read it which do not know these."""
    values = [getattr(view, name) for name in view.__struct_fields__]
    while values[-1] in ((), 0, None, MINIMUM):
        values.pop()
    return msgspec.msgpack.encode(values)


def decode_view(data: bytes) -> ShardView:
    """Raises Corruption on anything that is no view, UpgradeNeeded on one that is not known here."""
    return decoded(_VIEW, data, "view", Corruption)


def decode_history(data: bytes) -> HistoryPage:
    """Raises Corruption on anything that is no page of a commit history, UpgradeNeeded on what is not known here."""
    return decoded(_PAGE, data, "page of a commit history", Corruption)


def decode_staged(data: bytes, bad: type[PersistError]) -> tuple[Run, ...]:
    """Raises `bad` on anything that is no staged runs, UpgradeNeeded on what is not known here."""
    return decoded(_STAGED, data, "list of staged parts", bad).runs


def result_to_json(result: Result) -> dict[str, Any]:
    return {"result": result.__struct_config__.tag, **_shown(result)}


def view_to_json(view: ShardView) -> dict[str, Any]:
    """The view without its batches, and without what only who reads these asks for."""
    schemas = {
        str(number): {"arrow": b64encode(schema.arrow).decode(), "key": schema.key}
        for number, schema in view.schemas.items()
    }
    hidden = _OF_RECORDS if view.service_times else _OF_RECORDS | {"service_times"}
    return {name: value for name, value in _shown(view).items() if name not in hidden} | {"schemas": schemas}


def _shown(record: Result | ShardView) -> dict[str, Any]:
    return {name: x.to_json() if isinstance(x, Antichain) else x for name, x in asdict(record).items()}


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


def named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a decoder of JSON. Raises ValueError where it names something twice: only one would be heeded."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object gives two values for one name")
    return found
