"""What maintenance has not done: merges, collections, rollups, claims, and what should be gone and is not."""

from __future__ import annotations

from collections.abc import Iterator

from blob import BlobStat
from persist.check.findings import (
    BATCHES_MANY,
    CLAIM_SILENT_LEASES,
    CLAIM_SILENT_MS,
    DAY_MS,
    LOG_ENTRIES_LONG,
    ORPHAN_BYTES_MANY,
    ORPHANS_MANY,
    ROLLUP_ENTRIES_MAX,
    CheckedShard,
    Diagnosis,
    age,
    at,
    diagnosis,
    many,
    size,
)
from persist.copies.shard_facts import Faults
from persist.core import merge_plan
from persist.core.blob_keys import belongs_to, born_ms, shard_of
from persist.core.frontier import TIME_MAX, Antichain
from persist.core.record import replace
from persist.core.retention_plan import Facts, facts_of, next_look_ms, plan, waiting, wanted_cuts
from persist.core.shard_settings import RowPolicy
from persist.core.state import Claim, Policy, State, held_since, latest_time
from persist.inspect.part_listing import noted_parts

NO_MAINTENANCE = "no maintenance runs, or it does not keep up"
MAINTAIN = "persist maintain run --once"


def compaction_behind(seen: CheckedShard) -> Iterator[Diagnosis]:
    """A merge is due by the worker's own plan, and is late: very many batches, or a shard long at rest."""
    state = seen.state
    if state is None or state.is_closed:
        return
    due = merge_plan.plan(state, merge_plan.MergePolicy().beside_writers(), now_ms=state.lease_now_ms)
    batches, idle_ms = len(state.trace.batches), seen.now_ms - state.walltime_ms
    if not due or (batches < BATCHES_MANY and idle_ms < seen.limits.behind_ms):
        return
    rows = sum(spec.rows for spec in due)
    since = f", and nobody has committed for {age(idle_ms)}" if idle_ms >= seen.limits.behind_ms else ""
    yield diagnosis(
        "compaction-behind",
        seen.name,
        f"{many(len(due), 'merge')} of {rows:,} updates {'is' if len(due) == 1 else 'are'} due on a shard of "
        f"{many(batches, 'batch')}{since}: reads are slower, and the store is larger",
        cause=f"{NO_MAINTENANCE}; with {Policy().batches_max:,} batches writers are slowed down",
        remedy="start maintenance: a server has its own, else persist maintain run",
        command=MAINTAIN,
    )


def claim_stuck(seen: CheckedShard) -> Iterator[Diagnosis]:
    """Claims of workers that have said nothing for many leases. Nobody has taken them over."""
    if seen.state is None:
        return
    for key, claim in sorted(seen.state.claims.items()):
        silent_ms = seen.silent_ms(claim)
        if silent_ms < max(CLAIM_SILENT_MS, CLAIM_SILENT_LEASES * claim.lease_ms):
            continue
        yield diagnosis(
            "claim-stuck",
            seen.name,
            f"the worker {claim.owner} has said nothing for {age(silent_ms)} of {_work(claim)}, its claim {key!r}",
            cause="the worker was killed, and no other one looks at the shard",
            remedy="start maintenance: another worker goes on from what is written, or lets it go",
            command=MAINTAIN,
        )


def _work(claim: Claim) -> str:
    done = sum(part.size for part in claim.done)
    return f"a merge of {many(len(claim.inputs), 'part')}, {size(done)} written" if claim.inputs else "its work"


def rollup_old(seen: CheckedShard) -> Iterator[Diagnosis]:
    """Who opens the shard reads every state diff after the newest rollup."""
    if seen.state is None or seen.state.tombstone:
        return
    newest = max(seen.state.rollups, default=0)
    behind = seen.head - newest
    if behind <= ROLLUP_ENTRIES_MAX:
        return
    yield diagnosis(
        "rollup-old",
        seen.name,
        f"who opens the shard reads {behind:,} state diffs: the newest rollup is v{newest}, and the log ends at "
        f"v{seen.head}",
        cause="who commits cannot write rollups: the blob store refuses them, or is slow",
        remedy="look at persist_upkeep_failed_total, and at the logs of who writes; a collection makes one",
        command="persist maintain gc --once",
    )


