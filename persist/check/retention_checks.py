"""What should be gone and is not: history by age, rows by policies, rows that were erased."""

from __future__ import annotations

from collections.abc import Iterator

from persist.check.findings import Diagnosis, age, at, diagnosis
from persist.check.maintenance_checks import NO_MAINTENANCE
from persist.check.shard_probe import Seen
from persist.core.frontier import TIME_MAX, Antichain
from persist.core.record import replace
from persist.core.retention_plan import Facts, facts_of, next_look_ms, plan, waiting, wanted_cuts
from persist.core.retention_policy import RowPolicy
from persist.core.state import State, held_since, latest_time

MAINTENANCE_OR_CLOCKS = f"{NO_MAINTENANCE}, or the clocks of who commits and of the blob store do not agree"


def history_behind(seen: Seen) -> Iterator[Diagnosis]:
    """The shard keeps more history than its setting says, though no reader needs it."""
    state = seen.state
    if state is None or not state.settings.version or state.since.element is None:
        return
    kept_ms = state.settings.history_ms
    if kept_ms is None:
        return
    wanted = _wanted_since(seen, state, kept_ms)
    if wanted is None or not state.since < wanted:
        return
    old_ms = seen.age_ms(state.since.element)
    told = "is of unknown age" if old_ms is None else f"is {age(old_ms)} old"
    yield diagnosis(
        "retention-behind",
        seen.name,
        f"history is to be kept for {_kept(kept_ms)}, and the oldest readable time, {state.since.element}, {told}",
        cause=MAINTENANCE_OR_CLOCKS,
        remedy="start maintenance: since follows within minutes",
        command="persist gc --once",
    )


def _kept(kept_ms: int) -> str:
    return age(kept_ms) if kept_ms else "no longer than readers need it"


def _wanted_since(seen: Seen, state: State, kept_ms: int) -> Antichain | None:
    """Where since would be if maintenance had done its work by then. None: nobody knows."""
    by_ms = seen.now_ms - seen.limits.behind_ms - kept_ms
    if not kept_ms and state.walltime_ms < by_ms:
        return held_since(state, latest_time(state))
    upper = seen.upper_by(by_ms)
    if upper is None or upper.element == 0:
        return None
    hold = Antichain(TIME_MAX if upper.element is None else upper.element - 1)
    readers = [one.since for one in state.leased_readers.values() if not one.since.is_empty and not one.point]
    readers += [one.since for one in state.critical_readers.values() if not one.since.is_empty]
    return min([min(hold, latest_time(state)), *readers])


def retention_behind(seen: Seen) -> Iterator[Diagnosis]:
    """Rows that the policy would take away now, and should have taken away by then."""
    state = seen.state
    if state is None or state.is_closed or state.settings.rows is None:
        return
    facts, by_ms = facts_of(state), seen.now_ms - seen.limits.behind_ms
    upper = seen.upper_by(by_ms)
    if upper is None or (seen.log.settings_ms or seen.log.first_ms) >= by_ms - state.settings.rows.cut_every_ms:
        return  # nobody knows what came by then, or the policy is new
    late = _late(state.settings.rows, replace(facts, upper=min(upper, facts.upper)), by_ms)
    if late is None:
        return
    done = f"; it was last done {at(facts.done.at_ms)}" if facts.done.at_ms else "; it was never done"
    yield diagnosis(
        "retention-behind",
        seen.name,
        f"the policy of rows is behind: {late}{done}",
        cause=MAINTENANCE_OR_CLOCKS,
        remedy="start maintenance, or run the policy by hand",
        command=f"persist retention run {seen.name}",
    )


def _late(policy: RowPolicy, facts: Facts, by_ms: int) -> str | None:
    """What it should have done by then, with what had come by then. None: nothing."""
    due = plan(facts, by_ms).due
    if due is not None:
        return f"what was there by {at(due.cut_ms)} should be gone by its {' and '.join(due.why)}"
    look_ms = next_look_ms(facts, by_ms)
    if look_ms is not None and look_ms <= by_ms:
        return f"rows that column {policy.column!r} makes old enough were to be looked for"
    newest_ms, _ = facts.newest
    if newest_ms < by_ms - policy.cut_every_ms and any(wanted_cuts(facts, by_ms)):
        return f"no cut was taken since {at(newest_ms)}" if newest_ms else "no cut was ever taken"
    return None


def retention_held(seen: Seen) -> Iterator[Diagnosis]:
    """Consumers, or the way the shard is written, that hold a policy of rows back for long."""
    state = seen.state
    if state is None or state.is_closed or state.settings.rows is None:
        return
    facts = facts_of(state)
    held_by = (*plan(facts, seen.now_ms - seen.limits.held_ms).held_by, *waiting(facts))
    if held_by:
        yield diagnosis(
            "retention-held",
            seen.name,
            f"the policy of rows takes nothing away: {held_by[0]}",
            cause="; ".join(held_by[1:])
            or "it takes no row that a consumer has not passed, or of which others own the times",
            remedy="let the consumer go on, take it out of the policy, or give the policy consumers_max_age",
            command=f"persist retention show {seen.name}",
        )


def erasure_late(seen: Seen) -> Iterator[Diagnosis]:
    """Erasures whose deadline has passed, and of which there is no proof yet; and those that are pending for long."""
    if seen.state is None:
        return
    for key, erasure in sorted(seen.state.erasures.items()):
        deadline_ms = erasure.deadline_ms
        if erasure.pending is not None and erasure.requested_ms < seen.now_ms - seen.limits.held_ms:
            yield diagnosis(
                "erasure-late",
                seen.name,
                f"erasure {key} is pending for {age(seen.now_ms - erasure.requested_ms)}, and its rows can be read",
                cause="the shard is fed by append, and its writer has committed nothing since",
                remedy="let the writer commit, if only an empty append; or erase once more with --force, at once",
                command=f"persist erased {seen.name}",
            )
            continue
        if erasure.proof is not None or deadline_ms is None or deadline_ms >= seen.now_ms:
            continue
        yield diagnosis(
            "erasure-late",
            seen.name,
            f"erasure {key} was to be done by {at(deadline_ms)}, {age(seen.now_ms - deadline_ms)} ago, and rows may "
            "still be in a store",
            cause=f"it is {erasure.phase}: a reader, a tag, history, or maintenance that does not run holds it up",
            remedy="the command says what it waits for",
            command=f"persist erased {seen.name}",
        )
