"""Transitions of writers: registration by their first write, appends and inserts, and answers to retries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from persist.core import commands as c
from persist.core.batch import Description, Part, Run, Trace, batch_of, parts_of
from persist.core.erasure import Erasure
from persist.core.erasure_progress import pending_erasures, pending_runs
from persist.core.errors import Expired, InvalidUsage, Overloaded, UpperMismatch
from persist.core.frontier import MINIMUM, TIME_MAX, Antichain
from persist.core.ids import Token, WriterId
from persist.core.persistent_map import with_changes
from persist.core.record import replace
from persist.core.state import State, WriterState
from persist.core.transitions.attribute_updates import with_updates
from persist.core.transitions.context import RETRY_LATER_S, RETRY_SOON_S, Context
from persist.core.transitions.history_control import forgotten
from persist.core.transitions.lease_expiry import check_lease, heartbeat_ms, without_lapsed_writers
from persist.core.transitions.outcomes_and_audit import (
    answered,
    check_outcome_room,
    is_alone,
    is_retired,
    retired,
    with_outcome,
    without_entries,
)
from persist.core.transitions.part_admission import check_staged
from persist.core.transitions.row_drops import (
    check_not_withdrawn,
    without_undue,
)
from persist.core.transitions.time_checks import (
    at_time,
    check_interval,
    check_near,
    check_no_times,
    check_not_taken,
    check_times,
    check_upper,
    no_time_left,
    with_times,
)
from persist.core.truncations_and_drops import (
    clipped,
)

WRITERS_MAX = 100_000  # with leases; one more is refused (Overloaded)


def expire(state: State, command: c.ExpireWriter, context: Context) -> tuple[State, c.Done]:
    """An unknown id is remembered too, so that its first write, if it is delivered late, does not register it."""
    if command.writer not in state.writers:
        if state.is_closed or is_retired(state, command.writer, context):
            return state, c.Done()
        check_outcome_room(state, context.policy)
    return retired(state, (command.writer,), context.lease_now_ms), c.Done()


def compare_and_append(state: State, command: c.CompareAndAppend, context: Context) -> tuple[State, c.Appended]:
    lower, upper = command.expected_upper, command.new_upper
    check_interval(lower, upper, command.runs)
    check_times(command.runs, lower, upper)
    check_staged(state, command.runs, context)
    check_upper(state, lower)
    check_not_withdrawn(state, command.cut)
    check_near(state, upper)
    state = with_updates(state, command.attributes, context)
    result = c.Appended(lower, upper)
    if lower == upper and not command.attributes and not is_alone(command):
        return _kept(state, command, context), result
    if lower == upper:
        return with_answer(state, command, result, context), result
    return push(without_undue(state, command.runs), command, result, command.runs, context)


def append(state: State, command: c.Append, context: Context) -> tuple[State, c.Appended]:
    lower, upper = command.lower, command.upper
    check_interval(lower, upper, command.runs)
    check_times(command.runs, lower, upper)
    check_staged(state, command.runs, context)
    if command.attributes and state.upper != lower:
        # It is unknown whether the other replica changed the attributes, so the append might be applied in part.
        raise UpperMismatch(
            f"shard {state.name!r} has upper {state.upper}, not {lower}: an append with attributes is all or nothing",
            expected=lower.to_json(),
            actual=state.upper.to_json(),
        )
    check_not_taken(state, lower, upper)
    result = c.Appended(lower, upper)  # even if the shard had the beginning, so that a retry gets the same answer
    if upper <= state.upper:  # another replica has written all of it
        if command.attributes:  # it is an empty interval
            return with_answer(with_updates(state, command.attributes, context), command, result, context), result
        return (with_answer(state, command, result, context) if is_alone(command) else state), result
    if state.upper < lower:
        raise UpperMismatch(
            f"shard {state.name!r} has upper {state.upper}: an append from {lower} on would leave a gap; "
            "append the times before it first",
            expected=lower.to_json(),
            actual=state.upper.to_json(),
        )
    check_not_withdrawn(state, command.cut)
    check_near(state, upper)
    state = fed_by_append(with_updates(state, command.attributes, context), True, context)
    runs = command.runs if state.upper == lower else clipped(command.runs, state.upper.element or 0)
    return push(without_undue(state, runs), command, result, runs, context)


def insert(state: State, command: c.Insert, context: Context) -> tuple[State, c.Appended]:
    check_no_times(command.runs)
    time = state.upper.element
    if time is None or time > TIME_MAX:
        raise no_time_left(state)
    if not command.runs and not command.attributes and not is_alone(command):
        return state, c.Appended(state.upper, state.upper)
    state = with_updates(state, command.attributes, context)  # first: a failed condition shows a retry that it landed
    check_staged(state, command.runs, context)
    if not command.runs:
        result = c.Appended(state.upper, state.upper)
        return with_answer(state, command, result, context), result
    is_same = state.schema_times.get(state.schema_id, 0) < time  # rows of a newer schema have a later time
    if context.inserted_at is not None and time == context.inserted_at + 1 and is_same:
        state = without_undue(state, command.runs, Antichain(context.inserted_at))
        return _join_insert(state, command, context, context.inserted_at)
    state = without_undue(state, command.runs)
    result = c.Appended(state.upper, Antichain(time + 1))
    state = replace(state, service_times=with_times(state.service_times, time, time + 1))
    return push(fed_by_append(state, False, context), command, result, at_time(command.runs, time), context)


def fed_by_append(state: State, by_append: bool, context: Context) -> State:
    """Record whether the shard is fed by `append`: then a row policy must not take a time from its writers."""
    if state.retention.appended == by_append:
        return state
    return replace(state, retention=replace(state.retention, appended=by_append))


def let_go(state: State, at: int, context: Context, *, tags: bool) -> State:
    """The State without the shard's own holds on history before an erasure, and without the earlier commit history."""
    state = replace(
        without_entries(state),
        cuts={at_ms: cut for at_ms, cut in state.cuts.items() if cut.upper > at},
        tags={name: tag for name, tag in state.tags.items() if tag.time >= at} if tags else state.tags,
    )
    return forgotten(state, Antichain(at), context)


