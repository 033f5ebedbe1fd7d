"""What can be asked of an inspection, under the same names at every door, and who answers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from persist.client.wall_clock import instant_ms, read_instant
from persist.core.errors import InvalidUsage
from persist.core.ids import check_shard_name
from persist.inspect import holders, indexed, pieces
from persist.inspect.digests import digest_document
from persist.inspect.listing import shards_document
from persist.inspect.log import Span, log_document
from persist.inspect.looking import Look
from persist.inspect.part_file import SHOWN_MAX, part_document
from persist.inspect.records import Document, KeyShower
from persist.inspect.states import seqno_of
from persist.inspect.tree import state_document
from persist.inspect.usage import usage_document
from persist.inspect.words import diff_document


@dataclass(frozen=True, slots=True)
class Asked:
    """One question, with its options as texts; "": not given. `name` is the shard, a pattern, or the key of a part.

    `keys`: keys of rows are shown. `rows`: so many updates of a part are shown. `whole`: the whole State, not its
    outline alone. `dropped`: dropped shards too. `follow`: a log from a version that may be still to come.
    """

    what: str
    name: str = ""
    at: str = ""
    timestamp: str = ""
    first: str = ""
    last: str = ""
    as_of: str = ""
    lower: str = ""
    upper: str = ""
    keys: bool = False
    rows: int = 0
    whole: bool = False
    dropped: bool = False
    follow: bool = False


def inspected(look: Look, asked: Asked) -> Document:
    """The answer. Raises InvalidUsage (UnknownShard among them), NotReadable, Unavailable, Corruption.

    Corruption: nothing can be shown at all. All else that is wrong is a finding.
    """
    if asked.what not in ANSWERS:
        raise InvalidUsage(f"{asked.what!r:.60} cannot be inspected; give one of {', '.join(ANSWERS)}")
    if asked.what not in OF_MANY:
        if asked.what != "part":
            check_shard_name(asked.name)
        elif not asked.name:
            raise InvalidUsage("give the key of a part; `persist inspect parts NAME` lists them")
        if not 0 <= asked.rows <= SHOWN_MAX:
            raise InvalidUsage(f"rows is {asked.rows}; it must be from 0 to {SHOWN_MAX}")
    return ANSWERS[asked.what](look, asked)


def _state(look: Look, asked: Asked) -> Document:
    at = seqno_of(asked.at) if asked.at else None
    at_ms = instant_ms("timestamp", read_instant("timestamp", asked.timestamp)) if asked.timestamp else None
    return state_document(look, asked.name, at, at_ms, KeyShower(asked.keys), whole=asked.whole)


def span_of(asked: Asked) -> Span:
    """The versions that are asked for. Raises InvalidUsage."""
    span = Span(*(seqno_of(text) if text else None for text in (asked.first, asked.last)))
    span.check()
    return span


def _diff(look: Look, asked: Asked) -> Document:
    if not (asked.first and asked.last):
        raise InvalidUsage("a diff needs two versions, the earlier one first")
    return diff_document(look, asked.name, seqno_of(asked.first), seqno_of(asked.last))


def _time(text: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        raise InvalidUsage(f"as-of is {text!r:.60}; it must be a time, such as 416")
    return int(text)


Answer = Callable[[Look, Asked], Document]

ANSWERS: Mapping[str, Answer] = {
    "shards": lambda look, asked: shards_document(look, asked.name or None, with_dropped=asked.dropped),
    "state": _state,
    "log": lambda look, asked: log_document(look, asked.name, span_of(asked), waits=asked.follow),
    "diff": _diff,
    "rollups": lambda look, asked: pieces.rollups_document(look, asked.name),
    "batches": lambda look, asked: pieces.batches_document(look, asked.name),
    "runs": lambda look, asked: pieces.runs_document(look, asked.name, KeyShower(asked.keys)),
    "parts": lambda look, asked: pieces.parts_document(look, asked.name, KeyShower(asked.keys)),
    "part": lambda look, asked: part_document(look, asked.name, KeyShower(asked.keys), asked.rows),
    "readers": lambda look, asked: holders.readers_document(look, asked.name),
    "writers": lambda look, asked: holders.writers_document(look, asked.name),
    "cursors": lambda look, asked: holders.cursors_document(look, asked.name),
    "claims": lambda look, asked: holders.claims_document(look, asked.name, KeyShower(asked.keys)),
    "tags": lambda look, asked: holders.tags_document(look, asked.name),
    "loans": lambda look, asked: holders.loans_document(look, asked.name),
    "erasures": lambda look, asked: holders.erasures_document(look, asked.name),
    "attributes": lambda look, asked: indexed.attributes_document(
        look, asked.name, asked.lower or None, asked.upper or None
    ),
    "attribute-tree": lambda look, asked: indexed.tree_document(look, asked.name),
    "usage": lambda look, asked: usage_document(look, asked.name or None),
    "digest": lambda look, asked: digest_document(look, asked.name, _time(asked.as_of)),
}
OF_MANY = ("shards", "usage")  # of these the name is a pattern, and may be left out
OF_ONE = tuple(what for what in ANSWERS if what not in (*OF_MANY, "part"))
