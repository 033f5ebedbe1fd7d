"""The JSON Schema of a report, generated from its records. `schema.json` beside this is the published copy.

`python -m persist.check.report_schema` writes it anew. Within one version fields, and ids, are only added.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.json import schema_components

from persist.check.check_runner import VERSION, Report
from persist.inspect.json_schema import DIALECT, REFERENCE, to_text

FILE = Path(__file__).with_name("schema.json")


def schema() -> dict[str, Any]:
    """The schema of what `persist check --json` prints."""
    [reference], definitions = schema_components([Report], ref_template=REFERENCE)
    title = f"persist check --json, version {VERSION}"
    return {"$schema": DIALECT, "title": title, **reference, "$defs": definitions}


if __name__ == "__main__":
    FILE.write_text(to_text(schema()), encoding="utf-8")
