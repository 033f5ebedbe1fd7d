"""The whole State as JSON in pieces, its summary, and the changes between two States in words."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from persist.copies.shard_facts import at_version, newest
from persist.copies.state_file import shown
from persist.core import state_diff
from persist.core.batch import Batches, HollowBatch, Part, Run, Trace
from persist.core.blob_keys import COMPACTOR
from persist.core.errors import InvalidUsage
from persist.core.frontier import TIME_MAX, Antichain
from persist.core.phases import phase_of
from persist.core.record import replace
from persist.core.shard_settings import ShardSettings, history_text
from persist.core.spill import ENTRIES, OUTCOMES
from persist.core.state import State
from persist.inspect.documents import Document, Frontier, JsonRecord, KeyShower, instant
from persist.inspect.readonly_location import ReadOnlyLocation
from persist.parts import newest as newest_schema
from persist.parts import valid_schemas

# What changed between two States, in words.


NAMED_MAX = 10  # of one kind that a sentence names


class StateChange(JsonRecord, frozen=True):
    """A field of the State that changed, by its name in the code, and a sentence that says how."""

    field: str
    words: str


def state_changes(old: State, new: State) -> list[StateChange]:
    """What changed from one State to a later one."""
    return [StateChange(field, words) for field, words in _changes(old, new)]


def _changes(old: State, new: State) -> Iterator[tuple[str, str]]:
    if phase_of(old) != phase_of(new):
        yield "phase", f"the shard was {phase_of(old).value} and is {phase_of(new).value}"
    if old.shard_id != new.shard_id:
        yield "incarnation", f"life {old.incarnation} of the name ended and life {new.incarnation} began"
    if old.upper != new.upper:
        yield "upper", f"upper moved from {_time(old.upper)} to {_time(new.upper)}"
    if old.since != new.since:
        yield "since", f"since moved from {_time(old.since)} to {_time(new.since)}"
    yield from _trace(old, new)
    for name in state_diff.MAPPINGS:
        before, after = getattr(old, name), getattr(new, name)
        if before is not after and name != "entries":
            yield from ((name, words) for words in _mapping(name, before, after))
    for name in state_diff.SCALARS:
        before, after = getattr(old, name), getattr(new, name)
        if before != after and name not in _TOLD_ELSEWHERE:
            yield name, _scalar(name, before, after)


_TOLD_ELSEWHERE = frozenset({"since", "incarnation", "tombstone", "lease_clock_ms", "info_bytes"})


def _trace(old: State, new: State) -> Iterator[tuple[str, str]]:
    change = state_diff.trace_between(old.trace, new.trace)
    if change is None:
        return
    before = old.trace.batches[change.first : change.first + change.count]
    known = {(batch.desc.lower, batch.desc.upper): batch for batch in before}
    if not before:
        yield "trace", f"{_count(len(change.batches), 'batch')} came: {_batches(change.batches)}"
        return
    end = before[-1].desc.upper
    merged = [batch for batch in change.batches if batch.desc.lower < end]  # the last one may go on beyond it
    came = [batch for batch in change.batches if not batch.desc.lower < end]
    same = [batch for batch in merged if known.get((batch.desc.lower, batch.desc.upper)) is not None]
    what = "were written anew" if len(same) == len(merged) == len(before) else "became"
    sums = f"{_sum(before)} {what}: {_sum(merged)}"
    yield "trace", f"the batches {_span(before)} {sums}{_by(merged)}"
    if came:
        yield "trace", f"{_count(len(came), 'batch')} came: {_batches(tuple(came))}"


def _by(batches: list[HollowBatch]) -> str:
    keys = [key for batch in batches for key in batch.blob_keys()]
    return ", by a worker" if keys and all(f"/{COMPACTOR}/" in key for key in keys) else ""


def _sum(batches: Any) -> str:
    parts, rows, size = (sum(getattr(b, name) for b in batches) for name in ("part_count", "rows", "size"))
    counts = (_count(len(batches), "batch"), _count(parts, "part"), _count(rows, "update"), _count(size, "byte"))
    return f"({', '.join(counts)})"


def _batches(batches: tuple[HollowBatch, ...]) -> str:
    return _named([f"[{_end(b.desc.lower)}, {_end(b.desc.upper)}) {_sum([b])}" for b in batches])


def _span(batches: Any) -> str:
    return f"[{_end(batches[0].desc.lower)}, {_end(batches[-1].desc.upper)})"


_NAMES = {
    "schemas": "schema",
    "writers": "writer",
    "leased_readers": "reader",
    "critical_readers": "cursor",
    "rollups": "rollup",
    "claims": "claim",
    "attributes": "recent attribute",
    "attribute_chunks": "chunk of the attribute index",
    "left": "staged part that left",
    "outcomes": "outcome of a token",
    "spilled": "kind of spill file",
    "long_diffs": "blob of a long state diff",
    "marks": "mark",
    "tags": "tag",
    "cuts": "cut",
    "erasures": "erasure",
    "loans": "loan",
    "borrowed": "loan that it has",
    "schema_times": "first time of a schema",
}


def _mapping(name: str, before: Mapping[Any, Any], after: Mapping[Any, Any]) -> Iterator[str]:
    what, show = _NAMES[name], _SHOWN.get(name, lambda key, value: str(key))
    came = [show(key, after[key]) for key in after if key not in before]
    gone = [show(key, before[key]) for key in before if key not in after]
    changed = [show(key, after[key]) for key in after if key in before and before[key] != after[key]]
    for keys, verb in ((came, "came"), (gone, "went"), (changed, "changed")):
        if keys:
            named = f": {_named(keys)}" if name in _SHOWN else ""
            yield f"{_count(len(keys), what)} {verb}{named}"


_SHOWN: dict[str, Callable[[Any, Any], str]] = {
    "schemas": lambda key, value: str(key),
    "leased_readers": lambda key, one: f"{one.purpose or key} at {_time(one.since)}",
    "critical_readers": lambda key, one: f"{one.purpose or key} at {_time(one.since)}",
    "rollups": lambda key, one: f"v{key}",
    "claims": lambda key, one: f"{key} of {one.owner}",
    "spilled": lambda key, files: f"{key} in {_count(len(files), 'file')}",
    "long_diffs": lambda key, one: f"v{key}",
    "tags": lambda key, one: f"{key} at {one.time}",
    "marks": lambda key, one: f"{instant(key) or 'the beginning'} at {_time(one)}",
    "cuts": lambda key, one: f"{_instant(key)} at {one.upper}",
    "erasures": lambda key, one: f"{key} ({one.phase})",
    "loans": lambda key, one: f"to {one.borrower}",
    "borrowed": lambda key, one: f"of {one}",
    "schema_times": lambda key, time: f"{key} from {time} on" if time <= TIME_MAX else f"{key} after all times",
}


def _scalar(name: str, before: Any, after: Any) -> str:
    if isinstance(before, Antichain) and isinstance(after, Antichain):
        return f"{_words(name)} moved from {_time(before)} to {_time(after)}"
    if isinstance(after, ShardSettings):
        return f"the settings changed: history was {_history(before)} and is {_history(after)}"
    if type(before) is int and type(after) is int:
        if name.endswith("_ms"):
            return f"{_words(name.removesuffix('_ms'))} was {_instant(before)} and is {_instant(after)}"
        return f"{_words(name)} went from {before} to {after}"
    if isinstance(before, tuple) and isinstance(after, tuple) and len(before) != len(after):
        return f"{_words(name)} were {len(before)} and are {len(after)}"
    return f"{_words(name)} changed"


def _history(settings: ShardSettings) -> str:
    return history_text(settings.history_ms) if settings.version else "not set"


def _instant(at_ms: int) -> str:
    return instant(at_ms) or "not set"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _time(frontier: Antichain) -> str:
    return "closed" if frontier.is_empty else str(frontier.element)


def _end(frontier: Antichain) -> str:
    return "end" if frontier.is_empty else str(frontier.element)


def _count(number: int, what: str) -> str:
    if number == 1:
        return f"1 {what}"
    first, of, rest = what.partition(" of ")
    first, that, more = first.partition(" that ")
    return f"{number} {first}{'es' if first.endswith(('h', 's')) else 's'}{that}{more}{of}{rest}"


def _named(texts: list[str]) -> str:
    more = f" and {len(texts) - NAMED_MAX} more" if len(texts) > NAMED_MAX else ""
    return ", ".join(texts[:NAMED_MAX]) + more


# The whole State as JSON in pieces, its summary, and what changed since an earlier version.


KEYS = frozenset({"key_lower", "key_upper", "resume_key"})  # fields that hold encoded keys of rows
SECRETS = frozenset({"opaque"})  # who knows it moves a hold
_LARGE = (State, Trace, HollowBatch, Run)  # told piece by piece


class ColumnSummary(JsonRecord, frozen=True):
    """A column of the current schema; `is_key`: rows are told apart by it."""

    name: str
    type: str
    is_key: bool


class StateSummary(JsonRecord, frozen=True):
    """A State in short: its frontiers, and the counts of everything. `bytes` are those of parts."""

    shard_id: str
    incarnation: int
    phase: str
    timestamp: str | None
    commit_id: str | None
    since: Frontier
    upper: Frontier
    history: str | None
    columns: list[ColumnSummary]
    schemas: int
    batches: int
    runs: int
    parts: int
    updates: int
    bytes: int
    inline_bytes: int
    rollups: list[int]
    leased_readers: int
    critical_readers: int
    writers: int
    claims: int
    tags: int
    truncations: int
    drops: int
    erasures: int
    loans: int
    borrowed: int
    attributes_recent: int
    attributes_indexed: int
    outcomes: int
    history_entries: int
    features: list[str]


def summary_of(state: State) -> StateSummary:
    batches, settings = state.trace.batches, state.settings
    return StateSummary(
        shard_id=str(state.shard_id),
        incarnation=state.incarnation,
        phase=phase_of(state).value,
        timestamp=instant(state.walltime_ms),
        commit_id=state.commit_id or None,
        since=state.since.to_json(),
        upper=state.upper.to_json(),
        history=history_text(settings.history_ms) if settings.version else None,
        columns=_columns(state),
        schemas=len(state.schemas),
        batches=len(batches),
        runs=sum(batch.run_count for batch in batches),
        parts=sum(batch.part_count for batch in batches),
        updates=state.trace.rows,
        bytes=sum(batch.size for batch in batches),
        inline_bytes=state.trace.inline_bytes,
        rollups=sorted(map(int, state.rollups)),
        leased_readers=len(state.leased_readers),
        critical_readers=len(state.critical_readers),
        writers=len(state.writers),
        claims=len(state.claims),
        tags=len(state.tags),
        truncations=len(state.truncations),
        drops=len(state.drops),
        erasures=len(state.erasures),
        loans=len(state.loans),
        borrowed=len(state.borrowed),
        attributes_recent=len(state.attributes),
        attributes_indexed=state.attribute_root.count,
        outcomes=len(state.outcomes) + sum(file.count for file in state.files_of(OUTCOMES)),
        history_entries=sum(len(one.entries) for one in state.entries.values())
        + sum(file.count for file in state.files_of(ENTRIES)),
        features=list(state.features),
    )


def _columns(state: State) -> list[ColumnSummary]:
    sound = valid_schemas(state.schemas)
    if not sound:
        return []
    _, schema = newest_schema(sound)
    return [ColumnSummary(one.name, str(one.type), one.name in schema.key) for one in schema.arrow]


def state_document(
    look: ReadOnlyLocation, name: str, at: int | None, since: int | None, keys: KeyShower, *, whole: bool
) -> Document:
    """The State of a version, else the newest one, and what changed from the version `since` on.

    `whole`: all of it, else its summary alone. Raises UnknownShard, InvalidUsage, NotReadable, Corruption (no State can
    be made).
    """
    facts = newest(look, name) if at is None else at_version(look, name, at)
    state = facts.known()
    rows: list[StateChange] = []
    if since is not None:
        if since > state.seqno:
            raise InvalidUsage(f"v{since} is later than v{state.seqno}; give the earlier version as --from")
        before = at_version(look, name, since)
        facts.faults.take(before.faults)
        rows = state_changes(named(look, before.known()), named(look, state))
    tree = (lambda: encode_state(named(look, state), keys)) if whole else None
    return Document("state", facts.faults, name, int(state.seqno), summary_of(state), rows, tree)


def named(look: ReadOnlyLocation, state: State) -> State:
    """The State with the names of other shards as who looks may see them."""
    if not look.prefixes:
        return state
    loans = {key: replace(loan, borrower=look.shown_name(loan.borrower)) for key, loan in state.loans.items()}
    return replace(state, loans=loans, borrowed={key: look.shown_name(owner) for key, owner in state.borrowed.items()})


def encode_state(value: Any, keys: KeyShower) -> Iterator[str]:
    """A record as JSON in pieces: its fields by name. Bytes are base64, but for keys of rows, and rows are left out."""
    if isinstance(value, _LARGE):
        yield "{"
        for number, name in enumerate(value.__struct_fields__):
            yield f"{', ' if number else ''}{json.dumps(name)}: "
            yield from encode_state(getattr(value, name), keys)
        yield "}"
    elif isinstance(value, (tuple, Batches)) and value and isinstance(value[0], (*_LARGE, Part)):
        yield "["
        for number, item in enumerate(value):
            yield ", " if number else ""
            yield from encode_state(item, keys)
        yield "]"
    else:
        yield json.dumps(_small(value, keys))


def _small(value: Any, keys: KeyShower) -> Any:
    return shown(value, lambda name, item: _field(name, item, keys))


def _field(name: str, value: Any, keys: KeyShower) -> Any:
    if name in KEYS:
        return keys(value)
    if name in SECRETS:
        return KeyShower().value(value) if value else ""
    if name == "data":  # the rows of an inline part
        return None if value is None else {"bytes": len(value)}
    return _small(value, keys)
