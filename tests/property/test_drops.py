"""Truncations and overwrites by a drop: as plain dicts say, at every readable time, and to all who listen over them.

On the stack of `test_tags`: retractions, merges, collections, tags and readers of tags, moves of since.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st

from persist.core import commands as c
from persist.core.errors import InvalidUsage
from tests.property.test_tags import TAG_STEPS, Tagged
from tests.support.examples import examples
from tests.support.maintained import NAME, Row

# Most steps only add rows, since a drop is refused over retractions that follow its cut.
ADDED = st.lists(
    st.tuples(st.sampled_from([f"k{n}" for n in range(4)]), st.integers(0, 1), st.integers(0, 2), st.integers(1, 2)),
    max_size=6,
)
DROP_STEPS = st.one_of(
    st.tuples(st.just("append"), ADDED),
    st.tuples(st.just("append"), ADDED),
    st.tuples(st.just("insert"), ADDED),
    st.tuples(st.just("drop"), st.integers(0, 50)),
    st.tuples(st.just("drop"), st.integers(0, 50)),
    st.tuples(st.just("drop"), st.integers(0, 50)),
    st.tuples(st.just("overwrite"), ADDED),
    st.tuples(st.just("overwrite"), ADDED),
    st.tuples(st.just("settle"), st.none()),
    st.tuples(st.just("merge"), st.booleans()),
    st.tuples(st.just("truncate"), st.integers(0, 50)),
    st.tuples(st.just("restore"), st.integers(0, 50)),
    st.tuples(st.just("retract_new"), st.integers(1, 3)),
    TAG_STEPS,
)


@dataclass(frozen=True)
class Taken:
    """What a truncation took away at a time."""

    cut: int
    at: int
    rows: Counter[tuple[str, int]]


class Dropped(Tagged):
    """`world.rows` has what listeners see. `written` has what was written, by whom ever: drops go by its times."""

    def __init__(self, inline: bool) -> None:
        super().__init__(inline)
        self.unwritten: set[int] = set()  # places in `world.rows` of what drops took away
        self.floor = 0
        self.truncations: list[Taken] = []  # that no restore has undone, of either mode
        self.drops = 0

    @property
    def cut(self) -> int:
        return self.truncations[-1].cut if self.truncations else 0

    def written(self) -> list[Row]:
        return [row for place, row in enumerate(self.world.rows) if place not in self.unwritten]

    def held_between(self, lower: int, upper: int) -> bool:
        """Whether updates of these times are there. What one write added and took away is not."""
        sums: Counter[tuple[str, int, int]] = Counter()
        for key, value, time, diff in self.written():
            sums[key, value, time] += diff
        return any(lower <= time < upper for (_, _, time), diff in sums.items() if diff)

    def drop(self, choice: int) -> None:
        if self.upper == 0:
            return
        cut = self.since + 1 + choice % (self.upper - self.since)
        refused = ""
        try:
            done = self.world.shard.truncate(cut, mode="drop")
        except InvalidUsage as error:
            refused = error.message
        if refused:
            restored = "dropped already" in refused
            assert cut <= self.floor if restored else any(row[3] < 0 for row in self.written()), refused
            return
        going: Counter[tuple[str, int]] = Counter()
        for key, value, time, diff in self.written():
            if self.floor <= time < cut:
                going[key, value] += diff
        if cut <= self.cut or not done.changed:
            assert not done.changed
            assert cut <= self.cut or not any(going.values())  # since has passed what came and went, and merges too
            return
        assert done.lower.element == self.upper
        for (key, value), count in going.items():
            self.unwritten.add(len(self.world.rows))
            self.world.rows.append((key, value, self.upper, -count))
        self.truncations.append(Taken(cut, self.upper, going))
        self.floor, self.drops = cut, self.drops + 1
        self.upper += 1
        assert self.world.contents(self.upper - 1) == self.world.expected(self.upper - 1)
        assert not self.world.shard.truncate(cut, mode="drop").changed

    def overwrite(self, added: list[tuple[str, int, int, int]]) -> None:
        """What is there goes by a drop, and other rows are there from the same time on."""
        fresh = [(key, value) for key, value, _, count in added for _ in range(count)]
        done = self.world.shard.overwrite([{"k": key, "v": value} for key, value in fresh])
        assert done.added == len(fresh)
        assert self.upper == 0 or done.removed is None
        if not done.changed:
            assert not fresh
            assert not (self.upper and self.world.expected(self.upper - 1))
            return
        assert done.lower.element == self.upper
        going = Counter(self.world.expected(self.upper - 1)) if self.upper else Counter()
        for (key, value), count in going.items():
            self.unwritten.add(len(self.world.rows))
            self.world.rows.append((key, value, self.upper, -count))
        self.world.rows += [(key, value, self.upper, 1) for key, value in fresh]
        if self.world.state().truncated.at == self.upper:
            self.truncations.append(Taken(self.upper, self.upper, going))
            self.floor, self.drops = self.upper, self.drops + 1
        else:
            assert not going
        self.upper += 1
        assert self.world.contents(self.upper - 1) == self.world.expected(self.upper - 1)

    def settle(self, _: None) -> None:
        self.world.user.machine(NAME).apply(c.ForgetDropped())

    def truncate(self, choice: int) -> None:
        if self.upper == 0:
            return
        times = self.readable()
        cut = times[choice % len(times)] + 1
        held, left = self.world.expected(self.upper - 1), Counter(self.world.expected(cut - 1))
        for known in self.truncations:
            if known.at >= cut:
                left.subtract(known.rows)
        gone = {row: min(left[row], held[row]) for row in left if left[row] > 0 and held[row] > 0}
        gone = {} if cut <= self.cut else gone
        assert self.world.shard.truncate(cut, dry_run=True).removed == sum(gone.values())
        done = self.world.shard.truncate(cut)
        assert (done.changed, done.removed) == (bool(gone), sum(gone.values()))
        if cut > self.cut:  # what found nothing is remembered too
            self.truncations.append(Taken(cut, self.upper, Counter(gone)))
        if gone:
            self.world.rows += [(key, value, self.upper, -count) for (key, value), count in gone.items()]
            self.upper += 1
        assert self.world.contents(self.upper - 1) == self.world.expected(self.upper - 1)

    def restore(self, choice: int) -> None:
        if self.upper == 0:
            return
        time = self.since + choice % (self.upper - self.since)
        then, held = self.world.expected(time), self.world.expected(self.upper - 1)
        back = {row: then[row] - held[row] for row in {*then, *held} if then[row] != held[row]}
        done = self.world.shard.restore(time)
        assert done.changed == bool(back)
        if back:
            self.world.rows += [(key, value, self.upper, diff) for (key, value), diff in back.items()]
            self.truncations = [known for known in self.truncations if known.at <= time]
            self.upper += 1

    def retract_new(self, count: int) -> None:
        """Add a row and take it away again in one go, and of what a drop took away some more."""
        self.append([("k9", count, 0, 1), ("k9", count, 2, -1)])

    def check(self) -> None:
        super().check()
        self.held.clear()  # they are closed now
        shard = self.world.client.shard(NAME)
        for start in range(self.since, self.upper, 2):
            self.check_listen(start)
            for end in {self.since, self.upper - 1, (start + self.upper) // 2}:
                then, later = self.world.expected(start), self.world.expected(min(end, self.upper - 1))
                changes = shard.changes(start, min(end, self.upper - 1), num_splits=2).to_arrow().to_pylist()
                found = {(row["k"], row["v"]): row["__diff"] for row in changes}
                assert len(found) == len(changes)
                assert found == {row: later[row] - then[row] for row in {*then, *later} if then[row] != later[row]}

    def check_listen(self, start: int) -> None:
        sums = Counter(self.world.expected(start))
        listener = self.world.client.shard(NAME).listen(start, until=self.upper)
        for event in listener:
            for row in event.updates.to_pylist():
                assert event.lower.less_equal(row["__time"])
                sums[row["k"], row["v"]] += row["__diff"]
            if event.lower < event.upper and event.upper.element is not None:
                expected = self.world.expected(event.upper.element - 1)
                assert Counter({row: n for row, n in sums.items() if n}) == expected, f"at {event.upper}"
        assert listener.done


@examples(1, of_a_proof=120)
@given(st.booleans(), st.lists(DROP_STEPS, min_size=2, max_size=14))
@example(False, [("append", [("k0", 0, 0, 1), ("k1", 0, 2, 1)]), ("drop", 1), ("pass_by", 9), ("merge", True)])
@example(
    True,
    [
        *[("append", [("k0", 0, 0, 1), ("k1", 0, 1, 1), ("k2", 0, 2, 1)])] * 2,
        ("drop", 1), ("append", [("k0", 0, 0, 1)]), ("drop", 4), ("forget", 8), ("merge", True), ("settle", None),
    ],
)  # fmt: skip
@example(
    False,
    [
        ("append", [("k0", 0, 0, 1), ("k1", 0, 1, 1)]),
        ("overwrite", [("k0", 0, 0, 1), ("k2", 1, 0, 2)]), ("merge", True),
        ("overwrite", [("k2", 1, 0, 1)]), ("restore", 3), ("overwrite", []), ("truncate", 50), ("forget", 8),
    ],
)  # fmt: skip
def test_every_readable_time_and_everybody_who_listens_sees_the_drop(
    inline: bool, steps: list[tuple[str, object]]
) -> None:
    played = Dropped(inline)
    for step, argument in steps:
        played.play(step, argument)
    played.merge(idle=True)
    played.check()
    played.settle(None)
    played.check()
    played.merge(idle=True)
    played.settle(None)
    played.check()
