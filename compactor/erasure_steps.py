"""Erasures, step by step: what is left after the commit that took the rows away.

A step is done as soon as its time has come, by whichever process of maintenance comes first; every one may be repeated.
The shard's history is let go as far as readers allow. A worker merges what is older (`persist.core.merge_plan`). Then
rollups are made, and collected, until both stores hold no State of before. What nothing names waits for the sweep. In
the end both stores are scanned, and what was found is the receipt.
"""

from __future__ import annotations

import logging

from compactor.loop import Ending, Task, never
from compactor.orphans import Sweeper, SweepSettings
from persist.commit.collector import Collector
from persist.commit.erasure_scan import leave_out_before, scanned
from persist.commit.location import Location
from persist.commit.machine import Committer, CommitterOf
from persist.commit.state_loader import rolled_up
from persist.core import commands as c
from persist.core.erasure import Erasure, Proof, Scanned
from persist.core.erasure_progress import erased_at, is_rewritten, lent_before, states_held, under_way
from persist.core.frontier import Antichain
from persist.core.state import State
from persist.formats.store_errors import translated

log = logging.getLogger("persist.erasures")

EPOCHS_MAX = 4  # rollups and collections of one look at a shard
LOOK_AGAIN_S = 5.0
SWEEP_AGAIN_S = 3_600.0


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
        log.info("erased", extra={"shard": machine.name, "erasure": key, "time": erasure.at})
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
