"""Documents: the answers of an inspection, made of records that are JSON.

A document is streamed while its rows are computed, so that one with many rows takes little memory. Findings come last,
since computing the rows may add some.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, to_builtins

from persist.client.timestamps import INSTANT_MAX, instant_text
from persist.copies.shard_facts import Faults

VERSION: Literal[1] = 1  # of the JSON documents
HASH_BYTES = 8


Frontier = Annotated[list[int], Meta(max_length=1)]  # `[7]`; `[]` is closed


class JsonRecord(Struct, frozen=True):
    """The base of all records in an answer. Later versions may add fields."""

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = to_builtins(self, str_keys=True)
        return fields


class Finding(JsonRecord, frozen=True):
    """Something that is damaged or missing. `key` is the key of its blob (None: it is not about a blob)."""

    shard: str | None
    what: str
    key: str | None = None


@dataclass
class Document:
    """One answer. `about` describes the whole, `rows` its elements. `findings` is complete after the last row.

    `tree`: the whole State in pieces of JSON, if it was requested. `lines`: each row is a document of its own.
    """

    command: str
    findings: Faults
    shard: str | None = None
    seqno: int | None = None
    about: JsonRecord | None = None
    rows: Iterable[JsonRecord] = ()
    tree: Callable[[], Iterator[str]] | None = None
    lines: bool = False

    def pieces(self) -> Generator[str]:
        """The document as JSON on one line; with `lines`, a line for each row."""
        if self.lines:
            for row in self.rows_json():
                yield f"{json.dumps(row)}\n"
            return
        head = {"persist": "inspect", "version": VERSION, "command": self.command, "shard": self.shard}
        head |= {"seqno": self.seqno, "about": self.about_json()}
        yield json.dumps(head)[:-1]
        yield ', "state": '
        if self.tree is None:
            yield "null"
        else:
            yield from self.tree()
        yield ', "rows": ['
        for number, row in enumerate(self.rows_json()):
            yield f"{', ' if number else ''}{json.dumps(row)}"
        yield f'], "findings": {json.dumps(self.findings_json())}}}\n'

    def about_json(self) -> dict[str, Any] | None:
        return None if self.about is None else self.about.to_json()

    def rows_json(self) -> Iterator[dict[str, Any]]:
        return (row.to_json() for row in self.rows)

    def findings_json(self) -> list[dict[str, Any]]:
        """Complete once all rows were consumed."""
        return [Finding(fault.shard, fault.what, fault.key or None).to_json() for fault in self.findings.listed()]


def instant(at_ms: int | None) -> str | None:
    """The wall clock in RFC 3339, UTC; None if it is unknown or out of range."""
    return instant_text(at_ms) if at_ms is not None and 0 < at_ms <= INSTANT_MAX else None


@dataclass(frozen=True, slots=True)
class KeyFormat:
    """Formats values and encoded keys of rows, which are data: as they are, or without `shows` as a short hash."""

    shows: bool = False

    def __call__(self, key: bytes | None) -> str | None:
        """Format an encoded key, in hex. None: there is no bound. An empty key is the lower bound of all keys."""
        if key is None:
            return None
        if self.shows:
            return key.hex()
        return _hash(key) if key else ""

    def value(self, value: Any) -> str | None:
        """Format a value of a column, such as the minimum of a row group."""
        if value is None:
            return None
        return str(value) if self.shows else _hash(str(value).encode())


def _hash(data: bytes) -> str:
    return f"#{hashlib.blake2b(data, digest_size=HASH_BYTES).hexdigest()}"
