"""Wall clocks of times: who asks from when on times are shown, and a build that fails him.

What was told of a time stays, whenever it is asked for, one time alone or many of them page by page. It is refused only
where the time is forgotten. `InstantTruth.dated_as` holds it against what came when.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from persist.client import timestamps
from persist.client.shard import Shard
from persist.client.timestamps import instant_ms
from persist.core.clock_index import Mark
from persist.core.errors import Corruption, NotReadable
from persist.core.state import State
from persist.core.transitions import wall_clocks
from tests.simulation.breaking import Broken
from tests.simulation.host import COPIES, HANDLES, MAIN, WEATHER, Host, expect_damage, me
from tests.simulation.oracle import expect

DATED_SHARE = 0.4  # of the runs with history
PAGE = 3  # stretches that one request asks for, so that answers have pages
BEFORE_SINCE = 2  # so far before since it may ask


def dater(host: Host) -> None:
    """Asks for the wall clocks of a stretch of times, and of one of them alone."""
    shard = host.open(host.random.choice((MAIN, MAIN, COPIES)))
    while not host.run.stopping:  # it takes no operation from others
        state = host.run.truth(shard.name).state
        low, high = state.since.element, state.upper.element
        if low is not None and high:
            first = host.random.randint(max(0, min(low, high) - BEFORE_SINCE), high - 1)
            ask_dates(host, shard, first, host.random.randint(first, high - 1))
        host.sleep(0.4)


def ask_dates(host: Host, shard: Shard, first: int, last: int) -> None:
    """The wall clocks of the times from `first` to `last`, checked against what is known of each."""
    truth, times = host.run.truth(shard.name), range(first, last + 1)
    try:
        dates = timestamps.load_clock_stretches(shard._transport, shard.name, first, last, HANDLES.read.retry_s)
        one = host.random.choice(times)
        alone = shard.timestamp_of(one)
    except WEATHER:
        return
    except NotReadable as error:
        since, time = truth.state.since, error.details["as_of"]
        expect(not since.less_equal(time), "dated", f"when {time} came was refused with since {since}")
        host.run.path("dates forgotten")
        return
    except Corruption:
        expect_damage(host)
        return
    found = dates.of(pa.chunked_array([pa.array(times, pa.int64())])).to_pylist()
    for time, at in zip(times, found, strict=True):
        truth.instants.dated_as(time, _ms(at), me(host))
    truth.instants.dated_as(one, _ms(alone), me(host))
    host.run.path("dates told")


def small_pages() -> Broken:
    return patch.object(timestamps, "PAGE", PAGE)


def _ms(at: datetime | None) -> int | None:
    return None if at is None else instant_ms("at", at)


# --- broken builds


def date_before_its_mark() -> Broken:
    """What has no mark yet is told the next millisecond, and not the point of the grid at which its mark will lie."""
    real = wall_clocks._newest_first

    def newest_first(state: State) -> list[Mark]:
        marks = real(state)
        if marks and marks[0] is not state.seal.last:
            marks[0] = Mark(state.seal.floor_ms + 1, marks[0].upper)
        return marks

    return patch.object(wall_clocks, "_newest_first", newest_first)


BROKEN: tuple[Any, ...] = (date_before_its_mark,)

__all__ = ["BROKEN", "DATED_SHARE", "ask_dates", "dater", "small_pages"]
