"""Wall clocks against a plain list: an instant is answered by the last State that was stamped before it, for ever.

Commits come with clocks that jump, and with clocks that nobody has checked. Marks go to a real index of attributes in
between, and leave it when what they say is forgotten.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blob.memory_blobs import MemoryBlob
from persist.attributes.attribute_index import AttributeIndex
from persist.attributes.node_codec import Shape
from persist.attributes.node_store import NodeCache
from persist.core import commands as c
from persist.core.clock_index import GRIDS_MAX, Mark
from persist.core.errors import NotReadable, PersistError, Unavailable
from persist.core.frontier import Antichain
from persist.core.ids import ReaderId
from tests.support.examples import examples
from tests.support.location import AscendingIds
from tests.support.shard import Shard, numbered

EVERY_MS = 1_000
GRIDS_MS = (400, EVERY_MS, 1_500, 4_000)
FIRST_MS = max(GRIDS_MS)  # no checked clock is before the first point of a grid, which is a moment of 1970
SHAPE = Shape(leaf_entries_max=4, index_entries_max=4, chunk_bytes_target=500)


class Stamped(Shard):
    """A shard whose marks go to an index."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stamped, self.now_ms = True, 10_000
        self.index = AttributeIndex(MemoryBlob("mem:"), AscendingIds(), NodeCache(100_000), SHAPE)

    def asked(self, command: c.Command) -> Any:
        """The answer, or the error with which it was refused."""
        self.indexed = self.index.indexed(self.state, [command])
        [result] = self.commit(command)
        return result


