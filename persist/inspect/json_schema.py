"""The JSON Schema of every answer, generated from its records. `schema.json` beside this is the published copy.

`python -m persist.inspect.json_schema` writes it anew. Within one version fields are only added.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from msgspec.json import schema_components

from persist.inspect.attribute_listing import AttributeRow, AttributeTree
from persist.inspect.content_digest import ContentDigest
from persist.inspect.documents import VERSION, Finding, JsonRecord
from persist.inspect.holds import HolderRow
from persist.inspect.log_listing import LogEntry
from persist.inspect.part_listing import PartFileSummary, PartRow, RowGroupSummary
from persist.inspect.state_dump import StateChange, StateSummary
from persist.inspect.usage import LocationUsage, ShardUsage

FILE = Path(__file__).with_name("schema.json")
DIALECT = "https://json-schema.org/draft/2020-12/schema"
REFERENCE = "#/$defs/{name}"
About = TypeVar("About")
Row = TypeVar("Row")


class InspectDocument(JsonRecord, Generic[About, Row], frozen=True):
    """The document of one question: `about` the whole, `rows` of its parts, `findings` of what is damaged."""

    persist: Literal["inspect"]
    version: Literal[1]
    command: str
    shard: str | None
    seqno: int | None
    about: About
    state: dict[str, Any] | None
    rows: list[Row]
    findings: list[Finding]


# The answer to each question; `log` answers with one entry a line.
ANSWERS: dict[str, Any] = {
    "state": InspectDocument[StateSummary, StateChange],
    "log": LogEntry,
    "parts": InspectDocument[None, PartRow],
    "part": InspectDocument[PartFileSummary, RowGroupSummary],
    "holds": InspectDocument[None, HolderRow],
    "attributes": InspectDocument[AttributeTree, AttributeRow],
    "usage": InspectDocument[LocationUsage, ShardUsage],
    "digest": InspectDocument[ContentDigest, None],
}


def schema() -> dict[str, Any]:
    """The schema of what `persist inspect … --json` prints: of a document, or of a line of `log`."""
    references, definitions = schema_components(ANSWERS.values(), ref_template=REFERENCE)
    documents = [
        {"title": f"persist inspect {command}", **reference, "properties": {"command": {"const": command}}}
        for command, reference in zip(ANSWERS, references, strict=True)
    ]
    title = f"persist inspect --json, version {VERSION}"
    return {"$schema": DIALECT, "title": title, "oneOf": documents, "$defs": definitions}


def to_text(schema: dict[str, Any]) -> str:
    """A schema as it is published."""
    return json.dumps(schema, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(to_text(schema()), encoding="utf-8")
