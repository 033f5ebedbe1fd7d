"""What a process knows of bindings, in memory. Pure.

The newest bindings are known, from some time on. Of each partition `floor` is where it stood then: which time a
position up to it has, only the shard tells.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from persist.patterns.positions import BEFORE_ALL, Binding, Numbers

NOT_BOUND = -1  # in a column of times
_INT64 = "q"


@dataclass(slots=True)
class Tail:
    """The newest bindings of one partition, ascending both ways: positions in `(floor, head]`."""

    floor: int = BEFORE_ALL
    positions: array[int] = field(default_factory=lambda: array(_INT64))
    times: array[int] = field(default_factory=lambda: array(_INT64))

    @property
    def head(self) -> int:
        """The last position that is bound; BEFORE_ALL where none is."""
        return self.positions[-1] if self.positions else self.floor

    def at(self, time: int) -> int:
        """The last position that is bound to a time of at most `time`, if that is not before what is known."""
        count = bisect_right(self.times, time)
        return self.positions[count - 1] if count else self.floor

    def time_of(self, position: int) -> int:
        """The time of a position in `(floor, head]`."""
        return self.times[bisect_left(self.positions, position)]

    def times_of(self, positions: Numbers) -> Numbers:
        """The times of positions beyond `floor`; NOT_BOUND beyond `head`."""
        return times_by(np.array(self.positions, np.int64), np.array(self.times, np.int64), positions)

    def add(self, position: int, time: int) -> None:
        """One more binding, unless the position is bound already (a whole mint tells it again)."""
        if position > self.head:
            self.positions.append(position)
            self.times.append(time)

    def forget(self, time: int) -> None:
        """Forget the bindings up to that time."""
        count = bisect_right(self.times, time)
        if count:
            self.floor = self.positions[count - 1]
            del self.positions[:count], self.times[:count]


def times_by(bound: Numbers, times: Numbers, positions: Numbers) -> Numbers:
    """The time of each position, by the ascending positions `bound` to `times`; NOT_BOUND beyond the last one."""
    places = np.searchsorted(bound, positions, side="left")
    return np.append(times, NOT_BOUND)[places]


class Known:
    """Every binding with a time in `[since, upper)`, and where each partition stood before `since`."""

    def __init__(self) -> None:
        self.since = 0
        self.upper = 0
        self.rows = 0  # in the tails
        self.unsaved = 0  # rows since the last whole mint: a mint that is not whole adds to them
        self.tails: dict[str, Tail] = {}

    def __repr__(self) -> str:
        return f"Known([{self.since}, {self.upper}), {len(self.tails)} partitions, {self.rows} bindings)"

    def begin(self, time: int, heads: Mapping[str, int]) -> None:
        """Begin with a whole mint at `time`, which tells where every partition stood then."""
        self.since = time + 1
        self.upper = max(self.upper, self.since)
        self.tails = {partition: Tail(floor=position) for partition, position in heads.items()}

    def head(self, partition: str) -> int:
        """The last position of the partition that is bound; BEFORE_ALL where none is."""
        tail = self.tails.get(partition)
        return BEFORE_ALL if tail is None else tail.head

    def heads(self) -> dict[str, int]:
        """The same of every partition."""
        return {partition: tail.head for partition, tail in self.tails.items()}

    def add(self, rows: Iterable[tuple[str, int, int]], whole: bool) -> None:
        """More bindings (partition, position, time), in order of their times. `whole`: the last mint of them was."""
        before = self.rows
        for partition, position, time in rows:
            tail = self.tails.setdefault(partition, Tail())
            count = len(tail.times)
            tail.add(position, time)
            self.rows += len(tail.times) - count
        self.unsaved = 0 if whole else self.unsaved + self.rows - before

    def reach(self, upper: int) -> None:
        """Every time before `upper` is complete."""
        self.upper = max(self.upper, upper)

    def trim(self, rows_max: int) -> None:
        """Forget the older half of the times once there are more than `rows_max` bindings."""
        if self.rows <= rows_max:
            return
        times = np.concatenate([np.array(tail.times, np.int64) for tail in self.tails.values()])
        middle = int(np.median(times))
        for tail in self.tails.values():
            tail.forget(middle)
        self.since = max(self.since, middle + 1)
        self.rows = sum(len(tail.times) for tail in self.tails.values())

    def at(self, time: int) -> dict[str, int]:
        """Where each partition stood at `time`, which is not before `since - 1`."""
        found = {partition: tail.at(time) for partition, tail in self.tails.items()}
        return {partition: position for partition, position in found.items() if position != BEFORE_ALL}

    def not_covered(self, positions: Mapping[str, int]) -> dict[str, int]:
        """Those of the positions that are not bound yet."""
        return {partition: at for partition, at in positions.items() if at > self.head(partition)}

    def past(self, positions: Mapping[str, int]) -> dict[str, int]:
        """Those of the positions of whose time only the shard tells."""
        return {
            partition: at
            for partition, at in positions.items()
            if partition in self.tails and at <= self.tails[partition].floor
        }

    def covering(self, positions: Mapping[str, int]) -> Binding:
        """The first binding that covers all of them, which are bound, none of them in the past."""
        time = max(self.tails[partition].time_of(position) for partition, position in positions.items())
        return Binding({partition: self.tails[partition].at(time) for partition in positions}, time)
