"""Records <-> MessagePack. Errors of msgspec become errors of `persist.core.errors`."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from persist.core.batch import Batches
from persist.core.errors import InvalidUsage, PersistError, UpgradeNeeded
from persist.core.persistent_map import Entries
from persist.core.record import Record

_T = TypeVar("_T")


def _to_builtin(value: object) -> object:
    """The encoding hook for values that msgspec does not know."""
    if isinstance(value, Batches):
        return tuple(value)
    if isinstance(value, Entries):
        return value.plain()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it holds a {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_builtin)
# Messages of msgspec for a record with unknown fields, of an unknown type, or with an unknown enum value.
_NEWER = re.compile(r"^(Expected `array` of at most length|Invalid (enum )?value ')")


def encoded(record: Record) -> bytes:
    """The bytes of a record. Raises InvalidUsage for values that cannot be encoded, such as integers beyond 64 bits."""
    try:
        return _encoder.encode(record)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidUsage(f"a {type(record).__name__} cannot be written: {error}") from error


def decoded(decoder: msgspec.msgpack.Decoder[_T], data: bytes | memoryview, what: str, bad: type[PersistError]) -> _T:
    """Decode a record. Raises UpgradeNeeded if a newer version wrote it, and `bad` for any other invalid bytes."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        if _NEWER.search(str(error)):
            raise UpgradeNeeded(f"a {what} was written by a newer version of persist: {error}; upgrade") from error
        raise bad(f"a {what} of {len(data)} bytes is not valid: {error}") from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise bad(f"a {what} of {len(data)} bytes is truncated or damaged: {error}") from error


def json_crc(body: object) -> int:
    """The CRC-32 of a JSON value, independent of the order of its keys."""
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
