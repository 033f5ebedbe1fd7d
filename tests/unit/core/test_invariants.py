"""What is checked where batches are replaced finds what the whole check finds, and looks at no other batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from persist.core.batch import Description, HollowBatch, Trace, batch_of, trace_of
from persist.core.errors import Corruption
from persist.core.frontier import Antichain
from persist.core.invariants import check_batches_replaced, check_state
from persist.core.record import replace
from persist.core.state import State
from tests.support.shard import Shard, make_part, make_run

COUNT = 6


def batch(lower: int, upper: int, *numbers: int, since: int = 0, rows: int = 1) -> HollowBatch:
    desc = Description(Antichain(lower), Antichain(upper), Antichain(since))
    return batch_of(desc, tuple(make_run(make_part(n, rows=rows, times=(lower, lower), inline=7)) for n in numbers))


@pytest.fixture
def base() -> State:
    return replace(Shard().state, trace=trace_of(batch(n, n + 1, n) for n in range(COUNT)))


def spliced(base: State, *came: HollowBatch) -> State:
    """The State in which these stand for the batches of `[2, 4)`."""
    return replace(base, trace=base.trace.splice(2, 2, came))


def test_a_merge_of_two_batches_is_sound(base: State) -> None:
    check_batches_replaced(base, spliced(base, batch(2, 4, 20)))
    check_batches_replaced(base, replace(base, trace=base.trace.push(batch(COUNT, COUNT + 1, 30))))


BAD: dict[str, Callable[[State], State]] = {
    "do not tile: .* follows .2.": lambda base: spliced(base, batch(3, 4, 20)),
    "do not tile: .* follows .3.": lambda base: spliced(base, batch(2, 3, 20)),
    "do not tile": lambda base: spliced(base),
    "do not tile: .2.* follows .3.": lambda base: replace(base, trace=base.trace.splice(3, 0, (batch(2, 3, 20),))),
    "beyond the since": lambda base: spliced(base, batch(2, 4, 20, since=3)),
    "occurs twice": lambda base: spliced(base, batch(2, 4, 5)),
    "has no rows": lambda base: spliced(base, batch(2, 4, 20, rows=0)),
    "miscounted": lambda base: replace(base, trace=Trace(spliced(base, batch(2, 4, 20)).trace.batches, 1, COUNT - 1)),
    "has dropped rows": lambda base: replace(spliced(base, batch(2, 4, 20)), floor=1),
}


@pytest.mark.parametrize("said", BAD)
def test_what_the_whole_check_refuses_is_refused(base: State, said: str) -> None:
    bad = BAD[said](base)
    with pytest.raises(Corruption, match=said):
        check_batches_replaced(base, bad)
    with pytest.raises(Corruption):
        check_state(bad)
