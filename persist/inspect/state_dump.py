"""The whole State as JSON in pieces, its summary, and a description of the changes between two States."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def _changes(old: State, new: State) -> Iterator[tuple[str, str]]:
    """Describe the changes from one State to a later one: each field, and a description of its change."""
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
    added: Sequence[HollowBatch] = change.batches
    if before:
        first, end = before[0].desc.lower, before[-1].desc.upper
        merged = [batch for batch in change.batches if batch.desc.lower < end]  # the last one may extend beyond it
        added = [batch for batch in change.batches if not batch.desc.lower < end]
        known = {(batch.desc.lower, batch.desc.upper) for batch in before}
        is_same = len(merged) == len(before) and all((b.desc.lower, b.desc.upper) in known for b in merged)
        keys = [key for batch in merged for key in batch.blob_keys()]
        suffix = ", by a worker" if keys and all(f"/{COMPACTOR}/" in key for key in keys) else ""
        sums = f"{_sum(before)} {'were rewritten' if is_same else 'became'}: {_sum(merged)}"
        yield "trace", f"the batches [{_end(first)}, {_end(end)}) {sums}{suffix}"
    if added:
        named = _named([f"[{_end(b.desc.lower)}, {_end(b.desc.upper)}) {_sum([b])}" for b in added])
        yield "trace", f"{_count(len(added), 'batch')} added: {named}"


def _sum(batches: Sequence[HollowBatch]) -> str:
    parts, rows, size = (sum(getattr(b, name) for b in batches) for name in ("part_count", "rows", "size"))
    counts = (_count(len(batches), "batch"), _count(parts, "part"), _count(rows, "update"), _count(size, "byte"))
    return f"({', '.join(counts)})"


# The mappings of a State: what an item is called, and its text (None: items are only counted).
_ITEMS: dict[str, tuple[str, Callable[[Any, Any], str] | None]] = {
    "schemas": ("schema", lambda key, value: str(key)),
    "writers": ("writer", None),
    "leased_readers": ("reader", lambda key, record: f"{record.purpose or key} at {_time(record.since)}"),
    "critical_readers": ("cursor", lambda key, record: f"{record.purpose or key} at {_time(record.since)}"),
    "rollups": ("rollup", lambda key, record: f"v{key}"),
    "claims": ("claim", lambda key, record: f"{key} of {record.owner}"),
    "attributes": ("recent attribute", None),
    "attribute_chunks": ("chunk of the attribute index", None),
    "left": ("staged part that left", None),
    "outcomes": ("outcome of a token", None),
    "spilled": ("kind of spill file", lambda key, files: f"{key} in {_count(len(files), 'file')}"),
    "long_diffs": ("blob of a long state diff", lambda key, record: f"v{key}"),
    "marks": ("mark", lambda key, record: f"{instant(key) or 'the beginning'} at {_time(record)}"),
    "tags": ("tag", lambda key, record: f"{key} at {record.time}"),
    "cuts": ("cut", lambda key, record: f"{_instant(key)} at {record.upper}"),
    "erasures": ("erasure", lambda key, record: f"{key} ({record.phase})"),
    "loans": ("loan", lambda key, record: f"to {record.borrower}"),
    "borrowed": ("loan from another shard", lambda key, record: f"of {record}"),
    "schema_times": (
        "first time of a schema",
        lambda key, time: f"{key} from {time} on" if time <= TIME_MAX else f"{key} after all times",
    ),
}


def _mapping(name: str, before: Mapping[Any, Any], after: Mapping[Any, Any]) -> Iterator[str]:
    noun, show = _ITEMS[name]
    added = [(key, after[key]) for key in after if key not in before]
    removed = [(key, before[key]) for key in before if key not in after]
    changed = [(key, after[key]) for key in after if key in before and before[key] != after[key]]
    for items, verb in ((added, "added"), (removed, "removed"), (changed, "changed")):
        if items:
            named = "" if show is None else f": {_named([show(*item) for item in items])}"
            yield f"{_count(len(items), noun)} {verb}{named}"


def _scalar(name: str, before: Any, after: Any) -> str:
    words = name.replace("_", " ")
    if isinstance(before, Antichain) and isinstance(after, Antichain):
        return f"{words} moved from {_time(before)} to {_time(after)}"
    if isinstance(after, ShardSettings):
        return (
            f"the settings changed: history was {_history(before) or 'not set'} and is {_history(after) or 'not set'}"
        )
    if type(before) is int and type(after) is int:
        if name.endswith("_ms"):
            return f"{words.removesuffix(' ms')} was {_instant(before)} and is {_instant(after)}"
        return f"{words} went from {before} to {after}"
    if isinstance(before, tuple) and isinstance(after, tuple) and len(before) != len(after):
        return f"{words} were {len(before)} and are {len(after)}"
    return f"{words} changed"


def _history(settings: ShardSettings) -> str | None:
    return history_text(settings.history_ms) if settings.version else None


def _instant(at_ms: int) -> str:
    return instant(at_ms) or "not set"


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


def _summary(state: State) -> StateSummary:
    batches, schemas = state.trace.batches, valid_schemas(state.schemas)
    schema = newest_schema(schemas)[1] if schemas else None
    columns = [] if schema is None else [ColumnSummary(f.name, str(f.type), f.name in schema.key) for f in schema.arrow]
    return StateSummary(
        shard_id=str(state.shard_id),
        incarnation=state.incarnation,
        phase=phase_of(state).value,
        timestamp=instant(state.walltime_ms),
        commit_id=state.commit_id or None,
        since=state.since.to_json(),
        upper=state.upper.to_json(),
        history=_history(state.settings),
        columns=columns,
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
        changes = _changes(_redacted(location, before.known()), _redacted(location, state))
        rows = [StateChange(field, words) for field, words in changes]
    tree = (lambda: encode_state(_redacted(location, state), keys)) if whole else None
    return Document("state", facts.faults, name, int(state.seqno), _summary(state), rows, tree)


def _redacted(location: ReadOnlyLocation, state: State) -> State:
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
    def field(name: str, item: Any) -> Any:
        if name in KEYS:
            return keys(item)
        if name in SECRETS:
            return KeyFormat().value(item) if item else ""
        if name == "data":  # the rows of an inline part
            return None if item is None else {"bytes": len(item)}
        return _small(item, keys)

    return to_json_value(value, field)
