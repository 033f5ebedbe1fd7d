"""What a committer does after its commits, in the background: rollups, flushes of attributes, small merges.

Each kind of work is under way at most once at a time, and no two merges have a part in common. Losing any of it is
safe: a later commit asks again, and the workers of maintenance do it at the latest. Where the background falls behind,
a commit does the merge itself (`relief`): so writers are slowed, and what waits stays bounded.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

from persist.attributes.index import AttributeIndex
from persist.attributes.storage import StaleIndex
from persist.commit.counters import MachineMetrics
from persist.commit.merge_batches import merged
from persist.commit.system import Background
from persist.commit.versions import Versions
from persist.core import commands as c
from persist.core.batch import HollowBatch
from persist.core.errors import PersistError
from persist.core.ids import IdSource
from persist.core.merge_plan import (
    GARBAGE_PERCENT_MAX,
    INLINE_ROOM_PART,
    claimed,
    garbage_due,
    inline_due,
    inline_overdue,
    inline_stretch,
    tier_due,
    tier_overdue,
)
from persist.core.state import Policy, State
from persist.core.trace import Trace


class Upkeep:
    """The upkeep of one shard by one machine. Thread-safe. `merges`: whether it also does the small merges."""

    def __init__(
        self,
        apply: Callable[[c.Command], c.Result],
        current: Callable[[], State | None],
        *,
        versions: Versions,
        attributes: AttributeIndex,
        policy: Policy,
        ids: IdSource,
        background: Background,
        metrics: MachineMetrics,
        merges: bool,
    ) -> None:
        self._apply = apply
        self._current = current
        self._versions = versions
        self._attributes = attributes
        self._policy = policy
        self._ids = ids
        self._background = background
        self._metrics = metrics
        self._merges = merges
        self._lock = threading.Lock()  # guards the two below; never held across I/O
        self._under_way: dict[str, frozenset[str]] = {}  # kinds of work, and the parts that each merges
        self._looked_at: Trace | None = None

    def after(self, state: State) -> None:
        """Begin what the State that was just committed asks for. Does not wait."""
        if len(state.attributes) >= self._policy.attributes_flush_at:
            self._begin("attributes", lambda: self._flush_attributes(state))
        if state.seqno - max(state.rollups, default=0) >= self._policy.rollup_every:
            self._begin("rollup", lambda: self._roll_up(state))
        if self._merges and state.trace is not self._looked_at:
            self._looked_at = state.trace
            self._merge_what_is_due(state)

    def relief(self, state: State, added: int, lost: int = 0) -> c.MergeResult | None:
        """The merge that a commit to `state` has to take along, if any; it has `added` so many inline bytes.

        One for inline rows that find no room or are many at once (one blob instead of one for each command), or for
        what should have been merged long ago: the latter not by a commit that has `lost` races, which would merge anew
        for each of them. When the store fails, none: it is asked for again.
        """
        room = self._policy.inline_shard_bytes_max
        with contextlib.suppress(PersistError):
            if state.trace.inline_bytes > room or added * INLINE_ROOM_PART >= room:
                self._metrics.reliefs += 1
                return self._merged(state, inline_stretch(state.trace.batches))
            if self._merges and added and not lost and (late := self._overdue(state)):
                self._metrics.reliefs += 1
                return self._merged(state, late)
        return None

    def _overdue(self, state: State) -> Sequence[HollowBatch]:
        taken = claimed(state)
        if garbage := garbage_due(state, taken, GARBAGE_PERCENT_MAX):
            return garbage
        taken |= self._busy()  # a merge under way would be refused, and what it wrote would lie about as an orphan
        return inline_overdue(state.trace, taken) or tier_overdue(state.trace, taken)

    def _merge_what_is_due(self, state: State) -> None:
        taken = claimed(state) | self._busy()
        garbage = garbage_due(state, taken)
        self._begin_merge("garbage", state, garbage)
        if not garbage:
            self._begin_merge("inline", state, inline_due(state.trace, self._policy, taken))
            self._begin_merge("tier", state, tier_due(state.trace, taken))

    def _begin_merge(self, kind: str, state: State, batches: Sequence[HollowBatch]) -> None:
        inputs = frozenset(part.id for batch in batches for part in batch.parts())
        if len(inputs) > 1:
            self._begin(kind, lambda: self._merge(state, batches, inputs), inputs)

    def _busy(self) -> frozenset[str]:
        with self._lock:
            return frozenset().union(*self._under_way.values())

    def _begin(self, kind: str, work: Callable[[], None], inputs: frozenset[str] = frozenset()) -> None:
        with self._lock:
            if kind in self._under_way or any(not inputs.isdisjoint(held) for held in self._under_way.values()):
                return
            self._under_way[kind] = inputs

        def run() -> None:
            try:
                work()
            except (PersistError, StaleIndex):
                self._metrics.upkeep_failed += 1
            finally:
                self._end(kind)

        if not self._background.submit(run):
            self._end(kind)

    def _end(self, kind: str) -> None:
        with self._lock:
            del self._under_way[kind]

    def _merge(self, state: State, batches: Sequence[HollowBatch], inputs: frozenset[str]) -> None:
        if (self._current() or state).trace.covering(inputs) is None:
            return  # merged while this waited for its turn
        command = self._merged(state, batches)
        if command is None:
            return
        result = self._apply(command)
        if isinstance(result, c.MergeApplied) and result.applied:
            self._metrics.flushes += 1
        else:
            self._metrics.upkeep_refused += 1

    def _merged(self, state: State, batches: Sequence[HollowBatch]) -> c.MergeResult | None:
        command = merged(state, batches, self._versions.blob, self._ids)
        if command is not None:
            self._metrics.upkeep_bytes += sum(part.size for run in command.outputs for part in run.parts)
        return command

    def _flush_attributes(self, state: State) -> None:
        self._apply(self._attributes.flush(self._current() or state))

    def _roll_up(self, state: State) -> None:
        key, size = self._versions.write_rollup(state)
        self._apply(c.AddRollup(state.seqno, key, size))
