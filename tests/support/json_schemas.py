"""Writes the JSON Schemas of `persist inspect --json` and `persist check --json`: `make docs`.

They are made from the records of the answers, and published as `schema.json` beside these. Within one version fields,
and ids of findings, are only added.
"""

from __future__ import annotations

import json
from typing import Any, Generic, Literal, TypeVar

from msgspec.json import schema_components

from persist.check import check_runner
from persist.check.check_runner import Report
from persist.inspect.attribute_listing import AttributeRow, AttributeTree
from persist.inspect.content_digest import ContentDigest
from persist.inspect.documents import VERSION, Finding, JsonRecord
from persist.inspect.holds import HolderRow
from persist.inspect.log_listing import LogEntry
from persist.inspect.part_listing import PartFileSummary, PartRow, RowGroupSummary
from persist.inspect.state_dump import StateChange, StateSummary
from persist.inspect.usage import LocationUsage, ShardUsage
from tests.support.pages import ROOT

CHECK, INSPECT = (ROOT / "persist" / package / "schema.json" for package in ("check", "inspect"))
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


def inspect_schema() -> str:
    """Of what `persist inspect … --json` prints: of a document, or of a line of `log`."""
    references, definitions = schema_components(ANSWERS.values(), ref_template=REFERENCE)
    documents = [
        {"title": f"persist inspect {command}", **reference, "properties": {"command": {"const": command}}}
        for command, reference in zip(ANSWERS, references, strict=True)
    ]
    return _text("inspect", VERSION, {"oneOf": documents}, definitions)


def check_schema() -> str:
    """Of what `persist check --json` prints."""
    [reference], definitions = schema_components([Report], ref_template=REFERENCE)
    return _text("check", check_runner.VERSION, reference, definitions)


def _text(command: str, version: int, document: dict[str, Any], definitions: dict[str, Any]) -> str:
    title = f"persist {command} --json, version {version}"
    return json.dumps({"$schema": DIALECT, "title": title, **document, "$defs": definitions}, indent=1) + "\n"


if __name__ == "__main__":
    INSPECT.write_text(inspect_schema(), encoding="utf-8")
    CHECK.write_text(check_schema(), encoding="utf-8")
