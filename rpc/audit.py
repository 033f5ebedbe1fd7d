"""The audit log: one JSON line for each request that changes something."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from persist.core import commands as c
from persist.core.frontier import Antichain
from persist.core.ids import NAME_CHARS_MAX
from persist.core.record import Record, asdict
from persist.core.transitions.context import SOUND, Verdict
from persist.formats.exposition import COUNTER, Family, single_series
from rpc.route import ROUTE, Route

# Each line is written by the logger `persist.audit` after the commit and before the response. It holds names of tags,
# cursors and shards, policies and schemas, but no row values and no keys. Leases are not audited. The table of routes
# says which requests are audited.


SHARDS_MAX = 1_000  # names listed for a request about many shards
_log = logging.getLogger("persist.audit")


class Audit:
    """Writes the audit log of one server process. Belongs to the event loop's thread."""

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self._written = self._failed = 0

    def note(
        self, what: str, shard: str | None, detail: Mapping[str, Any], shards: Sequence[str] = (), **fields: Any
    ) -> None:
        """Write the line of one request. A failure is counted and does not change the response.

        `fields`: token, status (None: the client disconnected before the response), address and request_id.
        """
        line: dict[str, Any] = {"what": what, "shard": shard and shard[:NAME_CHARS_MAX], **fields}
        if detail:
            line["detail"] = dict(detail)
        if shards:
            line["shards"] = [name[:NAME_CHARS_MAX] for name in shards[:SHARDS_MAX]]
        record = _log.makeRecord(_log.name, logging.INFO, __file__, 0, "audit", (), None, extra=line)
        try:
            _log.handle(record)
        except Exception:  # from a handler that raises where the standard ones only report
            record.is_lost = True
        is_lost = getattr(record, "is_lost", False)
        self._failed += is_lost
        self._written += not is_lost

    def families(self) -> Iterator[Family]:
        yield single_series("persist_audit_lines_total", COUNTER, "Lines of the audit that were written", self._written)
        yield single_series("persist_audit_failures_total", COUNTER, "Lines of the audit that failed", self._failed)


# Descriptions of requests and commands for the audit log.

VALUE_CHARS_MAX = 500
# The query parameters that a line contains. Predicates, keys and attributes hold row values, so they are left out.
_PARAMETERS = (
    "as_of", "at", "before", "confirm", "cursor", "dry_run", "expected_upper", "follows", "force", "keep", "lower",
    "min_seqno", "mode", "new_upper", "read_time", "retries", "since", "timestamp", "upper",
)  # fmt: skip
# Keys of a request's scope: a short body; the description of its command; the names of the shards, if it is about many.
BODY_KEY, ACTION_KEY, SHARDS_KEY = "persist.body", "persist.did", "persist.many"
BODY_BYTES_MAX = 2_000  # of a body that is logged

MOVE_CURSOR, MOVE_SINCE, MOVE_UPPER, CLOSE = "move cursor", "move since", "move upper", "close"
# The audited commands of rich clients and their names.
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
    c.Rewrite: "rewrite",  # logged under its own operation
    c.ReplacePart: "repair",
    c.HandOver: "hand over",
}
_FIELDS = (
    "force", "since", "upper", "reader", "purpose", "tag", "name", "time", "until_ms", "expected_version", "history_ms",
    "mark_every_ms", "rows", "before", "as_of", "erasure", "reason", "tags", "part", "source", "epoch",
)  # fmt: skip


def describe_request(scope: Mapping[str, Any], shard: tuple[str, str] | None) -> tuple[str, dict[str, Any]] | None:
    """The name and details of a request or its command; None: it is not audited."""
    if ACTION_KEY in scope:
        described: tuple[str, dict[str, Any]] | None = scope[ACTION_KEY]
        return described
    route: Route | None = scope[ROUTE]
    if route is None or route.audit is None:
        return None
    query = scope["query_string"]
    detail = describe_query("" if shard is None else shard[1], query)
    if route.closes_by and dict(parse_qsl(query.decode("latin-1"))).get(route.closes_by) in ("[]", "closed"):
        return CLOSE, detail
    if route.audits_body and (body := scope.get(BODY_KEY)) is not None:
        detail["body"] = body.decode("utf-8", "replace")
    return route.audit, detail


def describe_command(command: c.Command, verdict: Verdict = SOUND) -> tuple[str, dict[str, Any]] | None:
    """The name and audited fields of a command; None: it is not audited."""
    if isinstance(command, c.Rewrite):
        return _of_rewrite(command)
    what = OF_COMMANDS.get(type(command))
    if what is None or (isinstance(command, c.DowngradeSince) and not command.moves_since):
        return None
    if isinstance(command, (c.AdvanceUpper, c.CompareAndAppend, c.Append)) and upper_of(command).is_empty:
        return CLOSE, {}
    return "set constraints" if verdict.constrains else what, _fields(command)


def _of_rewrite(command: c.Rewrite) -> tuple[str, dict[str, Any]]:
    """The operation under the name of its route or maintenance job, its time, and the details of an erasure."""
    operation = "run retention" if command.settings_version is not None else command.operation
    name = {"merge_into": "merge", c.DROP_BEFORE: c.TRUNCATE}.get(operation, operation.replace("_", "-"))
    erasure = {} if command.erasure is None else _fields(command.erasure)
    return name, erasure | {"as_of": c.effects(command).as_of}


def _fields(record: Record) -> dict[str, Any]:
    values = {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
    return {name: plain(value) for name, value in values.items() if value is not None}


def upper_of(command: c.AdvanceUpper | c.CompareAndAppend | c.Append) -> Antichain:
    return command.new_upper if isinstance(command, c.CompareAndAppend) else command.upper


def describe_query(verb: str, query: bytes) -> dict[str, Any]:
    """The audited query parameters of a request, and the tag in its path."""
    detail: dict[str, Any] = {}
    if verb.startswith("tags/"):
        detail["tag"] = verb.rpartition("/")[2][:VALUE_CHARS_MAX]
    parameters = parse_qsl(query.decode("latin-1"))
    return detail | {name: value[:VALUE_CHARS_MAX] for name, value in parameters if name in _PARAMETERS}


def plain(value: Any) -> Any:
    """A value of bounded size for JSON."""
    if isinstance(value, Antichain):
        return value.to_json()
    if isinstance(value, Record):
        return str(asdict(value))[:VALUE_CHARS_MAX]
    if value is None or isinstance(value, bool | int):
        return value
    return str(value)[:VALUE_CHARS_MAX]
