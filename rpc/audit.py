"""The audit: one JSON log line for each changing request, and which requests have one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from persist.core import commands as c
from persist.core.frontier import Antichain
from persist.core.ids import NAME_CHARS_MAX
from persist.core.record import Record, asdict
from persist.core.transitions.context import SOUND, Verdict
from persist.formats.exposition import COUNTER, Family, one
from rpc.route_table import ROUTE, Route

# The audit: who changed what, one log line for each changing request, by the logger `persist.audit`.
#
# The line is written after the commit and before the answer. It has no values of rows, and no keys.


SHARDS_MAX = 1_000  # of a request about many shards: so many are named
_log = logging.getLogger("persist.audit")


@dataclass(frozen=True, slots=True)
class AuditEntry:
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

    def note(self, entry: AuditEntry) -> None:
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


# What a line of the audit says of a request, and which commands have one. Never rows, nor keys.
#
# Which requests have one is in the table of routes.
#
# It has names of tags, cursors and shards, and what policies and schemas say. Leases have no lines.


VALUE_CHARS_MAX = 500
# The parameters of requests that a line has. No other one: predicates, keys and attributes have values of rows.
_PARAMETERS = (
    "as_of", "at", "before", "confirm", "cursor", "dry_run", "expected_upper", "follows", "force", "keep", "lower",
    "min_seqno", "mode", "new_upper", "read_time", "retries", "since", "timestamp", "upper",
)  # fmt: skip
BODY, DID = "persist.body", "persist.did"  # in the scope of a request: its body if it is short; what a command did
MANY = "persist.many"  # there, too: the shards of a request that is about many
BODY_BYTES_MAX = 2_000  # of a request whose body is told

MOVE_CURSOR, MOVE_SINCE, MOVE_UPPER, CLOSE = "move cursor", "move since", "move upper", "close"
# Commands of rich clients that have a line, and what they are called.
OF_COMMANDS: Mapping[type[c.Command], str] = {
    c.Insert: "insert",
    c.Append: "append",
    c.CompareAndAppend: "compare-and-append",
    c.AdvanceUpper: MOVE_UPPER,
    c.UpdateAttributes: "attributes",
    c.Drop: "drop",
    c.Recreate: "create",
    c.BeginClone: "clone",
    c.EvolveSchema: "evolve schema",
    c.RegisterCriticalReader: "take cursor",
    c.CompareAndDowngradeSince: MOVE_CURSOR,
    c.DowngradeSince: MOVE_SINCE,
    c.ExpireCriticalReader: "give up cursor",
    c.SetSettings: "settings",
    c.ForgetHistory: "forget history",
    c.SetTag: "set tag",
    c.RemoveTag: "remove tag",
    c.Rewrite: "rewrite",  # its own operation is told
    c.ReplacePart: "repair",
    c.HandOver: "hand over",
}
_FIELDS = (
    "force", "since", "upper", "reader", "purpose", "tag", "name", "time", "until_ms", "expected_version", "history_ms",
    "mark_every_ms", "rows", "before", "as_of", "erasure", "reason", "tags", "part", "source", "epoch",
)  # fmt: skip


def did(scope: Mapping[str, Any], shard: tuple[str, str] | None) -> tuple[str, dict[str, Any]] | None:
    """What a request, or its command, is called, and what is told of it; None: it has no line."""
    if DID in scope:
        found: tuple[str, dict[str, Any]] | None = scope[DID]
        return found
    route: Route | None = scope[ROUTE]
    if route is None or route.audit is None:
        return None
    query = scope["query_string"]
    detail = of_query("" if shard is None else shard[1], query)
    if route.closes_by and dict(parse_qsl(query.decode("latin-1"))).get(route.closes_by) in ("[]", "closed"):
        return CLOSE, detail
    if route.audits_body and (body := scope.get(BODY)) is not None:
        detail["body"] = body.decode("utf-8", "replace")
    return route.audit, detail


def of_command(command: c.Command, verdict: Verdict = SOUND) -> tuple[str, dict[str, Any]] | None:
    """What a command is called, and its fields as far as the line has them; None: it has no line."""
    if isinstance(command, c.Rewrite):
        return _of_rewrite(command)
    what = OF_COMMANDS.get(type(command))
    if what is None or (isinstance(command, c.DowngradeSince) and not command.moves_since):
        return None
    if isinstance(command, (c.AdvanceUpper, c.CompareAndAppend, c.Append)) and upper_of(command).is_empty:
        return CLOSE, {}
    return "set constraints" if verdict.constrains else what, _told(command)


def _of_rewrite(command: c.Rewrite) -> tuple[str, dict[str, Any]]:
    """Its operation as routes and maintenance call it, the time that it is about, and what is said of an erasure."""
    operation = "run retention" if command.settings_version is not None else command.operation
    called = {"merge_into": "merge", c.DROP_BEFORE: c.TRUNCATE}.get(operation, operation.replace("_", "-"))
    told = {} if command.erasure is None else _told(command.erasure)
    return called, told | {"as_of": c.effects(command).as_of}


def _told(record: Record) -> dict[str, Any]:
    found = {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
    return {name: plain(value) for name, value in found.items() if value is not None}


def upper_of(command: c.AdvanceUpper | c.CompareAndAppend | c.Append) -> Antichain:
    """Up to where the shard is complete once the command is done."""
    return command.new_upper if isinstance(command, c.CompareAndAppend) else command.upper


def of_query(verb: str, query: bytes) -> dict[str, Any]:
    """The parameters of a request, and the name of the tag in its path."""
    found: dict[str, Any] = {}
    if verb.startswith("tags/"):
        found["tag"] = verb.rpartition("/")[2][:VALUE_CHARS_MAX]
    given = parse_qsl(query.decode("latin-1"))
    return found | {name: value[:VALUE_CHARS_MAX] for name, value in given if name in _PARAMETERS}


def plain(value: Any) -> Any:
    """A value for JSON, of a bounded size."""
    if isinstance(value, Antichain):
        return value.to_json()
    if isinstance(value, Record):
        return str(asdict(value))[:VALUE_CHARS_MAX]
    if value is None or isinstance(value, bool | int):
        return value
    return str(value)[:VALUE_CHARS_MAX]
