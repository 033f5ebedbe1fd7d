"""What the audit tells: which requests and commands have an entry, and what of them is told. Never rows, nor keys.

Names of tags, cursors and shards are told, and what policies and schemas say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from persist.core import commands as c
from persist.core.antichain import Antichain
from persist.core.record import Record, asdict

DETAIL_CHARS_MAX = 2_000
VALUE_CHARS_MAX = 500
PARAMETERS_MAX = 20
BODY, DID = "persist.body", "persist.did"  # in the scope of a request: its body if it is short; what a command did
MANY = "persist.many"  # there, too: the shards of a request that is about many
SHARDS_TOLD_MAX = 1_000  # of these have an entry each
BODY_BYTES_MAX = 2_000  # of a request whose body is told

MOVE_CURSOR, MOVE_SINCE, MOVE_UPPER, CLOSE = "move cursor", "move since", "move upper", "close"
OVERWRITE = "overwrite"
OFTEN = frozenset({MOVE_CURSOR, MOVE_SINCE, MOVE_UPPER})  # such entries of one token and shard become one
# Commands of rich clients that have an entry, and what they are called. Appends have none: the commit history has them.
OF_COMMANDS: Mapping[type[c.Command], str] = {
    c.Drop: "drop",
    c.Recreate: "create",
    c.BeginClone: "clone",
    c.EvolveSchema: "evolve schema",
    c.Constrain: "set constraints",
    c.RegisterCriticalReader: "take cursor",
    c.CompareAndDowngradeSince: MOVE_CURSOR,
    c.DowngradeSince: MOVE_SINCE,
    c.ExpireCriticalReader: "give up cursor",
    c.SetSettings: "settings",
    c.ForgetHistory: "forget history",
    c.SetTag: "set tag",
    c.RemoveTag: "remove tag",
    c.Truncate: "truncate",
    c.DropBefore: "truncate",
    c.Restore: "restore",
    c.Erase: "erase",
    c.ReplacePart: "repair",
    c.HandOver: "hand over",
    c.TakeBack: "take back",
}
_TOLD = (
    "force", "since", "upper", "reader", "purpose", "tag", "name", "time", "until_ms", "expected_version", "history_ms",
    "mark_every_ms", "rows", "before", "as_of", "erasure", "reason", "tags", "part", "source", "epoch",
)  # fmt: skip

# Requests that have an entry, by method and verb: what they are called, and whether their bodies, in which are no rows,
# are told.
OF_REQUESTS: Mapping[tuple[str, str], tuple[str, bool]] = {
    ("PUT", ""): ("create", True),
    ("DELETE", ""): ("drop", False),
    ("POST", "downgrade-since"): (MOVE_CURSOR, False),
    ("POST", "forget"): ("forget history", False),
    ("PUT", "settings"): ("settings", True),
    ("POST", "schema"): ("evolve schema", True),
    ("PUT", "retention"): ("retention", True),
    ("PUT", "constraints"): ("set constraints", True),
    ("POST", "retention"): ("run retention", False),
    ("PUT", "tags"): ("set tag", False),
    ("DELETE", "tags"): ("remove tag", False),
    ("POST", "restore"): ("restore", False),
    ("POST", "truncate"): ("truncate", False),
    ("POST", "overwrite"): (OVERWRITE, False),
    ("POST", "erasures"): ("erase", False),
    ("POST", "optimize"): ("optimize", False),
    ("POST", "vacuum"): ("vacuum", False),
    ("POST", "/v1/clones"): ("clone", True),
    ("POST", "/v1/truncate"): ("truncate", True),
    ("POST", "/v1/shards:delete"): ("drop", True),
}


ADVANCE_UPPER = "advance-upper"
# Verbs that say by a parameter up to where the shard is to be complete.
_UPPERS = {ADVANCE_UPPER: "upper", "append": "upper", "compare-and-append": "new_upper"}


def did(scope: Mapping[str, Any], shard: tuple[str, str] | None) -> tuple[str, dict[str, Any]] | None:
    """What a request, or its command, is called, and what is told of it; None: it has no entry."""
    if DID in scope:
        found: tuple[str, dict[str, Any]] | None = scope[DID]
        return found
    verb = "" if shard is None else shard[1].partition("/")[0]
    known = of_request(scope["method"], verb, scope["path"], scope["query_string"], is_shard=shard is not None)
    if known is None:
        return None
    what, tells_body = known
    detail = of_query("" if shard is None else shard[1], scope["query_string"])
    if tells_body and (body := scope.get(BODY)) is not None:
        detail["body"] = body.decode("utf-8", "replace")
    return what, detail


def of_request(method: str, verb: str, path: str, query: bytes, *, is_shard: bool = True) -> tuple[str, bool] | None:
    """What a request is called, and whether its body is told; None: it has no entry."""
    if method == "POST" and verb in _UPPERS:
        given = dict(parse_qsl(query.decode("latin-1"))).get(_UPPERS[verb])
        what = CLOSE if given in ("[]", "closed") else MOVE_UPPER if verb == ADVANCE_UPPER else None
        return None if what is None else (what, False)
    return OF_REQUESTS.get((method, verb or ("" if is_shard else path)))


def of_command(command: c.Command) -> tuple[str, dict[str, Any]] | None:
    """What a command is called, and its fields as far as they are told; None: it has no entry."""
    if isinstance(command, (c.AdvanceUpper, c.CompareAndAppend, c.Append)):
        upper = upper_of(command)
        if upper.is_empty:
            return CLOSE, {}
        return (MOVE_UPPER, {"upper": plain(upper)}) if isinstance(command, c.AdvanceUpper) else None
    what = (
        command.verb if isinstance(command, c.Editing) and command.verb == OVERWRITE else OF_COMMANDS.get(type(command))
    )
    if what is None:
        return None
    found = {name: getattr(command, name) for name in _TOLD if hasattr(command, name)}
    return what, {name: plain(value) for name, value in found.items() if value is not None}


def upper_of(command: c.AdvanceUpper | c.CompareAndAppend | c.Append) -> Antichain:
    """Up to where the shard is complete once the command is done."""
    return command.new_upper if isinstance(command, c.CompareAndAppend) else command.upper


def of_query(verb: str, query: bytes) -> dict[str, Any]:
    """The parameters of a request, and the name of the tag in its path."""
    found: dict[str, Any] = {}
    if verb.startswith("tags/"):
        found["tag"] = verb.rpartition("/")[2][:VALUE_CHARS_MAX]
    for name, value in parse_qsl(query.decode("latin-1"))[:PARAMETERS_MAX]:
        if name != "token":  # a text of the caller's own
            found[name[:100]] = value[:VALUE_CHARS_MAX]
    return found


def plain(value: Any) -> Any:
    """A value for JSON, of a bounded size."""
    if isinstance(value, Antichain):
        return value.to_json()
    if isinstance(value, Record):
        return str(asdict(value))[:VALUE_CHARS_MAX]
    if value is None or isinstance(value, bool | int):
        return value
    return str(value)[:VALUE_CHARS_MAX]


def detail_of(told: Mapping[str, Any]) -> str:
    """What an entry tells besides, as JSON of a bounded length."""
    text = json.dumps(told, separators=(",", ":"), sort_keys=True)
    return text if len(text) <= DETAIL_CHARS_MAX else json.dumps({"cut": text[: DETAIL_CHARS_MAX // 2]})
