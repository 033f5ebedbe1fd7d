"""The commit history as readers see it, and the information that writers attach to a commit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from persist.client.arguments import checked, json_object
from persist.client.idempotency import RetriedCall, call_with_retries
from persist.client.timestamps import datetime_text, to_datetime
from persist.client.transport import Transport
from persist.core.audit_log import INFO_BYTES_MAX, NOBODY, PURPOSE_CHARS_MAX, EntryPlace, PlacedEntry, point_of
from persist.core.errors import InvalidUsage, shown
from persist.core.frontier import Antichain
from persist.core.ids import SeqNo
from persist.formats.http_messages import named_once

Info = Mapping[str, Any]
RETRY_S = 30.0  # of one page
DEPTH_MAX = 32  # of nested objects and lists


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """What one command did to a shard; `Shard.history` returns them.

    `seqno` is the version that its commit created, `number` its position among the commands of that commit, from 0.
    `timestamp` is the commit time in UTC by the committer's clock. `[lower, upper)` is the interval of times that the
    command added (None: closed), whose rows it merged, or by which since moved. `rows` and `size` (bytes) are what it
    added. `retractions` counts the stored rows with a negative multiplicity (None: not known). `purpose` is the
    writer's, `who` the id of its HTTP token, `info` what the caller attached; None if there is none. `point` is the
    time that a restore went back to, or before which a truncation removed rows.
    """

    seqno: int
    number: int
    timestamp: datetime
    operation: str
    lower: int | None
    upper: int | None
    rows: int
    size: int
    retractions: int | None
    purpose: str | None
    who: str | None
    info: dict[str, Any] | None
    point: int | None = None

    @property
    def place(self) -> str:
        """Its position, such as `7.0`; the next page of the history begins before the last entry's place."""
        return f"{self.seqno}.{self.number}"


def read_entries(
    transport: Transport, name: str, before: EntryPlace | None, limit: int, maintenance: bool
) -> list[PlacedEntry]:
    """Read the commit history before a place (None: its end), newest first. Fewer than `limit` only at its end."""
    entries: list[PlacedEntry] = []
    while len(entries) < limit:
        page = call_with_retries(
            partial(transport.history, name, before, limit - len(entries), maintenance),
            RetriedCall(f"the commit history of shard {name!r}", name),
            transport,
            RETRY_S,
            remedy="ask again",
            lapses=True,
        )
        entries += page.entries
        if page.following is None:
            break
        before = page.following
    return entries


def to_history_entry(placed: PlacedEntry) -> HistoryEntry:
    """Convert a stored entry for callers; `info` is parsed."""
    entry = placed.entry
    caller = entry.caller or NOBODY
    return HistoryEntry(
        int(placed.place.seqno),
        placed.place.number,
        to_datetime(placed.at_ms),
        entry.operation,
        entry.lower.element,
        entry.upper.element,
        entry.rows,
        entry.size,
        entry.retractions,
        caller.purpose or None,
        caller.who or None,
        json.loads(caller.info) if caller.info else None,
        point_of(entry),
    )


def entry_json(entry: HistoryEntry) -> dict[str, Any]:
    """Convert an entry to JSON: frontiers are `[7]` or `[]`, the timestamp is in RFC 3339."""
    return {
        "place": entry.place,
        "seqno": entry.seqno,
        "timestamp": datetime_text(entry.timestamp),
        "operation": entry.operation,
        "lower": Antichain(entry.lower).to_json(),
        "upper": Antichain(entry.upper).to_json(),
        "rows": entry.rows,
        "bytes": entry.size,
        "retractions": entry.retractions,
        "purpose": entry.purpose,
        "who": entry.who,
        "info": entry.info,
        "point": entry.point,
    }


def info_bytes(what: str, info: object) -> bytes:
    """Encode what a caller attaches as compact JSON; empty for None. Raises InvalidUsage naming `what`."""
    if info is None:
        return b""
    if not isinstance(info, Mapping):
        raise InvalidUsage(f"{what} is {shown(info)}; it must be a JSON object, as {{'job': 'nightly'}}")
    try:
        _check_depth(what, info, DEPTH_MAX)
        encoded = json.dumps(dict(info), separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
        if len(encoded) <= INFO_BYTES_MAX:
            json.loads(encoded, object_pairs_hook=named_once)  # 1 and "1" have one name in JSON
    except (TypeError, ValueError) as error:
        raise InvalidUsage(f"{what} cannot be written as JSON: {error}") from error
    if len(encoded) > INFO_BYTES_MAX:
        raise InvalidUsage(f"{what} has {len(encoded)} bytes as JSON; the limit is {INFO_BYTES_MAX}")
    return encoded


def read_info(what: str, text: str) -> bytes:
    """As `info_bytes`, for JSON text. Raises InvalidUsage."""
    return info_bytes(what, json_object(what, text, '{"job": "nightly"}'))


def checked_purpose(what: str, purpose: object) -> str:
    """Return the purpose. Raises InvalidUsage if it is not text, or too long."""
    checked(what, purpose, str)
    if not isinstance(purpose, str) or len(purpose) > PURPOSE_CHARS_MAX:
        raise InvalidUsage(f"{what} has {len(str(purpose))} characters; the limit is {PURPOSE_CHARS_MAX}")
    return purpose


def read_place(what: str, text: object) -> EntryPlace | None:
    """Parse a place such as `7.0`; None for None. Raises InvalidUsage."""
    if text is None:
        return None
    seqno, _, number = text.partition(".") if isinstance(text, str) else ("", "", "")
    digits = seqno + number
    if not isinstance(text, str) or not (digits.isascii() and seqno.isdecimal() and number.isdecimal()):
        raise InvalidUsage(f"{what} is {shown(text)}; it must be the place of an entry, such as '7.0'")
    if len(seqno) > 18 or len(number) > 9:
        raise InvalidUsage(f"{what} is {text!r:.100}; there is no such place")
    return EntryPlace(SeqNo(int(seqno)), int(number))


def _check_depth(what: str, value: object, deeper: int) -> None:
    if isinstance(value, (Mapping, list, tuple)):
        if not deeper:
            raise InvalidUsage(f"{what} has more than {DEPTH_MAX} nested objects and lists")
        for item in value.values() if isinstance(value, Mapping) else value:
            _check_depth(what, item, deeper - 1)
