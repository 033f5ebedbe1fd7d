"""What a listener gives, time by time: a commit that comes in pieces is put together."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from persist.client.listen import Listen
from persist.core.antichain import Antichain


def whole_events(listen: Listen, wait_s: float) -> Iterator[tuple[pa.Table, Antichain]]:
    """The updates before each frontier that is reached, and that frontier; waits at most so long for the first.

    The pieces of a large commit are held until the last one came, since what is appended is a whole interval of times.
    Raises what `Listen.next_events` does.
    """
    held: list[pa.Table] = []
    for event in listen.next_events(wait_s):
        held.append(event.updates)
        if event.lower != event.upper:
            yield pa.concat_tables(held), event.upper
            held = []
