"""Reading what was routed over several shards: each update once, those of a key in the order of their appends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from persist.client.arguments import checked, checked_wait
from persist.client.columns import NamedColumns, ShardSchema, check_alike
from persist.client.listen import Listen
from persist.core.antichain import TIME_MAX, Antichain
from persist.core.errors import InvalidUsage, shown
from persist.patterns.events import whole_events
from persist.patterns.routes import Epoch, Routes

ROWS_MAX = 10_000_000  # that `read_routed` gives at once
EPOCH_COLUMN, TIME_COLUMN = "__epoch", "__time"


@dataclass(frozen=True, slots=True)
class RoutedEvent:
    """Updates of one shard in one epoch, complete before `upper`, by time. `updates` has `__time` and `__diff`.

    `schema` is that by which they were read: shards whose columns are changed one after the other differ for a while.
    """

    epoch: int
    shard: str
    upper: int
    updates: pa.Table
    schema: ShardSchema


@dataclass(frozen=True, slots=True)
class RoutedPosition:
    """How far a reader has come: in an epoch, before which time in each of its shards (left out: where it began)."""

    epoch: int = 0
    uppers: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The same for JSON."""
        return {"epoch": self.epoch, "uppers": dict(self.uppers)}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> RoutedPosition:
        """The position that `to_json` gave. Raises InvalidUsage."""
        epoch, uppers = given.get("epoch"), given.get("uppers")
        known = isinstance(uppers, Mapping) and all(type(upper) is int and upper >= 0 for upper in uppers.values())
        if type(epoch) is not int or epoch < 0 or not isinstance(uppers, Mapping) or not known:
            raise InvalidUsage(
                f"a position of routes is {shown(dict(given))}; take one that RoutedPosition.to_json gave"
            )
        return cls(epoch, dict(uppers))


