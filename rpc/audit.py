"""The audit: who changed what, one log line for each changing request, by the logger `persist.audit`.

The line is written after the commit and before the answer. It has no values of rows, and no keys.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from persist.core.ids import NAME_CHARS_MAX
from persist.formats.exposition import COUNTER, Family, one

SHARDS_MAX = 1_000  # of a request about many shards: so many are named
_log = logging.getLogger("persist.audit")


@dataclass(frozen=True, slots=True)
class Entry:
    """What one request did. `status` is that of its answer; None: the caller left before there was one."""

    token: str
    what: str
    shard: str | None
    status: int | None
    address: str | None
    request_id: str
    detail: Mapping[str, Any] = field(default_factory=dict)
    shards: Sequence[str] = ()


class Audit:
    """Writes the lines of one server process. Belongs to the event loop's thread."""

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self._written = self._failed = 0

    def note(self, entry: Entry) -> None:
        """Write the line of a request. One that fails is counted, and changes no answer."""
        line: dict[str, Any] = {
            "token": entry.token,
            "what": entry.what,
            "shard": entry.shard and entry.shard[:NAME_CHARS_MAX],
            "status": entry.status,
            "address": entry.address,
            "request_id": entry.request_id,
        }
        if entry.detail:
            line["detail"] = dict(entry.detail)
        if entry.shards:
            line["shards"] = [name[:NAME_CHARS_MAX] for name in entry.shards[:SHARDS_MAX]]
        record = _log.makeRecord(_log.name, logging.INFO, __file__, 0, "audit", (), None, extra=line)
        try:
            _log.handle(record)
        except Exception:  # of a handler that raises what the standard ones only report
            record.is_lost = True
        if getattr(record, "is_lost", False):
            self._failed += 1
        else:
            self._written += 1

    def families(self) -> Iterator[Family]:
        """Its metrics."""
        yield one("persist_audit_lines_total", COUNTER, "Lines of the audit that were written", self._written)
        yield one("persist_audit_failures_total", COUNTER, "Lines of the audit that failed", self._failed)