def log_long(seen: CheckedShard) -> Iterator[Diagnosis]:
    """A log that a collection would make shorter. Where a reader holds it, `gc-held` tells."""
    state = seen.state
    if state is None or seen.log.entries < LOG_ENTRIES_LONG:
        return
    horizon = max((seqno for seqno in state.rollups if seqno <= state.seqno_since), default=0)
    unneeded = int(horizon) - seen.log.first_seqno
    if unneeded < LOG_ENTRIES_LONG:
        return
    whole = "" if seen.log.is_whole else "at least "
    yield diagnosis(
        "log-long",
        seen.name,
        f"the log has {whole}{seen.log.entries:,} entries of {size(seen.log.bytes)}, and nobody needs {unneeded:,} of "
        "them",
        cause="no collection runs: what left the shard stays in both stores",
        remedy="start maintenance: a server has its own, else persist maintain gc",
        command="persist maintain gc --once",
    )


def orphans_many(seen: CheckedShard) -> Iterator[Diagnosis]:
    """Blobs that nothing names for a day: writes that failed. Where not all of the log was read nobody can tell."""
    state = seen.state
    if state is None or not seen.log.is_whole or seen.log.wrong:
        return
    old = [stat for stat in seen.listed.values() if _is_old(seen, stat)]
    total = sum(stat.size for stat in old)
    if len(old) < ORPHANS_MANY and total < ORPHAN_BYTES_MANY:  # named ones among them: most shards end here
        return
    known = _known(seen, state)
    if known is None:
        return
    orphans = [stat for stat in old if stat.key not in known]
    total = sum(stat.size for stat in orphans)
    if len(orphans) < ORPHANS_MANY and total < ORPHAN_BYTES_MANY:
        return
    yield diagnosis(
        "orphans-many",
        seen.name,
        f"{many(len(orphans), 'blob')} of {size(total)} are older than a day, and nothing names them",
        cause="writes failed after they had put their blobs, and the orphan sweep does not run",
        remedy="run the sweep; with --dry-run it only tells what it finds",
        command="persist maintain sweep --dry-run",
    )


def _is_old(seen: CheckedShard, stat: BlobStat) -> bool:
    if not belongs_to(stat.key, shard_of(stat.key)):
        return False
    return seen.now_ms - max(born_ms(stat.key), stat.modified_ms) >= DAY_MS


def _known(seen: CheckedShard, state: State) -> set[str] | None:
    """The blobs that the State names, has lent, or has left to GC, also by what bundles list. None: nobody knows."""
    faults = Faults(seen.name)
    known = set(state.blob_keys()).union(seen.keys_left(faults), *seen.lent(faults).values())
    known |= {one.part.key for one in noted_parts(seen, faults) if one.part.key is not None}
    return None if faults else known


# What should be gone and is not: history by age, rows by policies, rows that were erased.


MAINTENANCE_OR_CLOCKS = f"{NO_MAINTENANCE}, or the clocks of who commits and of the blob store do not agree"


def history_behind(seen: CheckedShard) -> Iterator[Diagnosis]:
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
        command="persist maintain gc --once",
    )


def _kept(kept_ms: int) -> str:
    return age(kept_ms) if kept_ms else "no longer than readers need it"


def _wanted_since(seen: CheckedShard, state: State, kept_ms: int) -> Antichain | None:
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


def retention_behind(seen: CheckedShard) -> Iterator[Diagnosis]:
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


def retention_held(seen: CheckedShard) -> Iterator[Diagnosis]:
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


def erasure_late(seen: CheckedShard) -> Iterator[Diagnosis]:
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
                command=f"persist erase status {seen.name}",
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
            command=f"persist erase status {seen.name}",
        )
