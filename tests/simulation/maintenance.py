"""Compaction, garbage collection and the orphan sweep as actors, and how a run comes to rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from compactor import worker as merging
from compactor.engine import EngineSettings
from compactor.metering import MaintenanceMetrics
from compactor.orphans import Sweeper, SweepSettings
from compactor.tasks import history_task
from compactor.worker import Worker, WorkerSettings
from persist.commit.location import Location
from persist.core.blob_keys import born_ms, is_loan_key
from persist.core.erasure_progress import erased_from
from persist.core.errors import UnknownShard
from persist.core.frontier import meet
from persist.core.ids import family_of
from persist.core.merge_plan import MergePolicy
from persist.core.readable_times import latest_time
from persist.formats.state_frames import decode_lent
from persist.maintenance import collector as collecting
from persist.maintenance.collector import Collector
from tests.simulation.accountant import read_attributes
from tests.simulation.breaking import Broken
from tests.simulation.dating import ask_dates
from tests.simulation.historians import ask
from tests.simulation.host import COPIES, MAIN, PART_BYTES, POLICY, WRITE_LEASE_MS, Host, weathered
from tests.simulation.oracle import expect, is_clone
from tests.simulation.readers import read_once
from tests.simulation.retaining import check_retained
from tests.simulation.tagging import read_tags
from tests.simulation.world import CLOCK_JUMP_MS_MAX

ORPHAN_AGE_MS = 60_000
SWEEP = SweepSettings(age_ms=ORPHAN_AGE_MS)
READ_TIMES_MAX = 3  # times that are read at the end
SETTLE_ROUNDS_MAX = 100
SETTLED_LOG_MAX = 3 * POLICY.rollup_every  # entries of a log at rest
SETTLED_ROLLUPS_MAX = 2
SETTLED_BATCHES_MAX = 12
LOANS_ROUNDS = 8  # of collections, in which loans come to their end
CLAIM_LEASE_MS = 3_000
GRID_MS = 3_000
UNTAKEN_MS = 10_000
ASKED_AGAIN = 40  # instants, at the end
AGED_WITHIN_MS = 15_000  # beyond the history: three steps of maintenance

WORKER = WorkerSettings(
    policy=MergePolicy(fan_in=2, batches_soft=4),
    engine=EngineSettings(memory_bytes=64 * 1024, part_bytes_target=PART_BYTES // 4),
)


class SmallCollector(Collector):
    """Truncates little at a time, makes rollups often, and ends loans soon, unlike collectors in the background."""

    def __init__(self, location: Location, count: Callable[..., None] = lambda **counts: None) -> None:
        with patch.multiple(collecting, ENTRIES_MAX=24, ROLLUP_LEAST=6, UNTAKEN_MS=UNTAKEN_MS):
            super().__init__(location, count=count)


def short_claims() -> Broken:
    """Claims of workers lapse soon, and so do shards come to rest."""
    return patch.multiple(merging, CLAIM_LEASE_MS=CLAIM_LEASE_MS, IDLE_MS=2_000)


def compactor(host: Host) -> None:
    """A compaction worker. Several of them meet in the claims."""
    for name in (MAIN, COPIES):
        host.open(name)
    beside = replace(WORKER, policy=WORKER.policy.beside_writers())
    worker = Worker(host.location, host.random.choice((WORKER, beside)))
    while not host.run.over:
        with maintaining(host):
            idle = host.random.choice((None, None, True))
            worker.run(some_shard(host), idle=idle, merges_max=3)
        host.sleep(0.6)
    counted(host, worker.metrics)


def collector(host: Host) -> None:
    """A garbage collector."""
    for name in (MAIN, COPIES):
        host.open(name)
    metrics = MaintenanceMetrics()
    gc = SmallCollector(host.location, count=metrics.add)
    while not host.run.over:
        with maintaining(host):
            gc.run(some_shard(host))
        host.sleep(0.8)
    counted(host, metrics)


def sweeper(host: Host) -> None:
    """A sweep of orphans, now and then."""
    for name in (MAIN, COPIES):
        host.open(name)
    found = Sweeper(host.location, SWEEP)
    while not host.run.over:
        with maintaining(host):
            found.sweep(some_shard(host))
            if host.random.random() < 0.2:
                found.sweep_unborn()
        host.sleep(4.0)


def historian(host: Host) -> None:
    """Lets shards forget what is older than their history."""
    for name in (MAIN, COPIES):
        host.open(name)
    task = history_task(host.location, host.location.machine)
    while not host.run.over:
        with maintaining(host):
            task(some_shard(host))
        host.sleep(0.6)


def some_shard(host: Host) -> str:
    return host.random.choice(sorted(host.run.oracle.shards))


@contextmanager
def maintaining(host: Host) -> Iterator[None]:
    """What may interrupt maintenance: the weather, and damage. Another round finds what was left."""
    try:
        with weathered(host, "maintenance interrupted"):
            yield
    except UnknownShard:  # it was dropped meanwhile
        host.run.path("maintenance of a dropped shard")


def counted(host: Host, metrics: MaintenanceMetrics) -> None:
    """Add what a worker or collector did to the paths that were walked."""
    figures = metrics.to_json()
    for name, count in figures.items():
        if isinstance(count, int) and not name.startswith("bytes"):
            host.run.oracle.paths[name.replace("_", " ")] += count


def settle(host: Host) -> None:
    """Everybody has come to rest: merge and collect until nothing is left to do, then read every time there is."""
    truths = host.run.oracle.shards
    worker, gc = Worker(host.location, WORKER), SmallCollector(host.location)
    for name in sorted(truths):
        gc.run(name)
    host.run.world.scheduler.sleep(2 * WRITE_LEASE_MS / 1000)  # the collector watches how what the dead held lapses
    for name in sorted(truths):
        _quiesce(host, name, worker, gc)
        _check_bounded(host, name)
    if any(map(is_clone, truths)):  # what a clone gave back last its owner has not deleted yet
        for name in sorted(truths):
            gc.run(name)
    host.run.world.scheduler.sleep((ORPHAN_AGE_MS + 2 * CLOCK_JUMP_MS_MAX) / 1000)
    for name in sorted(truths):
        _sweep(host, name, Sweeper(host.location, SWEEP))
        if not truths[name].state.is_closed:
            if not is_clone(name):  # the truth of a clone knows no instants
                _ask_again(host, name)
                _check_aged(host, name)
            _read_back(host, name)
            read_tags(host, name)
        host.run.path("settled")
    check_retained(host)
    _let_clones_go(host)
    known = read_attributes(host, host.open(MAIN))
    expect(known is not None, "liveness", "the attributes cannot be read in a healed world")


def _let_clones_go(host: Host) -> None:
    """Half of the clones are dropped, then all: each time what is left reads as before, and no loan stays in vain."""
    truths, gc, sweeper = host.run.oracle.shards, SmallCollector(host.location), Sweeper(host.location, SWEEP)
    clones = [name for name in sorted(truths) if is_clone(name)]
    for dropped in (clones[::2], clones[1::2]) if clones else ():
        for name in dropped:
            if not truths[name].state.is_closed:
                host.client.shard(name).drop(force=True)
        for _ in range(LOANS_ROUNDS):
            for name in sorted(truths):
                gc.run(name)
            host.run.world.scheduler.sleep(UNTAKEN_MS / 1000)
        host.run.world.scheduler.sleep((ORPHAN_AGE_MS + 2 * CLOCK_JUMP_MS_MAX) / 1000)
        for name in sorted(truths):
            _sweep(host, name, sweeper)
            if not truths[name].state.is_closed:
                _read_back(host, name)
    for name in sorted(truths) if clones else ():
        now_ms = host.location.clock.now_ms()
        # One that a clock of days ahead has begun, and that nobody took, ends when that time has come.
        loans = [one for one in truths[name].state.loans.values() if max(one.begun_ms, born_ms(one.list_key)) < now_ms]
        expect(not loans, "loans", f"{name} has lent {loans}, and no clone is left")
        if len(loans) < len(truths[name].state.loans):
            host.run.path("loan of a clock ahead")
            continue
        expect(not truths[name].state.borrowed, "loans", f"{name} has borrowed, and names nothing of others")
        host.run.path("loans ended")


def _sweep(host: Host, name: str, sweeper: Sweeper) -> None:
    sweeper.sweep(name)
    _check_swept(host, name)
    if host.run.truth(name).state.is_closed:
        _check_buried(host, name)


def lent(host: Host, name: str) -> set[str]:
    """The blobs that lists keep for others: those of loans, and of loans whose end GC has not come to yet."""
    truth, blobs = host.run.truth(name), host.run.world.blobs
    stored = filter(is_loan_key, [stat.key for stat in blobs.list(family_of(truth.state.shard_id))])
    lists = [key for key in stored if key in truth.named or key in truth.gone_at]
    return {key for one in lists for key in decode_lent(blobs.get(one)).keys}


def _ask_again(host: Host, name: str) -> None:
    """Instants of the whole run: those that were asked for, and others, also of the time since all came to rest."""
    shard, truth = host.open(name), host.run.truth(name).instants
    now_ms = host.run.oracle.clock()
    others = [truth.made[-1].at_ms + (now_ms - truth.made[-1].at_ms) * part // 4 for part in range(5)]
    others += [truth.made[len(truth.made) * part // 4].at_ms + GRID_MS for part in range(1, 4)]
    asked = sorted(truth.answers)
    for at_ms in asked[:: max(1, len(asked) // ASKED_AGAIN)] + others:
        if at_ms < now_ms:
            ask(host, shard, at_ms, reads=False)
    state = host.run.truth(name).state
    if truth.dated and state.since.element is not None and state.upper.element not in (None, 0):
        last = (state.upper.element or 0) - 1
        ask_dates(host, shard, min(state.since.element, last), last)


def _check_aged(host: Host, name: str) -> None:
    """Maintenance lets go what the settings do not keep any more, and ends with what readers hold."""
    settings = host.run.truth(name).state.settings
    if not settings.version or settings.history_ms is None:
        return
    task, began_ms = history_task(host.location, host.location.machine), host.run.oracle.clock()
    while (wait_s := task(name)) is not None:
        passed_ms = host.run.oracle.clock() - began_ms
        most_ms = settings.history_ms + host.run.oracle.clocks_off_ms + 2 * settings.mark_every_ms + AGED_WITHIN_MS
        expect(passed_ms <= most_ms, "policy", f"since of {name} does not follow {settings} within {passed_ms} ms")
        host.run.world.scheduler.sleep(wait_s)
    state = host.run.truth(name).state
    wanted = meet([latest_time(state), *(reader.since for reader in state.critical_readers.values())])
    expect(wanted <= state.since, "policy", f"since of {name} is {state.since} by {settings}; nobody holds {wanted}")


def _check_buried(host: Host, name: str) -> None:
    """Of a shard that was dropped only its tombstone is left."""
    truth = host.run.truth(name)
    expect(truth.state.tombstone, "buried", f"{name} was dropped, and is no tombstone yet")
    found = {stat.key for stat in host.run.world.blobs.list(f"{truth.state.shard_id}/")}
    now_ms = host.run.oracle.clock()  # what a clock ahead of it has minted waits until that time has come
    stored = {key for key in found if born_ms(key) <= now_ms}
    needed = {rollup.key for rollup in truth.state.rollups.values()} | lent(host, name)
    needed |= {loan.list_key for loan in truth.state.loans.values()}
    expect(stored <= needed, "buried", f"{name} was dropped, but {sorted(stored - needed)[:3]} are still there")


def _check_swept(host: Host, name: str) -> None:
    """What is in the store is what the State names, or what GC will take once the log moves on."""
    truth = host.run.truth(name)
    first = min(entry.seqno for entry in host.run.world.logs.scan(name, 0, 1))
    known = truth.named | {key for key, gone in truth.gone_at.items() if gone > first} | lent(host, name)
    stored = {stat.key for stat in host.run.world.blobs.list(family_of(truth.state.shard_id))}
    # What a clock that was ahead has stamped waits until true time has come so far.
    old_ms = host.clock.now_ms() - ORPHAN_AGE_MS
    orphans = {key for key in stored - known if born_ms(key) < old_ms}
    expect(not orphans, "swept", f"{len(orphans)} orphans of {name} survive the sweep: {sorted(orphans)[:3]}")


def _quiesce(host: Host, name: str, worker: Worker, gc: Collector) -> None:
    for _ in range(SETTLE_ROUNDS_MAX):
        merged = worker.run(name, idle=True)
        report = gc.run(name)
        claims = host.run.truth(name).state.claims.values()
        now_ms = host.location.machine(name).lease_now_ms(host.location.machine(name).refresh())
        waits = any(not claim.lapsed(now_ms) for claim in claims)
        if not merged and report.done and not waits:
            return
        host.run.world.scheduler.sleep(1.0)
    expect(False, "liveness", f"maintenance of {name} finds no end in {SETTLE_ROUNDS_MAX} rounds")


def _check_bounded(host: Host, name: str) -> None:
    """Metadata at rest is that of what lives, not of what was."""
    state = host.run.truth(name).state
    entries = len(host.run.world.logs.scan(name, 0, 10_000))
    expect(entries <= SETTLED_LOG_MAX, "bounded", f"the log of {name} at rest has {entries} entries")
    rollups = len(state.rollups)
    expect(rollups <= SETTLED_ROLLUPS_MAX, "bounded", f"{name} at rest names {rollups} rollups")
    expect(not state.leased_readers, "bounded", f"{name} at rest has readers that lapsed: {state.leased_readers}")
    batches = sum(1 for batch in state.trace.batches if batch.runs)
    expect(batches <= SETTLED_BATCHES_MAX, "bounded", f"{name} at rest has {batches} batches")


def _read_back(host: Host, name: str) -> None:
    shard = host.client.shard(name)
    state = host.run.truth(name).state
    low, high = max(state.since, erased_from(state)).element, state.upper.element
    assert low is not None
    assert high is not None
    for as_of in sorted({*range(max(low, high - READ_TIMES_MAX), high), *([low] if high > low else [])}):
        read_once(host, shard, as_of, pause_s=0)


MAINTENANCE_ROLES: dict[str, Callable[[Host], None]] = {
    "compactor": compactor,
    "collector": collector,
    "sweeper": sweeper,
}
MAINTENANCE = tuple(MAINTENANCE_ROLES)
MAINTENANCE_ROLES["historian"] = historian  # only where there is history
