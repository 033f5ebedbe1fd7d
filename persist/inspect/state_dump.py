"""The whole State as JSON in pieces, its summary, and a description of the changes between two States."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from persist.copies.shard_facts import at_version, newest
from persist.copies.state_file import to_json_value
from persist.core import state_diff
from persist.core.batch import Batches, HollowBatch, Part, Run, Trace
from persist.core.errors import InvalidUsage
from persist.core.record import replace
from persist.core.shard_phases import phase_of
from persist.core.shard_settings import history_text
from persist.core.spill import ENTRIES, OUTCOMES
from persist.core.state import State
from persist.inspect.documents import Document, Frontier, JsonRecord, KeyFormat, instant
from persist.inspect.readonly_location import ReadOnlyLocation
from persist.parts import newest as newest_schema
from persist.parts import valid_schemas

# Descriptions of the changes between two States.


NAMED_MAX = 10  # how many items of a kind are listed
VALUE_CHARS_MAX = 200
_OMITTED = frozenset({"tombstone", "lease_clock_ms", "info_bytes"})
_LABELS = ("purpose", "owner", "borrower")  # fields of an item that say whose it is


class StateChange(JsonRecord, frozen=True):
    """A field of the State that changed, by its name in the code, and a description of the change.

    Of a mapping these are its items that were added (+), changed (~) and removed (-); else both values, as JSON.
    """

    field: str
    words: str


def _changes(old: State, new: State, keys: KeyFormat) -> Iterator[StateChange]:
    """Describe the changes from one State to a later one."""
    values = {"phase": (phase_of(old).value, phase_of(new).value), "upper": (old.upper, new.upper)}
    values |= {name: (getattr(old, name), getattr(new, name)) for name in state_diff.SCALARS if name not in _OMITTED}
    mappings = {"trace": (_batches(old), _batches(new))}
    mappings |= {name: (getattr(old, name), getattr(new, name)) for name in state_diff.MAPPINGS if name != "entries"}
    for name, (before, after) in values.items():
        if before != after:
            texts = (json.dumps(_small(value, keys))[:VALUE_CHARS_MAX] for value in (before, after))
            yield StateChange(name, " -> ".join(texts))
    for name, (earlier, later) in mappings.items():
        if earlier is not later and (words := _item_changes(earlier, later)):
            yield StateChange(name, words)


def _batches(state: State) -> dict[str, str]:
    """The batches by their intervals."""
    return {
        str(batch.desc): f"{batch.part_count} parts, {batch.rows} updates, {batch.size} bytes"
        for batch in state.trace.batches
    }


def _item_changes(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> str:
    signs = {
        "+": [(key, after[key]) for key in after if key not in before],
        "~": [(key, after[key]) for key in after if key in before and before[key] != after[key]],
        "-": [(key, before[key]) for key in before if key not in after],
    }
    return "; ".join(f"{sign} {_named(items)}" for sign, items in signs.items() if items)


def _named(items: Sequence[tuple[Any, Any]]) -> str:
    shown = ((to_json_value(key), _label(value)) for key, value in items[:NAMED_MAX])
    texts = (f"{key} ({label})" if label else str(key) for key, label in shown)
    return ", ".join(texts) + (f" and {len(items) - NAMED_MAX} more" if len(items) > NAMED_MAX else "")


def _label(value: Any) -> str:
    if isinstance(value, str):
        return value
    return next((str(label) for name in _LABELS if (label := getattr(value, name, ""))), "")


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
        history=history_text(state.settings.history_ms) if state.settings.version else None,
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
        rows = list(_changes(_redacted(location, before.known()), _redacted(location, state), keys))
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
