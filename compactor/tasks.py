"""What the loop does with a shard: forget what is older than its history or policy, merge it, collect it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from compactor.loop import Ending, Task, never
from compactor.metering import MaintenanceMetrics
from compactor.worker import Worker, idle_for_ms
from persist.client.row_retention import RetentionKeeper, RetentionRun
from persist.client.transport import Transport
from persist.commit.collector import Collector
from persist.commit.expiry import age, forget_dropped, forget_tags, is_aging, step_s, tags_in_s
from persist.commit.location import Location
from persist.commit.machine import Committer, CommitterOf
from persist.commit.publication_keeper import Published
from persist.core.errors import PersistError
from persist.core.merge_plan import claim_is_for_merge
from persist.core.state import State
from persist.core.transitions.history_control import CLAIM_KEPT_LEASES

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
    """Move the shard's own hold on since with the clock, in steps, and let tags go; look again when more is due.

    Rows that were dropped leave the State once nobody can read them.
    """
    due: dict[str, float] = {}

    def forget(name: str) -> float | None:
        machine = committer_of(name)
        forget_tags(machine, location.clock)
        again_s = aged(name, machine)
        forget_dropped(machine)
        return again_s

    def aged(name: str, machine: Committer) -> float | None:
        now_s = location.clock.monotonic()
        if (wait_s := due.get(name, now_s) - now_s) > 0:
            return _soonest(wait_s if is_aging(machine.state()) else None, machine.state(), location)
        if age(machine, location.clock) is None:
            return _soonest(None, machine.state(), location)
        if len(due) >= AGED_MAX:
            due.clear()
        state = machine.state()
        due[name] = now_s + step_s(state)
        return _soonest(step_s(state) if is_aging(state) else None, state, location)

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
        claim.heartbeat_ms + claim.lease_ms - now_ms + 1
        for key, claim in state.claims.items()
        if claim_is_for_merge(key) and not claim.lapsed(now_ms)
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
