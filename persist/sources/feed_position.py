"""How far a shard has been fed from its feed, kept with the shard, and appends by which it moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from persist.client.shard import Shard
from persist.client.write import Updates, WriteHandle
from persist.core.attribute import AttributeUpdate, named_key
from persist.core.errors import AttributeMismatch, Conflict, Unavailable, UpperMismatch
from persist.core.frontier import TIME_MAX

TIME = "__time"
POSITION = named_key("fed before the time")
REACHED = named_key("fed up to the upper")  # if beyond the position: earlier times belong to the feed, too
APPEND_TRIES_MAX = 100  # a try fails if a rival was faster, or another writer took a time

Intervals = tuple[tuple[int, int], ...]  # half-open, ascending


class FeedPosition:
    """How far a shard has been fed from its feed (bindings, or a log), as this process knows it. Not thread-safe.

    The shard contains the updates of the feed at every time before `before`; `upper` is its first free time. The
    position is an attribute that moves in the commit that writes the rows. The upper is not enough, because inserts,
    erasures and recoveries take times of the shard, too. Updates of the feed at taken times are written at the first
    free time.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._stored: int | None = None
        self._accepted = 0
        self.before = 0
        self.upper = 0

    def load(self) -> None:
        """Read the position from the shard. Raises Conflict (it is closed, or others have written to it)."""
        view = self._shard.view(with_service_times=True)  # first, so that the position is not older than the upper
        attributes = self._shard.attributes.get_many([POSITION, REACHED])
        self._stored = attributes[POSITION]
        self.upper = self._check_open(view.upper.element)
        taken = tuple((start, min(end, self.upper)) for start, end in view.service_times if start < self.upper)
        self.before = self._stored or 0
        others = tuple(_gaps(taken, max(self.before, attributes[REACHED] or 0), self.upper))
        is_unfed = self._stored is None and not taken  # without a position the writers are unknown, and nothing is lost
        if others and others[-1][1] > self._accepted and not is_unfed:
            raise Conflict(
                f"times {_show(others)} of shard {self._shard.name!r} were written by others than its feed; stop the "
                "other writers, then call rebind() to continue"
            )
        if self._stored is None and others:  # the feed begins at a later time
            self.before = self.upper

    def accept(self) -> None:
        """Accept the times that others have written up to now. Raises Conflict (the shard is closed)."""
        self._accepted = self._check_open(self._shard.upper().element)

    def refresh(self) -> None:
        """Learn the progress of rivals, with one request if there is none. Raises as `load`."""
        if self._shard.attributes.get(POSITION) != self._stored:
            self.load()

    def append(self, writer: WriteHandle, end: int | None, rows: Callable[[], Updates | None]) -> None:
        """Write the updates of the feed before `end` to the shard; None: write all, and close the shard.

        Args:
            writer: a writer of the shard.
            end: nothing is written beyond it.
            rows: returns the updates from the time `before` on, after `place`; None: there are none. It is called again
                after a rival was faster, or another writer took a time.
        Raises: Unavailable (that happened too often; retry), Conflict as `load`, and as the writer.
        """
        for _ in range(APPEND_TRIES_MAX):
            if end is not None and self.before >= end:
                return
            updates = rows()
            if updates is None and end is not None and end <= self.upper:  # nothing to write at taken times
                self.before = end
                return
            upper = None if end is None else max(end, self.upper + (updates is not None))
            moves = [AttributeUpdate.replace_if_equals(POSITION, TIME_MAX if end is None else end, self._stored)]
            if upper is not None and upper != end:
                moves.append(AttributeUpdate.replace(REACHED, upper))
            info = {"feed_times": [self.before, self.upper]} if self.before < self.upper else None
            try:
                writer.append(() if updates is None else updates, self.upper, upper, attributes=moves, info=info)
            except (UpperMismatch, AttributeMismatch):
                self.load()
                continue
            self.before = self._stored = TIME_MAX if end is None else end
            self.upper = self.upper if upper is None else upper
            return
        raise Unavailable(f"the times of shard {self._shard.name!r} are taken by others repeatedly; retry")

    def place(self, updates: pa.Table) -> pa.Table:
        """The updates, by their times in the feed, that the shard does not contain yet, at its free times."""
        updates = updates.filter(pc.greater_equal(updates.column(TIME), self.before))
        times = pc.max_element_wise(updates.column(TIME), pa.scalar(self.upper, pa.int64()))
        return updates.set_column(updates.schema.get_field_index(TIME), TIME, times)

    def _check_open(self, upper: int | None) -> int:
        if upper is None:
            raise Conflict(f"shard {self._shard.name!r} is closed, so nothing can be written")
        return upper


def _gaps(taken: Intervals, lower: int, upper: int) -> Iterator[tuple[int, int]]:
    """The parts of `[lower, upper)` that are not in `taken`."""
    for start, end in taken:
        if lower < min(start, upper):
            yield lower, min(start, upper)
        lower = max(lower, end)
    if lower < upper:
        yield lower, upper


def _show(intervals: Intervals) -> str:
    return ", ".join(f"[{start}, {end})" for start, end in intervals[:10]) + (", …" if len(intervals) > 10 else "")