class MarksAgainstList(RuleBasedStateMachine):
    @initialize(kept=st.booleans())
    def create(self, kept: bool) -> None:
        self.shard = Stamped()
        if kept:
            self.shard.one(c.SetSettings(0, 20_000, EVERY_MS))
        self.stamps: list[tuple[int | None, int]] = []  # stamp (None: not known yet), and the upper since then
        self.sealed = 0
        self.dated: dict[int, int] = {}
        self.answers: dict[int, c.TimeResolved] = {}
        self.grids: list[tuple[int, int]] = [(0, EVERY_MS)]  # from an instant on the points are so far apart

    # --- the plain list

    def committed(self, before: Any) -> None:
        """What a commit means for the list: a checked stamp dates all that came before it without one."""
        state = self.shard.state
        if state is before:
            return
        upper = state.upper.element
        assert upper is not None
        if self.shard.is_checked:
            self.sealed = max(self.sealed, self.shard.now_ms)
            self.stamps = [(self.sealed if stamp is None else stamp, at) for stamp, at in self.stamps]
        if state.upper != before.upper:
            self.stamps.append((self.sealed if self.shard.is_checked else None, upper))

    def expected(self, at_ms: int) -> Antichain:
        point = self.point(at_ms)
        shown = [upper for stamp, upper in self.stamps if stamp is not None and stamp < point]
        return Antichain(max(shown, default=0))

    def point(self, at_ms: int) -> int:
        """The last point at or before the instant."""
        start, every_ms = max(grid for grid in self.grids if grid[0] <= at_ms)
        return max(start, at_ms // every_ms * every_ms)

    def point_after(self, at_ms: int) -> int:
        start, every_ms = max(grid for grid in self.grids if grid[0] <= at_ms)
        following = [later for later, _ in self.grids if later > start]
        return min([*following, (at_ms // every_ms + 1) * every_ms])

    # --- what happens

    @precondition(lambda self: len(self.grids) < GRIDS_MAX)
    @rule(every_ms=st.sampled_from(GRIDS_MS))
    def change_the_grid(self, every_ms: int) -> None:
        """From the next point on. Where nothing was sealed yet nothing was told."""
        before = self.shard.state
        settings = before.settings
        start = self.point_after(self.sealed) if self.sealed else 0
        self.shard.one(c.SetSettings(settings.version, settings.history_ms, every_ms))
        if every_ms != settings.mark_every_ms:
            self.grids = [*(grid for grid in self.grids if grid[0] < start), (start, every_ms)]
        self.committed(before)

    @rule(by=st.integers(0, 3), passed=st.sampled_from([0, 1, 300, 700, 2_500, 60_000]), back=st.integers(0, 4))
    def append(self, by: int, passed: int, back: int) -> None:
        """By a clock that may be behind that of the one before."""
        self.shard.now_ms = max(FIRST_MS, self.shard.now_ms + (passed if back else -min(passed, 9_000)))
        before = self.shard.state
        upper = before.upper.element
        assert upper is not None
        self.shard.one(c.AdvanceUpper(Antichain(upper + by)))
        self.committed(before)

    @rule()
    def commit_something_else(self) -> None:
        before = self.shard.state
        self.shard.one(c.RegisterReader(ReaderId(numbered("r", before.seqno)), None, 1))
        self.committed(before)

    @rule(is_checked=st.booleans())
    def clock(self, is_checked: bool) -> None:
        self.shard.is_checked = is_checked

    @rule()
    def flush(self) -> None:
        before = self.shard.state
        self.shard.one(self.shard.index.flush(before))
        self.committed(before)

    @rule(ago=st.integers(0, 30_000))
    def forget(self, ago: int) -> None:
        before = self.shard.state
        self.shard.asked(c.AgeHistory(max(0, self.shard.now_ms - 20_000 - ago)))
        self.committed(before)

    @rule(at_ms=st.integers(0, 100_000), near=st.booleans())
    def ask(self, at_ms: int, near: bool) -> None:
        at_ms = self.shard.now_ms - at_ms % 5_000 if near else at_ms
        before, at_ms = self.shard.state, max(0, at_ms)
        found = self.shard.asked(c.ResolveTime(at_ms))
        self.committed(before)
        self.answered(at_ms, found)

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        at_ms = data.draw(st.sampled_from(sorted(self.answers)))
        before = self.shard.state
        self.answered(at_ms, self.shard.asked(c.ResolveTime(at_ms)))
        assert self.shard.state is before, "an instant that was answered is sealed already"

    def answered(self, at_ms: int, found: Any) -> None:
        if isinstance(found, (Unavailable, c.TimeToCome)):
            assert self.point(at_ms) > self.sealed
            assert not self.shard.is_checked or at_ms > self.shard.now_ms
            return
        if isinstance(found, NotReadable):  # its mark has left the index
            assert self.expected(at_ms) <= self.shard.state.since, f"it is not forgotten yet: {found}"
            return
        since = self.shard.state.since.element
        assert since is not None
        if found.upper.element > since:  # else it is forgotten, and who reads is told so
            assert found == c.TimeResolved(self.expected(at_ms), self.point(at_ms))
            assert self.answers.setdefault(at_ms, found) == found

    @rule(back=st.integers(1, 20))
    def ask_when_a_time_was_written(self, back: int) -> None:
        upper, since = self.shard.state.upper.element, self.shard.state.since.element
        assert upper is not None
        if upper - back < max(0, since or 0):
            return
        found = self.shard.asked(c.TimeShown(upper - back))
        assert not isinstance(found, PersistError)
        if found.at_ms is None:
            return
        if found.at_ms <= self.sealed:
            assert not self.expected(found.at_ms).less_equal(upper - back)
        assert self.dated.setdefault(upper - back, found.at_ms) == found.at_ms
        if found.at_ms and self.point_after(found.at_ms - 1) == found.at_ms:
            assert self.expected(found.at_ms - 1).less_equal(upper - back)

    @rule(back=st.integers(1, 20), many=st.integers(1, 20), limit=st.integers(2, 5))
    def ask_when_many_times_were_written(self, back: int, many: int, limit: int) -> None:
        """It is what each time by itself is told, and stays so."""
        upper, since = self.shard.state.upper.element, self.shard.state.since.element
        assert upper is not None
        first = max(upper - back, since or 0)
        times = range(first, min(first + many, upper))
        if not times:
            return
        marks: list[Mark] = []
        following: int | None = times[-1]
        while following is not None:
            before = self.shard.state
            page = self.shard.asked(c.TimesShown(first, following, limit))
            self.committed(before)
            marks, following = [*marks, *page.marks], page.following
        for time in times:
            at_ms = min((mark.at_ms for mark in marks if not mark.upper.less_equal(time)), default=None)
            assert at_ms == self.shard.asked(c.TimeShown(time)).at_ms
            if at_ms is not None:
                assert self.dated.setdefault(time, at_ms) == at_ms

    @invariant()
    def old_marks_leave(self) -> None:
        state = self.shard.state
        assert state.seal.sealed_ms <= self.sealed
        assert self.point(state.seal.sealed_ms) == self.point(self.sealed), "all points are settled"
        assert len(state.marks) + state.attribute_root.count <= len(self.stamps) + 2


def test_an_instant_whose_mark_has_left_is_not_readable() -> None:
    """What it named is forgotten. The mark of the newest time that is forgotten may be there still."""
    state = MarksAgainstList()
    state.create(kept=True)
    state.clock(is_checked=True)
    state.append(by=1, passed=1, back=0)
    state.append(by=1, passed=1, back=1)
    state.flush()
    state.flush()
    state.append(by=0, passed=60_000, back=1)
    state.forget(ago=0)
    state.flush()
    state.flush()
    assert isinstance(state.shard.asked(c.ResolveTime(0)), NotReadable)
    state.ask(at_ms=0, near=False)


MarksAgainstList.TestCase.settings = examples(3, stateful_step_count=60)
TestMarksAgainstList = MarksAgainstList.TestCase
