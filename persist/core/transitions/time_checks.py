"""Whether times may be written: the expected upper, intervals, and the times that the service chose itself."""

from __future__ import annotations

from collections.abc import Iterable

from persist.core.batch import Run, parts_of
from persist.core.errors import InvalidUsage, UpperMismatch
from persist.core.frontier import FAR_TIME, Antichain
from persist.core.state import SERVICE_TIMES_MAX, State


def check_upper(state: State, expected: Antichain) -> None:
    if state.upper != expected:
        raise UpperMismatch(
            f"shard {state.name!r} has upper {state.upper}, not the expected {expected}; read it and decide anew",
            expected=expected.to_json(),
            actual=state.upper.to_json(),
        )


def check_near(state: State, upper: Antichain) -> None:
    """Refuse a far upper, which is usually a mistake and would use up all times of the shard. An upper that is already
    far may advance.
    """
    if upper.element is not None and upper.element > FAR_TIME and state.upper <= Antichain(FAR_TIME):
        raise InvalidUsage(
            f"the upper {upper} of shard {state.name!r} would be beyond {FAR_TIME}, where no clock counts, and it "
            "never moves back; give it in the unit of the other times, or advance the upper with force"
        )


def no_time_left(state: State) -> UpperMismatch:
    return UpperMismatch(
        f"shard {state.name!r} has no time left: its upper is {state.upper}",
        expected=None,
        actual=state.upper.to_json(),
    )


def check_interval(lower: Antichain, upper: Antichain, runs: tuple[Run, ...]) -> None:
    if upper < lower:
        raise InvalidUsage(f"the interval from {lower} to {upper} goes backwards")
    if runs and lower == upper:
        raise InvalidUsage(f"the interval from {lower} to {upper} is empty but the batch has rows; give a later upper")


def check_times(runs: Iterable[Run], lower: Antichain, upper: Antichain) -> None:
    for part in parts_of(runs):
        if not lower.less_equal(part.time_min) or upper.less_equal(part.time_max):
            raise InvalidUsage(
                f"rows have times in [{part.time_min}, {part.time_max}], not from {lower} to before {upper}"
            )


def check_no_times(runs: Iterable[Run]) -> None:
    """Raise InvalidUsage if rows of an insert have times of their own: the service chooses its time."""
    for part in parts_of(runs):
        if part.time_min or part.time_max:
            raise InvalidUsage(
                f"rows of an insert have times in [{part.time_min}, {part.time_max}], but the service chooses the time "
                "of an insert; leave out the column __time, or use compare_and_append"
            )


def with_times(taken: tuple[tuple[int, int], ...], lower: int, upper: int) -> tuple[tuple[int, int], ...]:
    """The intervals with `[lower, upper)`, which is beyond them, appended."""
    if taken and taken[-1][1] == lower:
        return (*taken[:-1], (taken[-1][0], upper))
    if len(taken) == SERVICE_TIMES_MAX:
        taken = ((taken[0][0], taken[1][1]), *taken[2:])
    return (*taken, (lower, upper))


def check_not_taken(state: State, lower: Antichain, upper: Antichain) -> None:
    """Raise UpperMismatch if an append covers times that the service chose: their rows are not those of a replica."""
    first, last = lower.element, upper.element
    if first == last:
        return  # an interval without times has no rows
    for start, end in state.service_times:
        if first is not None and first < end and (last is None or start < last):
            raise UpperMismatch(
                f"times [{start}, {end}) of shard {state.name!r} were taken by inserts or by a recovery: an append "
                f"from {lower} to {upper} is not what was written there; append from the upper on",
                expected=lower.to_json(),
                actual=state.upper.to_json(),
            )


def at_time(runs: Iterable[Run], time: int) -> tuple[Run, ...]:
    return tuple(Run(tuple(part.at(time) for part in run.parts)) for run in runs)
