"""What the loop does with a shard: forget what is older than its history or policy, merge, collect and erase."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from compactor.loop import Ending, Task, never
from compactor.metering import MaintenanceMetrics
from compactor.orphans import Sweeper, SweepSettings
from compactor.worker import Worker, idle_for_ms
from persist.client.row_retention import RetentionKeeper, RetentionRun
from persist.client.transport import Transport
from persist.commit.location import Location
from persist.commit.machine import Committer, CommitterOf
from persist.commit.state_loader import rolled_up
from persist.core import commands as c
from persist.core.erasure import Erasure, Proof, Scanned
from persist.core.erasure_progress import erased_at, is_rewritten, lent_before, states_held, under_way
from persist.core.errors import PersistError
from persist.core.frontier import Antichain
from persist.core.state import State
from persist.core.transitions.history_control import CLAIM_KEPT_LEASES
from persist.formats.store_errors import translated
from persist.maintenance.collector import Collector
from persist.maintenance.erasure_scan import leave_out_before, scanned
from persist.maintenance.expiry import forget_outlived, is_aging, step_s, tags_in_s
from persist.maintenance.publication_keeper import Published

log = logging.getLogger("persist.publications")

BUSY_AGAIN_S = 1.0
ROUND_LOOK_S = 5.0
EPOCHS_REMEMBERED_MAX = 100_000  # shards of which a collector remembers the last epoch
AGED_MAX = 100_000  # shards of which it is remembered when the next step is due


def merge_task(
    location: Location, make_worker: Callable[[], Worker], *, idle: bool | None = None, ending: Ending = never
) -> Task:
    """Merge what is due. Every thread has a worker of its own, so that two of them claim as two."""
    local = threading.local()

    def merge(name: str) -> float | None:
        worker: Worker | None = getattr(local, "worker", None)
        if worker is None:
            worker = local.worker = make_worker()
        worker.run(name, idle=idle, ending=ending)
        return _merge_again_s(location, worker, location.machine(name).state())

    return merge


def history_task(location: Location, committer_of: CommitterOf) -> Task:
    """Forget what the shard has outlived, its history in steps; look again when more is due."""
    due: dict[str, float] = {}

    def forget(name: str) -> float | None:
        machine, now_s = committer_of(name), location.clock.monotonic()
        wait_s = due.get(name, now_s) - now_s
        aged = forget_outlived(machine, location.clock, ages=wait_s <= 0)
        state = machine.state()
        if aged:
            if len(due) >= AGED_MAX:
                due.clear()
            wait_s = step_s(state)
            due[name] = now_s + wait_s
        return _soonest(wait_s if wait_s > 0 and is_aging(state) else None, state, location)

    return forget


def retention_task(location: Location, transport: Transport, metrics: MaintenanceMetrics | None = None) -> Task:
    """Take the cuts that policies of rows need, and take rows away by them; look again when something may be due."""
    counted = metrics or MaintenanceMetrics()
    keeper = RetentionKeeper(location, transport)

    def retain(name: str) -> float | None:
        try:
            run, again_s = keeper.run(name)
        except PersistError:
            counted.add(retention_failed=1)
            raise
        if run is not None:
            _count(counted, run)
        return again_s

    return retain


def _count(metrics: MaintenanceMetrics, run: RetentionRun) -> None:
    runs = int(run.truncated is not None and (run.truncated.changed or run.truncated.pending))
    removed = (run.truncated.removed or 0) if run.truncated is not None else 0
    if run.by_column is not None:
        runs, removed = runs + run.by_column.changed, removed + run.by_column.removed
    metrics.add(
        retention_cuts=run.cuts, retention_runs=runs, retention_rows=removed, retention_overran=bool(run.passed)
    )


def _soonest(step: float | None, state: State, location: Location) -> float | None:
    """When the next step is due, or the next tag was kept for long enough."""
    tags_s = tags_in_s(state, location.clock)
    waits = [wait for wait in (step, None if tags_s is None else max(BUSY_AGAIN_S, tags_s)) if wait is not None]
    return min(waits, default=None)


def gc_task(
    location: Location,
    collector: Collector,
    *,
    epochs_max: int = 3,
    every_s: float = 5.0,
    ending: Ending = never,
) -> Task:
    """Collect until nothing is left to do for now; of a shard that moves all the time an epoch every `every_s`."""
    last: dict[str, float] = {}

    def collect(name: str) -> float | None:
        now = location.clock.monotonic()
        since = now - last.get(name, now - every_s)
        if since < every_s:
            return every_s - since
        if len(last) > EPOCHS_REMEMBERED_MAX:
            last.clear()
        last[name] = now
        try:
            for _ in range(epochs_max):
                if collector.run(name).done or ending():
                    break
        except PersistError:
            collector.metrics.add(gc_failed=1)
            raise
        return _gc_again_s(location, location.machine(name).state())

    return collect


def publish_task(location: Location, published: Published) -> Task:
    """Publish what the processes that committed it did not; look again while something waits for its interval."""

    def publish(name: str) -> float | None:
        return published.look(name, location.machine(name).refresh())

    return publish


def names_dropped(location: Location) -> dict[str, bool]:
    """All names, and of each whether its shard was dropped. Raises what the consensus store raises."""
    live = set(location.all_names(with_dropped=False))
    return {name: name not in live for name in location.all_names(with_dropped=True)}


class Rounds:
    """A thread that tells now and then that maintenance is at work, and tidies publications up."""

    def __init__(self, location: Location, published: Published) -> None:
        self._location = location
        self._published = published
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="persist-rounds", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the round under way has ended."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def once(self) -> bool:
        """A round, if it is time. Errors are logged. Whether there was one."""
        try:
            if not self._published.is_time():
                return False
            return self._published.round(names_dropped(self._location))
        except PersistError as error:
            log.warning("publications are not tidied up now: %s", error)
        except Exception:
            log.exception("publications are not tidied up")
        return False

    def _run(self) -> None:
        while not self._stop.wait(ROUND_LOOK_S):
            self.once()


def _merge_again_s(location: Location, worker: Worker, state: State) -> float | None:
    """When the shard will count as idle, or a claim will have lapsed."""
    now_ms = location.machine(state.name).lease_now_ms(state)
    waits = [
        claim.heartbeat_ms + claim.lease_ms - now_ms + 1 for claim in state.claims.values() if not claim.lapsed(now_ms)
    ]
    idle_in_ms = worker.settings.idle_ms - idle_for_ms(location, state)
    if idle_in_ms > 0 and not state.tombstone:
        waits.append(idle_in_ms)
    return max(BUSY_AGAIN_S, min(waits) / 1000) if waits else None


def _gc_again_s(location: Location, state: State) -> float | None:
    """When the first lease will have lapsed, which may hold something back."""
    now_ms = location.machine(state.name).lease_now_ms(state)
    waits = [reader.heartbeat_ms + reader.lease_ms - now_ms + 1 for reader in state.leased_readers.values()]
    waits += [claim.heartbeat_ms + CLAIM_KEPT_LEASES * claim.lease_ms - now_ms + 1 for claim in state.claims.values()]
    return max(BUSY_AGAIN_S, min(waits) / 1000) if waits else None


# Erasures, step by step: what is left after the commit that took the rows away.
#
# A step is done as soon as its time has come, by whichever process of maintenance comes first; each may be repeated.
# The shard's history is let go as far as readers allow. A worker merges what is older (`persist.core.merge_plan`). Then
# rollups are made, and collected, until both stores hold no State of before. What nothing names waits for the sweep. In
# the end both stores are scanned, and what was found is the receipt.


EPOCHS_MAX = 4  # rollups and collections of one look at a shard
LOOK_AGAIN_S = 5.0
SWEEP_AGAIN_S = 3_600.0
erasure_log = logging.getLogger("persist.erasures")


class Eraser:
    """Takes erasures of shards of a location to their ends. Stateless between runs; any number may work at once.

    `sweep` says by which age blobs that nothing names are deleted. So long as `published_within_s` after a commit a
    process may yet publish its log entry, with rows: a receipt waits for that, counted from when no part shows the
    rows. 0: no process publishes.
    """

    def __init__(
        self,
        location: Location,
        collector: Collector,
        *,
        sweep: SweepSettings | None = None,
        published_within_s: float = 0.0,
        committer_of: CommitterOf | None = None,
        ending: Ending = never,
    ) -> None:
        self._ending = ending
        self._location = location
        self._collector = collector
        self._sweep = sweep or SweepSettings()
        self._published_within_s = published_within_s
        self._committer_of = committer_of or location.machine

    def run(self, name: str) -> float | None:
        """Do what can be done now; in how many seconds to look again (None: no erasure is under way).

        Raises what the stores raise.
        """
        machine = self._committer_of(name)
        state = machine.refresh()
        wanted = {} if state.is_closed else under_way(state)  # of a dropped shard all goes
        if not wanted:
            return None
        self._forget(machine, state)
        for key, erasure in wanted.items():
            if not erasure.rewritten and not self._ending():
                self._note(machine, key, erasure)
        waits = [
            LOOK_AGAIN_S if self._ending() else self._prove(machine, key, erasure)
            for key, erasure in under_way(machine.refresh()).items()
        ]
        return min([wait for wait in waits if wait is not None], default=None)

    def _forget(self, machine: Committer, state: State) -> None:
        at = Antichain(erased_at(state))
        if state.since < at:
            machine.apply(c.ForgetHistory(at))

    def _note(self, machine: Committer, key: str, erasure: Erasure) -> None:
        """Note since when no part of the State shows the rows, and which blobs did."""
        if is_rewritten(machine.refresh(), erasure.at):
            machine.apply(c.NoteRewritten(key, scanned(self._location, machine, erasure.at).doomed))

    def _prove(self, machine: Committer, key: str, erasure: Erasure) -> float | None:
        """Collect what shows the rows still, and tell the State once nothing does. In how many seconds to look again.

        None: it has ended.
        """
        if not erasure.rewritten:
            return LOOK_AGAIN_S
        found = self._scanned(machine, erasure)
        for _ in range(EPOCHS_MAX):
            if self._ending() or not self._may_collect(machine, erasure, found):
                break
            self._roll_up(machine)
            self._collector.run(machine.name)
            found = self._scanned(machine, erasure)
        due_s = (erasure.rewritten_ms - self._location.clock.now_ms()) / 1000 + self._published_within_s
        if due_s > 0:
            return max(LOOK_AGAIN_S, due_s)
        if found.older_count:
            leave_out_before(self._location, machine.name, found.horizon)
            found = self._scanned(machine, erasure)
        if lent_before(machine.refresh(), erasure):
            return SWEEP_AGAIN_S
        if found.unnamed_ms is not None:
            due_ms = found.unnamed_ms + self._sweep.age_ms - self._location.clock.now_ms()
            if due_ms >= 0:
                return min(SWEEP_AGAIN_S, max(LOOK_AGAIN_S, due_ms / 1000 + 1))
            Sweeper(self._location, self._sweep).sweep(machine.name)
            found = self._scanned(machine, erasure)
        if not found.is_clean or found.horizon < erasure.rewritten:
            return LOOK_AGAIN_S
        with translated():
            left = self._location.consensus.scrub()
        proof = Proof(found.at_ms, found.horizon, found.entries, found.blobs, found.size, left)
        machine.apply(c.ProveErasure(key, proof))
        erasure_log.info("erased", extra={"shard": machine.name, "erasure": key, "time": erasure.at})
        return None if machine.refresh().erasures[key].proof is not None else LOOK_AGAIN_S

    def _scanned(self, machine: Committer, erasure: Erasure) -> Scanned:
        return scanned(self._location, machine, erasure.at, erasure.rewritten_ms)

    def _may_collect(self, machine: Committer, erasure: Erasure, found: Scanned) -> bool:
        """Whether a collection gets somewhere: something of before is there, and no reader holds such a State.

        What only the sweep takes does not count. Each collection is two commits, which would bring the next look.
        """
        state = machine.refresh()
        is_older = found.older_count > found.waiting_count or not found.rewritten or found.horizon < erasure.rewritten
        return is_older and not states_held(state, erasure.rewritten)

    def _roll_up(self, machine: Committer) -> None:
        state = machine.refresh()
        if state.seqno > max(state.rollups):
            rolled_up(self._location.versions, state, machine.apply)


def erasure_task(
    location: Location,
    collector: Collector,
    committer_of: CommitterOf | None = None,
    published_within_s: float = 0.0,
    ending: Ending = never,
) -> Task:
    """Take erasures a step further, and look again while one is under way."""
    return Eraser(
        location, collector, published_within_s=published_within_s, committer_of=committer_of, ending=ending
    ).run
