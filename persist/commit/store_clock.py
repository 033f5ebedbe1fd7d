"""What time the blob store says that it is: the second source for an age that guards deletion."""

from __future__ import annotations

from persist.commit.place import Place
from persist.formats.store_errors import translated

PREFIX = "clock/"  # of the probes: no shard's blobs begin so
KNOWN_FOR_S = 60.0
LEFT_BEHIND_MS = 3_600_000  # a probe that is so old was left by a process that died


class StoreClock:
    """Puts an empty blob, asks when it was written, and deletes it. One thread at a time."""

    def __init__(self, location: Place) -> None:
        self._location = location
        self._asked_s = 0.0
        self._now_ms: int | None = None

    def now_ms(self) -> int:
        """The store's time in milliseconds since 1970: now, or up to a minute ago. Raises what the store raises."""
        now_s = self._location.clock.monotonic()
        if self._now_ms is None or now_s - self._asked_s > KNOWN_FOR_S:
            self._now_ms, self._asked_s = self._probed(), now_s
        return self._now_ms

    def _probed(self) -> int:
        blob, key = self._location.blob, f"{PREFIX}{self._location.ids.uuid7()}"
        with translated():
            blob.put(key, b"")
            found = {stat.key: stat.modified_ms for stat in blob.list(PREFIX)}
            now_ms = found[key] if key in found else max(found.values(), default=0)
            blob.delete([key, *(other for other, put_ms in found.items() if put_ms < now_ms - LEFT_BEHIND_MS)])
        return now_ms
