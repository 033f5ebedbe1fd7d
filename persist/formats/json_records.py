"""Frozen dataclasses <-> JSON values, driven by their type hints. Used by `codec` (durable) and `wire` (HTTP).

Records of the hot path (`Part`, `Run`, `HollowBatch`, `Description`) are written as arrays in field order, others as
objects. Fields that are missing take their defaults, so fields may be added (at the end), never removed or reordered.
How bytes are written is up to the caller: base64 text, or a reference into a payload beside the JSON.
"""

from __future__ import annotations

import base64
import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from persist.core.antichain import Antichain
from persist.core.batch import Description, HollowBatch, Part, Run
from persist.core.errors import InvalidUsage
from persist.core.ids import Id, SeqNo

Json = Any
BytesOut = Callable[[bytes], Json]
BytesIn = Callable[[Json], bytes]
_Encode = Callable[[Any, BytesOut], Json]
_Decode = Callable[[Json, BytesIn], Any]

_AS_ARRAY: frozenset[type] = frozenset({Part, Run, HollowBatch, Description})


def bytes_to_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def text_to_bytes(text: Json) -> bytes:
    """Raises InvalidUsage on anything but base64 text."""
    if not isinstance(text, str):
        raise InvalidUsage(f"bytes are written as base64 text, not {type(text).__name__}")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise InvalidUsage(f"bytes are not valid base64: {error}") from error


class Payload:
    """Byte strings beside the JSON, which refers to them as `[offset, length]`."""

    def __init__(self, data: bytes = b"") -> None:
        self.chunks: list[bytes] = []
        self.size = 0
        self.data = data

    def put(self, data: bytes) -> list[int]:
        self.chunks.append(data)
        self.size += len(data)
        return [self.size - len(data), len(data)]

    def take(self, reference: Any) -> bytes:
        """Raises InvalidUsage when the reference leads out of the payload."""
        if not isinstance(reference, list) or len(reference) != 2:
            raise InvalidUsage(f"bytes are written as [offset, length], not {reference!r:.80}")
        offset, length = reference
        if type(offset) is not int or type(length) is not int or not 0 <= offset <= offset + length <= len(self.data):
            raise InvalidUsage(f"reference {reference!r:.80} lies outside the payload")
        return self.data[offset : offset + length]


def encode(value: Any, hint: Any, bytes_out: BytesOut = bytes_to_text) -> Json:
    """The JSON value of `value`, which is of the type `hint`."""
    return _encoder(hint)(value, bytes_out)


def decode(value: Json, hint: Any, bytes_in: BytesIn = text_to_bytes) -> Any:
    """The object of the type `hint` that `value` writes. Raises InvalidUsage when it does not."""
    try:
        return _decoder(hint)(value, bytes_in)
    except InvalidUsage:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise InvalidUsage(f"not a valid {getattr(hint, '__name__', hint)}: {error}") from error


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _optional_of(hint: Any) -> Any:
    """X of `X | None`. Other unions are not written."""
    rest = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
    if len(rest) != 1:
        raise TypeError(f"cannot write the union {hint}")
    return rest[0]


@cache
def _encoder(hint: Any) -> _Encode:
    origin = typing.get_origin(hint)
    if _is_union(hint):
        inner = _encoder(_optional_of(hint))
        return lambda v, out: None if v is None else inner(v, out)
    if origin is tuple:
        item = _encoder(typing.get_args(hint)[0])
        return lambda v, out: [item(x, out) for x in v]
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_encoder(hint)
    if hint is bytes:
        return lambda v, out: out(v)
    if hint is Antichain:
        return lambda v, out: v.to_json()
    if isinstance(hint, type) and issubclass(hint, (int, str)):
        return lambda v, out: v
    if dataclasses.is_dataclass(hint):
        return _record_encoder(hint)
    raise TypeError(f"cannot write values of {hint}")


def _mapping_encoder(hint: Any) -> _Encode:
    key_hint, value_hint = typing.get_args(hint)
    value = _encoder(value_hint)
    if issubclass(key_hint, int):
        return lambda v, out: {str(int(k)): value(x, out) for k, x in v.items()}
    return lambda v, out: {k: value(x, out) for k, x in v.items()}


