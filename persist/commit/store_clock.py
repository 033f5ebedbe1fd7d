"""What time the blob store says that it is.

It is the second source for an age that guards deletion, the clock by which a token is from the future, and the witness
without which no wall clock settles which time it names.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass

from blob import Blob
from persist.commit.system import Clock, Stamps
from persist.core.errors import PersistError
from persist.core.ids import IdSource
from persist.formats.store_errors import translated

PREFIX = "clock/"  # of the probes: no shard's blobs begin so
KNOWN_FOR_S = 60.0
OFFSET_MS_MAX = 10_000  # by so much two clocks that agree may differ
COMPARED_EVERY_S = 300.0
COUNTS_FOR_S = 24 * 3600.0  # for so long a comparison counts
TRIED_EVERY_S = 10.0  # a comparison that failed is not tried again sooner
JUMP_MS_MAX = 1_000  # by more than that a clock is not set without notice
LEFT_BEHIND_MS = 3_600_000  # a probe that is so old was left by a process that died


class StoreClock:
    """Puts an empty blob, asks when it was written, and deletes it. One thread at a time."""

    def __init__(self, blob: Blob, clock: Clock, ids: IdSource) -> None:
        self._blob = blob
        self._clock = clock
        self._ids = ids
        self._asked_s = 0.0
        self._now_ms: int | None = None

    def now_ms(self) -> int:
        """The store's time in milliseconds since 1970: now, or up to a minute ago. Raises what the store raises."""
        now_s = self._clock.monotonic()
        if self._now_ms is None or now_s - self._asked_s > KNOWN_FOR_S:
            self._now_ms, self._asked_s = probed(self._blob, self._ids), now_s
        return self._now_ms


def checked_ms(stamps: Stamps | None, now_ms: int) -> int | None:
    """This clock, if it may be trusted. It is compared at once where nothing is known, as in a new process."""
    if stamps is None:
        return None
    if stamps.agrees(now_ms):
        return now_ms
    if stamps.begins():
        stamps.compare()
    return now_ms if stamps.agrees(now_ms) else None


def probed(blob: Blob, ids: IdSource) -> int:
    """The store's time now, in milliseconds since 1970. Raises what the store raises."""
    key = f"{PREFIX}{ids.uuid7()}"
    with translated():
        blob.put(key, b"")
        found = {stat.key: stat.modified_ms for stat in blob.list(PREFIX)}
        now_ms = found[key] if key in found else max(found.values(), default=0)
        blob.delete([key, *(other for other, put_ms in found.items() if put_ms < now_ms - LEFT_BEHIND_MS)])
    return now_ms


@dataclass(frozen=True, slots=True)
class _Compared:
    """When the two clocks were compared, by this process, and whether they agreed."""

    now_ms: int
    at_s: float
    agreed: bool


class CheckedClock:
    """Whether the wall clock of this process may settle instants: the blob store agrees with it. Thread-safe.

    The first commit of a process waits for that, since a short program has no other one. From then on it is compared in
    the background, every COMPARED_EVERY_S seconds in which there are commits. A clock that was set since does not count
    until it is compared again: the monotonic clock tells.
    """

    def __init__(self, blob: Blob, clock: Clock, ids: IdSource) -> None:
        self._blob = blob
        self._clock = clock
        self._ids = ids
        self._lock = threading.Lock()
        self._compared: _Compared | None = None
        self._tried_s: float | None = None

    def agrees(self, now_ms: int) -> bool:
        """Whether `now_ms`, which this process has just read, may be trusted."""
        compared = self._compared
        if compared is None or not compared.agreed:
            return False
        passed_s = self._clock.monotonic() - compared.at_s
        return passed_s <= COUNTS_FOR_S and abs(now_ms - compared.now_ms - passed_s * 1000) <= JUMP_MS_MAX

    @property
    def agreed(self) -> bool | None:
        """Whether the two clocks agreed when they were compared last. None: they were not yet."""
        compared = self._compared
        return None if compared is None else compared.agreed

    def is_due(self) -> bool:
        """Whether so long has passed since the clocks were compared that `begins` is to be asked.

        It costs next to nothing. It does not see that a clock was set: `agrees` does.
        """
        compared = self._compared
        return compared is None or self._clock.monotonic() - compared.at_s >= COMPARED_EVERY_S

    def begins(self) -> bool:
        """Whether it is time to compare. Who is told so calls `compare`; nobody else is for a while."""
        with self._lock:
            now_s, tried_s, compared = self._clock.monotonic(), self._tried_s, self._compared
            if tried_s is not None and now_s - tried_s < TRIED_EVERY_S:
                return False
            if compared is not None and now_s - compared.at_s < COMPARED_EVERY_S and self._is_steady(compared):
                return False
            self._tried_s = now_s
            return True

    def compare(self) -> None:
        """Compare the two clocks now. Where the store is away, what was known before counts for its time.

        Nobody knows when in between the store told its time. So it has to agree with the clock before and after that:
        a process that was stopped meanwhile would otherwise take its own delay for the store's, and a wild clock that
        was set right meanwhile would count as it was before.
        """
        before_ms, at_s = self._clock.now_ms(), self._clock.monotonic()
        with suppress(PersistError):
            store_ms = probed(self._blob, self._ids)
            agreed = all(abs(store_ms - own_ms) <= OFFSET_MS_MAX for own_ms in (before_ms, self._clock.now_ms()))
            self._compared = _Compared(before_ms, at_s, agreed)

    def _is_steady(self, compared: _Compared) -> bool:
        return not compared.agreed or self.agrees(self._clock.now_ms())
