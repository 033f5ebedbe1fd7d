"""The background duties of a shard in one process: rollups, bundles, flushes to blobs, small merges.

`Upkeep` only decides. From a committed State it derives duties, which are values; the machine runs them in the
background and reports when each has ended. At most one duty of each kind is under way, and no two merges share a part.
Losing a duty is safe: a later commit derives it again, or a maintenance worker does the work. If merges fall behind,
each commit waits a moment for them: the threads of a process share its interpreter, and a writer in a loop would leave
them almost no time. The backlog is bounded by `Policy.batches_max`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from msgspec import Struct

from persist.commit.commit_plan import BatchMerge, BundleUp, FlushIndex, FlushRecent, RollUp
from persist.core.batch import EMPTY_TRACE, HollowBatch, parts_of
from persist.core.bundles import to_bundle
from persist.core.ids import SeqNo
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
from persist.core.transitions.outcomes_and_audit import is_flush_due

TURNS_LEFT_MAX = 16  # times in a row that a kind of duty is left to another process that is doing it
ROLLUP_BYTES = 512 * 1024  # of state diffs since the newest rollup, after which one is due
GIVE_WAY_S = 0.02  # that a commit waits at most for merges that are behind
ROLLUP_GONE = 32  # blobs that have left the State since then: a later rollup allows their deletion


class Duty(Struct, frozen=True):
    """One background task on the blob store, or a call with the name of the shard.

    `inputs` are the parts that it will replace.
    """

    kind: str
    task: BatchMerge | BundleUp | RollUp | FlushIndex | FlushRecent | Callable[[str], object]
    inputs: frozenset[str] = frozenset()


class SinceRollup:
    """The commits of this process since the newest rollup, at most `most` of them."""

    def __init__(self, most: int) -> None:
        self._commits: deque[tuple[SeqNo, int, int]] = deque(maxlen=most)
        self._bytes = 0
        self._gone = 0

    def add(self, seqno: SeqNo, nbytes: int, gone: int) -> None:
        """Add a commit whose log entry has `nbytes` bytes and which removed `gone` blobs from the State."""
        if len(self._commits) == self._commits.maxlen:
            self._drop_first()
        self._commits.append((seqno, nbytes, gone))
        self._bytes += nbytes
        self._gone += gone

    def turns(self, state: State, policy: Policy) -> float:
        """How many rollups are due since the newest one, as a fraction. Commits of other processes weigh most."""
        newest = max(state.rollups, default=SeqNo(0))
        while self._commits and self._commits[0][0] <= newest:
            self._drop_first()
        passed = state.seqno - newest
        turns = max(passed / policy.rollup_every, (passed - len(self._commits)) / ROLLUP_LEAST)
        if passed >= ROLLUP_LEAST:
            # A large State is written again once the log has grown by its size: each byte is written twice in all.
            size = max((rollup.size for rollup in state.rollups.values()), default=0)
            turns = max(turns, self._bytes / max(ROLLUP_BYTES, size), self._gone / ROLLUP_GONE)
        return turns

    def _drop_first(self) -> None:
        _, nbytes, gone = self._commits.popleft()
        self._bytes -= nbytes
        self._gone -= gone


class Upkeep:
    """Decides which duties are due, and tracks those under way. Thread-safe.

    `merges` says whether small merges are among the duties, and so are garbage collection and row policies once
    `collect` and `retain` are set. A collection is due once per rollup, and only if its horizon can move. Whether a row
    policy is due is decided when it runs.
    """

    def __init__(self, policy: Policy, merges: bool) -> None:
        self.merging: frozenset[str] = frozenset()  # parts that merges under way will replace
        self.policy = policy
        self._merges = merges
        self._looking = threading.Lock()  # a leader looks while the next one commits
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)
        self._writing: set[str] = set()  # kinds of merges that still write their part
        self._inline = 0  # number of the newest batches, as of the last look, that hold inline rows only
        self._small = 0  # number of the newest batches, as of the last look, that are small and have rows
        self._is_behind = False  # as of the last look
        self._under_way: dict[str, frozenset[str]] = {}  # kinds of duties, and the inputs of each
        self._left: dict[str, int] = {}  # times in a row that duties of a kind were left to other processes
        self._looked_at = EMPTY_TRACE
        self._crowded: list[HollowBatch] = []  # batches of `_looked_at` with enough parts for a bundle
        self._given_away: SeqNo | None = None  # the rollup after which flushes took the place of the next one
        self.collect: Callable[[str], object] | None = None
        self.retain: Callable[[str], object] | None = None
        self._collected: tuple[SeqNo, bool, bool] | None = None
        self._since_rollup = SinceRollup(2 * policy.rollup_every)

    def committed(self, seqno: SeqNo, nbytes: int, gone: int) -> None:
        """Note a commit of this process."""
        with self._looking:
            self._since_rollup.add(seqno, nbytes, gone)

    def due(self, state: State) -> list[Duty]:
        """The duties that are due in a State that was just committed. They count as under way from now on.

        States may arrive out of order.
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
                self._is_behind = is_behind(state.trace, self.policy, self._small)
            self._looked_at = state.trace
            duties += self._merges_due(state) if self._merges else ()
            duties += self._bundles_due(state)
        if self.collect is not None and self._has_to_collect(state):
            duties.append(Duty("collection", self.collect))
        if self.retain is not None and state.settings.rows is not None and not state.is_closed:
            duties.append(Duty("retention", self.retain))
        return duties

    def _turn(self, state: State) -> Iterator[Duty]:
        """A rollup, or flushes in its place. An overlay above its limit is flushed at once.

        A rollup is due after many commits, or after fewer that wrote much to the log or left blobs to delete. So
        commits that only move frontiers cause almost none, and opening a shard reads a bounded number of bytes. Since
        flushes take the place of rollups, both together cause no more commits and blobs than rollups alone. At most
        every other rollup is replaced, so opening reads at most twice as many state diffs.
        """
        newest, turns = max(state.rollups, default=SeqNo(0)), self._since_rollup.turns(state, self.policy)
        is_turn = turns >= 1 and self._given_away != newest
        flushes = list(self._flushes(state, is_turn))
        if flushes and is_turn:
            self._given_away = newest
        yield from flushes
        if turns >= 2 or (is_turn and not flushes):
            yield Duty("rollup", RollUp(state))

    def _flushes(self, state: State, is_turn: bool) -> Iterator[Duty]:
        policy = self.policy
        marks_most = policy.overlay_turn_at if is_turn else policy.overlay_flush_at
        if len(state.attributes) >= policy.overlay_flush_at or len(state.marks) >= marks_most:
            yield Duty("attributes", FlushIndex())
        for kind in (OUTCOMES, ENTRIES):
            if is_flush_due(state, kind, policy, in_turn=is_turn):
                yield Duty(kind, FlushRecent(kind))

    def is_left(self, duty: Duty, is_others: bool) -> bool:
        """Whether this duty is left to another process; `is_others`: one is doing a duty of this kind.

        Not too often in a row, since that process may have been stopped.
        """
        with self._lock:
            self._left[duty.kind] = self._left.get(duty.kind, 0) + 1 if is_others else 0
            return 0 < self._left[duty.kind] <= TURNS_LEFT_MAX

    def ended(self, duty: Duty) -> None:
        """Note that the duty was done, failed or was dropped. Another of its kind may begin."""
        with self._lock:
            del self._under_way[duty.kind]
            self.merging = frozenset().union(*self._under_way.values())
        self.written(duty)

    def written(self, duty: Duty) -> None:
        """Note that the duty only waits for its commit, or has ended."""
        with self._written:
            self._writing.discard(duty.kind)
            self._written.notify_all()

    def give_way(self) -> None:
        """If merges are behind, wait until one of them has written its part, at most GIVE_WAY_S."""
        if self._is_behind:
            with self._written:
                if self._writing:
                    self._written.wait(GIVE_WAY_S)

    def _has_to_collect(self, state: State) -> bool:
        """Whether garbage collection can delete anything that it could not delete before.

        It can if two rollups precede every reader's hold, or if the shard was dropped.
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
        """The merges that are due. A kind that is under way is skipped, since another of it would not begin."""
        taken = claimed(state) | self.merging
        stretches = {"garbage": garbage_due(state, taken)}
        if not stretches["garbage"]:
            if "inline" not in self._under_way:
                stretches["inline"] = inline_due(state.trace, self.policy, taken, self._inline)
            if "tier" not in self._under_way:
                stretches["tier"] = tier_due(state.trace, taken, self._inline)
        for kind, batches in stretches.items():
            merge = BatchMerge(state, batches)
            if batches and len(inputs := merge.inputs) > 1:
                yield Duty(kind, merge, inputs)

    def _look_for_crowded(self, state: State, change: tuple[int, int, tuple[HollowBatch, ...]]) -> None:
        """Update the list by the batches that changed: there may be thousands, and each commit looks."""
        first, count, came = change
        gone = self._looked_at.batches[first : first + count]
        before = [batch for batch in self._crowded if batch not in gone]
        self._crowded = before + [batch for batch in came if to_bundle(batch, self.policy, state.shard_id)]

    def _bundles_due(self, state: State) -> Iterator[Duty]:
        """The bundling of a batch that has too many parts, if no merge reads them."""
        for batch in self._crowded:
            if runs := to_bundle(batch, self.policy, state.shard_id):
                inputs = frozenset(part.id for part in parts_of(runs))
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
