"""What time the blob store says that it is.

It is the second source for an age that guards deletion, and the clock by which a token is from the future.
"""

from __future__ import annotations

from blob import Blob
from persist.commit.system import Clock
from persist.core.ids import IdSource
from persist.formats.store_errors import translated

PREFIX = "clock/"  # of the probes: no shard's blobs begin so
KNOWN_FOR_S = 60.0
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


def probed(blob: Blob, ids: IdSource) -> int:
    """The store's time now, in milliseconds since 1970. Raises what the store raises."""
    key = f"{PREFIX}{ids.uuid7()}"
    with translated():
        blob.put(key, b"")
        found = {stat.key: stat.modified_ms for stat in blob.list(PREFIX)}
        now_ms = found[key] if key in found else max(found.values(), default=0)
        blob.delete([key, *(other for other, put_ms in found.items() if put_ms < now_ms - LEFT_BEHIND_MS)])
    return now_ms
