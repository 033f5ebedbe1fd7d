"""The upkeep of a shard by one machine: what a State asks for (rollups, bundles, flushes to blobs, small merges).

Upkeep only decides. It is told of a State and answers with duties, which are values; the machine has them done in the
background, and tells when each has ended. Each kind of duty is under way at most once at a time, and no two merges have
a part in common. Losing any of it is safe: a later commit asks again, and the workers of maintenance do it at the
latest. Where merges fall behind, each commit waits a moment for them: threads of one process share its interpreter, and
a writer in a loop would leave them next to none of it. What piles up all the same is bounded by `Policy.batches_max`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from msgspec import Struct

from persist.commit.commit_plan import (
    BatchMerge,
    BundleUp,
    Collect,
    FlushIndex,
    FlushRecent,
    Retain,
    RollUp,
)
from persist.core.batch import EMPTY_TRACE, HollowBatch
from persist.core.ids import SeqNo
from persist.core.manifests import to_bundle
from persist.core.merge_plan import (
    claimed,
    count_newest,
    garbage_due,
    inline_due,
    is_behind,
    is_inline,
    is_small,
    tier_due,
)
from persist.core.spill import ENTRIES, OUTCOMES
from persist.core.state import ROLLUP_LEAST, Policy, State
from persist.core.transitions.spill_flush import is_flush_due

TURNS_LEFT_MAX = 16  # times in a row that a kind of duty is left to another process that is at it
ROLLUP_BYTES = 512 * 1024  # of state diffs since the newest rollup, after which one is due
GIVE_WAY_S = 0.02  # what a commit waits at most for merges that are behind
ROLLUP_GONE = 32  # blobs that have left the State since then: they are deleted once a rollup lies beyond


class Duty(Struct, frozen=True):
    """One piece of upkeep: a task of the blob store. `inputs` are the parts that it will replace."""

    kind: str
    task: BatchMerge | BundleUp | RollUp | FlushIndex | FlushRecent | Collect | Retain
    inputs: frozenset[str] = frozenset()


class SinceRollup:
    """What this machine has committed since the newest rollup, of at most `most` commits."""

    def __init__(self, most: int) -> None:
        self._commits: deque[tuple[SeqNo, int, int]] = deque(maxlen=most)
        self._bytes = 0
        self._gone = 0

    def add(self, seqno: SeqNo, nbytes: int, gone: int) -> None:
        """A commit whose log entry has `nbytes` bytes, and by which `gone` blobs have left the State."""
        if len(self._commits) == self._commits.maxlen:
            self._drop_first()
        self._commits.append((seqno, nbytes, gone))
        self._bytes += nbytes
        self._gone += gone

    def turns(self, state: State, policy: Policy) -> float:
        """How many times what makes one rollup due has come since the newest one. Commits of others weigh most."""
        newest = max(state.rollups, default=SeqNo(0))
        while self._commits and self._commits[0][0] <= newest:
            self._drop_first()
        passed = state.seqno - newest
        turns = max(passed / policy.rollup_every, (passed - len(self._commits)) / ROLLUP_LEAST)
        if passed >= ROLLUP_LEAST:
            # A State that is larger is written as often as the log has grown by as much: each byte twice in all.
            size = max((rollup.size for rollup in state.rollups.values()), default=0)
            turns = max(turns, self._bytes / max(ROLLUP_BYTES, size), self._gone / ROLLUP_GONE)
        return turns

    def _drop_first(self) -> None:
        _, nbytes, gone = self._commits.popleft()
        self._bytes -= nbytes
        self._gone -= gone


class Upkeep:
    """Remembers what is under way. Thread-safe. `merges`: whether small merges are among the duties.

    `collects`: whether collections are. One is asked for once a rollup, and only where its horizon can move.
    `retains`: whether policies of rows are run. Whether one is due is looked up in the State, by whoever runs it.
    """

    def __init__(self, policy: Policy, merges: bool) -> None:
        self.merging: frozenset[str] = frozenset()  # parts that merges under way will replace
        self._policy = policy
        self._merges = merges
        self._looking = threading.Lock()  # a leader looks once the next one commits
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)
        self._writing: set[str] = set()  # kinds of merges whose command is not there yet
        self._inline = 0  # of the newest batches, as of the last look, those that hold inline rows only
        self._small = 0  # of the newest batches, as of then, those that are small and have rows
        self._is_behind = False  # as of then, too
        self._under_way: dict[str, frozenset[str]] = {}  # kinds of duties, and the inputs of each
        self._left: dict[str, int] = {}  # times in a row that duties of a kind were left to others
        self._looked_at = EMPTY_TRACE
        self._crowded: list[HollowBatch] = []  # of the trace that was looked at: those with parts for bundles
        self._given_away: SeqNo | None = None  # the rollup after which flushes took the place of the next one
        self.collects = False
        self._collected: tuple[SeqNo, bool, bool] | None = None
        self.retains = False
        self._since_rollup = SinceRollup(2 * policy.rollup_every)

    def committed(self, seqno: SeqNo, nbytes: int, gone: int) -> None:
        """This machine has made that version."""
        with self._looking:
            self._since_rollup.add(seqno, nbytes, gone)

    def due(self, state: State) -> list[Duty]:
        """What the State that was just committed asks for, and is not under way. All of it counts as under way now.

        A State may come after a later one.
        """
        with self._looking:
            return [duty for duty in self._asked(state) if self._begins(duty)]

    def _asked(self, state: State) -> list[Duty]:
        duties = list(self._turn(state))
        if state.trace is not self._looked_at:
            if (change := self._looked_at.difference(state.trace)) is not None:
                self._look_for_crowded(state, change)
                self._inline = count_newest(state.trace, change, self._inline, is_inline)
                self._small = count_newest(state.trace, change, self._small, is_small, with_rows=True)
                self._is_behind = is_behind(state.trace, self._policy, self._small)
            self._looked_at = state.trace
            duties += self._merges_due(state) if self._merges else ()
            duties += self._bundles_due(state)
        if self.collects and self._has_to_collect(state):
            duties.append(Duty("collection", Collect()))
        if self.retains and state.settings.rows is not None and not state.is_closed:
            duties.append(Duty("retention", Retain()))
        return duties

    def _turn(self, state: State) -> Iterator[Duty]:
        """A rollup, or in the place of one what has to be flushed. What has become too much waits for no turn.

        A rollup is due after many commits, or after fewer that have written much to the log, or that have left blobs
        to be deleted. So moves of frontiers cost nearly none, and opening reads a bounded number of bytes. Flushes and
        rollups together are no more commits and blobs than rollups alone. No two rollups in a row give their place
        away: opening reads twice as many state diffs at most.
        """
        newest, turns = max(state.rollups, default=SeqNo(0)), self._since_rollup.turns(state, self._policy)
        is_turn = turns >= 1 and self._given_away != newest
        flushes = list(self._flushes(state, is_turn))
        if flushes and is_turn:
            self._given_away = newest
        yield from flushes
        if turns >= 2 or (is_turn and not flushes):
            yield Duty("rollup", RollUp(state))

    def _flushes(self, state: State, is_turn: bool) -> Iterator[Duty]:
        policy = self._policy
        marks_most = policy.overlay_turn_at if is_turn else policy.overlay_flush_at
        if len(state.attributes) >= policy.overlay_flush_at or len(state.marks) >= marks_most:
            yield Duty("attributes", FlushIndex())
        for kind in (OUTCOMES, ENTRIES):
            if is_flush_due(state, kind, policy, in_turn=is_turn):
                yield Duty(kind, FlushRecent(kind))

    def is_left(self, duty: Duty, is_others: bool) -> bool:
        """Whether this duty is left to another process, which `is_others` says is at one of its kind.

        Not too often in a row: that one may have been stopped.
        """
        with self._lock:
            self._left[duty.kind] = self._left.get(duty.kind, 0) + 1 if is_others else 0
            return 0 < self._left[duty.kind] <= TURNS_LEFT_MAX

    def ended(self, duty: Duty) -> None:
        """The duty was done, or failed, or was dropped. Another of its kind may begin."""
        with self._lock:
            del self._under_way[duty.kind]
            self.merging = frozenset().union(*self._under_way.values())
        self.written(duty)

    def written(self, duty: Duty) -> None:
        """The duty waits for nothing but its commit, or has ended."""
        with self._written:
            self._writing.discard(duty.kind)
            self._written.notify_all()

    def give_way(self) -> None:
        """If merges are behind, wait until one of those under way has written its part; for a moment at most."""
        if self._is_behind:
            with self._written:
                if self._writing:
                    self._written.wait(GIVE_WAY_S)

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
        """What is looked for only while no merge of its kind is under way: such a merge would not begin."""
        taken = claimed(state) | self.merging
        stretches = {"garbage": garbage_due(state, taken)}
        if not stretches["garbage"]:
            if "inline" not in self._under_way:
                stretches["inline"] = inline_due(state.trace, self._policy, taken, self._inline)
            if "tier" not in self._under_way:
                stretches["tier"] = tier_due(state.trace, taken, self._inline)
        for kind, batches in stretches.items():
            merge = BatchMerge(state, batches)
            if batches and len(inputs := merge.inputs) > 1:
                yield Duty(kind, merge, inputs)

    def _look_for_crowded(self, state: State, change: tuple[int, int, tuple[HollowBatch, ...]]) -> None:
        """Only batches that came since the last look are looked at: there may be thousands, and each commit asks."""
        first, count, came = change
        gone = self._looked_at.batches[first : first + count]
        before = [batch for batch in self._crowded if batch not in gone]
        self._crowded = before + [batch for batch in came if to_bundle(batch, self._policy, state.shard_id)]

    def _bundles_due(self, state: State) -> Iterator[Duty]:
        """A batch that has too many parts of its own, and on which no merge is at work."""
        for batch in self._crowded:
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
            if duty.inputs:
                self._writing.add(duty.kind)
            return True