def _effective(state: State, pending: Mapping[str, Erasure], context: Context) -> State:
    """The State in which these erasures have retracted their rows, by the batch that was just added."""
    for key, erasure in pending.items():
        tags = erasure.pending is not None and erasure.pending.tags
        state = let_go(state, erasure.at, context, tags=tags)
        state = replace(state, erasures=with_changes(state.erasures, {key: replace(erasure, pending=None)}))
    return state


def advance_upper(state: State, command: c.AdvanceUpper, context: Context) -> tuple[State, c.Appended]:
    if command.upper <= state.upper:
        return state, c.Appended(command.upper, command.upper)
    if not command.force:
        check_near(state, command.upper)
    pending = pending_erasures(state)
    runs, desc = pending_runs(pending), Description(state.upper, command.upper, MINIMUM)
    state = _with_trace(state, state.trace.push(batch_of(desc, runs)), runs)
    return _effective(state, pending, context), c.Appended(desc.lower, desc.upper)


def update_attributes(state: State, command: c.UpdateAttributes, context: Context) -> tuple[State, c.Done]:
    result = c.Appended(state.upper, state.upper)
    return with_answer(with_updates(state, command.attributes, context), command, result, context), c.Done()


def answered_before(state: State, command: c.Command, context: Context) -> c.Result | None:
    """The answer to a retry; None: the command is new. Raises Expired if its writer has ended.

    Raises TokenReused and OutcomeForgotten for a caller's token.
    """
    if not isinstance(command, c.WriterCommand):
        return None
    if is_alone(command):
        answer = answered(state, command, context)
    else:
        _check_registrable(state, command, context)
        answer = _answered(state.writers.get(command.writer), command.token)
    return c.Done() if answer is not None and isinstance(command, c.UpdateAttributes) else answer


def _join_insert(state: State, command: c.Insert, context: Context, time: int) -> tuple[State, c.Appended]:
    last = state.trace.batches[-1]
    trace = state.trace.extend_last(stored(at_time(command.runs, time)))
    check_inline(state, trace.inline_bytes, command.runs, context)
    result = c.Appended(last.desc.lower, last.desc.upper)
    return with_answer(_with_trace(state, trace, command.runs), command, result, context), result


