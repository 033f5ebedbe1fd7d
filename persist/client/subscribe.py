"""Contents and then changes, as one stream."""

from __future__ import annotations

from collections.abc import Iterator

from persist.client.arguments import checked_wait
from persist.client.complete import BEFORE_ALL
from persist.client.listen import Listen, ListenEvent
from persist.client.snapshot import Held
from persist.core.antichain import Antichain
from persist.core.errors import InvalidUsage, NotReadable
from persist.parts import Selection, at_time


class Subscription(Listen):
    """An iterator of events: first the contents as of a time, then every change after it. Nothing lies between them.

    The contents come as updates at the time `as_of`, in one event or several, of which only the last moves the
    frontier: to `as_of + 1`. Where there are none (nothing was written yet: `as_of` is -1) no event tells of them.
    Whoever adds up `__diff` of all updates has the contents as of each frontier. `Shard.subscribe` gives one. All else
    is as `Listen` says: `frontier` is where another `listen` goes on, and a step that was cut begins anew.
    """

    def __init__(self, held: Held, until: Antichain, selection: Selection, known: int | None = None) -> None:
        name = held.view.name
        if held.lease.is_point:
            raise NotReadable(
                f"shard {name!r} keeps [{held.as_of}] alone, and has forgotten what came after it; subscribe as of a "
                f"time from {held.view.since} on",
                as_of=held.as_of,
                since=held.view.since.to_json(),
            )
        if until < Antichain(held.as_of + 1) and until.element is not None:
            raise InvalidUsage(f"until is {until}, where the contents as of {held.as_of} come first; it must be later")
        super().__init__(held.transport, name, held.lease, (None, until), held.settings, selection)
        self.known = known
        self._begins: Held | None = held
        self.as_of = held.as_of

    def __repr__(self) -> str:
        return f"Subscription({self._name!r}, as_of={self.as_of}, frontier={self.frontier}, until={self._until})"

    def next_events(self, timeout_s: float) -> Iterator[ListenEvent]:
        """The contents, when they were not given yet; then as `Listen.next_events`.

        Raises: what that does, and `timeout_s` is as there.
        """
        checked_wait("timeout_s", timeout_s)
        held, at = self._begins, self.as_of
        if held is None or at == BEFORE_ALL or self.frontier > Antichain(0):
            self._begins = None  # which it is not at once: the contents may be given again until they were whole
            yield from super().next_events(timeout_s)
            return
        if self._closed:
            raise InvalidUsage(f"this subscription to shard {self._name!r} was closed; subscribe again")
        wanted, reader = self._reader(held.view)
        rows = sum(part.rows for run in held.runs for part in run.parts)
        pieces = reader.read_range(held.runs, as_of=at, key_range=wanted.key_range, columns=wanted.read)
        self._lease.check()
        yield from self._events((at_time(table, at) for table in pieces), rows, Antichain(at + 1), wanted)
