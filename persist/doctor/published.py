"""The JSON schema of a report, made of its records. `schema.json` beside this holds it, as published.

`python -m persist.doctor.published` writes it anew. Within one version fields, and ids, are only added.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from persist.doctor.diagnosis import IDS, SEVERITIES
from persist.doctor.examining import VERSION, Report
from persist.inspect.published import DIALECT, object_schema

FILE = Path(__file__).with_name("schema.json")


def schema() -> dict[str, Any]:
    """The schema of what `persist doctor --json` prints."""
    definitions: dict[str, Any] = {}
    made = object_schema(Report, definitions, inline=True)
    made["properties"] |= {"persist": {"const": "doctor"}, "version": {"const": VERSION}}
    definitions["Diagnosis"]["properties"] |= {"id": {"enum": list(IDS)}, "severity": {"enum": list(SEVERITIES)}}
    title = f"persist doctor --json, version {VERSION}"
    return {"$schema": DIALECT, "title": title, **made, "$defs": dict(sorted(definitions.items()))}


def text() -> str:
    """The file as it is published."""
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