def _record_encoder(cls: Any) -> _Encode:
    hints = typing.get_type_hints(cls)
    fields = [(f.name, _plain(hints[f.name]), _encoder(hints[f.name])) for f in dataclasses.fields(cls)]
    if cls in _AS_ARRAY:
        return lambda v, out: [getattr(v, name) if plain else enc(getattr(v, name), out) for name, plain, enc in fields]
    return lambda v, out: {
        name: getattr(v, name) if plain else enc(getattr(v, name), out) for name, plain, enc in fields
    }


def _plain(hint: Any) -> bool:
    """Whether values are written as they are."""
    if _is_union(hint):
        hint = _optional_of(hint)
    return isinstance(hint, type) and issubclass(hint, (int, str))


@cache
def _decoder(hint: Any) -> _Decode:
    origin = typing.get_origin(hint)
    if _is_union(hint):
        inner = _decoder(_optional_of(hint))
        return lambda v, take: None if v is None else inner(v, take)
    if origin is tuple:
        return _tuple_decoder(_decoder(typing.get_args(hint)[0]))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_decoder(hint)
    if hint is bytes:
        return lambda v, take: take(v)
    if hint is Antichain:
        return lambda v, take: Antichain.from_json(v)
    if isinstance(hint, type) and issubclass(hint, (int, str)):
        return _scalar_decoder(hint)
    if dataclasses.is_dataclass(hint):
        return _record_decoder(hint)
    raise TypeError(f"cannot read values of {hint}")


def _tuple_decoder(item: _Decode) -> _Decode:
    def read(value: Json, take: BytesIn) -> Any:
        if not isinstance(value, list):
            raise InvalidUsage(f"expected an array, not {type(value).__name__}")
        return tuple(item(x, take) for x in value)

    return read


def _mapping_decoder(hint: Any) -> _Decode:
    key_hint, value_hint = typing.get_args(hint)
    item = _decoder(value_hint)

    def read(value: Json, take: BytesIn) -> Any:
        if not isinstance(value, dict):
            raise InvalidUsage(f"expected an object, not {type(value).__name__}")
        return {key_hint(k): item(x, take) for k, x in value.items()}

    return read


def _scalar_decoder(hint: Any) -> _Decode:
    if issubclass(hint, Id):
        return lambda v, take: hint.parse(v)
    base = bool if hint is bool else int if issubclass(hint, int) else str
    convert = hint is not base

    def read(value: Json, take: BytesIn) -> Any:
        if type(value) is not base:
            raise InvalidUsage(f"expected {base.__name__}, not {value!r:.80}")
        return hint(value) if convert else value

    return read


def _record_decoder(cls: Any) -> _Decode:
    hints = typing.get_type_hints(cls)
    # Most fields are numbers and strings that are taken as they are: no call for these.
    fields = [(f.name, _taken_as_is(hints[f.name]), _decoder(hints[f.name])) for f in dataclasses.fields(cls)]
    names = frozenset(name for name, _, _ in fields)

    def read_array(value: Json, take: BytesIn) -> Any:
        if not isinstance(value, list) or len(value) > len(fields):
            raise InvalidUsage(f"a {cls.__name__} is written as an array of at most {len(fields)} values")
        return cls(*[x if type(x) is kind else dec(x, take) for x, (_, kind, dec) in zip(value, fields, strict=False)])

    def read_object(value: Json, take: BytesIn) -> Any:
        if not isinstance(value, dict) or not names.issuperset(value):
            raise InvalidUsage(f"a {cls.__name__} is written as an object with fields {sorted(names)}")
        return cls(
            **{
                name: value[name] if type(value[name]) is kind else dec(value[name], take)
                for name, kind, dec in fields
                if name in value
            }
        )

    return read_array if cls in _AS_ARRAY else read_object


def _taken_as_is(hint: Any) -> type | None:
    """The type whose values need no look at all, if there is one."""
    if _is_union(hint):
        hint = _optional_of(hint)
    return hint if hint in (bool, int, str) else None


__all__ = ["BytesIn", "BytesOut", "Json", "Payload", "SeqNo", "bytes_to_text", "decode", "encode", "text_to_bytes"]
