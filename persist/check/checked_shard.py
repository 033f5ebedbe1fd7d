"""A shard under examination: what was read of it, and how old what it holds is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from persist.attributes.attribute_index import Marks
from persist.attributes.node_store import ChunkReader, StaleIndex
from persist.check.findings import CheckThresholds
from persist.copies.shard_facts import ShardFacts
from persist.core.clock_index import Mark
from persist.core.errors import Corruption
from persist.core.frontier import Antichain
from persist.core.state import Leased, State
from persist.inspect.readonly_location import ReadOnlyLocation


@dataclass
class CheckedShard(ShardFacts):
    """A shard, the location that it was read from, and the limits of the check. Ages are counted by `now_ms`."""

    look: ReadOnlyLocation = field(kw_only=True)
    now_ms: int = field(kw_only=True)
    limits: CheckThresholds = field(kw_only=True)

    @classmethod
    def of(cls, facts: ShardFacts, look: ReadOnlyLocation, now_ms: int, limits: CheckThresholds) -> CheckedShard:
        """The facts, which are not read again."""
        made = cls(look, facts.name, facts.head, facts.state, facts.faults, look=look, now_ms=now_ms, limits=limits)
        made.log, made.listed = facts.log, facts.listed
        return made

    def silent_ms(self, held: Leased) -> int:
        """For how long at least nobody has renewed a lease.

        The lease clock goes on by what committers watch. What has passed since the last commit counts by wall clocks.
        """
        if self.state is None:
            return 0
        idle_ms = max(0, self.now_ms - self.state.walltime_ms)
        return max(0, self.state.lease_now_ms - held.heartbeat_ms) + idle_ms

    def complete_ms(self, time: int) -> int | None:
        """When the shard first was complete beyond a time, by a mark, or else by the log. None: nobody knows."""
        assert self.state is not None
        found = _mark_beyond(self.look, self.state, time)
        if found is not None and found.at_ms:
            return found.at_ms
        if self.log.uppers and (self.log.first_seqno == 1 or self.log.uppers[0][1] <= time):
            return next((at_ms for at_ms, upper in self.log.uppers if upper > time), None)
        return None

    def age_ms(self, time: int) -> int | None:
        """How long ago that was."""
        at_ms = self.complete_ms(time)
        return None if at_ms is None else max(0, self.now_ms - at_ms)

    def upper_by(self, at_ms: int) -> Antichain | None:
        """The upper that the shard had by an instant, at least, as marks and the log tell it. None: nobody knows."""
        assert self.state is not None
        by_log = [Antichain(upper) for known_ms, upper in self.log.uppers if known_ms <= at_ms]
        by_mark = _mark_by(self.look, self.state, at_ms)
        return max([*by_log[-1:], *([] if by_mark is None else [by_mark.upper])], default=None)


def _mark_beyond(look: ReadOnlyLocation, state: State, time: int) -> Mark | None:
    last = state.seal.last
    marks = [Mark(at_ms, upper) for at_ms, upper in sorted(state.marks.items())]
    marks += [last] if last is not None else []
    shown = next((mark for mark in marks if not mark.upper.less_equal(time)), None)
    if shown is None or shown is not marks[0]:
        return shown
    return _indexed(look, state, lambda indexed: indexed.first_beyond(time)) or shown


def _mark_by(look: ReadOnlyLocation, state: State, at_ms: int) -> Mark | None:
    last = state.seal.last
    if last is not None and last.at_ms <= at_ms:
        return last
    recent = max((known for known in state.marks if known <= at_ms), default=None)
    if recent is not None:
        return Mark(recent, state.marks[recent])
    return _indexed(look, state, lambda marks: marks.newest_at(at_ms))


def _indexed(look: ReadOnlyLocation, state: State, ask: Callable[[Marks], Mark | None]) -> Mark | None:
    """What the index of attributes tells of marks. One that is damaged, or has moved on, tells nothing."""
    if not state.attribute_root.height:
        return None
    try:
        return ask(Marks(state, ChunkReader(look.blob, state.attribute_chunks, look.nodes)))
    except (Corruption, StaleIndex):
        return None
