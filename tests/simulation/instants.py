"""The naive truth of wall clocks and of what a shard keeps: which upper there was when, by true time.

The blob store's clock is the true one. A clock that counts as checked is off from it by at most `off_ms`, which is
the most that any clock of the run was, as far as such a clock counts at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from persist.commit.clocks_and_ids import JUMP_MS_MAX, OFFSET_MS_MAX
from persist.core.frontier import Antichain
from persist.core.shard_settings import ShardSettings
from persist.core.state import State
from tests.simulation.oracle_errors import expect

CHECKED_OFF_MS_MAX = OFFSET_MS_MAX + JUMP_MS_MAX  # a clock that is off by more does not count


def number(frontier: Antichain) -> float:
    """The frontier's time; `[]` lies beyond all of them."""
    return math.inf if frontier.element is None else frontier.element


@dataclass(frozen=True)
class Made:
    """A commit: nothing of it was there before `came_ms`, all of it was at `at_ms`. The `upper` since then.

    `dated`: all rows are known by a checked stamp, as the State says itself.
    """

    came_ms: int
    at_ms: int
    upper: float
    dated: bool


@dataclass
class InstantTruth:
    """What is true of one life of a shard. `may_forget` is the time to which its settings ever let since move."""

    off_ms: Callable[[], int] = lambda: 0
    made: list[Made] = field(default_factory=lambda: [Made(-1, 0, 0, dated=True)])
    answers: dict[int, tuple[float, str]] = field(default_factory=dict)  # by instant, and who heard it first
    shown: list[tuple[int, int]] = field(default_factory=list)  # times, and the instants from which they are shown
    dated: dict[int, tuple[int, str]] = field(default_factory=dict)  # by time: from when on it is shown, and who heard
    grids_ms: set[int] = field(default_factory=set)
    asked: float = 0  # to which somebody asked to forget
    may_forget: float = 0

    # --- what was committed

    def committed(self, old: State, new: State, now_ms: int, sent_ms: int) -> None:
        """`sent_ms`: when the latest of the commands that landed was sent first."""
        self.grids_ms.add(new.settings.mark_every_ms)
        came_ms = max(sent_ms, self.made[-1].at_ms)
        self.made.append(Made(came_ms, now_ms, number(new.upper), new.seal.passed is None))
        if new.settings != old.settings:
            grew = new.settings.version > old.settings.version
            expect(grew, "settings", f"settings {old.settings} of {new.name} are followed by {new.settings}")
        self._check_kept(old, new, now_ms)

    def _check_kept(self, old: State, new: State, now_ms: int) -> None:
        """Since moves only as far as the settings let it, or as somebody asked who may."""
        changes = new.settings.version - old.settings.version
        if not (old.settings.keeps_history and new.settings.keeps_history) or changes > 1:
            self.may_forget = max(number(new.since), self._aged(new.settings, now_ms))
            return
        aged = max(self._aged(old.settings, now_ms), self._aged(new.settings, now_ms))
        self.may_forget = max(self.may_forget, aged)
        if new.since == old.since or new.since.is_empty:  # only a drop comes to that here
            return
        most = max(self.may_forget, self.asked)
        expect(
            number(new.since) <= most,
            "policy",
            f"{new.name} forgets before {new.since} by {new.settings}, which let it forget before {most}",
        )

    def _aged(self, settings: ShardSettings, now_ms: int) -> float:
        """The latest time that settings with an age may let go now."""
        if not settings.version or settings.history_ms is None:
            return 0
        return self.latest(now_ms - settings.history_ms + self.off_ms()) - 1

    # --- what was answered

    def latest(self, at_ms: int) -> float:
        """The upper with all that was there at the instant, or may have been."""
        return max(made.upper for made in self.made if made.came_ms < at_ms + self.off_ms())

    def earliest(self, at_ms: int) -> float:
        """The upper with all that was there for certain a grid before the instant. A change of grid costs one more."""
        before_ms = at_ms - self.off_ms() - 2 * max(self.grids_ms, default=0)
        return max(made.upper for made in self.made if made.dated and made.at_ms <= max(0, before_ms))

    def answered(self, at_ms: int, upper: Antichain, who: str) -> None:
        """Somebody was told that the instant names this upper."""
        found = number(upper)
        known, first = self.answers.setdefault(at_ms, (found, who))
        expect(known == found, "sealed", f"{at_ms} ms is {found} for {who}, and was {known} for {first}")
        low, high = self.earliest(at_ms), self.latest(at_ms)
        expect(found <= high, "sealed", f"{who}: {at_ms} ms shows {found}, and only {high} had come by then")
        expect(found >= low, "sealed", f"{who}: {at_ms} ms shows {found}, and {low} was there before")

    def dated_as(self, time: int, at_ms: int | None, who: str) -> None:
        """Somebody was told that the time is shown from this instant on (None: nobody knows)."""
        told, first = self.dated.get(time, (at_ms, who))
        if len(self.grids_ms) == 1:  # what is told of instants to come holds while the grid stays
            expect(told == at_ms, "dated", f"time {time}: shown from {at_ms} ms for {who}, from {told} for {first}")
        if at_ms is None:
            return
        high, low = self.latest(at_ms), self.earliest(at_ms - 1)
        expect(high > time, "dated", f"{who}: time {time} is shown from {at_ms} ms, and only {high} had come")
        expect(low <= time, "dated", f"{who}: time {time} is shown from {at_ms} ms, and {low} was there before")
        if time not in self.dated:
            self.dated[time] = at_ms, who
            self.shown.append((time, at_ms))

    def refused(self, at_ms: int, since: Antichain, who: str) -> None:
        """Somebody was told that the instant is not known, or not any more."""
        low = self.earliest(at_ms)
        expect(low <= number(since), "sealed", f"{who}: {at_ms} ms is not known; {low} was there, since is {since}")

    def check(self) -> None:
        """Answers for later instants are no earlier, and times are shown from the instants that were told."""
        before = 0.0
        for at_ms, (upper, who) in sorted(self.answers.items()):
            expect(before <= upper, "sealed", f"{who}: {at_ms} ms is {upper}, and an earlier instant is {before}")
            before = upper
        for time, shown_ms in self.shown:
            for at_ms, (upper, who) in self.answers.items():
                said = f"time {time} is shown from {shown_ms} ms on, but {at_ms} ms is {upper} for {who}"
                expect((at_ms >= shown_ms) == (upper > time), "sealed", said)


__all__ = ["CHECKED_OFF_MS_MAX", "InstantTruth", "Made", "number"]
