"""How far a shard has been fed: the time before which it has all that its feed says. A feed is bindings, or a log.

The shard keeps the position as an attribute, which moves in the commit that writes the rows. The upper of the shard
says less: inserts, erasures and recoveries take times of the shard too. The rows that the feed has at times that were
taken are written at the first time that is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from persist.client.shard import Shard
from persist.client.write import Updates, WriteHandle
from persist.core.antichain import TIME_MAX
from persist.core.attribute import AttributeUpdate, named_key
from persist.core.errors import AttributeMismatch, Conflict, Unavailable, UpperMismatch
from persist.patterns.given import TIME

POSITION = named_key("fed before the time")
REACHED = named_key("fed up to the upper")  # where that is beyond the position: times before it are the feed's too
TRIES_MAX = 100  # of an append; each failed one means that a rival was quicker, or that somebody took a time

Intervals = tuple[tuple[int, int], ...]  # half-open, ascending


class FeedPosition:
    """The position of the feed of one shard, as this process knows it. Not thread-safe.

    The shard has what the feed says of every time before `before`. `upper` is the first time of the shard that is free.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._stored: int | None = None
        self._accepted = 0
        self.before = 0
        self.upper = 0

    def load(self) -> None:
        """Learn the position from the shard. Raises Conflict (it is closed, or others have written to it)."""
        view = self._shard.view(with_service_times=True)  # first: so the position is not older than the upper
        known = self._shard.attributes.get_many([POSITION, REACHED])
        self._stored = known[POSITION]
        self.upper = self._open(view.upper.element)
        taken = tuple((start, min(end, self.upper)) for start, end in view.service_times if start < self.upper)
        self.before = self._stored or 0
        others = tuple(_gaps(taken, max(self.before, known[REACHED] or 0), self.upper))
        is_old = self._stored is None and not taken  # without a position nothing tells who wrote, nor that any is lost
        if others and others[-1][1] > self._accepted and not is_old:
            raise Conflict(
                f"times {_shown(others)} of shard {self._shard.name!r} were written by others than its feed, or by an "
                "older version of it; stop who writes there, then call rebind() to go on"
            )
        if self._stored is None and others:  # it was fed before there were positions, or begins at a time
            self.before = self.upper

    def accept(self) -> None:
        """Let what others have written up to now be. Raises Conflict (the shard is closed)."""
        self._accepted = self._open(self._shard.upper().element)

    def refresh(self) -> None:
        """Learn whether a rival has gone on; costs one request where none has. Raises as `load`."""
        if self._shard.attributes.get(POSITION) != self._stored:
            self.load()

    def append(self, writer: WriteHandle, end: int | None, rows: Callable[[], Updates | None]) -> None:
        """Let the shard have what the feed says of the times before `end`; None: of all, and close the shard.

        Args:
            writer: a writer of the shard.
            end: beyond it nothing is written.
            rows: gives what is there from the time `before` on, as `placed` changes it; None: nothing. It is asked
                again after a rival was quicker, or somebody took a time.
        Raises: Unavailable (that happened each of many times; retry), Conflict as `load`, and what the writer raises.
        """
        for _ in range(TRIES_MAX):
            if end is not None and self.before >= end:
                return
            found = rows()
            if found is None and end is not None and end <= self.upper:  # nothing to write at times that were taken
                self.before = end
                return
            upper = None if end is None else max(end, self.upper + (found is not None))
            moved = [AttributeUpdate.replace_if_equals(POSITION, TIME_MAX if end is None else end, self._stored)]
            if upper is not None and upper != end:
                moved.append(AttributeUpdate.replace(REACHED, upper))
            info = {"feed_times": [self.before, self.upper]} if self.before < self.upper else None
            try:
                writer.append(() if found is None else found, self.upper, upper, attributes=moved, info=info)
            except (UpperMismatch, AttributeMismatch):
                self.load()
                continue
            self.before = self._stored = TIME_MAX if end is None else end
            self.upper = self.upper if upper is None else upper
            return
        raise Unavailable(f"the times of shard {self._shard.name!r} are taken by others all the time; retry")

    def placed(self, rows: pa.Table) -> pa.Table:
        """Updates with their times in the feed, as the shard takes them: at times that are free, and what is new."""
        rows = rows.filter(pc.greater_equal(rows.column(TIME), self.before))
        times = pc.max_element_wise(rows.column(TIME), pa.scalar(self.upper, pa.int64()))
        return rows.set_column(rows.schema.get_field_index(TIME), TIME, times)

    def _open(self, upper: int | None) -> int:
        if upper is None:
            raise Conflict(f"shard {self._shard.name!r} is closed: nothing can be written any more")
        return upper


def _gaps(taken: Intervals, lower: int, upper: int) -> Iterator[tuple[int, int]]:
    """What `taken` leaves of `[lower, upper)`."""
    for start, end in taken:
        if lower < min(start, upper):
            yield lower, min(start, upper)
        lower = max(lower, end)
    if lower < upper:
        yield lower, upper


def _shown(found: Intervals) -> str:
    return ", ".join(f"[{start}, {end})" for start, end in found[:10]) + (", …" if len(found) > 10 else "")
