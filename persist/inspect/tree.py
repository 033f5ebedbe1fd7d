"""The whole State as JSON in pieces, its summary, and what changed since an earlier version."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from typing import Any

from persist.core.antichain import Antichain
from persist.core.batch import HollowBatch, Part, Run
from persist.core.batches import Batches
from persist.core.errors import InvalidUsage
from persist.core.phases import phase_of
from persist.core.record import Record
from persist.core.shard_settings import history_text
from persist.core.state import State
from persist.core.trace import Trace
from persist.inspect.documents import Document, Frontier, JsonRecord, KeyShower, instant
from persist.inspect.looking import Look
from persist.inspect.state_changes import StateChange, state_changes
from persist.inspect.states import Seen, at_version, named, newest
from persist.parts import newest as newest_schema
from persist.parts import sound_schemas

KEYS = frozenset({"key_lower", "key_upper", "resume_key"})  # fields that hold encoded keys of rows
SECRETS = frozenset({"opaque"})  # who knows it moves a hold
_LARGE = (State, Trace, HollowBatch, Run)  # told piece by piece


class Column(JsonRecord, frozen=True):
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
    columns: list[Column]
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
        outcomes=len(state.outcomes) + sum(file.count for file in state.outcome_files),
        history_entries=sum(len(one.entries) for one in state.entries.values())
        + sum(file.entries for file in state.entry_files),
        features=list(state.features),
    )


def _columns(state: State) -> list[Column]:
    sound = sound_schemas(state.schemas)
    if not sound:
        return []
    _, schema = newest_schema(sound)
    return [Column(one.name, str(one.type), one.name in schema.key) for one in schema.arrow]


def state_document(
    look: Look, name: str, at: int | None, since: int | None, keys: KeyShower, *, whole: bool
) -> Document:
    """The State of a version, else the newest one, and what changed from the version `since` on.

    `whole`: all of it, else its summary alone. Raises UnknownShard, InvalidUsage, NotReadable, Corruption (no State can
    be made).
    """
    seen: Seen = newest(look, name) if at is None else at_version(look, name, at)
    state = seen.known()
    rows: list[StateChange] = []
    if since is not None:
        if since > state.seqno:
            raise InvalidUsage(f"v{since} is later than v{state.seqno}; give the earlier version as --from")
        before = at_version(look, name, since)
        seen.findings.take(before.findings)
        rows = state_changes(named(look, before.known()), named(look, state))
    tree = (lambda: encode_state(named(look, state), keys)) if whole else None
    return Document("state", seen.findings, name, int(state.seqno), summary_of(state), rows, tree)


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
        yield json.dumps(shown(value, keys))


def shown(value: Any, keys: KeyShower) -> Any:
    """A small value as JSON."""
    if isinstance(value, Antichain):
        return value.to_json()
    if isinstance(value, Record):
        return {name: _field(name, getattr(value, name), keys) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {str(shown(key, keys)): shown(value[key], keys) for key in value}
    if isinstance(value, (tuple, list, frozenset, Batches)):
        return [shown(item, keys) for item in value]
    return b64encode(value).decode() if isinstance(value, (bytes, memoryview)) else value


def _field(name: str, value: Any, keys: KeyShower) -> Any:
    if name in KEYS:
        return keys(value)
    if name in SECRETS:
        return KeyShower().value(value) if value else ""
    if name == "data":  # the rows of an inline part
        return None if value is None else {"bytes": len(value)}
    return shown(value, keys)
