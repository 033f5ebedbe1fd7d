"""Transitions of writers: registration by their first write, the ways to move a shard's upper, and rewrites."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from persist.core import commands as c
from persist.core.batch import Description, Part, Run, Trace, batch_of, diff_sum_of, parts_of
from persist.core.erasure import ERASURES_MAX, REASON_CHARS_MAX, Erasure, ErasureRequest
from persist.core.erasure_progress import erased_at, pending_erasures, pending_runs
from persist.core.errors import Conflict, Expired, InvalidUsage, NotReadable, Overloaded, UpperMismatch
from persist.core.frontier import MINIMUM, TIME_MAX, Antichain
from persist.core.ids import Token, WriterId
from persist.core.persistent_map import with_changes
from persist.core.readable_times import earliest_readable, is_kept
from persist.core.record import replace
from persist.core.state import SERVICE_TIMES_MAX, State, WriterState
from persist.core.transitions.attribute_updates import with_updates
from persist.core.transitions.audit_recording import (
    answered,
    check_outcome_room,
    is_alone,
    is_retired,
    retired,
    with_outcome,
    without_entries,
)
from persist.core.transitions.context import RETRY_LATER_S, RETRY_SOON_S, Context
from persist.core.transitions.history_control import forgotten
from persist.core.transitions.lease_expiry import check_lease, heartbeat_ms, without_lapsed_writers
from persist.core.transitions.lifecycle import with_schema
from persist.core.transitions.part_admission import check_near, check_staged, check_upper, no_time_left
from persist.core.transitions.policy_and_erasure_progress import with_passed_cut
from persist.core.transitions.row_drops import (
    check_not_withdrawn,
    drops_rows,
    without_cuts,
    without_pending,
    without_undue,
)
from persist.core.truncation import (
    TRUNCATIONS_MAX,
    RowDrop,
    Truncation,
    clipped,
    owned_by_appenders,
    pending_drop,
    until,
    with_truncation,
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
    _check_interval(lower, upper, command.runs)
    _check_times(command.runs, lower, upper)
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
    _check_interval(lower, upper, command.runs)
    _check_times(command.runs, lower, upper)
    check_staged(state, command.runs, context)
    if command.attributes and state.upper != lower:
        # It is unknown whether the other replica changed the attributes, so the append might be applied in part.
        raise UpperMismatch(
            f"shard {state.name!r} has upper {state.upper}, not {lower}: an append with attributes is all or nothing",
            expected=lower.to_json(),
            actual=state.upper.to_json(),
        )
    _check_not_taken(state, lower, upper)
    result = c.Appended(lower, upper)  # even if the shard had the beginning, so that a retry gets the same answer
    if upper <= state.upper:  # another replica has written all of it
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
    state = _fed_by_append(with_updates(state, command.attributes, context), True, context)
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
    state = without_undue(state, command.runs)
    if not command.runs:
        result = c.Appended(state.upper, state.upper)
        return with_answer(state, command, result, context), result
    is_same = state.schema_times.get(state.schema_id, 0) < time  # rows of a newer schema have a later time
    if context.inserted_at is not None and time == context.inserted_at + 1 and is_same:
        return _join_insert(state, command, context, context.inserted_at)
    result = c.Appended(state.upper, Antichain(time + 1))
    state = replace(state, service_times=with_times(state.service_times, time, time + 1))
    return push(_fed_by_append(state, False, context), command, result, at_time(command.runs, time), context)


def _fed_by_append(state: State, by_append: bool, context: Context) -> State:
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


def _check_interval(lower: Antichain, upper: Antichain, runs: tuple[Run, ...]) -> None:
    if upper < lower:
        raise InvalidUsage(f"the interval from {lower} to {upper} goes backwards")
    if runs and lower == upper:
        raise InvalidUsage(f"the interval from {lower} to {upper} is empty but the batch has rows; give a later upper")


def _check_times(runs: Iterable[Run], lower: Antichain, upper: Antichain) -> None:
    for part in parts_of(runs):
        if not lower.less_equal(part.time_min) or upper.less_equal(part.time_max):
            raise InvalidUsage(
                f"rows have times in [{part.time_min}, {part.time_max}], not from {lower} to before {upper}"
            )


def check_no_times(runs: Iterable[Run]) -> None:
    """Raise InvalidUsage if rows of an insert have times of their own: the service chooses its time."""
    for part in parts_of(runs):
        if part.time_min or part.time_max:
            raise InvalidUsage(
                f"rows of an insert have times in [{part.time_min}, {part.time_max}], but the service chooses the time "
                "of an insert; leave out the column __time, or use compare_and_append"
            )


def check_inline(state: State, inline_bytes: int, runs: Iterable[Run], context: Context) -> None:
    """Raise Overloaded if the State has no room for the inline rows of these runs; `inline_bytes` is the new total."""
    most = context.policy.inline_shard_bytes_max
    if inline_bytes > most and any(part.is_inline for part in parts_of(runs)):
        raise Overloaded(
            f"shard {state.name!r} has no room for these rows: {most} bytes of inline rows wait to be moved to a blob; "
            "if this persists, check the blob store",
            retry_after_s=RETRY_SOON_S,
        )


def with_times(taken: tuple[tuple[int, int], ...], lower: int, upper: int) -> tuple[tuple[int, int], ...]:
    """The intervals with `[lower, upper)`, which is beyond them, appended."""
    if taken and taken[-1][1] == lower:
        return (*taken[:-1], (taken[-1][0], upper))
    if len(taken) == SERVICE_TIMES_MAX:
        taken = ((taken[0][0], taken[1][1]), *taken[2:])
    return (*taken, (lower, upper))


def _check_not_taken(state: State, lower: Antichain, upper: Antichain) -> None:
    """Raise UpperMismatch if an append covers times that the service chose: their rows are not those of a replica."""
    first, last = lower.element, upper.element
    if first == last:
        return  # an interval without times has no rows
    for start, end in state.service_times:
        if first is not None and first < end and (last is None or start < last):
            raise UpperMismatch(
                f"times [{start}, {end}) of shard {state.name!r} were taken by inserts or by a recovery: an append "
                f"from {lower} to {upper} is not what was written there; append from the upper on",
                expected=lower.to_json(),
                actual=state.upper.to_json(),
            )


def at_time(runs: Iterable[Run], time: int) -> tuple[Run, ...]:
    return tuple(Run(tuple(part.at(time) for part in run.parts)) for run in runs)


# A rewrite: its parts apply in the order of docs/design/0002-command-set.md, or nothing changes.


def rewrite(state: State, command: c.Rewrite, context: Context) -> tuple[State, c.Appended]:
    """Apply the parts of the command. If it takes no time, the interval of the answer is empty.

    In a shard that is fed by `append` a tombstone and an erasure take no time of its writer: they become effective
    with the next time that it completes, unless they are forced. Until then the State keeps the rows.
    """
    effects = c.effects(command)
    if not effects.is_consistent:
        raise InvalidUsage(f"the parts of this command are not those of the operation {command.operation!r:.100}")
    if command.truncates is not None and command.truncates <= state.truncated.before:
        return with_passed_cut(state, command, 0, context), c.Appended(state.upper, state.upper)
    is_fed = state.retention.appended
    if is_fed and effects.refused_fed:
        raise owned_by_appenders(state.name, state.upper)
    following = _with_what_is_asked(state, command, context)
    time = _checked_time(state, command)
    _check_conditions(state, command, effects.as_of, time)
    cut = _cut(following, command, time)
    has_pending = pending_drop(state.drops, state.upper) is not None
    settles = command.tombstone is not None and not command.expected_upper.is_empty and has_pending
    waits = is_fed and effects.waits
    takes_time = not waits and (bool(command.runs) or cut is not None or settles or effects.takes_time)
    runs = at_time(command.runs, time)
    following = without_undue(following, runs) if cut is None else _dropped(following, cut, time)
    if command.truncates is not None:
        removed = -(diff_sum_of(parts_of(command.runs)) or 0)
        looked = command.expected_upper.element or 0
        new = Truncation(command.truncates, time, state.truncated.removed + removed, bool(runs), looked)
        following = with_passed_cut(_truncated(following, new), command, removed, context)
    elif command.tombstone is not None:
        following = with_passed_cut(following, command, None if cut is not None else 0, context)
    if command.undoes is not None and takes_time:
        # A restore may bring truncated rows back, so that the same truncation has to remove them again.
        kept = until(following.truncations, command.undoes)
        following = replace(following, truncations=kept, restored_at=time)
    result = c.Appended(state.upper, Antichain(time + 1) if takes_time else state.upper)
    if takes_time:
        following = replace(following, service_times=with_times(following.service_times, time, time + 1))
        following, result = push(following, command, result, runs, context)
    elif effects.is_remembered or is_alone(command):  # so that a late retry changes nothing
        following = with_answer(following, command, result, context)
    if command.erasure is not None:
        request = ErasureRequest(stored(runs), command.erasure.tags) if waits else None
        following = _with_erasure(following, command, command.erasure, time, request, context)
    return following, result


def _with_what_is_asked(state: State, command: c.Rewrite, context: Context) -> State:
    """The State with the attributes and the schema of the command, by which its rows are checked.

    A failed condition of an attribute takes precedence, since it shows a retry that it has landed. For a restore the
    upper takes precedence: a write by another client matters more.
    """
    check_no_times(command.runs)
    if command.undoes is not None:
        check_upper(state, command.expected_upper)
    following = with_updates(state, command.attributes, context)
    if command.schema is not None:
        following = with_schema(following, command.schema, context)
    check_staged(following, command.runs, context)
    if command.cut is not None:
        check_not_withdrawn(following, command.cut)
    return following


def _checked_time(state: State, command: c.Rewrite) -> int:
    """The next time, at which the computed rows land. Raises the error that refuses them."""
    time, expected = state.upper.element, command.expected_upper
    if time == 0 and command.operation not in c.EDITS:
        what = command.operation.partition("_")[0]
        raise InvalidUsage(f"nothing was written to shard {state.name!r} yet, so there is nothing to {what}")
    if not expected.is_empty or command.tombstone is None:
        if command.truncates is None or not _is_only_added_to(state, command.truncates, expected):
            check_upper(state, expected)
        if command.as_of + 1 != expected.element:
            raise UpperMismatch(
                f"shard {state.name!r} has upper {state.upper}: rows that were computed from the time "
                f"{command.as_of} do not follow it",
                expected=[command.as_of + 1],
                actual=state.upper.to_json(),
            )
    if time is None or time > TIME_MAX:
        raise no_time_left(state)
    return time


def _is_only_added_to(state: State, before: int, expected: Antichain) -> bool:
    """Whether rows were only added since the upper from which a truncation was computed, if that is an earlier one.

    Then all the rows that it removes are still there, so writers that only add rows do not delay it. Raises
    UpperMismatch if rows may have been retracted.
    """
    seen, time = expected.element, state.upper.element
    if seen is None or time is None or not before <= seen < time:
        return False
    earlier = max(state.truncated.at, state.restored_at, *(drop.at for drop in state.drops))
    if earlier < seen and is_kept(state, before - 1):
        later = (batch for batch in state.trace.batches if expected < batch.desc.upper)
        if not any(part.diff_min < 0 and part.time_max >= seen for batch in later for part in batch.parts()):
            return True
    raise UpperMismatch(
        f"shard {state.name!r} has upper {state.upper}, not the expected [{seen}], and rows may have been retracted "
        "since; read it and decide again",
        expected=[seen],
        actual=state.upper.to_json(),
        stays=False,  # a retracted row may be added again, and a merge would cancel both
    )


def _check_conditions(state: State, command: c.Rewrite, point: int, time: int) -> None:
    """Raise the error that refuses the settings version, the target time `point`, or the erasure."""
    settings = state.settings
    has_column = settings.rows is not None and settings.rows.column is not None
    if command.settings_version is not None and (command.settings_version != settings.version or not has_column):
        raise Conflict(
            f"the row policy of shard {state.name!r} has changed: its settings have version {settings.version}, and "
            f"expired rows were selected by version {command.settings_version}; nothing was removed",
            expected=command.settings_version,
            actual=settings.version,
        )
    is_about_a_time = command.undoes is not None or command.truncates is not None
    if is_about_a_time and not 0 <= point < time:
        raise InvalidUsage(f"time {point} of shard {state.name!r} is not complete: its upper is {state.upper}")
    if command.undoes is not None and command.undoes < (at := erased_at(state)):
        raise NotReadable(  # a reader from before the erasure must not bring erased rows back
            f"rows of shard {state.name!r} were erased at time {at}: the contents at {point} cannot be restored",
            as_of=[point],
            since=state.since.to_json(),
        )
    if command.erasure is not None:
        _check_erasure(state, command.erasure)


def _check_erasure(state: State, erasure: c.NewErasure) -> None:
    if len(erasure.reason) > REASON_CHARS_MAX:
        raise InvalidUsage(f"the reason has {len(erasure.reason)} characters; at most {REASON_CHARS_MAX} are kept")
    if erasure.erasure in state.erasures:
        raise InvalidUsage(f"shard {state.name!r} has an erasure {erasure.erasure} already; use another id")
    if erasure.pending != len(pending_erasures(state)):  # two pending ones must not retract the same row
        raise UpperMismatch(
            f"the pending erasures of shard {state.name!r} have changed since the rows were computed; decide again",
            expected=state.upper.to_json(),
            actual=state.upper.to_json(),
            stays=False,
        )


def _cut(state: State, command: c.Rewrite, time: int) -> int | None:
    """The time before which the tombstone drops rows; None: it has none, or the parts show that there are no rows."""
    if command.tombstone is None or not time:
        return None
    cut = time if command.tombstone.element is None else command.tombstone.element
    return cut if drops_rows(state, cut) else None


def _dropped(state: State, cut: int, time: int) -> State:
    """The State in which rows before the cut are invisible from this time, the next one, on."""
    state = without_pending(state)
    state = _truncated(state, Truncation(cut, time, state.truncated.removed))
    return replace(state, drops=(*state.drops, RowDrop(cut, time)), cuts=without_cuts(state, cut))


def _truncated(state: State, new: Truncation) -> State:
    """The State with one more truncation. Raises InvalidUsage if there are too many."""
    earliest = earliest_readable(state).element
    known = with_truncation(state.truncations, new, new.at if earliest is None else earliest)
    if len(known) > TRUNCATIONS_MAX:
        raise InvalidUsage(
            f"shard {state.name!r} has {len(known) - 1} truncations that readable times precede, which is the maximum; "
            "forget history first, or remove the tags of earlier times"
        )
    return replace(state, truncations=known)


def _with_erasure(
    state: State, command: c.Rewrite, new: c.NewErasure, at: int, request: ErasureRequest | None, context: Context
) -> State:
    """The State with the erasure at a time, and without holds on earlier history; `request`: it is pending.

    Callers' texts in the earlier commit history may mention the rows, so it is removed as well.
    """
    now_ms = context.checked_ms or context.now_ms
    deadline_ms = None if new.deadline_ms is None else now_ms + new.deadline_ms
    if request is not None:
        waiting = parts_of((*pending_runs(pending_erasures(state)), *request.runs))  # bounded as inline rows are
        check_inline(state, sum(part.size for part in waiting if part.is_inline), request.runs, context)
    state = _with_room(state)
    erasure = Erasure(at, command.question, now_ms, deadline_ms, new.reason, pending=request)
    state = replace(state, erasures=with_changes(state.erasures, {new.erasure: erasure}))
    return state if request is not None else let_go(state, at, context, tags=new.tags)


def _with_room(state: State) -> State:
    """The State without the oldest completed erasure, if it has as many as it may."""
    if len(state.erasures) < ERASURES_MAX:
        return state
    ended = [(erasure.at, name) for name, erasure in state.erasures.items() if erasure.proof is not None]
    if not ended:
        raise Conflict(  # not Overloaded, which clients retry: an erasure may take a day
            f"shard {state.name!r} has {len(state.erasures)} unfinished erasures, which is the maximum: erase again "
            "once one is complete (`persist maintain run`); `persist erase status` shows what they wait for"
        )
    return replace(state, erasures=with_changes(state.erasures, {}, (min(ended)[1],)))
