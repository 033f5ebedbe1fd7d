"""The parts of every answer of an inspection: records that are JSON, findings, documents.

A document is sent in pieces, and its rows are made meanwhile. So a document of many rows takes little memory, and the
findings that its rows lead to come last.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, to_builtins

from persist.client.timestamps import INSTANT_MAX, instant_text
from persist.copies.shard_facts import Fault, Faults

VERSION: Literal[1] = 1  # of what `--json` prints
HASH_BYTES = 8


Frontier = Annotated[list[int], Meta(max_length=1)]  # `[7]`, or `[]`: closed


class JsonRecord(Struct, frozen=True):
    """The base of all that an answer consists of. Later builds may add fields."""

    def to_json(self) -> dict[str, Any]:
        """Its fields by name."""
        found: dict[str, Any] = to_builtins(self, str_keys=True)
        return found


class Finding(JsonRecord, frozen=True):
    """Something that is damaged or missing. `key` is that of the blob (None: it is of no blob)."""

    shard: str | None
    what: str
    key: str | None = None

    @classmethod
    def of(cls, fault: Fault) -> Finding:
        return cls(fault.shard, fault.what, fault.key or None)


@dataclass
class Document:
    """One answer. `about` is of the whole, `rows` are of its parts. `findings` is complete once the rows were made.

    `tree`: the whole State in pieces of JSON, where it was asked for. `lines`: each row is a document of its own.
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
        """The document as JSON on one line, with its line feed; with `lines`, a line for each row."""
        if self.lines:
            for row in self.rows:
                yield f"{json.dumps(row.to_json())}\n"
            return
        head = {"persist": "inspect", "version": VERSION, "command": self.command, "shard": self.shard}
        head |= {"seqno": self.seqno, "about": None if self.about is None else self.about.to_json()}
        yield json.dumps(head)[:-1]
        yield ', "state": '
        if self.tree is None:
            yield "null"
        else:
            yield from self.tree()
        yield ', "rows": ['
        for number, row in enumerate(self.rows):
            yield f"{', ' if number else ''}{json.dumps(row.to_json())}"
        yield f'], "findings": {json.dumps([Finding.of(fault).to_json() for fault in self.findings.listed()])}}}\n'


def instant(at_ms: int | None) -> str | None:
    """The wall clock in RFC 3339, UTC; None where it is not known, or is none that can be shown."""
    return instant_text(at_ms) if at_ms is not None and 0 < at_ms <= INSTANT_MAX else None


@dataclass(frozen=True, slots=True)
class KeyShower:
    """How keys of rows, which are data, are shown: as they are encoded, in hex, or only a short hash of that."""

    shows: bool = False

    def __call__(self, key: bytes | None) -> str | None:
        """None: there is no bound. An empty key is the bound below all keys."""
        if key is None:
            return None
        if self.shows:
            return key.hex()
        return f"#{hashlib.blake2b(key, digest_size=HASH_BYTES).hexdigest()}" if key else ""

    def value(self, value: Any) -> str | None:
        """A value of a column, such as the least of a row group."""
        if value is None:
            return None
        text = str(value)
        return text if self.shows else f"#{hashlib.blake2b(text.encode(), digest_size=HASH_BYTES).hexdigest()}"
