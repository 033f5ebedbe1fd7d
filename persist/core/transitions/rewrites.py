"""The rewrite: its parts apply in the order of docs/design/0002-command-set.md, or nothing changes."""

from __future__ import annotations

from persist.core import commands as c
from persist.core.batch import diff_sum_of, parts_of
from persist.core.erasure import ERASURES_MAX, REASON_CHARS_MAX, Erasure, ErasureRequest
from persist.core.erasure_progress import erased_at, pending_erasures, pending_runs
from persist.core.errors import Conflict, InvalidUsage, NotReadable, UpperMismatch
from persist.core.frontier import MINIMUM, TIME_MAX, Antichain
from persist.core.persistent_map import with_changes
from persist.core.readable_times import earliest_readable, is_kept
from persist.core.record import replace
from persist.core.state import State
from persist.core.transitions.attribute_updates import with_updates
from persist.core.transitions.context import Context
from persist.core.transitions.lifecycle import with_schema
from persist.core.transitions.outcomes_and_audit import is_alone
from persist.core.transitions.part_admission import check_staged
from persist.core.transitions.policy_and_erasure_progress import with_passed_cut
from persist.core.transitions.row_drops import (
    check_not_withdrawn,
    drops_rows,
    is_waiting,
    without_cuts,
    without_pending,
    without_undue,
)
from persist.core.transitions.time_checks import at_time, check_no_times, check_upper, no_time_left, with_times
from persist.core.transitions.writers import check_inline, fed_by_append, let_go, push, stored, with_answer
from persist.core.truncations_and_drops import (
    TRUNCATIONS_MAX,
    RowDrop,
    Truncation,
    owned_by_appenders,
    pending_drop,
    until,
    with_truncation,
)


def rewrite(state: State, command: c.Rewrite, context: Context) -> tuple[State, c.Appended]:
    """Apply the parts of the command. If it takes no time, the interval of the answer is empty.

    In a shard that is fed by `append` a tombstone and an erasure take no time of its writer: they become effective
    with the next time that it completes, unless they are forced. Until then the State keeps the rows.
    """
    effects = c.effects(command)
    if not effects.is_consistent:
        raise InvalidUsage(f"the parts of this command are not those of the operation {command.operation!r:.100}")
    if command.as_of == c.NEVER:
        check_upper(state, command.expected_upper)
        raise _not_following(state, command)
    if _has_nothing_to_truncate(state, command):
        result = c.Appended(state.upper, state.upper)
        return with_answer(with_passed_cut(state, command, 0, context), command, result, context), result
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
        if command.operation == c.INSERT:  # into a shard with unique keys
            following = fed_by_append(following, False, context)
        following = replace(following, service_times=with_times(following.service_times, time, time + 1))
        following, result = push(following, command, result, runs, context)
    elif effects.is_remembered or is_alone(command):  # so that a late retry changes nothing
        following = with_answer(following, command, _remembered(following, command, result), context)
    if command.erasure is not None:
        request = ErasureRequest(stored(runs), command.erasure.tags) if waits else None
        following = _with_erasure(following, command, command.erasure, time, request, context)
    return following, result


def _remembered(state: State, command: c.Rewrite, result: c.Appended) -> c.Appended:
    """The answer as the outcome of a token remembers it: see `TokenOutcome.waited`."""
    cut = None if command.tombstone is None else command.tombstone.element
    return c.Appended(result.lower, MINIMUM) if cut and is_alone(command) and is_waiting(state, cut) else result


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
            raise _not_following(state, command)
    if time is None or time > TIME_MAX:
        raise no_time_left(state)
    return time


def _not_following(state: State, command: c.Rewrite) -> UpperMismatch:
    """The error of rows that were not computed from the latest time, and of a token without an outcome (`NEVER`)."""
    return UpperMismatch(
        f"shard {state.name!r} has upper {state.upper}: rows that were computed from the time {command.as_of} do not "
        "follow it",
        expected=[command.as_of + 1],
        actual=state.upper.to_json(),
    )


def _has_nothing_to_truncate(state: State, command: c.Rewrite) -> bool:
    """Whether a truncation has no rows to remove, whatever the upper. A drop may also settle a pending one."""
    if command.tombstone is not None:
        return command.tombstone == MINIMUM
    settled = without_pending(state).truncated.before  # a pending one may yet be withdrawn
    return command.truncates is not None and command.truncates <= settled


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
        what = f"time {point}" if command.truncates is None else f"a time before {command.truncates}"
        raise InvalidUsage(f"{what} of shard {state.name!r} is not complete: its upper is {state.upper}")
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
