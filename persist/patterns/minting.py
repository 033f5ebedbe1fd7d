"""A minter: binds what is new in a source, at an interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from persist.client.arguments import NUMBER_MAX, checked
from persist.core.errors import InvalidUsage, Overloaded, PersistError, Unavailable, shown
from persist.patterns.bindings import Bindings
from persist.patterns.following import Clock
from persist.patterns.positions import BEFORE_ALL, Binding, checked_positions

Watermarks = Callable[[], Mapping[str, int]]


class Minter:
    """Follows the high watermarks of a source: what is new there gets a time, at most once an interval.

    Any number of minters may follow one source, in any number of processes. Each position is bound once.
    """

    def __init__(
        self,
        bindings: Bindings,
        watermarks: Watermarks,
        *,
        positions_max: int | None = None,
        advances: bool = False,
    ) -> None:
        """Nothing is asked before the first `tick`.

        Args:
            bindings: where they are bound.
            watermarks: gives the last position of each partition that can be read now; partitions without a record may
                be left out.
            positions_max: a binding moves each partition by at most so many positions: a long backlog becomes several
                times, each of which is ingested as one batch. None: all at once.
            advances: whether time goes on where nothing is new, by one commit a tick: readers who wait for a time
                then see that nothing came.
        Raises: InvalidUsage (`positions_max` is no positive integer).
        """
        checked("bindings", bindings, Bindings)
        checked("positions_max", positions_max, int, type(None))
        if positions_max is not None and not 0 < positions_max <= NUMBER_MAX:
            raise InvalidUsage(f"positions_max is {shown(positions_max)}; it must be in [1, {NUMBER_MAX}] or None")
        checked("advances", advances, bool)
        self._bindings = bindings
        self._watermarks = watermarks
        self._positions_max = positions_max
        self._advances = advances
        self.last_error: PersistError | None = None  # what the last ticks of `run` that failed were told

    def tick(self) -> list[Binding]:
        """Bind what is new; the bindings, in order. None are minted where a rival has bound all that.

        Raises: InvalidUsage (the watermarks are no positions), and what `Bindings.get_binding` may; whatever the
            watermarks raise. Repeating it is safe.
        """
        found = self._watermarks()
        wanted = checked_positions(found) if found else {}
        minted = []
        while step := self._step(wanted):
            minted.append(self._bindings.get_binding(step))
        if not minted and self._advances:
            self._bindings.advance()
        return minted

    def run(self, until: Callable[[], bool], clock: Clock, interval_s: float = 1.0) -> None:
        """Tick at each interval until `until` says so. What a store does not answer is tried again at the next one.

        Raises: InvalidUsage (`interval_s` is no positive number), and what `tick` may, but for Unavailable and
            Overloaded.
        """
        checked("interval_s", interval_s, int, float)
        if not 0 < interval_s <= NUMBER_MAX:
            raise InvalidUsage(f"interval_s is {shown(interval_s)}; it must be a positive number of seconds")
        while not until():
            begun = clock.monotonic()
            try:
                self.tick()
            except (Unavailable, Overloaded) as error:
                self.last_error = error
            clock.sleep(max(0.0, interval_s - (clock.monotonic() - begun)))

    def _step(self, wanted: dict[str, int]) -> dict[str, int]:
        """The positions of the next binding; none where all is bound."""
        heads = self._bindings.heads
        new = {partition: at for partition, at in wanted.items() if at > heads.get(partition, BEFORE_ALL)}
        if self._positions_max is None:
            return new
        most = self._positions_max
        return {partition: min(at, heads.get(partition, BEFORE_ALL) + most) for partition, at in new.items()}
