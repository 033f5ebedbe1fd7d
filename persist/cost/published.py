"""The JSON schema of an answer, made of the records themselves. `schema.json` beside this holds it, as published.

`python -m persist.cost.published` writes it anew. Within one version fields are only added.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from persist.cost.document import VERSION, WindowTold
from persist.cost.priced import LocationCost, MeteredTold, ShardCost
from persist.cost.prices import Prices
from persist.inspect.published import DIALECT, object_schema
from persist.inspect.records import Finding

FILE = Path(__file__).with_name("schema.json")


def schema() -> dict[str, Any]:
    """The schema of what `persist cost --json` prints."""
    definitions: dict[str, Any] = {}

    def maybe(record: Any) -> dict[str, Any]:
        return {"oneOf": [object_schema(record, definitions), {"type": "null"}]}

    properties = {
        "persist": {"const": "cost"},
        "version": {"const": VERSION},
        "prices": object_schema(Prices, definitions),
        "window": maybe(WindowTold),
        "location": maybe(LocationCost),
        "metered": maybe(MeteredTold),
        "shards": {"type": "array", "items": object_schema(ShardCost, definitions)},
        "findings": {"type": "array", "items": object_schema(Finding, definitions)},
    }
    return {
        "$schema": DIALECT,
        "title": f"persist cost --json, version {VERSION}",
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        "$defs": dict(sorted(definitions.items())),
    }


def text() -> str:
    """The file as it is published."""
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
