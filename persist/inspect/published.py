"""The JSON schema of every answer, made of the records themselves. `schema.json` beside this holds it, as published.

`python -m persist.inspect.published` writes it anew. Within one version fields are only added.
"""

from __future__ import annotations

import json
import types
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

from persist.core.antichain import Antichain
from persist.inspect import holders, indexed, pieces
from persist.inspect.digests import DigestTold
from persist.inspect.listing import ShardTold
from persist.inspect.log import LogEntry
from persist.inspect.looking import LocationTold
from persist.inspect.part_file import PartFileTold, RowGroupTold
from persist.inspect.records import VERSION, Finding, Told
from persist.inspect.tree import Outline
from persist.inspect.usage import LocationUsage, UsageTold
from persist.inspect.words import Between, Change

FILE = Path(__file__).with_name("schema.json")
DIALECT = "https://json-schema.org/draft/2020-12/schema"
_FRONTIER = {"type": "array", "items": {"type": "integer"}, "maxItems": 1}
_SIMPLE = {int: "integer", str: "string", bool: "boolean", float: "number"}

# What each command tells of the whole, and of each row; `log` tells a row a line.
PARTS: dict[str, tuple[type[Told] | None, type[Told] | None]] = {
    "shards": (LocationTold, ShardTold),
    "state": (Outline, None),
    "diff": (Between, Change),
    "rollups": (None, pieces.RollupTold),
    "batches": (None, pieces.BatchTold),
    "runs": (None, pieces.RunTold),
    "parts": (None, pieces.PartTold),
    "part": (PartFileTold, RowGroupTold),
    "readers": (None, holders.ReaderTold),
    "writers": (None, holders.WriterTold),
    "cursors": (None, holders.CursorTold),
    "claims": (None, holders.ClaimTold),
    "tags": (None, holders.TagTold),
    "loans": (None, holders.LoanTold),
    "erasures": (None, holders.ErasureTold),
    "attributes": (None, indexed.AttributeTold),
    "attribute-tree": (indexed.TreeTold, indexed.TreeRow),
    "usage": (LocationUsage, UsageTold),
    "digest": (DigestTold, None),
}


def schema() -> dict[str, Any]:
    """The schema of what `persist inspect … --json` prints: of a document, or of a line of `log`."""
    definitions: dict[str, Any] = {}
    documents = [_document(command, *parts, definitions) for command, parts in PARTS.items()]
    line = object_schema(LogEntry, definitions, inline=True)
    heads = {"version": {"const": VERSION}, "command": {"const": "log"}}
    line = {**line, "properties": {**heads, **line["properties"]}, "required": [*heads, *line["required"]]}
    return {
        "$schema": DIALECT,
        "title": f"persist inspect --json, version {VERSION}",
        "oneOf": [*documents, line],
        "$defs": dict(sorted(definitions.items())),
    }


def _document(
    command: str, about: type[Told] | None, row: type[Told] | None, definitions: dict[str, Any]
) -> dict[str, Any]:
    properties = {
        "persist": {"const": "inspect"},
        "version": {"const": VERSION},
        "command": {"const": command},
        "shard": {"type": ["string", "null"]},
        "seqno": {"type": ["integer", "null"]},
        "about": {"type": "null"} if about is None else object_schema(about, definitions),
        "state": {"type": ["object", "null"]} if command == "state" else {"type": "null"},
        "rows": {"type": "array", **({"maxItems": 0} if row is None else {"items": object_schema(row, definitions)})},
        "findings": {"type": "array", "items": object_schema(Finding, definitions)},
    }
    return {
        "title": f"persist inspect {command}",
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def object_schema(record: type[Told], definitions: dict[str, Any], *, inline: bool = False) -> dict[str, Any]:
    """The schema of a record: a reference to its definition, unless it is wanted here."""
    if not inline and record.__name__ in definitions:
        return {"$ref": f"#/$defs/{record.__name__}"}
    hints = typing.get_type_hints(record)
    names = [one.name for one in fields(record)]  # type: ignore[arg-type]
    made = {
        "type": "object",
        "description": " ".join((record.__doc__ or "").split()),
        "properties": {name: _of(hints[name], definitions) for name in names},
        "required": names,
        "additionalProperties": False,
    }
    if inline:
        return made
    definitions[record.__name__] = made
    return {"$ref": f"#/$defs/{record.__name__}"}


def _of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if hint is Antichain:
        return _FRONTIER
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        [one] = [part for part in inner if part is not type(None)]
        found = _of(one, definitions)
        simple = isinstance(found.get("type"), str) and found.keys() == {"type"}
        return {"type": [found["type"], "null"]} if simple else {"oneOf": [found, {"type": "null"}]}
    if origin is list:
        return {"type": "array", "items": _of(inner[0], definitions)}
    if origin is dict:
        return {"type": "object"}
    return object_schema(hint, definitions)


def text() -> str:
    """The file as it is published."""
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