class RoutedReader:
    """Follows all shards of some routes, epoch by epoch. Not thread-safe.

    An epoch is read to its end in every shard before the next one begins. So the updates of a key come in the order of
    their appends, whichever shards it was routed to. Shards of one epoch are read in turns. Their history has to reach
    back to what is read. `position` is where another reader goes on; it holds nothing by itself.
    """

    def __init__(self, routes: Routes, position: RoutedPosition | None = None, **selected: Any) -> None:
        """Begin at `position` (None: at the first epoch).

        Args:
            routes: which shards.
            position: of a reader before it.
            selected: as `Shard.listen` says: `where`, `columns`, `start_key`, `end_key`, `key_prefix`. Names of columns
                mean those so called now, in every epoch.
        Raises: InvalidUsage (the arguments are others; unknown columns are refused by the first step), and what every
            call may.
        """
        checked("routes", routes, Routes)
        checked("position", position, RoutedPosition, type(None))
        self.routes = routes
        self.position = position or RoutedPosition()
        self._listens: dict[str, Listen] = {}
        self._known: dict[str, int | None] = {}  # by which schemas of the shards it selects, as its first listeners did
        self._named: NamedColumns | None = None
        if selected:
            name = routes.opened()[-1].shards[0]
            self._named = NamedColumns(routes.of(name), f"this reader of routes {routes.shard.name!r}", **selected)
            self._known[name] = self._named.schema_id
        self._epochs = 0  # that were open when these began

    def next_events(self, wait_s: float = 0.0) -> Iterator[RoutedEvent]:
        """What is there now; waits at most `wait_s` for the first of it. `position` moves as events are taken.

        After any error another call goes on from `position`; so it does after Expired (nobody asked for minutes).
        Raises: NotReadable (a shard has forgotten what comes next), and what `Shard.listen` and its steps may.
        """
        checked_wait("wait_s", wait_s)
        came = False
        try:
            for event in self._steps(0.0):
                came = True
                yield event
            if not came and wait_s > 0:
                yield from self._steps(wait_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give back what it holds. Raises nothing."""
        for listen in self._listens.values():
            listen.close()
        self._listens = {}

    def __enter__(self) -> RoutedReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- how

    def _steps(self, wait_s: float) -> Iterator[RoutedEvent]:
        """One step of each shard of the last epoch, once those before it were read to their ends."""
        epochs = self.routes.opened()
        if self._epochs != len(epochs):  # an epoch has ended, and its listeners are to end there
            self.close()
            self._epochs = len(epochs)
        while self.position.epoch < len(epochs) - 1:
            yield from self._to_the_end(epochs[self.position.epoch], epochs[self.position.epoch + 1])
            self.close()
            self.position = RoutedPosition(self.position.epoch + 1)
        last = epochs[-1]
        for name in last.shards:
            yield from self._step(last, name, wait_s / len(last.shards))

    def _to_the_end(self, epoch: Epoch, following: Epoch) -> Iterator[RoutedEvent]:
        """All that is left of an epoch that has ended. Each shard is complete there, and need not be waited for."""
        for name in epoch.shards:
            end = (following.began or {})[name]
            if self._upper(epoch, name) < end:
                with self._listen(epoch, name, end) as listen:
                    while not listen.done:
                        for updates, frontier in whole_events(listen, 0.0):
                            yield from self._told(epoch, name, updates, frontier, listen)

    def _step(self, epoch: Epoch, name: str, wait_s: float) -> Iterator[RoutedEvent]:
        if name not in self._listens:
            self._listens[name] = self._listen(epoch, name, None)
        listen = self._listens[name]
        for number, (updates, frontier) in enumerate(whole_events(listen, wait_s)):
            # What was seen may be of the next epoch, if that was open by then. Other shards come first in that case.
            if number == 0 and len(self.routes.opened()) != self._epochs:
                self.close()
                return
            yield from self._told(epoch, name, updates, frontier, listen)

    def _listen(self, epoch: Epoch, name: str, end: int | None) -> Listen:
        begin, purpose = self._upper(epoch, name), f"routes {self.routes.shard.name}"
        shard = self.routes.of(name)
        if self._named is None:
            listen = shard.listen(begin - 1, until=end, purpose=purpose)
        else:
            listen = self._named.listen(shard, begin - 1, end, purpose)
        if name not in self._known and self._named is not None and listen.known is not None:
            try:
                self._named.check(shard, listen.known)
            except BaseException:
                listen.close()
                raise
        listen.known = self._known.setdefault(name, listen.known)
        return listen

    def _upper(self, epoch: Epoch, name: str) -> int:
        return self.position.uppers.get(name, (epoch.began or {})[name])

    def _told(
        self, epoch: Epoch, name: str, updates: pa.Table, frontier: Antichain, listen: Listen
    ) -> Iterator[RoutedEvent]:
        schema = listen.schema or self.routes.of(name).schema
        upper = TIME_MAX if frontier.element is None else frontier.element
        if len(updates):
            yield RoutedEvent(epoch.number, name, upper, updates, schema)
        self.position = RoutedPosition(epoch.number, {**self.position.uppers, name: upper})


def read_routed(routes: Routes, *, rows_max: int = ROWS_MAX, **selected: Any) -> pa.Table:
    """All updates that were routed up to now, by key, and those of a key in the order of their appends.

    Args:
        routes: which shards.
        rows_max: more than so many updates are refused; take a part of them, by keys.
        selected: as `Shard.listen` says: `where`, `columns` (with the key), `start_key`, `end_key`, `key_prefix`.
    Returns: the columns, `__time` (of the shard of then), `__diff` and `__epoch`. Sum up `__diff` for the contents.
    Raises: InvalidUsage (there are more updates, or shards have different columns: change them alike, then read
        again), NotReadable (a shard has forgotten what was there in the beginning).
    """
    checked("rows_max", rows_max, int)
    if rows_max <= 0:
        raise InvalidUsage(f"rows_max is {shown(rows_max)}; it must be a positive number of updates")
    found: list[pa.Table] = []
    schemas: dict[str, ShardSchema] = {}
    rows = 0
    with RoutedReader(routes, **selected) as reader:
        for event in reader.next_events():
            schemas.setdefault(event.shard, event.schema)
            check_alike(f"routes {routes.shard.name!r} are not read", {**schemas, event.shard: event.schema})
            rows += len(event.updates)
            if rows > rows_max:
                raise InvalidUsage(
                    f"routes {routes.shard.name!r} have more than {rows_max} updates; read them by ranges of keys, or "
                    "with RoutedReader"
                )
            epochs = pa.repeat(pa.scalar(event.epoch, pa.int64()), len(event.updates))
            found.append(event.updates.append_column(EPOCH_COLUMN, epochs))
    if not found:
        empty = routes.of(routes.current().shards[0]).refresh_schema().updates_schema.empty_table()
        return empty.append_column(EPOCH_COLUMN, pa.array([], pa.int64()))
    order = [(name, "ascending") for name in (*event.schema.key, EPOCH_COLUMN, TIME_COLUMN)]
    return pa.concat_tables(found, promote_options="default").sort_by(order)
