"""The shards of a location, one row each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from persist.attributes.marks import Marks
from persist.attributes.storage import ChunkReader, StaleIndex
from persist.client.retaining import policy_json
from persist.core.antichain import Antichain
from persist.core.errors import Corruption, InvalidUsage, UnknownShard
from persist.core.phases import phase_of
from persist.core.shard_settings import history_text
from persist.core.state import State
from persist.inspect.looking import LocationTold, Look, location_told
from persist.inspect.records import Document, Findings, Told, instant
from persist.inspect.states import Rechecked, Seen, newest
from persist.parts.ahead import in_order

READERS = 8  # shards that are looked at at the same time
PATTERN_CHARS_MAX = 256
_OF_STATE = (
    "phase", "since", "upper", "batches", "parts", "updates", "bytes", "committed", "oldest", "history", "policy",
)  # fields that only a State tells  # fmt: skip
_CHOICE = re.compile(r"\[[^]]*\]")
_LITERAL = re.compile(r"[A-Za-z0-9._/-]*")


@dataclass(frozen=True, slots=True)
class ShardTold(Told):
    """A shard. What a shard of which no State can be made would tell is null; then `findings` says why.

    `committed` is when its last version was committed, by the committer's clock. `oldest` is the wall clock of its
    oldest mark. `bytes` are those of parts, with all history. `health` is `ok`, or `damaged`.
    """

    name: str
    phase: str | None
    seqno: int
    since: Antichain | None
    upper: Antichain | None
    batches: int | None
    parts: int | None
    updates: int | None
    bytes: int | None
    committed: str | None
    oldest: str | None
    history: str | None
    policy: dict[str, Any] | None
    health: str


def prefix_of(pattern: str) -> str:
    """What every name begins with that the pattern matches. Raises InvalidUsage: it is none.

    `*` stands for any characters, slashes too, `?` for one, and `[ab]` for one of these.
    """
    is_wrong = re.search(r"[^A-Za-z0-9._/*?\[\]!-]", pattern) or "!" in _CHOICE.sub("", pattern)
    if is_wrong or not 0 < len(pattern) <= PATTERN_CHARS_MAX:
        raise InvalidUsage(f"{pattern!r:.60} is no pattern of names; give a name, or one with * and ?, as 'eu/*'")
    found = _LITERAL.match(pattern)
    return "" if found is None else found[0]


def matching(look: Look, pattern: str | None, *, with_dropped: bool = True) -> Iterator[str]:
    """The names that a pattern matches (None: all that who looks may see), ascending. Raises InvalidUsage."""
    if pattern is None:
        found = dict.fromkeys(n for p in look.prefixes for n in look.names(p, with_dropped=with_dropped))
        yield from sorted(found) if look.prefixes else look.names(with_dropped=with_dropped)
        return
    matches = re.compile(translate(pattern)).match
    yield from (name for name in look.names(prefix_of(pattern), with_dropped=with_dropped) if matches(name))


def shards_document(look: Look, pattern: str | None, *, with_dropped: bool = False) -> Document:
    """The shards whose names match, and the location. Raises InvalidUsage: no such shard, where one was named."""
    if pattern is not None:
        prefix_of(pattern)
    findings = Findings()
    about: LocationTold = location_told(look, findings)
    names = matching(look, pattern, with_dropped=with_dropped)
    if pattern is not None and _LITERAL.fullmatch(pattern):
        check_named(look, pattern)

    def rows() -> Iterator[ShardTold]:
        for seen, told in in_order(lambda name: _looked(look, name), names, READERS):
            findings.take(seen.findings)
            yield told

    return Document("shards", findings, about=about, rows=rows())


def check_named(look: Look, name: str) -> None:
    """Raises UnknownShard."""
    if not any(found == name for found in look.names(name)):
        raise UnknownShard(f"there is no shard {name!r} here; `persist inspect shards` lists them")


def _looked(look: Look, name: str) -> tuple[Seen, ShardTold]:
    seen = newest(look, name)
    state = seen.state
    oldest = None if state is None else instant(_oldest_ms(look, state, seen.findings))
    health = "damaged" if seen.findings else "ok"
    if state is None:
        nothing: dict[str, Any] = dict.fromkeys(_OF_STATE)
        return seen, ShardTold(name=name, seqno=seen.head, health=health, **nothing)
    batches, settings = state.trace.batches, state.settings
    return seen, ShardTold(
        name=name,
        phase=phase_of(state).value,
        seqno=int(state.seqno),
        since=state.since,
        upper=state.upper,
        batches=len(batches),
        parts=sum(batch.part_count for batch in batches),
        updates=state.trace.rows,
        bytes=sum(batch.size for batch in batches),
        committed=instant(state.walltime_ms),
        oldest=oldest,
        history=history_text(settings.history_ms) if settings.version else None,
        policy=None if settings.rows is None else policy_json(settings.rows),
        health=health,
    )


def _oldest_ms(look: Look, state: State, findings: Findings) -> int | None:
    """Where the oldest mark lies. That of a new shard, before which nothing was written, does not count."""
    last = state.seal.last
    held = [at_ms for at_ms in (*state.marks, *(() if last is None else (last.at_ms,))) if at_ms]
    if state.attribute_root.height:
        try:
            indexed = Marks(state, ChunkReader(look.blob, state.attribute_chunks, look.nodes)).first_ms()
            held += [indexed] if indexed else []
        except Corruption as error:
            findings.note(f"the attribute index cannot be read: {error}")
        except StaleIndex as error:
            if not Rechecked(look, state).has_moved:
                findings.note(f"the attribute index cannot be read: {error}")
    return min(held, default=None)
