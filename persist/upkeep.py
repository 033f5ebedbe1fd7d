"""What a committer does after its commits, in the background: rollups, and flushes of what the State should not keep.

Each kind of work is under way at most once at a time. Losing any of it is safe: a later commit asks again, and the
workers of maintenance do it at the latest. It is done here as well because a commit of the process that commits anyway
joins its group, while another process has to win races against a busy writer.
"""

from __future__ import annotations

from collections.abc import Callable

from persist import commands as c
from persist.attributes.index import AttributeIndex
from persist.attributes.storage import StaleIndex
from persist.errors import PersistError
from persist.flushing import flushed
from persist.ids import IdSource
from persist.machine_metrics import MachineMetrics
from persist.state import Policy, State
from persist.system import Background
from persist.versions import Versions

INLINE_ROOM_PART = 4  # inline rows are flushed when they take this part of their room
INLINE_BATCHES = 24  # or when that many batches in a row hold nothing else


class Upkeep:
    """The upkeep of one shard by one machine. Thread-safe in so far as `apply` is."""

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
    ) -> None:
        self._apply = apply
        self._current = current
        self._versions = versions
        self._attributes = attributes
        self._policy = policy
        self._ids = ids
        self._background = background
        self._metrics = metrics
        self._under_way: set[str] = set()

    def after(self, state: State) -> None:
        """Begin what the State that was just committed asks for. Does not wait."""
        if len(state.attributes) >= self._policy.attributes_flush_at:
            self._begin("attributes", lambda: self._flush_attributes(state))
        if self._inline_due(state):
            self._begin("inline", lambda: self._flush_inline(state))
        if state.seqno - max(state.rollups, default=0) >= self._policy.rollup_every:
            self._begin("rollup", lambda: self._roll_up(state))

    def _begin(self, kind: str, work: Callable[[], None]) -> None:
        if kind in self._under_way:
            return
        self._under_way.add(kind)

        def run() -> None:
            try:
                work()
            except (PersistError, StaleIndex):
                self._metrics.upkeep_failed += 1
            finally:
                self._under_way.discard(kind)

        if not self._background.submit(run):
            self._under_way.discard(kind)

    def _inline_due(self, state: State) -> bool:
        trace = state.trace
        if trace.inline_bytes * INLINE_ROOM_PART >= self._policy.inline_shard_bytes_max:
            return True
        if not trace.inline_bytes or len(trace.batches) < INLINE_BATCHES:
            return False
        newest = trace.batches[-INLINE_BATCHES:]
        return all(batch.runs and all(part.is_inline for part in batch.parts()) for batch in newest)

    def _flush_inline(self, state: State) -> None:
        command = flushed(self._current() or state, self._versions.blob, self._ids)
        if command is not None:
            self._apply(command)
            self._metrics.flushes += 1

    def _flush_attributes(self, state: State) -> None:
        self._apply(self._attributes.flush(self._current() or state))

    def _roll_up(self, state: State) -> None:
        key, size = self._versions.write_rollup(state)
        self._apply(c.AddRollup(state.seqno, key, size))
