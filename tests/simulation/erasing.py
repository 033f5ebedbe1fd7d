"""Erasures in the simulation: who erases beside writers, who takes erasures to their ends, and builds that fail them.

The oracle takes an erasure for the rows that are meant at the moment it lands. So every later read is held against the
rest, and neither more nor less may go. What it checks of the bytes is in `erasures.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import compactor.tasks
import persist.client.optimistic_loop
import persist.core.erasure_progress
from compactor.orphans import Sweeper
from compactor.tasks import Eraser
from compactor.worker import Worker
from persist.client.erasure_api import Question
from persist.client.shard import Shard
from persist.commit.committer import Committer
from persist.core import commands as c
from persist.core.blob_keys import born_ms
from persist.core.erasure import Erasure, Scanned
from persist.core.errors import Corruption, Indeterminate, NotReadable
from persist.core.frontier import Antichain
from persist.core.ids import SeqNo, Token, critical_reader_id_of
from persist.core.record import replace
from persist.core.state import State
from persist.maintenance.expiry import forget_outlived
from tests.simulation.breaking import Broken, ignores_the_upper
from tests.simulation.erasures import HEX, MARKER, PHASES, Meant, gone_markers, shown
from tests.simulation.host import KEYS, MAIN, WEATHER, Host, expect_damage, extras_of, me
from tests.simulation.maintenance import ORPHAN_AGE_MS, SWEEP, WORKER, SmallCollector, maintaining
from tests.simulation.oracle import Write, expect
from tests.simulation.readers import read_once, reading
from tests.simulation.retaining import CONSUMER
from tests.simulation.writers import as_table, attempted, retried, told

ERASED_SHARE = 0.25  # of the runs
MARKERS_MAX = 12  # keys that are written to be erased, of one run
MANY_ROWS = 60  # of one marker: more than lie inline
UNSETTLED_MAX = 8  # erasures that somebody began and did not hear of
CURSORS = ("one", "two", CONSUMER)
RECEIPT_WITHIN_MS = 3 * ORPHAN_AGE_MS  # once nobody holds anything, beyond what a wrong clock has stamped
ROUNDS_MAX = 400


class Begun(NamedTuple):
    """An erasure that somebody asked for, who may be dead."""

    write: Write
    token: Token
    host: Host
    incarnation: int

    @property
    def is_orphaned(self) -> bool:
        return self.host.process.incarnation != self.incarnation or not self.host.process.alive


def eraser(host: Host) -> None:
    """Writes rows to be erased, and erases them, and others; what the dead have begun he asks for once more."""
    shard = host.open(MAIN)
    while not host.run.stopping:  # it takes no operation from others
        kind = host.random.random()
        if kind < 0.45:
            _plant(host, shard)
        elif kind < 0.55:
            _retract(host, shard)
        elif any(begun.is_orphaned for begun in host.run.unerased):
            _settle(host, shard)
        else:
            _erase(host, shard)
        _look(host, shard)
        host.sleep(0.2)


def _plant(host: Host, shard: Shard) -> None:
    """Write rows of a marker; now and then of one that was erased."""
    run, pick = host.run, host.random
    known = sorted(run.markers)
    if known and (len(known) >= MARKERS_MAX or pick.random() < 0.3):
        key = pick.choice(known)
    else:
        key = f"{MARKER}{pick.getrandbits(4 * HEX):0{HEX}x}"
        run.markers.add(key)
    count = MANY_ROWS if pick.random() < 0.3 else pick.randint(1, 3)
    beside = key[: len(MARKER) + 4]  # a key that begins as the marker does, and is never erased
    _insert(host, shard, [*((key, value, 0, pick.choice((1, 1, 2, -1))) for value in range(count)), (beside, 0, 0, 1)])


def _retract(host: Host, shard: Shard) -> None:
    """Take the rows of a marker away as any writer may: an erasure lets them go for good."""
    truth = host.run.truth(MAIN)
    there = Meant(tuple(host.run.markers)).of(truth.contents(truth.state.upper.element or 0))
    if there:
        key = host.random.choice(sorted({key for key, _ in there}))
        rows = [(k, value, 0, -count) for (k, value), count in there.items() if k == key]
        _insert(host, shard, [row for row in rows if isinstance(row[1], int)])


def _insert(host: Host, shard: Shard, rows: list[tuple[str, Any, int, int]]) -> None:
    if not rows:
        return
    table = as_table(rows, timed=False, extras=extras_of(shard))
    write = Write(0, "insert", me(host), MAIN, rows)
    with attempted(host, write) as token:
        told(write, shard.insert(table, token=token))
    retried(host, write, lambda again: shard.insert(table, token=again))


def _some(host: Host) -> Meant:
    """Markers, by their keys or one by a predicate; an ordinary key; or nothing, so that only what is gone goes."""
    pick, markers = host.random, sorted(host.run.markers)
    if pick.random() < 0.15:
        return Meant()
    if not markers or pick.random() < 0.2:
        return Meant((pick.choice(KEYS),), pick.choice((None, 1)))
    if pick.random() < 0.3:
        return Meant((pick.choice(markers),), pick.choice((None, 0)))
    return Meant(tuple(pick.sample(markers, min(len(markers), pick.randint(1, 3)))))


def _erase(host: Host, shard: Shard) -> None:
    run = host.run
    if not run.truth(MAIN).state.upper.element:
        return
    write = Write(0, "erase", me(host), MAIN, [], meant=_some(host))
    begun: Begun | None = None
    with attempted(host, write) as token:
        if token is not None and len(run.unerased) < UNSETTLED_MAX:
            begun = Begun(write, token, host, host.process.incarnation)
            run.unerased.append(begun)
        told(write, _ask(host, shard, write, token))
    retried(host, write, lambda again: _ask(host, shard, write, again))
    if begun is not None:
        run.unerased.remove(begun)


def _settle(host: Host, shard: Shard) -> None:
    """Ask again with the token of an erasure that somebody of a process began which has died since."""
    begun = next(found for found in host.run.unerased if found.is_orphaned)
    host.run.unerased.remove(begun)
    task = host.run.world.scheduler.current
    assert task is not None
    write, task.local["given"] = begun.write, begun.token
    task.local["write"], write.answer = write, "unknown"
    host.run.path("erasure asked again")
    retried(host, write, lambda again: _ask(host, shard, write, again))


def _ask(host: Host, shard: Shard, write: Write, token: Token | None) -> c.Appended:
    """Erase, and look at the contents that the answer tells of. Others append: with `force`, so that it is at once."""
    meant, reason = write.meant, f"#{write.number}"
    assert meant is not None
    where = " and ".join([f"k = '{key}'" for key in meant.keys] + [f"v = {v}" for v in [meant.value] if v is not None])
    by_predicate = len(meant.keys) == 1 and (meant.value is not None or write.number % 2)
    try:
        if by_predicate:
            found = shard.erase(where=where, reason=reason, token=token, force=True)
        else:
            keys = list(meant.keys) or None
            found = shard.erase(keys=keys, gone=keys is None, reason=reason, token=token, force=True)
    except NotReadable as error:  # nobody holds the latest time, and since is beyond it
        raise Indeterminate("the latest time is forgotten, and an earlier try may be under way") from error
    host.run.path("erased" if write.removed else "erased the gone")
    if found.removed is not None:
        right = found.removed == write.removed
        expect(right, "erased", f"#{write.number} removed {write.removed} rows, and was told {found.removed}")
    with reading(host, MAIN, found.at):
        read_once(host, shard, found.at, pause_s=0)
    return c.Appended(Antichain(found.at), Antichain(found.at + 1))


def _look(host: Host, shard: Shard) -> None:
    """How far erasures are: what is told was so between the question and the answer."""
    before = host.run.truth(MAIN).state.erasures
    try:
        found = shard.erasures()
    except WEATHER:
        return
    except Corruption:
        expect_damage(host)
        return
    after = host.run.truth(MAIN).state.erasures
    for key, told_one in found.items():
        now = after.get(key)
        expect(now is not None, "erased", f"erasure {key} is told of, and nobody began it")
        assert now is not None
        low = PHASES.index(before[key].phase) if key in before else 0
        fits = low <= PHASES.index(told_one.phase) <= PHASES.index(now.phase)
        expect(fits, "erased", f"erasure {key} is {now.phase}, and was told to be {told_one.phase}")
        host.run.path("erasure waits" if told_one.waits else f"erasure {told_one.phase}")
    expect(before.keys() <= found.keys(), "erased", f"{before.keys() - found.keys()} are not told of")


class Watched(Eraser):
    """Tells the oracle when each scan began, so that it knows what a scan cannot have seen."""

    def __init__(self, host: Host) -> None:
        super().__init__(host.location, SmallCollector(host.location), sweep=SWEEP)
        self._host = host

    def _scan(self, machine: Committer, erasure: Erasure) -> Scanned:
        began_ms = self._host.run.oracle.clock()
        found = super()._scan(machine, erasure)
        seen = (found.at_ms, found.horizon, found.entries, found.blobs, found.size)
        self._host.run.truth(machine.name).erasures.scanned(seen, began_ms)
        return found


def prover(host: Host) -> None:
    """Maintenance that takes erasures a step further, as several processes do at once."""
    host.open(MAIN)
    steps = Watched(host)
    while not host.run.over:
        with maintaining(host):
            forget_outlived(host.location.machine(MAIN), host.location.clock, ages=False)
            steps.run(MAIN)
        host.sleep(1.0)


def check_erased(host: Host) -> None:
    """At rest, once nobody holds anything, every erasure comes to its receipt, and the bytes are as it says."""
    truth = host.run.truth(MAIN)
    if not truth.state.erasures:
        return
    shard, began_ms = host.open(MAIN), host.run.oracle.clock()
    for cursor in CURSORS:
        if critical_reader_id_of(cursor) in truth.state.critical_readers:
            hold = shard.critical_reader(cursor)
            hold.downgrade_since(max(truth.state.upper, hold.since))
    for tag in sorted(truth.state.tags):
        shard.untag(tag)
    steps, worker, gc = Watched(host), Worker(host.location, WORKER), SmallCollector(host.location)
    born = [born_ms(stat.key) for stat in host.run.world.blobs.list(f"{truth.state.shard_id}/")]
    most_ms = max([began_ms, *born]) + RECEIPT_WITHIN_MS + host.run.oracle.clocks_off_ms
    for _ in range(ROUNDS_MAX):
        wait_s = steps.run(MAIN)
        if wait_s is None:
            break
        forget_outlived(host.location.machine(MAIN), host.location.clock, ages=False)
        worker.run(MAIN, idle=True)
        gc.run(MAIN)
        now_ms = host.run.oracle.clock()
        left = {key: (one.phase, one.waits) for key, one in shard.erasures().items() if not one.done}
        expect(now_ms <= most_ms, "receipt", f"no receipt after {now_ms - began_ms} ms: {left}")
        host.run.world.scheduler.sleep(max(wait_s, (max(born) + ORPHAN_AGE_MS - now_ms) / 1000))
    done = [found.done for found in shard.erasures().values()]
    expect(all(done), "receipt", f"erasures of {MAIN} find no end in {ROUNDS_MAX} rounds")
    Sweeper(host.location, SWEEP).sweep(MAIN)
    markers = set().union(*(gone_markers(truth.updates, one.at) for one in truth.state.erasures.values()))
    left_in = shown(markers, host.run.oracle.stored())
    expect(not left_in, "erased", f"all receipts are there, nothing is under way, and still: {left_in[:4]}")
    host.run.path("receipts")


# --- broken builds


def receipt_before_the_sweep() -> Broken:
    """A receipt does not wait for what nothing names."""
    return _scans(lambda found: replace(found, unnamed=(), unnamed_count=0, unnamed_ms=None))


def receipt_with_rollups_left() -> Broken:
    """A receipt does not wait for States of before, and what they name: rollups and files that are to be collected."""
    horizon = SeqNo(2**40)
    return _scans(lambda found: replace(found, rewritten=True, older=(), older_count=0, horizon=horizon))


def rewritten_before_they_met() -> Broken:
    """One batch counts as merged, whether its inserts have met their retractions or not."""

    def is_merged(state: State, at: int) -> bool:
        return len([batch for batch in persist.core.erasure_progress.stretch(state, at) if batch.runs]) <= 1

    return patch.object(persist.core.erasure_progress, "is_merged", is_merged)


def erase_ignores_the_upper() -> Broken:
    """An erasure lands though another write came since it looked."""
    return ignores_the_upper(c.ERASE)


def erased_over_a_drop() -> Broken:
    """An erasure that begins anew does not see that a drop came between: it takes what that took once more."""
    erases = lambda view: (view.erasing, view.retracting)  # noqa: E731
    return patch.object(persist.client.optimistic_loop, "is_recast", lambda one, other: erases(one) != erases(other))


def erased_by_key_alone() -> Broken:
    """Of a predicate only the keys count: rows go that were not meant."""
    real = Question.key_ranges
    return patch.object(Question, "key_ranges", lambda *given: (real(*given)[0], None))


def _scans(other: Callable[[Scanned], Scanned]) -> Broken:
    """Scans find something else."""
    real = compactor.tasks.scan_shard
    return patch.object(compactor.tasks, "scan_shard", lambda *given: other(real(*given)))


BROKEN = (receipt_before_the_sweep, receipt_with_rollups_left, rewritten_before_they_met)
BROKEN += (erase_ignores_the_upper, erased_over_a_drop, erased_by_key_alone)

__all__ = ["BROKEN", "ERASED_SHARE", "check_erased", "eraser", "prover"]