def push(
    state: State, command: c.WriterCommand, result: c.Appended, runs: tuple[Run, ...], context: Context
) -> tuple[State, c.Appended]:
    """The State with a batch of these runs, and of pending erasures, from its upper to that of `result`."""
    if len(state.trace.batches) >= context.policy.batches_max and runs:
        raise Overloaded(
            f"shard {state.name!r} has {len(state.trace.batches)} batches that wait for compaction; run a compactor",
            retry_after_s=RETRY_LATER_S,
        )
    pending = pending_erasures(state)
    erased = pending_runs(pending)
    trace = state.trace.push(batch_of(Description(state.upper, result.upper, MINIMUM), (*stored(runs), *erased)))
    check_inline(state, trace.inline_bytes, runs, context)
    state = _effective(_with_trace(state, trace, (*runs, *erased)), pending, context)
    return with_answer(state, command, result, context), result


def _with_trace(state: State, trace: Trace, runs: tuple[Run, ...]) -> State:
    """The State with rows appended and counted in the core attributes."""
    updates = sum(part.updates for part in parts_of(runs))
    size = sum(part.size if part.clip is None else _new_bytes(part) for part in parts_of(runs))
    return replace(state, trace=trace, event_count=state.event_count + updates, byte_count=state.byte_count + size)


def _new_bytes(part: Part) -> int:
    """The bytes of a part, without the share of its clipped rows."""
    return part.size * min(part.updates, part.rows) // part.rows


def stored(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    if not any(part.is_staged for part in parts_of(runs)):
        return runs
    return tuple(Run(tuple(part.as_durable() for part in run.parts)) for run in runs)


def with_answer(state: State, command: c.WriterCommand, result: c.Appended, context: Context) -> State:
    """The State that remembers the answer, for retries."""
    if is_alone(command):
        return with_outcome(state, command, result, context)
    entry = WriterState(context.lease_now_ms, command.lease_ms, command.token, result.lower, result.upper)
    return _with_writer(state, command.writer, entry, context)


def _kept(state: State, command: c.WriterCommand, context: Context) -> State:
    """The State in which the writer's lease is renewed and its last outcome unchanged."""
    known = state.writers.get(command.writer, WriterState(0, command.lease_ms))
    entry = replace(known, heartbeat_ms=heartbeat_ms(known, context), lease_ms=command.lease_ms)
    return _with_writer(state, command.writer, entry, context)


def _with_writer(state: State, writer: WriterId, entry: WriterState, context: Context) -> State:
    """The State with this writer, which may be new. Raises Overloaded if there are too many."""
    if writer not in state.writers and len(state.writers) >= WRITERS_MAX:
        state = without_lapsed_writers(state, context.lease_now_ms)
        if len(state.writers) >= WRITERS_MAX:
            raise Overloaded(
                f"shard {state.name!r} has {len(state.writers)} writers; close some", retry_after_s=RETRY_LATER_S
            )
    return replace(state, writers=with_changes(state.writers, {writer: entry}))


def _check_registrable(state: State, command: c.WriterCommand, context: Context) -> None:
    """Raise Expired for an unregistered writer that may have written before, InvalidUsage for a bad lease."""
    check_lease("writer", command.lease_ms)
    if command.writer not in state.writers and is_retired(state, command.writer, context):
        raise Expired(
            f"writer {command.writer} of shard {state.name!r} was retired, its lease lapsed, or it is older than the "
            "shard; open a new writer"
        )


def _answered(writer: WriterState | None, token: Token) -> c.Appended | None:
    """The answer to the writer's most recent command, if this is a retry of it.

    A writer's tokens ascend, so an older one is a duplicate that was delivered late, whose caller no longer waits.
    """
    if writer is None or writer.token is None or writer.token < token:
        return None
    if writer.token == token:
        return c.Appended(writer.lower, writer.upper)
    raise InvalidUsage(f"token {token} is older than the writer's last one, {writer.token}: tokens ascend")


def check_inline(state: State, inline_bytes: int, runs: Iterable[Run], context: Context) -> None:
    """Raise Overloaded if the State has no room for the inline rows of these runs; `inline_bytes` is the new total."""
    most = context.policy.inline_shard_bytes_max
    if inline_bytes > most and any(part.is_inline for part in parts_of(runs)):
        raise Overloaded(
            f"shard {state.name!r} has no room for these rows: {most} bytes of inline rows wait to be moved to a blob; "
            "if this persists, check the blob store",
            retry_after_s=RETRY_SOON_S,
        )
