"""The fields of durable records: which there are, and which have a value other than their default somewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import NODEFAULT, inspect

from persist.core.batch import Listing
from persist.core.ids import LocationBinding
from persist.core.record import Record
from persist.core.state import State
from persist.core.state_diff import StateDiff
from persist.formats.state_frames import THIS_BUILD

DURABLE = (State, StateDiff, Listing, LocationBinding)  # what frames hold

Field = tuple[str, str]  # the name of the record, that of the field


def with_defaults(roots: Iterable[type[Record]]) -> set[Field]:
    """The fields with a default, of these records and of all within them. A field without one is always written."""
    return {
        (kind.__name__, field.name)
        for kind, struct in _structs(roots).items()
        for field in struct.fields
        if not field.required
    }


def used(records: Iterable[Record]) -> set[Field]:
    """The fields that are not at their default in one of the records, or in one within them."""
    found: set[Field] = set()
    defaults: dict[type[Record], dict[str, Any]] = {}
    for value in records:
        for record in _within(value):
            kind = type(record)
            if kind not in defaults:
                defaults[kind] = _defaults(kind)
            values = defaults[kind].items()
            found |= {(kind.__name__, name) for name, default in values if getattr(record, name) != default}
    return found


def unusable() -> set[Field]:
    """The fields that cannot have a value yet: no build knows a feature that a State could name."""
    return set() if THIS_BUILD.features else {("State", "features"), ("StateDiff", "features")}


def _within(value: Any) -> Iterator[Record]:
    """The record, and every record in its fields."""
    if isinstance(value, Record):
        yield value
        for name in value.__struct_fields__:
            yield from _within(getattr(value, name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _within(item)
    elif isinstance(value, tuple):
        for item in value:
            yield from _within(item)


def _structs(roots: Iterable[type[Record]]) -> dict[type[Record], inspect.StructType]:
    """These records and all that they can hold, by what their decoders know of them."""
    found: dict[type[Record], inspect.StructType] = {}
    seen: set[object] = set()
    waiting: list[Any] = list(inspect.multi_type_info(roots))
    while waiting:
        info = waiting.pop()
        if isinstance(info, inspect.StructType):
            if info.cls not in seen:
                seen.add(info.cls)  # one for each kind of entries that a MapDiff has
                found[getattr(info.cls, "__origin__", info.cls)] = info
                waiting += [field.type for field in info.fields]
        else:
            waiting += [*getattr(info, "types", ()), *getattr(info, "item_types", ())]
            waiting += [getattr(info, name) for name in ("item_type", "key_type", "value_type") if hasattr(info, name)]
    return found


def _defaults(kind: type[Record]) -> dict[str, Any]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return {
        field.name: field.default if field.default is not NODEFAULT else field.default_factory()
        for field in info.fields
        if not field.required
    }
