"""The whole State as JSON in pieces, its summary, and a description of the changes between two States."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from persist.copies.shard_facts import at_version, newest
from persist.copies.state_file import to_json_value
from persist.core import state_diff
from persist.core.batch import Batches, HollowBatch, Part, Run, Trace
from persist.core.blob_keys import COMPACTOR
from persist.core.errors import InvalidUsage
from persist.core.frontier import TIME_MAX, Antichain
from persist.core.record import replace
from persist.core.shard_phases import phase_of
from persist.core.shard_settings import ShardSettings, history_text
from persist.core.spill import ENTRIES, OUTCOMES
from persist.core.state import State
from persist.inspect.documents import Document, Frontier, JsonRecord, KeyFormat, instant
from persist.inspect.readonly_location import ReadOnlyLocation
from persist.parts import newest as newest_schema
from persist.parts import valid_schemas

# Descriptions of the changes between two States.


NAMED_MAX = 10  # how many items of a kind are listed


class StateChange(JsonRecord, frozen=True):
    """A field of the State that changed, by its name in the code, and a description of the change."""

    field: str
    words: str


def state_changes(old: State, new: State) -> list[StateChange]:
    """Describe the changes from one State to a later one."""
    return [StateChange(field, text) for field, text in _changes(old, new)]


def _changes(old: State, new: State) -> Iterator[tuple[str, str]]:
    if phase_of(old) != phase_of(new):
        yield "phase", f"the shard was {phase_of(old).value} and is {phase_of(new).value}"
    if old.shard_id != new.shard_id:
        yield "incarnation", f"incarnation {old.incarnation} of the name ended and incarnation {new.incarnation} began"
    if old.upper != new.upper:
        yield "upper", f"upper moved from {_time(old.upper)} to {_time(new.upper)}"
    if old.since != new.since:
        yield "since", f"since moved from {_time(old.since)} to {_time(new.since)}"
    yield from _trace(old, new)
    for name in state_diff.MAPPINGS:
        before, after = getattr(old, name), getattr(new, name)
        if before is not after and name != "entries":
            yield from ((name, text) for text in _mapping(name, before, after))
    for name in state_diff.SCALARS:
        before, after = getattr(old, name), getattr(new, name)
        if before != after and name not in _OMITTED:
            yield name, _scalar(name, before, after)


_OMITTED = frozenset({"since", "incarnation", "tombstone", "lease_clock_ms", "info_bytes"})


def _trace(old: State, new: State) -> Iterator[tuple[str, str]]:
    change = state_diff.trace_between(old.trace, new.trace)
    if change is None:
        return
    before = old.trace.batches[change.first : change.first + change.count]
    known = {(batch.desc.lower, batch.desc.upper): batch for batch in before}
    if not before:
        yield "trace", f"{_count(len(change.batches), 'batch')} added: {_batches(change.batches)}"
        return
    end = before[-1].desc.upper
    merged = [batch for batch in change.batches if batch.desc.lower < end]  # the last one may extend beyond it
    added = [batch for batch in change.batches if not batch.desc.lower < end]
    same = [batch for batch in merged if known.get((batch.desc.lower, batch.desc.upper)) is not None]
    verb = "were rewritten" if len(same) == len(merged) == len(before) else "became"
    sums = f"{_sum(before)} {verb}: {_sum(merged)}"
    yield "trace", f"the batches {_span(before)} {sums}{_worker_suffix(merged)}"
    if added:
        yield "trace", f"{_count(len(added), 'batch')} added: {_batches(tuple(added))}"


def _worker_suffix(batches: list[HollowBatch]) -> str:
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
    "borrowed": "loan from another shard",
    "schema_times": "first time of a schema",
}


def _mapping(name: str, before: Mapping[Any, Any], after: Mapping[Any, Any]) -> Iterator[str]:
    noun, show = _NAMES[name], _FORMATS.get(name, lambda key, value: str(key))
    added = [show(key, after[key]) for key in after if key not in before]
    removed = [show(key, before[key]) for key in before if key not in after]
    changed = [show(key, after[key]) for key in after if key in before and before[key] != after[key]]
    for keys, verb in ((added, "added"), (removed, "removed"), (changed, "changed")):
        if keys:
            named = f": {_named(keys)}" if name in _FORMATS else ""
            yield f"{_count(len(keys), noun)} {verb}{named}"


_FORMATS: dict[str, Callable[[Any, Any], str]] = {
    "schemas": lambda key, value: str(key),
    "leased_readers": lambda key, record: f"{record.purpose or key} at {_time(record.since)}",
    "critical_readers": lambda key, record: f"{record.purpose or key} at {_time(record.since)}",
    "rollups": lambda key, record: f"v{key}",
    "claims": lambda key, record: f"{key} of {record.owner}",
    "spilled": lambda key, files: f"{key} in {_count(len(files), 'file')}",
    "long_diffs": lambda key, record: f"v{key}",
    "tags": lambda key, record: f"{key} at {record.time}",
    "marks": lambda key, record: f"{instant(key) or 'the beginning'} at {_time(record)}",
    "cuts": lambda key, record: f"{_instant(key)} at {record.upper}",
    "erasures": lambda key, record: f"{key} ({record.phase})",
    "loans": lambda key, record: f"to {record.borrower}",
    "borrowed": lambda key, record: f"of {record}",
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


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    first, of, rest = noun.partition(" of ")
    first, clause, more = first.partition(" that ")
    return f"{number} {first}{'es' if first.endswith(('h', 's')) else 's'}{clause}{more}{of}{rest}"


def _named(texts: list[str]) -> str:
    more = f" and {len(texts) - NAMED_MAX} more" if len(texts) > NAMED_MAX else ""
    return ", ".join(texts[:NAMED_MAX]) + more


# The State as JSON, and its summary.


KEYS = frozenset({"key_lower", "key_upper", "resume_key"})  # fields that hold encoded keys of rows
SECRETS = frozenset({"opaque"})  # fencing tokens: knowing one suffices to move the hold
_LARGE = (State, Trace, HollowBatch, Run)  # streamed field by field


_COUNTED = (
    "schemas", "leased_readers", "critical_readers", "writers", "claims", "tags", "truncations", "drops", "erasures",
    "loans", "borrowed",
)  # fmt: skip


class ColumnSummary(JsonRecord, frozen=True):
    """A column of the current schema; `is_key`: it is a key column."""

    name: str
    type: str
    is_key: bool


class StateSummary(JsonRecord, frozen=True):
    """A State in short: its frontiers, and its counts. `bytes` are those of parts."""

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
        **{name: len(getattr(state, name)) for name in _COUNTED},
        batches=len(batches),
        runs=sum(batch.run_count for batch in batches),
        parts=sum(batch.part_count for batch in batches),
        updates=state.trace.rows,
        bytes=sum(batch.size for batch in batches),
        inline_bytes=state.trace.inline_bytes,
        rollups=sorted(map(int, state.rollups)),
        attributes_recent=len(state.attributes),
        attributes_indexed=state.attribute_root.count,
        outcomes=len(state.outcomes) + sum(file.count for file in state.files_of(OUTCOMES)),
        history_entries=sum(len(record.entries) for record in state.entries.values())
        + sum(file.count for file in state.files_of(ENTRIES)),
        features=list(state.features),
    )


def _columns(state: State) -> list[ColumnSummary]:
    sound = valid_schemas(state.schemas)
    if not sound:
        return []
    _, schema = newest_schema(sound)
    return [ColumnSummary(column.name, str(column.type), column.name in schema.key) for column in schema.arrow]


def state_document(
    location: ReadOnlyLocation, name: str, at: int | None, since: int | None, keys: KeyFormat, *, whole: bool
) -> Document:
    """The State at a version, or the newest one, and its changes since the version `since`.

    `whole`: the whole State instead of its summary. Raises UnknownShard, InvalidUsage, NotReadable, Corruption (the
    State cannot be loaded).
    """
    facts = newest(location, name) if at is None else at_version(location, name, at)
    state = facts.known()
    rows: list[StateChange] = []
    if since is not None:
        if since > state.seqno:
            raise InvalidUsage(f"v{since} is later than v{state.seqno}; give the earlier version as --from")
        before = at_version(location, name, since)
        facts.faults.take(before.faults)
        rows = state_changes(redacted(location, before.known()), redacted(location, state))
    tree = (lambda: encode_state(redacted(location, state), keys)) if whole else None
    return Document("state", facts.faults, name, int(state.seqno), summary_of(state), rows, tree)


def redacted(location: ReadOnlyLocation, state: State) -> State:
    """The State with only visible names of other shards."""
    if not location.prefixes:
        return state
    loans = {key: replace(loan, borrower=location.shown_name(loan.borrower)) for key, loan in state.loans.items()}
    return replace(
        state, loans=loans, borrowed={key: location.shown_name(owner) for key, owner in state.borrowed.items()}
    )


def encode_state(value: Any, keys: KeyFormat) -> Iterator[str]:
    """Stream a record as JSON, its fields by name. Bytes are base64, except encoded keys; rows are omitted."""
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


def _small(value: Any, keys: KeyFormat) -> Any:
    return to_json_value(value, lambda name, item: _field(name, item, keys))


def _field(name: str, value: Any, keys: KeyFormat) -> Any:
    if name in KEYS:
        return keys(value)
    if name in SECRETS:
        return KeyFormat().value(value) if value else ""
    if name == "data":  # the rows of an inline part
        return None if value is None else {"bytes": len(value)}
    return _small(value, keys)
