"""Checks of maintenance: overdue merges, collections, rollups and claims; data that should have been deleted."""

from __future__ import annotations

from collections.abc import Iterator

from blob import BlobStat
from persist.check.findings import DAY_MS, HOUR_MS, CheckedShard, Diagnosis, age, at, is_or_are, many, size
from persist.copies.shard_facts import Faults
from persist.core import merge_plan
from persist.core.blob_keys import belongs_to, born_ms, shard_of
from persist.core.frontier import TIME_MAX, Antichain
from persist.core.readable_times import held_since, latest_time
from persist.core.record import replace
from persist.core.retention_plan import Facts, facts_of, next_look_ms, plan, waiting, wanted_cuts
from persist.core.shard_settings import RowPolicy
from persist.core.state import Policy, State
from persist.inspect.part_listing import parts_noting_faults

NO_MAINTENANCE = "no maintenance is running, or it does not keep up"
MAINTAIN = "persist maintain run --once"
BATCHES_MANY = 256  # with so many batches a due merge is late
CLAIM_SILENT_LEASES = 10  # after so many leases without a heartbeat, and an hour, the worker is dead
ROLLUP_ENTRIES_MAX = 4_096  # state diffs after the newest rollup, all of which are read when a shard is opened
LOG_ENTRIES_LONG = 2_000  # log entries that no reader holds, which a collection would delete
ORPHANS_MANY = 100  # blobs that no State names, older than a day
ORPHAN_BYTES_MANY = 1024**3


def compaction_behind(shard: CheckedShard) -> Iterator[Diagnosis]:
    """A merge is overdue by the worker's own plan: very many batches, or a shard that has long been idle."""
    state = shard.known()
    if state.is_closed:
        return
    due = merge_plan.plan(state, merge_plan.MergePolicy().beside_writers(), now_ms=state.lease_now_ms)
    batches, idle_ms = len(state.trace.batches), shard.now_ms - state.walltime_ms
    if not due or (batches < BATCHES_MANY and idle_ms < shard.limits.behind_ms):
        return
    rows = sum(spec.rows for spec in due)
    since = f", and the last commit was {age(idle_ms)} ago" if idle_ms >= shard.limits.behind_ms else ""
    yield shard.finding(
        "compaction-behind",
        f"{many(len(due), 'merge')} of {rows:,} updates {is_or_are(len(due))} due on a shard of "
        f"{many(batches, 'batch')}{since}: reads are slower, and the store is larger",
        cause=f"{NO_MAINTENANCE}; with {Policy().batches_max:,} batches writers are slowed down",
        remedy="start maintenance: a server with maintenance, or persist maintain run",
        command=MAINTAIN,
    )


def claim_stuck(shard: CheckedShard) -> Iterator[Diagnosis]:
    """Claims of workers without a heartbeat for many leases, which no other worker has taken over."""
    for key, claim in sorted(shard.known().claims.items()):
        silent_ms = shard.silent_ms(claim)
        if silent_ms < max(HOUR_MS, CLAIM_SILENT_LEASES * claim.lease_ms):
            continue
        written = size(sum(part.size for part in claim.done))
        work = f"a merge of {many(len(claim.inputs), 'part')} ({written} written)" if claim.inputs else "its work"
        yield shard.finding(
            "claim-stuck",
            f"the worker {claim.owner} has not renewed its claim {key!r} on {work} for {age(silent_ms)}",
            cause="the worker was killed, and no other worker handles the shard",
            remedy="start maintenance: another worker resumes the merge, or releases the claim",
            command=MAINTAIN,
        )


def rollup_old(shard: CheckedShard) -> Iterator[Diagnosis]:
    """Opening the shard reads every state diff after the newest rollup."""
    state = shard.known()
    if state.tombstone:
        return
    newest = max(state.rollups, default=0)
    behind = shard.head - newest
    if behind <= ROLLUP_ENTRIES_MAX:
        return
    yield shard.finding(
        "rollup-old",
        f"opening the shard reads {behind:,} state diffs: the newest rollup is v{newest}, and the log ends at "
        f"v{shard.head}",
        cause="committers cannot write rollups: the blob store rejects them, or is slow",
        remedy="see persist_upkeep_failed_total and the logs of the writers; a collection writes one",
        command="persist maintain gc --once",
    )


