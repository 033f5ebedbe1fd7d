"""The upkeep of a shard by one machine: what a State asks for (rollups, bundles, flushes to blobs, small merges).

Upkeep only decides. It is told of a State and answers with duties, which are values; the machine has them done in the
background, and tells when each has ended. Each kind of duty is under way at most once at a time, and no two merges have
a part in common. Losing any of it is safe: a later commit asks again, and the workers of maintenance do it at the
latest. Where the background falls behind, commits take the merges along themselves (`commit_plan`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from msgspec import Struct

from persist.commit.commit_plan import BundleUp, Collect, FlushHistory, FlushIndex, FlushTokens, Merge, Retain, RollUp
from persist.core.bundles import to_bundle
from persist.core.ids import SeqNo
from persist.core.merge_plan import claimed, garbage_due, inline_due, tier_due
from persist.core.state import Policy, State
from persist.core.trace import Trace
from persist.core.transitions import recording
from persist.core.transitions.bundling import BUNDLES_LEVEL
from persist.core.transitions.outcomes import flush_is_due

MARKS_URGENT = 2  # times as many marks as make a flush due do not wait for its turn


class Duty(Struct, frozen=True):
    """One piece of upkeep: a task of the blob store. `inputs` are the parts that it will replace."""

    kind: str
    task: Merge | BundleUp | RollUp | FlushIndex | FlushTokens | FlushHistory | Collect | Retain
    inputs: frozenset[str] = frozenset()


class Upkeep:
    """Remembers what is under way. Thread-safe. `merges`: whether small merges are among the duties.

    `collects`: whether collections are. One is asked for once a rollup, and only where its horizon can move.
    `retains`: whether policies of rows are run. Whether one is due is looked up in the State, by whoever runs it.
    """

    def __init__(self, policy: Policy, merges: bool) -> None:
        self.merging: frozenset[str] = frozenset()  # parts that merges under way will replace
        self._policy = policy
        self._merges = merges
        self._lock = threading.Lock()
        self._under_way: dict[str, frozenset[str]] = {}  # kinds of duties, and the inputs of each
        self._looked_at: Trace | None = None
        self._given_away: SeqNo | None = None  # the rollup after which a flush of marks took the place of the next one
        self.collects = False
        self._collected: tuple[SeqNo, bool, bool] | None = None
        self.retains = False

    def due(self, state: State, level: int = BUNDLES_LEVEL) -> list[Duty]:
        """What the State that was just committed asks for, and is not under way. All of it counts as under way now.

        `level` is that of the location.
        """
        duties = []
        are_many = len(state.marks) >= MARKS_URGENT * self._policy.marks_flush_at
        if are_many or len(state.attributes) >= self._policy.attributes_flush_at:
            duties.append(Duty("attributes", FlushIndex()))
        if flush_is_due(state, self._policy):
            duties.append(Duty("outcomes", FlushTokens(self._policy)))
        duties += self._turn(state)
        if state.trace is not self._looked_at:
            self._looked_at = state.trace
            duties += self._merges_due(state) if self._merges else ()
            duties += self._bundles_due(state) if level >= BUNDLES_LEVEL else ()
        if self.collects and self._has_to_collect(state):
            duties.append(Duty("collection", Collect()))
        if self.retains and state.settings.rows is not None and not state.is_closed:
            duties.append(Duty("retention", Retain()))
        return [duty for duty in duties if self._begins(duty)]

    def _turn(self, state: State) -> Iterator[Duty]:
        """A rollup, or in the place of one a file of entries, or a flush of marks.

        So all of them together are no more commits and blobs than rollups alone. No two rollups in a row give their
        place away: opening reads twice as many state diffs at most.
        """
        newest, every = max(state.rollups, default=SeqNo(0)), self._policy.rollup_every
        passed = state.seqno - newest
        is_taken = self._given_away == newest or any(file.last > newest for file in state.entry_files[-1:])
        is_turn = passed >= every and not is_taken
        flushes = recording.flush_is_due(state, self._policy)
        if flushes and (is_turn or recording.flush_is_urgent(state, self._policy)):
            yield Duty("entries", FlushHistory())
        elif is_turn and len(state.marks) >= self._policy.marks_flush_at:
            self._given_away = newest
            yield Duty("attributes", FlushIndex())
        elif is_turn:
            yield Duty("rollup", RollUp(state))
            return
        if passed >= 2 * every:
            yield Duty("rollup", RollUp(state))

    def ended(self, duty: Duty) -> None:
        """The duty was done, or failed, or was dropped. Another of its kind may begin."""
        with self._lock:
            del self._under_way[duty.kind]
            self.merging = frozenset().union(*self._under_way.values())

    def _has_to_collect(self, state: State) -> bool:
        """Whether two rollups lie before every reader's hold, so that what was before the later one may go.

        Or whether the shard was dropped, so that all of it may.
        """
        held = state.seqno_since
        if sum(1 for seqno in state.rollups if seqno <= held) < 2 and (state.tombstone or not state.is_closed):
            return False
        seen = (max(state.rollups), state.is_closed, state.tombstone)
        if seen == self._collected:
            return False
        self._collected = seen
        return True

    def _merges_due(self, state: State) -> Iterator[Duty]:
        taken = claimed(state) | self.merging
        found = {"garbage": garbage_due(state, taken)}
        if not found["garbage"]:
            found = {"inline": inline_due(state.trace, self._policy, taken), "tier": tier_due(state.trace, taken)}
        for kind, batches in found.items():
            merge = Merge(state, batches)
            if batches and len(inputs := merge.inputs) > 1:
                yield Duty(kind, merge, inputs)

    def _bundles_due(self, state: State) -> Iterator[Duty]:
        """The first batch that has too many parts of its own, and on which no merge is at work."""
        for batch in state.trace.batches:
            if runs := to_bundle(batch, self._policy, state.shard_id):
                inputs = frozenset(part.id for run in runs for part in run.parts)
                if inputs.isdisjoint(claimed(state)) and inputs.isdisjoint(self.merging):
                    yield Duty("bundles", BundleUp(state, batch), inputs)
                    return

    def _begins(self, duty: Duty) -> bool:
        with self._lock:
            if duty.kind in self._under_way or not duty.inputs.isdisjoint(self.merging):
                return False
            self._under_way[duty.kind] = duty.inputs
            self.merging |= duty.inputs
            return True
