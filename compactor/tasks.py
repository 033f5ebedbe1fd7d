"""The tasks of the maintenance loop: history and retention, merges, garbage collection, publications and erasures."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from compactor.loop import BackgroundThread, Ending, Task, never, soonest
from compactor.metering import MaintenanceMetrics
from compactor.orphans import Sweeper, SweepSettings
from compactor.worker import Worker
from persist.client.row_retention import RetentionKeeper
from persist.client.transport import Transport
from persist.commit.committer import Committer, CommitterOf
from persist.commit.location import Location
from persist.commit.state_loader import rolled_up
from persist.core import commands as c
from persist.core.erasure import Erasure, Proof, Scanned
from persist.core.erasure_progress import erased_at, is_rewritten, lent_before, states_held, under_way
from persist.core.errors import PersistError
from persist.core.frontier import Antichain
from persist.core.state import State
from persist.core.transitions.lease_expiry import CLAIM_KEPT_LEASES
from persist.formats.store_errors import translated
from persist.maintenance.collector import Collector
from persist.maintenance.erasure_scan import remove_entries_before, scan_shard
from persist.maintenance.expiry import forget_outlived, is_aging, step_s, tags_in_s
from persist.maintenance.journal_keeper import Published

log = logging.getLogger("persist.publications")
erasure_log = logging.getLogger("persist.erasures")

BUSY_AGAIN_S = 1.0
ROUND_POLL_S = 5.0
SHARDS_MAX = 100_000  # shards for which a task remembers its last run; then it forgets all of them
EPOCHS_PER_VISIT_MAX = 3
EPOCHS_MAX = 4  # rollups and collections per visit of a shard with an erasure
LOOK_AGAIN_S = 5.0
SWEEP_AGAIN_S = 3_600.0


def merge_task(
    location: Location, make_worker: Callable[[], Worker], *, idle: bool | None = None, ending: Ending = never
) -> Task:
    """Execute due merges. Every thread has a worker of its own, so that each thread holds its own claims."""
    local = threading.local()

    def merge(name: str) -> float | None:
        worker: Worker | None = getattr(local, "worker", None)
        if worker is None:
            worker = local.worker = make_worker()
        worker.run(name, idle=idle, ending=ending)
        return _merge_again_s(location, worker, location.machine(name).state())

    return merge


def history_task(location: Location, committer_of: CommitterOf) -> Task:
    """Forget expired history, in steps, and expired tags."""
    due: dict[str, float] = {}

    def forget(name: str) -> float | None:
        machine, now_s = committer_of(name), location.clock.monotonic()
        wait_s = due.get(name, now_s) - now_s
        aged = forget_outlived(machine, location.clock, ages=wait_s <= 0)
        state = machine.state()
        if aged:
            if len(due) >= SHARDS_MAX:
                due.clear()
            wait_s = step_s(state)
            due[name] = now_s + wait_s
        tags_s = tags_in_s(state, location.clock)
        return soonest(
            wait_s if wait_s > 0 and is_aging(state) else None, None if tags_s is None else max(BUSY_AGAIN_S, tags_s)
        )

    return forget


def retention_task(location: Location, transport: Transport, metrics: MaintenanceMetrics | None = None) -> Task:
    """Take the cuts that retention policies need, and delete rows by the policies."""
    metrics = metrics or MaintenanceMetrics()
    keeper = RetentionKeeper(location, transport)

    def retain(name: str) -> float | None:
        try:
            run, delay_s = keeper.run(name)
        except PersistError:
            metrics.add(retention_failed=1)
            raise
        if run is not None:
            runs = removed = 0
            if run.truncated is not None:
                runs, removed = int(run.truncated.changed or run.truncated.pending), run.truncated.removed or 0
            if run.by_column is not None:
                runs, removed = runs + run.by_column.changed, removed + run.by_column.removed
            metrics.add(retention_cuts=run.cuts, retention_runs=runs, retention_rows=removed)
            metrics.add(retention_overran=bool(run.passed))
        return delay_s

    return retain


def gc_task(location: Location, collector: Collector, *, every_s: float = 5.0, ending: Ending = never) -> Task:
    """Collect garbage until nothing is due, for each shard at most every `every_s` seconds."""
    last: dict[str, float] = {}

    def collect(name: str) -> float | None:
        now_s = location.clock.monotonic()
        elapsed_s = now_s - last.get(name, now_s - every_s)
        if elapsed_s < every_s:
            return every_s - elapsed_s
        if len(last) >= SHARDS_MAX:
            last.clear()
        last[name] = now_s
        try:
            for _ in range(EPOCHS_PER_VISIT_MAX):
                if collector.run(name).done or ending():
                    break
        except PersistError:
            collector.count(gc_failed=1)
            raise
        state = location.machine(name).state()
        now_ms = location.machine(name).lease_now_ms(state)
        # Until the first lease lapses, which may hold garbage.
        ends = [reader.heartbeat_ms + reader.lease_ms for reader in state.leased_readers.values()]
        ends += [claim.heartbeat_ms + CLAIM_KEPT_LEASES * claim.lease_ms for claim in state.claims.values()]
        return max(BUSY_AGAIN_S, (min(ends) - now_ms + 1) / 1000) if ends else None

    return collect


def publish_task(location: Location, published: Published) -> Task:
    """Publish log entries that the committing processes did not publish."""
    return lambda name: published.visit(name, location.machine(name).refresh())


def names_dropped(location: Location) -> dict[str, bool]:
    """All names, each with whether its shard was dropped. Raises the errors of the consensus store."""
    live = set(location.all_names(with_dropped=False))
    return {name: name not in live for name in location.all_names(with_dropped=True)}


class PublicationRounds(BackgroundThread):
    """A thread that periodically publishes a sign of life of maintenance and deletes obsolete publications."""

    def __init__(self, location: Location, published: Published) -> None:
        super().__init__("persist-rounds", ROUND_POLL_S, log)
        self._location = location
        self._published = published

    def once(self) -> bool:
        """Run a round if one is due. Errors of the stores are logged. Whether there was one."""
        try:
            return self._published.is_time() and self._published.round(names_dropped(self._location))
        except PersistError as error:
            log.warning("publications cannot be cleaned up now: %s", error)
        except Exception:  # a bug: maintenance continues
            log.exception("publications cannot be cleaned up")
        return False


def _merge_again_s(location: Location, worker: Worker, state: State) -> float | None:
    """Seconds until the shard counts as idle or a claim lapses."""
    now_ms = location.machine(state.name).lease_now_ms(state)
    waits = [
        claim.heartbeat_ms + claim.lease_ms - now_ms + 1 for claim in state.claims.values() if not claim.lapsed(now_ms)
    ]
    idle_in_ms = worker.idle_in_ms(state)
    if idle_in_ms > 0 and not state.tombstone:
        waits.append(idle_in_ms)
    return max(BUSY_AGAIN_S, min(waits) / 1000) if waits else None


@dataclass
class Eraser:
    """Completes erasures: everything that follows the commit that deletes the rows. Its task is `run`.

    Each step runs as soon as it is due, in any maintenance process, and may be repeated: history is forgotten as far as
    readers allow; workers merge older parts (`persist.core.merge_plan`); rollups are made and collected until neither
    store has an older State; unnamed blobs wait for the sweep; finally both stores are scanned, and the result of the
    scan is the proof. There is no state between runs; any number of erasers may work at the same time.

    `sweep` gives the age at which unnamed blobs are deleted. A process may publish a log entry, with rows, up to
    `published_within_s` after its commit: the proof waits for so long after the rewrite. 0: no process publishes.
    """

    location: Location
    collector: Collector
    _: KW_ONLY
    sweep: SweepSettings = field(default_factory=SweepSettings)
    published_within_s: float = 0.0
    committer_of: CommitterOf | None = None
    ending: Ending = never

    def run(self, name: str) -> float | None:
        """Do what is due. Returns the seconds until the next visit (None: no erasure is in progress).

        Raises the errors of the stores.
        """
        machine = (self.committer_of or self.location.machine)(name)
        state = machine.refresh()
        pending = {} if state.is_closed else under_way(state)  # a dropped shard is deleted completely
        if not pending:
            return None
        erased_until = Antichain(erased_at(state))
        if state.since < erased_until:
            machine.apply(c.ForgetHistory(erased_until))
        for key, erasure in pending.items():
            if erasure.rewritten or self.ending() or not is_rewritten(machine.refresh(), erasure.at):
                continue
            # No part of the State contains the rows: record that, and which blobs contained them.
            machine.apply(c.NoteRewritten(key, scan_shard(self.location, machine, erasure.at).doomed))
        return soonest(
            *(
                LOOK_AGAIN_S if self.ending() else self._prove(machine, key, erasure)
                for key, erasure in under_way(machine.refresh()).items()
            )
        )

    def _prove(self, machine: Committer, key: str, erasure: Erasure) -> float | None:
        """Delete the remaining copies of the rows, and commit the proof once there are none.

        Returns the seconds until the next visit (None: the erasure has ended).
        """
        if not erasure.rewritten:
            return LOOK_AGAIN_S
        scan = self._scan(machine, erasure)
        for _ in range(EPOCHS_MAX):
            if self.ending() or not self._may_collect(machine, erasure, scan):
                break
            state = machine.refresh()
            if state.seqno > max(state.rollups):
                rolled_up(self.location.versions, state, machine.apply)
            self.collector.run(machine.name)
            scan = self._scan(machine, erasure)
        due_s = (erasure.rewritten_ms - self.location.clock.now_ms()) / 1000 + self.published_within_s
        if due_s > 0:
            return max(LOOK_AGAIN_S, due_s)
        if scan.older_count:
            remove_entries_before(self.location, machine.name, scan.horizon)
            scan = self._scan(machine, erasure)
        if lent_before(machine.refresh(), erasure):
            return SWEEP_AGAIN_S
        if scan.unnamed_ms is not None:
            due_ms = scan.unnamed_ms + self.sweep.age_ms - self.location.clock.now_ms()
            if due_ms >= 0:
                return min(SWEEP_AGAIN_S, max(LOOK_AGAIN_S, due_ms / 1000 + 1))
            Sweeper(self.location, self.sweep).sweep(machine.name)
            scan = self._scan(machine, erasure)
        if not scan.is_clean or scan.horizon < erasure.rewritten:
            return LOOK_AGAIN_S
        with translated():
            remaining = self.location.consensus.scrub()
        proof = Proof(scan.at_ms, scan.horizon, scan.entries, scan.blobs, scan.size, remaining)
        machine.apply(c.ProveErasure(key, proof))
        erasure_log.info("erased", extra={"shard": machine.name, "erasure": key, "time": erasure.at})
        return None if machine.refresh().erasures[key].proof is not None else LOOK_AGAIN_S

    def _scan(self, machine: Committer, erasure: Erasure) -> Scanned:
        return scan_shard(self.location, machine, erasure.at, erasure.rewritten_ms)

    def _may_collect(self, machine: Committer, erasure: Erasure, scan: Scanned) -> bool:
        """Whether a collection makes progress: there are older copies, and no reader holds an older State.

        Blobs that only the sweep deletes do not count: each collection makes two commits, which cause the next visit.
        """
        state = machine.refresh()
        is_older = scan.older_count > scan.waiting_count or not scan.rewritten or scan.horizon < erasure.rewritten
        return is_older and not states_held(state, erasure.rewritten)