def log_long(shard: CheckedShard) -> Iterator[Diagnosis]:
    """A log that a collection would truncate. If a reader holds it, `gc-held` reports that."""
    state = shard.known()
    if shard.log.entries < LOG_ENTRIES_LONG:
        return
    horizon = max((seqno for seqno in state.rollups if seqno <= state.seqno_since), default=0)
    unneeded = int(horizon) - shard.log.first_seqno
    if unneeded < LOG_ENTRIES_LONG:
        return
    at_least = "" if shard.log.is_whole else "at least "
    yield shard.finding(
        "log-long",
        f"the log has {at_least}{shard.log.entries:,} entries of {size(shard.log.bytes)}, and {unneeded:,} of them are "
        "not needed",
        cause="no collection is running: what left the shard remains in both stores",
        remedy="start maintenance: a server with maintenance, or persist maintain gc",
        command="persist maintain gc --once",
    )


def orphans_many(shard: CheckedShard) -> Iterator[Diagnosis]:
    """Blobs that no State has named for a day: failed writes. Unknown unless the whole log was read."""
    state = shard.known()
    if not shard.log.is_whole or shard.log.wrong:
        return
    old_blobs = [stat for stat in shard.listed.values() if _is_old(shard, stat)]
    total = sum(stat.size for stat in old_blobs)
    if len(old_blobs) < ORPHANS_MANY and total < ORPHAN_BYTES_MANY:  # including named ones: most shards end here
        return
    # What the State names, has lent, or has left to GC, including the blobs in bundles.
    faults = Faults(shard.name)
    known = set(state.blob_keys()).union(shard.keys_left(faults), *shard.lent(faults).values())
    known |= {named.part.key for named in parts_noting_faults(shard, faults) if named.part.key is not None}
    if faults:
        return
    orphans = [stat for stat in old_blobs if stat.key not in known]
    total = sum(stat.size for stat in orphans)
    if len(orphans) < ORPHANS_MANY and total < ORPHAN_BYTES_MANY:
        return
    yield shard.finding(
        "orphans-many",
        f"{many(len(orphans), 'blob')} of {size(total)} are older than a day, and no State names them",
        cause="writes failed after they had put their blobs, and the orphan sweep is not running",
        remedy="run the sweep; with --dry-run it only lists them",
        command="persist maintain sweep --dry-run",
    )


def _is_old(shard: CheckedShard, stat: BlobStat) -> bool:
    if not belongs_to(stat.key, shard_of(stat.key)):
        return False
    return shard.now_ms - max(born_ms(stat.key), stat.modified_ms) >= DAY_MS


# Data that should have been deleted: history by age, rows by policies, erased rows.


MAINTENANCE_OR_CLOCKS = f"{NO_MAINTENANCE}, or the clocks of the writers and of the blob store differ"


def history_behind(shard: CheckedShard) -> Iterator[Diagnosis]:
    """The shard keeps more history than its settings say, though no reader needs it."""
    state = shard.known()
    if not state.settings.version or state.since.element is None:
        return
    kept_ms = state.settings.history_ms
    wanted = None if kept_ms is None else _wanted_since(shard, state, kept_ms)
    if wanted is None or not state.since < wanted:
        return
    kept = age(kept_ms) if kept_ms else "only as long as readers need it"
    age_ms = shard.age_ms(state.since.element)
    age_text = "is of unknown age" if age_ms is None else f"is {age(age_ms)} old"
    yield shard.finding(
        "retention-behind",
        f"history should be kept for {kept}, and the oldest readable time, {state.since.element}, {age_text}",
        cause=MAINTENANCE_OR_CLOCKS,
        remedy="start maintenance: since advances within minutes",
        command="persist maintain gc --once",
    )


def _wanted_since(shard: CheckedShard, state: State, kept_ms: int) -> Antichain | None:
    """Where since would be if maintenance had been on time. None: unknown."""
    by_ms = shard.now_ms - shard.limits.behind_ms - kept_ms
    if not kept_ms and state.walltime_ms < by_ms:
        return held_since(state, latest_time(state))
    upper = shard.upper_by(by_ms)
    if upper is None or upper.element == 0:
        return None
    hold = Antichain(TIME_MAX if upper.element is None else upper.element - 1)
    readers = [r.since for r in state.leased_readers.values() if not r.since.is_empty and not r.point]
    readers += [r.since for r in state.critical_readers.values() if not r.since.is_empty]
    return min([min(hold, latest_time(state)), *readers])


