"""Listening to a shard: every update after a time, once, in order, with progress."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

from persist.client.arguments import checked_wait
from persist.client.contents_diff import changes_at, load_full_view, runs_in_interval, runs_of
from persist.client.deadlines import Timeable
from persist.client.snapshot import VIEW_WAIT_S, Held, ReadLease, ReadSettings, check_held, part_reader, with_renewal
from persist.client.timestamps import BEFORE_ALL
from persist.client.transport import Transport
from persist.core.batch import HollowBatch
from persist.core.errors import HistoryLost, InvalidUsage, NotReadable, Overloaded, Unavailable
from persist.core.frontier import Antichain, frontier
from persist.core.ids import SeqNo
from persist.core.shard_view import SeenVersion, ShardView, ViewRequest
from persist.core.truncations_and_drops import RowDrop, clipped, drops_within, taken_away
from persist.parts import EVERYTHING, TIME, PartReader, Selected, Selection, ShardSchema, at_time, newest, valid_schemas

# A listener moves its holds at most this often per lease, so that progress does not grow the log.
DOWNGRADES_PER_LEASE = 30
EVENT_ROWS = 100_000  # adjacent batches are combined up to this number of updates


@dataclass(frozen=True, slots=True)
class ListenEvent:
    """All updates with times in `[lower, upper)`: no more will come for these times.

    `updates` has the columns, `__time` and `__diff`, consolidated and ordered by time. A batch of more than
    EVENT_ROWS updates, or of more bytes than the reader's `memory_bytes`, comes as several events, one key range after
    another, of which only the last moves the frontier: `lower == upper` means "more to come".
    """

    lower: Antichain
    upper: Antichain
    updates: pa.Table

    def __repr__(self) -> str:
        return f"ListenEvent({self.lower}, {self.upper}, {len(self.updates)} updates)"


class Listen(Timeable):
    """An iterator of events. It holds `since` at what it has delivered, so nothing it needs is forgotten or deleted.

    `Shard.listen` returns one. Iterate it, or call `next_events`. The hold is released when `until` is reached, when it
    is closed, and when a `for` loop over it is left, except by Unavailable and Overloaded: then another loop continues.
    The hold of a listener that is only polled and then forgotten lapses.
    Both raise Expired (the lease lapsed: listen anew from `frontier`), UnknownShard (the shard was dropped) and
    InvalidUsage (a selected column was renamed or dropped: listen anew from `frontier`, with the current names) before
    they return wrong events, and Unavailable (retrying is safe) and Corruption.
    """

    def __init__(
        self,
        transport: Transport,
        name: str,
        lease: ReadLease,
        between: tuple[int | None, Antichain],
        settings: ReadSettings,
        selection: Selection = EVERYTHING,
    ) -> None:
        """`between`: the time after which it begins (None: the beginning), and the frontier at which it ends."""
        as_of, until = between
        self._transport = transport
        self._name = name
        self._lease = lease
        self._settings = settings
        self._until = until
        self._selection = selection
        self._downgraded_s = transport.clock.monotonic()
        self._closed = threading.Event()
        self._seen: SeenVersion | None = None
        self.known: int | None = None  # the id of the schema that names its columns; None: that of the first view
        self.schema: ShardSchema | None = None  # of the updates of the last event
        self.frontier = frontier(0 if as_of is None else as_of + 1)

    def __repr__(self) -> str:
        return f"Listen({self._name!r}, frontier={self.frontier}, until={self._until})"

    @property
    def done(self) -> bool:
        """Whether everything before `until` (or everything, of a closed shard) was delivered."""
        return self.frontier.is_empty or self._until <= self.frontier

    def __iter__(self) -> Iterator[ListenEvent]:
        try:
            while not self.done:
                yield from self.next_events(VIEW_WAIT_S)
                if self._closed.is_set():  # by another thread, while this one waited
                    return
            self.close()
        except GeneratorExit:  # the loop was left, or the iterator was forgotten
            self._closed.set()
            self._lease.release()
            raise
        except (Unavailable, Overloaded):  # nothing is lost: another loop continues from the frontier
            raise
        except BaseException:
            self.close()
            raise

    def next_events(self, timeout_s: float) -> Iterator[ListenEvent]:
        """The events up to the shard's upper, waiting at most `timeout_s` for the first; none if nothing came.

        The frontier moves as they are taken. Raises InvalidUsage (the listener is closed and not done), and what the
        class says.
        """
        checked_wait("timeout_s", timeout_s)
        if self.done or self.frontier.element is None:
            self.close()
            return
        if self._closed.is_set():
            raise InvalidUsage(f"this listener of shard {self._name!r} was closed; listen again as of its frontier")
        self._lease.keep()
        lower = self.frontier
        request = ViewRequest(
            past=lower.element, timeout_s=timeout_s, min_seqno=self._lease.seqno, lower=lower, seen=self._seen
        )
        view = self._transport.view(self._name, request)
        if view.seqno < self._lease.seqno:
            raise HistoryLost(
                f"this listener has read v{self._lease.seqno} of shard {self._name!r}, and the log ends before it: the "
                "consensus store has lost commits. Its last events may be lost; listen anew to continue without them"
            )
        if self._closed.is_set():  # by another thread, and so the hold is gone
            return
        self._seen = view.seen
        check_held(view, max(self.frontier.element - 1, 0))
        upper = min(view.upper, self._until)
        if upper <= lower:
            return
        wanted, reader = self._reader(view)
        for drop in drops_within(view.drops, lower.element or 0, upper.element):
            yield from self._steps(view, Antichain(drop.at), reader, wanted)
            yield from self._dropped(view, drop)
        yield from self._steps(view, upper, reader, wanted)
        self._downgrade(view.seqno)

    def _reader(self, view: ShardView) -> tuple[Selected, PartReader]:
        """The selection by the schema of this view, and a reader for it.

        Raises InvalidUsage if a name of the selection means no column by now, or another one than at first.
        """
        schemas = valid_schemas(view.schemas)
        number, schema = newest(schemas)
        self.known = number if self.known is None else self.known
        wanted = self._selection.on(schema)
        wanted.check_names(schemas.get(self.known, schema), f"this listener of shard {self._name!r}")
        return wanted, part_reader(self._transport, view, self._settings, wanted.keeps)[1]

    def _steps(self, view: ShardView, upper: Antichain, reader: PartReader, wanted: Selected) -> Iterator[ListenEvent]:
        """The events of what was written before `upper`."""
        if upper <= self.frontier:
            return
        batches = [b for b in view.batches if self.frontier < b.desc.upper and b.desc.lower < upper]
        for group in _groups(batches, self._settings.memory_bytes):
            # The events of adjacent batches: one, ordered by time, unless it would be too large.
            end, parts = min(group[-1].desc.upper, upper), [part for batch in group for part in batch.parts()]
            pieces = reader.read_updates(parts, self.frontier, end, key_range=wanted.key_range, columns=wanted.read)
            yield from self._events(pieces, sum(batch.rows for batch in group), end, wanted)

    def _dropped(self, view: ShardView, drop: RowDrop) -> Iterator[ListenEvent]:
        """The events of a drop: the rows that it removed, at its time, and the rows written at that time.

        The removed rows are computed here, since no retractions were written.
        """
        whole = load_full_view(self._transport, self._name, view)
        check_held(whole, max(drop.at - 1, 0))
        wanted, reader = self._reader(whole)
        runs = taken_away(runs_of(whole), whole.drops, drop)
        written = runs_in_interval(clipped(runs_of(whole), drop.cut), drop.at - 1, drop.at)
        rows = sum(part.rows for run in (*runs, *written) for part in run.parts)
        pieces = changes_at(reader, runs, written, drop, wanted.key_range, wanted.read)
        yield from self._events(pieces, rows, Antichain(drop.at + 1), wanted)

    def _events(self, pieces: Iterator[pa.Table], rows: int, end: Antichain, wanted: Selected) -> Iterator[ListenEvent]:
        """The updates up to `end`, of which there are at most `rows`, as one event or several.

        There is an event even without selected updates: it reports progress.
        """
        lower = self.frontier
        self.schema = wanted.schema
        held: list[pa.Table] = []
        left = self._settings.memory_bytes if rows <= EVENT_ROWS else 0
        for piece in filter(len, map(wanted.apply, with_renewal(pieces, self._lease))):
            left -= piece.nbytes
            if left < 0:
                yield from (ListenEvent(lower, lower, table) for table in held)
                held = []
            held.append(piece)
        last = pa.concat_tables(held) if held else wanted.no_updates()
        if len(held) > 1:
            last = last.take(pc.sort_indices(last, sort_keys=[(TIME, "ascending")]))
        self.frontier = end
        yield ListenEvent(lower, end, last)

    def _downgrade(self, seqno: SeqNo) -> None:
        """Called when the consumer asks for more: move the hold to the last delivered time, or release it."""
        if self.done:
            self.close()
        if self._closed.is_set():
            return
        now = self._transport.clock.monotonic()
        if now - self._downgraded_s < self._settings.lease_ms / 1000 / DOWNGRADES_PER_LEASE:
            return
        element = self.frontier.element
        since = self.frontier if element is None else Antichain(max(element - 1, 0))
        self._lease.move(since, seqno, moves_since=self._transport.listening_moves_since)
        self._downgraded_s = now

    def close(self) -> None:
        """Release the hold. Repeating it is safe. Raises nothing: if no store answers, it lapses."""
        self._closed.set()
        self._lease.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _groups(batches: Sequence[HollowBatch], bytes_max: int) -> Iterator[list[HollowBatch]]:
    """The batches in order, small ones combined: up to EVENT_ROWS updates and `bytes_max` encoded bytes."""
    group: list[HollowBatch] = []
    rows = size = 0
    for batch in batches:
        if group and (rows + batch.rows > EVENT_ROWS or size + batch.size > bytes_max):
            yield group
            group, rows, size = [], 0, 0
        group.append(batch)
        rows, size = rows + batch.rows, size + batch.size
    if group:
        yield group


class Subscription(Listen):
    """An iterator of events: first the contents as of a time, then every change after it, without a gap.

    The contents come as updates at the time `as_of`, in one event or several, of which only the last moves the
    frontier: to `as_of + 1`. If the shard is empty (`as_of` is -1), there is no event for them. The sum of `__diff` of
    all updates is the contents as of each frontier. `Shard.subscribe` returns one. Otherwise it is as `Listen`:
    `frontier` is where another `listen` continues, and an interrupted step starts again.
    """

    def __init__(self, held: Held, until: Antichain, selection: Selection, known: int | None = None) -> None:
        name = held.view.name
        if held.lease.is_point:
            raise NotReadable(
                f"shard {name!r} keeps only [{held.as_of}], and has forgotten what came after it; subscribe as of a "
                f"time from {held.view.since} on",
                as_of=held.as_of,
                since=held.view.since.to_json(),
            )
        if until < Antichain(held.as_of + 1) and until.element is not None:
            raise InvalidUsage(f"until is {until}, but the contents as of {held.as_of} come first; it must be later")
        super().__init__(held.transport, name, held.lease, (None, until), held.settings, selection)
        self.known = known
        self._begins: Held | None = held
        self.as_of = held.as_of

    def __repr__(self) -> str:
        return f"Subscription({self._name!r}, as_of={self.as_of}, frontier={self.frontier}, until={self._until})"

    def next_events(self, timeout_s: float) -> Iterator[ListenEvent]:
        """The contents first, then the events of `Listen.next_events`. `timeout_s` and Raises: see there."""
        checked_wait("timeout_s", timeout_s)
        held, at = self._begins, self.as_of
        if held is None or at == BEFORE_ALL or self.frontier > Antichain(0):
            self._begins = None  # only now: the contents are repeated until they were delivered as a whole
            yield from super().next_events(timeout_s)
            return
        if self._closed.is_set():
            raise InvalidUsage(f"this subscription to shard {self._name!r} was closed; subscribe again")
        wanted, reader = self._reader(held.view)
        rows = sum(part.rows for run in held.runs for part in run.parts)
        pieces = reader.read_range(held.runs, as_of=at, key_range=wanted.key_range, columns=wanted.read)
        self._lease.check()
        yield from self._events((at_time(table, at) for table in pieces), rows, Antichain(at + 1), wanted)
