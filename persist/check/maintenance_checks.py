"""What maintenance has not done: merges, collections, rollups, claims to take over, blobs that nothing names."""

from __future__ import annotations

from collections.abc import Iterator

from blob import BlobNotFound, BlobStat
from persist.check.findings import (
    BATCHES_MANY,
    CLAIM_SILENT_LEASES,
    CLAIM_SILENT_MS,
    DAY_MS,
    LOG_ENTRIES_LONG,
    ORPHAN_BYTES_MANY,
    ORPHANS_MANY,
    ROLLUP_ENTRIES_MAX,
    Diagnosis,
    age,
    diagnosis,
    many,
    size,
)
from persist.check.shard_probe import Seen
from persist.commit.blob_tasks import keys_in
from persist.commit.clone_refs import LoanLists
from persist.core.blob_keys import belongs_to, born_ms, is_bundle_key, shard_of
from persist.core.errors import PersistError
from persist.core.merge_plan import MergePolicy, plan
from persist.core.state import Claim, Policy, State
from persist.formats.store_errors import translated_but_missing
from persist.inspect.documents import Findings
from persist.inspect.part_listing import placed

NO_MAINTENANCE = "no maintenance runs, or it does not keep up"
MAINTAIN = "persist compactor --gc --once"


def compaction_behind(seen: Seen) -> Iterator[Diagnosis]:
    """A merge is due by the worker's own plan, and is late: very many batches, or a shard long at rest."""
    state = seen.state
    if state is None or state.is_closed:
        return
    due = plan(state, MergePolicy().beside_writers(), now_ms=state.lease_now_ms)
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
        remedy="start maintenance: a server has its own, else persist compactor",
        command=MAINTAIN,
    )


def claim_stuck(seen: Seen) -> Iterator[Diagnosis]:
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


def rollup_old(seen: Seen) -> Iterator[Diagnosis]:
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
        command="persist gc --once",
    )


def log_long(seen: Seen) -> Iterator[Diagnosis]:
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
        remedy="start maintenance: a server has its own, else persist gc",
        command="persist gc --once",
    )


def orphans_many(seen: Seen) -> Iterator[Diagnosis]:
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
        command="persist gc --once --orphans --dry-run",
    )


def _is_old(seen: Seen, stat: BlobStat) -> bool:
    if not belongs_to(stat.key, shard_of(stat.key)):
        return False
    return seen.now_ms - max(born_ms(stat.key), stat.modified_ms) >= DAY_MS


def _known(seen: Seen, state: State) -> set[str] | None:
    """The blobs that the State names, has lent, or has left to GC, also by what bundles list. None: nobody knows."""
    findings = Findings(seen.name)
    known = set(state.blob_keys()) | set(seen.log.gone)
    known |= {one.part.key for one in placed(seen.look, state, findings) if one.part.key is not None}
    lists = LoanLists(seen.look.blob)
    try:
        for loan in state.loans.values():
            known.update(lists.keys(loan.list_key))
        for bundle in filter(is_bundle_key, seen.log.gone):
            with translated_but_missing():
                known.update(keys_in(seen.look.blob, bundle))
    except (BlobNotFound, PersistError):
        return None
    return None if findings else known