def retention_behind(shard: CheckedShard) -> Iterator[Diagnosis]:
    """Rows that the policy should have deleted already."""
    state = shard.known()
    if state.is_closed or state.settings.rows is None:
        return
    facts, by_ms = facts_of(state), shard.now_ms - shard.limits.behind_ms
    upper = shard.upper_by(by_ms)
    if upper is None or (shard.log.settings_ms or shard.log.first_ms) >= by_ms - state.settings.rows.cut_every_ms:
        return  # what existed by then is unknown, or the policy is new
    overdue = _late(state.settings.rows, replace(facts, upper=min(upper, facts.upper)), by_ms)
    if overdue is None:
        return
    last_run = f"; it last ran {at(facts.done.at_ms)}" if facts.done.at_ms else "; it has never run"
    yield shard.finding(
        "retention-behind",
        f"the row retention policy is behind: {overdue}{last_run}",
        cause=MAINTENANCE_OR_CLOCKS,
        remedy="start maintenance, or run the policy manually",
        command=f"persist retention run {shard.name}",
    )


def _late(policy: RowPolicy, facts: Facts, by_ms: int) -> str | None:
    """What the policy should have done by then with the rows of that time. None: nothing."""
    due = plan(facts, by_ms).due
    if due is not None:
        return f"rows that existed by {at(due.cut_ms)} should have been deleted by its {' and '.join(due.why)}"
    look_ms = next_look_ms(facts, by_ms)
    if look_ms is not None and look_ms <= by_ms:
        return f"rows that have expired by column {policy.column!r} should have been looked for"
    newest_ms, _ = facts.newest
    if newest_ms < by_ms - policy.cut_every_ms and any(wanted_cuts(facts, by_ms)):
        return f"no cut was taken since {at(newest_ms)}" if newest_ms else "no cut was ever taken"
    return None


def retention_held(shard: CheckedShard) -> Iterator[Diagnosis]:
    """A row retention policy that has long been held back by consumers, or by how the shard is written."""
    state = shard.known()
    if state.is_closed or state.settings.rows is None:
        return
    facts = facts_of(state)
    held_by = (*plan(facts, shard.now_ms - shard.limits.held_ms).held_by, *waiting(facts))
    if held_by:
        yield shard.finding(
            "retention-held",
            f"the row retention policy deletes nothing: {held_by[0]}",
            cause="; ".join(held_by[1:]) or "it keeps rows that a consumer has not passed, or whose times others own",
            remedy="resume the consumer, remove it from the policy, or set consumers_max_age in the policy",
            command=f"persist retention show {shard.name}",
        )


def erasure_late(shard: CheckedShard) -> Iterator[Diagnosis]:
    """Erasures without a proof whose deadline has passed; and those that have long been pending."""
    for key, erasure in sorted(shard.known().erasures.items()):
        deadline_ms = erasure.deadline_ms
        if erasure.pending is not None and erasure.requested_ms < shard.now_ms - shard.limits.held_ms:
            yield shard.finding(
                "erasure-late",
                f"erasure {key} is pending for {age(shard.now_ms - erasure.requested_ms)}, and its rows can be read",
                cause="the shard is fed by append, and its writer has not committed since",
                remedy="let the writer commit, if only an empty append; or erase again with --force",
                command=f"persist erase status {shard.name}",
            )
            continue
        if erasure.proof is not None or deadline_ms is None or deadline_ms >= shard.now_ms:
            continue
        yield shard.finding(
            "erasure-late",
            f"erasure {key} was due by {at(deadline_ms)}, {age(shard.now_ms - deadline_ms)} ago, and its rows may "
            "still be in a store",
            cause=f"it is {erasure.phase}: it waits for a reader, a tag, history, or maintenance that is not running",
            remedy="the command shows what it waits for",
            command=f"persist erase status {shard.name}",
        )
