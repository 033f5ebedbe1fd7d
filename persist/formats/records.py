"""Records <-> MessagePack. What cannot be read is told as an error of the tree."""

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


def _plain(value: object) -> object:
    """What msgspec cannot write, as what it can."""
    if isinstance(value, Batches):
        return tuple(value)
    if isinstance(value, Entries):
        return value.plain()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it holds a {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
# What msgspec says of a record with more fields, of another kind of record, and of another word than it knows.
_NEWER = re.compile(r"^(Expected `array` of at most length|Invalid (enum )?value ')")


def encoded(record: Record) -> bytes:
    """The bytes of a record. Raises InvalidUsage where it holds what none can, as a number of more than 64 bits."""
    try:
        return _encoder.encode(record)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidUsage(f"a {type(record).__name__} cannot be written: {error}") from error


def decoded(decoder: msgspec.msgpack.Decoder[_T], data: bytes | memoryview, what: str, bad: type[PersistError]) -> _T:
    """The record that the bytes hold. Raises UpgradeNeeded when a newer build wrote it, `bad` on anything else."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        if _NEWER.search(str(error)):
            raise UpgradeNeeded(f"a {what} holds what this persist does not know: {error}; upgrade it") from error
        raise bad(f"a {what} of {len(data)} bytes does not make sense: {error}") from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise bad(f"a {what} of {len(data)} bytes is cut short or damaged: {error}") from error


def json_crc(body: object) -> int:
    """The CRC-32 of a value of JSON, whatever the order of its names: what a file of JSON has beside it."""
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
