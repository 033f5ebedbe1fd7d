"""The commit history as its readers see it, and what callers say of their writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from persist.client.arguments import checked
from persist.client.idempotency import RetriedCall, settled
from persist.client.timestamps import datetime_text, shown_instant
from persist.client.transport import Transport
from persist.core.audit_log import (
    INFO_BYTES_MAX,
    NOBODY,
    PAGE_MAX,
    PURPOSE_CHARS_MAX,
    EntryPlace,
    PlacedEntry,
    point_of,
)
from persist.core.errors import InvalidUsage, shown
from persist.core.frontier import Antichain
from persist.core.ids import SeqNo
from persist.formats.http_messages import named_once

Info = Mapping[str, Any]
RETRY_S = 30.0  # of one page
DEPTH_MAX = 32  # of objects and lists within each other


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """What one command did to a shard; `Shard.history` gives them.

    `seqno` is the version that its commit made, `number` its place among the commands of that commit, from 0 on.
    `timestamp` is when, in UTC, by the clock of who committed it. `[lower, upper)` are the times that it added (None:
    closed); those of which rows were merged; or by which since has moved. `rows` and `size` (bytes) are what it added.
    `retractions` are those of the stored rows with a negative multiplicity; None where that is not known. `purpose` is
    the writer's, `who` the id of the token over HTTP, `info` what the caller said; None where there is none. `point` is
    the time to which a restore went back, or before which a truncation took rows away.
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
        """Where it stands, as `7.0`; a page of the history goes on before the place of its last entry."""
        return f"{self.seqno}.{self.number}"


def entries_told(
    transport: Transport, name: str, before: EntryPlace | None, limit: int, maintenance: bool
) -> list[PlacedEntry]:
    """The entries of a shard's commit history before a place (None: its end), newest first. Fewer only at its end."""
    found: list[PlacedEntry] = []
    while len(found) < limit:
        page = settled(
            partial(transport.history, name, before, limit - len(found), maintenance),
            RetriedCall(f"the commit history of shard {name!r}", name),
            transport,
            RETRY_S,
            remedy="ask again",
            lapses=True,
        )
        found += page.entries
        if page.following is None:
            break
        before = page.following
    return found


def entry_shown(told: PlacedEntry) -> HistoryEntry:
    """The entry, with what was said as an object."""
    entry = told.entry
    caller = entry.caller or NOBODY
    return HistoryEntry(
        int(told.place.seqno),
        told.place.number,
        shown_instant(told.at_ms),
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
    """The entry as JSON tells it: frontiers are `[7]` or `[]`, the instant is RFC 3339."""
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
    """What a caller says, as JSON without blanks; empty for None. Raises InvalidUsage naming it."""
    if info is None:
        return b""
    if not isinstance(info, Mapping):
        raise InvalidUsage(f"{what} is {shown(info)}; it must be a JSON object, as {{'job': 'nightly'}}")
    try:
        _check_depth(what, info, DEPTH_MAX)
        found = json.dumps(dict(info), separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
        if len(found) <= INFO_BYTES_MAX:
            json.loads(found, object_pairs_hook=named_once)  # 1 and "1" have one name in JSON
    except (TypeError, ValueError) as error:
        raise InvalidUsage(f"{what} cannot be written as JSON: {error}") from error
    if len(found) > INFO_BYTES_MAX:
        raise InvalidUsage(f"{what} has {len(found)} bytes as JSON; at most {INFO_BYTES_MAX} are kept: say less")
    return found


def read_info(what: str, text: str) -> bytes:
    """As `info_bytes`, of JSON that comes as text. Raises InvalidUsage."""
    try:
        found = json.loads(text, object_pairs_hook=named_once)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"{what} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidUsage(f'{what} is {text!r:.100}; it must be a JSON object, as {{"job": "nightly"}}')
    return info_bytes(what, found)


def checked_purpose(what: str, purpose: object) -> str:
    """Raises InvalidUsage where it is no text, or too long."""
    checked(what, purpose, str)
    if not isinstance(purpose, str) or len(purpose) > PURPOSE_CHARS_MAX:
        raise InvalidUsage(f"{what} has {len(str(purpose))} characters; it may have {PURPOSE_CHARS_MAX}")
    return purpose


def checked_limit(limit: object) -> int:
    """Raises InvalidUsage where one answer cannot hold so many entries."""
    if type(limit) is not int or not 0 < limit <= PAGE_MAX:
        raise InvalidUsage(f"limit is {shown(limit)}; it must be a whole number in [1, {PAGE_MAX}]")
    return limit


def read_place(what: str, text: object) -> EntryPlace | None:
    """The place that a text such as `7.0` tells; None for None. Raises InvalidUsage."""
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
            raise InvalidUsage(f"{what} has more than {DEPTH_MAX} objects and lists within each other; say less")
        for item in value.values() if isinstance(value, Mapping) else value:
            _check_depth(what, item, deeper - 1)
