"""Records <-> MessagePack. What cannot be read is told as an error of the tree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from persist.core.batches import Batches
from persist.core.entries import Entries
from persist.core.errors import InvalidUsage, PersistError, UpgradeNeeded
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


def encoded_at(record: Record, level: int) -> bytes:
    """As `encoded`, for a location of a lower level than this build's: without the fields that came after it.

    Raises InvalidUsage where the record needs such a field.
    """
    return _encoder.encode(_at_level(record, level))


def _at_level(value: Any, level: int) -> Any:
    if isinstance(value, Record):
        kind, kept = type(value), []
        defaults = dict(zip(reversed(kind.__struct_fields__), reversed(kind.__struct_defaults__), strict=False))
        for name in kind.__struct_fields__:
            needed = kind.levels.get(name, level)
            found = getattr(value, name)
            if needed <= level:
                kept.append(_at_level(found, level))
            elif name not in kind.droppable and found != _made(defaults[name]):
                raise InvalidUsage(
                    f"{kind.__name__}.{name} needs level {needed}, and this location has level {level}: "
                    "run `persist upgrade`"
                )
        return kept
    if isinstance(value, Mapping):
        return {key: _at_level(item, level) for key, item in value.items()}
    return [_at_level(item, level) for item in value] if isinstance(value, Batches | tuple) else value


def _made(default: Any) -> Any:
    return default.factory() if hasattr(default, "factory") else default


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
