"""Transitions of a shard as a whole: its schema, closing it, finalising it to a tombstone, and the next life."""

from __future__ import annotations

from persist.core import commands as c
from persist.core.antichain import EMPTY, MINIMUM, TIME_MAX
from persist.core.attribute import NO_INDEX
from persist.core.batch import Description, HollowBatch
from persist.core.errors import Conflict, InvalidUsage, SchemaMismatch
from persist.core.ids import INCARNATION_MAX, shard_id_of
from persist.core.outcomes import births
from persist.core.record import replace
from persist.core.row_policy import NO_RETENTION
from persist.core.shard_settings import ShardSettings
from persist.core.state import State, initial_state
from persist.core.trace import trace_of
from persist.core.transitions.context import Context
from persist.core.transitions.leases import without_lapsed_readers
from persist.core.transitions.outcomes import of_ended_life
from persist.core.transitions.uppers import check_upper

FINALISE_BATCHES_PER_STEP = 100
HOLDERS_NAMED_MAX = 5


def evolve_schema(state: State, command: c.EvolveSchema, context: Context) -> tuple[State, c.SchemaRegistered]:
    current = state.schema_id
    if state.schemas[current] == command.schema:  # nothing to do, or a retry of what landed
        return state, c.SchemaRegistered(current)
    following = with_schema(state, command, context)
    if command.expected_upper is not None:  # what was staged by the schema before is staged anew
        check_upper(state, command.expected_upper)
        following = replace(following, schema_floor=current + 1)
    return following, c.SchemaRegistered(current + 1)


def with_schema(state: State, command: c.EvolveSchema | c.Reshape, context: Context) -> State:
    """The State whose current schema is that of the command. Raises SchemaMismatch, and what the verdict says."""
    _check_current(state, command.expected_id)
    context.verdict.check()
    settings = _settings_after(state, context.verdict.settings)
    return _dated(replace(reshaped(state, command), settings=settings), context)


def _dated(state: State, context: Context) -> State:
    """The State that knows from which time on it has its current schema."""
    first = TIME_MAX + 1 if state.upper.element is None else state.upper.element
    return replace(state, schema_times={**state.schema_times, state.schema_id: first})


def read_schema_times(state: State, command: c.ReadSchemaTimes, context: Context) -> tuple[State, c.SchemaTimes]:
    return state, c.SchemaTimes(state.schema_id, dict(state.schema_times))


def reshaped(state: State, command: c.EvolveSchema | c.Reshape) -> State:
    """The State as it would be with the schema of the command. Nothing is checked."""
    return replace(state, schemas={**state.schemas, command.expected_id + 1: command.schema})


def _settings_after(state: State, looked_at: int | None) -> ShardSettings:
    """The settings after a change of the columns. `looked_at`: their version by which no name that goes is needed.

    A policy of rows knows its column by the name. So where names go the settings have another version then: whoever has
    looked at the columns before, to set a policy, is refused.
    """
    known = state.settings
    if looked_at is None:
        return known
    if known.version != looked_at:
        raise SchemaMismatch(
            f"the settings of shard {state.name!r} changed while its columns were about to; nothing was changed: try "
            "again",
            expected=looked_at,
            actual=known.version,
        )
    return replace(known, version=known.version + 1) if known.version else known


def constrain(state: State, command: c.Constrain, context: Context) -> tuple[State, c.SchemaRegistered]:
    """What is committed from here on was staged by a writer who knew the constraints, and so has obeyed them."""
    current = state.schema_id
    if state.schemas[current] == command.schema:  # nothing to do, or a retry of what landed
        return state, c.SchemaRegistered(current)
    _check_current(state, command.expected_id)
    if command.expected_upper is not None:
        check_upper(state, command.expected_upper)
    context.verdict.check()
    schemas = {**state.schemas, current + 1: command.schema}
    floor = state.schema_floor if command.expected_upper is None else current + 1
    following = _dated(replace(state, schemas=schemas, schema_floor=floor), context)
    return following, c.SchemaRegistered(current + 1)


def _check_current(state: State, expected: int) -> None:
    if expected != state.schema_id:
        raise SchemaMismatch(
            f"shard {state.name!r} has schema {state.schema_id}, not the expected {expected}; read it anew",
            expected=expected,
            actual=state.schema_id,
        )


def drop(state: State, command: c.Drop, context: Context) -> tuple[State, c.Done]:
    if state.is_closed:
        return state, c.Done()
    state = without_lapsed_readers(state, context.lease_now_ms)
    holders = [r.purpose or str(k) for k, r in state.critical_readers.items() if not r.since.is_empty]
    holders += [r.purpose or str(k) for k, r in state.leased_readers.items() if not r.since.is_empty]
    if holders and not command.force:
        named = ", ".join(sorted(holders)[:HOLDERS_NAMED_MAX])
        raise Conflict(
            f"shard {state.name!r} is held by {len(holders)} readers ({named}); close them, or drop it by force",
            holders=sorted(holders),
        )
    trace = state.trace
    if not state.upper.is_empty:
        trace = trace.push(HollowBatch(Description(state.upper, EMPTY, MINIMUM), (), 0))
    return replace(state, trace=trace, since=EMPTY, leased_readers={}, critical_readers={}), c.Done()


def finalise(state: State, command: c.Finalise, context: Context) -> tuple[State, c.Finalised]:
    if state.tombstone:
        return state, c.Finalised(done=True)
    batches = state.trace.batches
    if len(batches) > 1 or batches[0].runs:
        taken = batches[:FINALISE_BATCHES_PER_STEP]
        emptied = HollowBatch(Description(taken[0].desc.lower, taken[-1].desc.upper, MINIMUM), (), 0)
        state = replace(state, trace=trace_of((emptied, *batches[len(taken) :])))
        return state, c.Finalised(done=False)
    store_ms = context.now_ms if command.store_ms is None else command.store_ms
    born = [*births(state.outcomes), *(file.born_last for file in state.outcome_files)]
    gone = replace(
        state,
        writers={},
        leased_readers={},
        critical_readers={},
        claims={},
        attributes={},
        attribute_root=NO_INDEX,
        attribute_chunks={},
        marks={},
        entries={},
        entry_files=(),
        info_bytes=0,
        tags={},
        truncations=(),
        restored_at=0,
        drops=(),
        floor=0,
        cuts={},
        retention=NO_RETENTION,
        erasures={},
        left={},
        # A minted token that landed in this life is not to land in the next one. A birth in the future would hold up
        # all others until that time: such tokens are remembered one by one.
        outcomes=of_ended_life(state, store_ms, context),
        outcome_files=(),
        forgotten_ms=max(state.forgotten_ms, min(max(born, default=0), store_ms)),
        tombstone=True,
    )
    return gone, c.Finalised(done=True)


def recreate(state: State, command: c.Recreate, context: Context) -> tuple[State, c.Done]:
    """The next life begins as the first one did. The log goes on, so its rollups stay named until it is cut."""
    context.verdict.check()
    incarnation = state.incarnation + 1
    if incarnation > INCARNATION_MAX:
        raise InvalidUsage(f"the name {state.name!r} was used {incarnation} times; take another one")
    born = initial_state(state.name, command.schema, context.now_ms, command.settings)
    return replace(
        born,
        shard_id=shard_id_of(state.name, incarnation),
        seqno=state.seqno,
        rollups=state.rollups,
        features=state.features,
        incarnation=incarnation,
        forgotten_ms=state.forgotten_ms,
        outcomes=state.outcomes,
        long_diffs=state.long_diffs,
        loans=state.loans,
        borrowed=state.borrowed,
        entries={},
    ), c.Done()
