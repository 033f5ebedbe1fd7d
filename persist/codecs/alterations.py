"""Changes of a shard's columns as JSON, for HTTP and for the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from persist.codecs.json_rows import UNREADABLE, rows_of_json
from persist.codecs.schemas import read_type
from persist.core.errors import InvalidUsage
from persist.parts.altering import (
    CHANGES_MAX,
    AddColumn,
    Change,
    DropColumn,
    MoveColumn,
    RelaxColumn,
    RenameColumn,
    WidenColumn,
)

EXAMPLE = [
    {"add": "currency", "type": "string", "default": "EUR", "after": "state"},
    {"rename": "state", "to": "status"},
    {"widen": "n", "type": "int64"},
    {"allow_nulls": "status"},
    {"move": "n", "after": None},
    {"drop": "note"},
]


def read_changes(wanted: Any) -> list[Change]:
    """The changes of a list of objects, each as one of `EXAMPLE`. Raises InvalidUsage."""
    if not isinstance(wanted, list) or not 0 < len(wanted) <= CHANGES_MAX:
        raise InvalidUsage(f'"changes" is a list of between 1 and {CHANGES_MAX} changes')
    return [_change(one) for one in wanted]


def _change(one: Any) -> Change:
    verbs = [verb for verb in _FORMS if isinstance(one, dict) and verb in one]
    if len(verbs) != 1:
        raise InvalidUsage(f"a change is an object with one of {', '.join(_FORMS)}, not {one!r:.100}")
    needed, more, make = _FORMS[verbs[0]]
    unknown, absent = sorted(set(one) - {verbs[0], *needed, *more}), [name for name in needed if name not in one]
    if unknown or absent:
        what = f"has the unknown setting {unknown[0]!r}" if unknown else f"lacks {absent[0]!r}"
        raise InvalidUsage(f"the change {verbs[0]!r} of column {one[verbs[0]]!r:.100} {what}")
    for name in (verbs[0], "to", "type", "after"):
        if name in one and not isinstance(one[name], str) and not (name == "after" and one[name] is None):
            raise InvalidUsage(f"{name!r} of a change is a text, not {one[name]!r:.100}")
    return make(one)


def _added(one: Mapping[str, Any]) -> Change:
    nullable = one.get("nullable", True)
    if not isinstance(nullable, bool):
        raise InvalidUsage(f"'nullable' of a change is true or false, not {nullable!r:.100}")
    kind = read_type(one["type"])
    return AddColumn(one["add"], kind, nullable, _default(one, kind), one.get("after"))


def _default(one: Mapping[str, Any], kind: pa.DataType) -> pa.Scalar | None:
    """The default, written as rows are in JSON."""
    if one.get("default") is None:
        return None
    try:
        return rows_of_json([{"value": one["default"]}], pa.schema([("value", kind)])).column(0)[0]
    except UNREADABLE as error:
        raise InvalidUsage(f"the default of column {one['add']!r:.100} does not fit {kind}: {error}") from error


# verb -> settings that it needs, those that it may have, what it makes of them
_FORMS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[Mapping[str, Any]], Change]]] = {
    "add": (("type",), ("nullable", "default", "after"), _added),
    "rename": (("to",), (), lambda one: RenameColumn(one["rename"], one["to"])),
    "drop": ((), (), lambda one: DropColumn(one["drop"])),
    "move": ((), ("after",), lambda one: MoveColumn(one["move"], one.get("after"))),
    "widen": (("type",), (), lambda one: WidenColumn(one["widen"], read_type(one["type"]))),
    "allow_nulls": ((), (), lambda one: RelaxColumn(one["allow_nulls"])),
}
