"""A home looks whether another one has taken over: in its stores, and in the index of regions.

A later epoch in either ends its writes, at most `LOOK_EVERY_S` after it can be seen there. A process that slept looks
before it writes again.
"""

from __future__ import annotations

import logging
import threading
import time

from persist.commit.location_identity import LOOK_EVERY_S, Identity
from persist.core.errors import InvalidUsage, PersistError, ReadOnly
from persist.regions.region_index import Index, IndexFile, IndexUrl, OlderIndex

FENCE_S_MIN = 2 * LOOK_EVERY_S
FENCE_S_MAX = 86_400.0
PAUSE_S = 0.5  # between looks that take long
log = logging.getLogger("persist.regions")


def check_fence(fence_s: float) -> None:
    """Raises InvalidUsage where that is no time after which a home can stop by itself. 0: it never does."""
    if fence_s and not FENCE_S_MIN <= fence_s <= FENCE_S_MAX:
        least, most = f"{FENCE_S_MIN:.0f}", f"{FENCE_S_MAX:.0f}"
        raise InvalidUsage(f"self_fence is {fence_s:g}; it must be 0, or in [{least}, {most}] seconds")


class HomeWatch:
    """Looks for one process, from `start` on until `close`. `region`: the one that it is home of."""

    def __init__(
        self, identity: Identity, region: str, index: IndexFile | IndexUrl | None = None, fence_s: float = 0.0
    ) -> None:
        check_fence(fence_s)
        self._identity = identity
        self._region = region
        self._index = index
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        identity.look_elsewhere(self.taken_over, fence_s or None)

    def taken_over(self) -> ReadOnly | None:
        """Why this process only reads, by the index; None: it may write. Raises Unavailable."""
        if self._index is None or not self._region:
            return None
        epoch = self._identity.binding().epoch
        try:
            return taken_over(self._index.fetch(), self._region, epoch)
        except OlderIndex as error:
            if (taken := taken_over(error.index, self._region, epoch)) is not None:
                return taken  # it tells enough where it has a later epoch
            raise

    def start(self) -> None:
        """Look now, and from now on in the background."""
        self._look()
        self._thread = threading.Thread(target=self._run, name="persist-fence", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        took_s = 0.0
        while not self._ends.wait(max(PAUSE_S, LOOK_EVERY_S / 2 - took_s)):
            began_s = time.monotonic()
            self._look()
            took_s = time.monotonic() - began_s

    def _look(self) -> None:
        try:
            self._identity.look()
        except PersistError as error:
            log.warning("it could not be looked whether another home has taken over: %s", error)
        except Exception:  # a bug: the next look may tell
            log.exception("looking whether another home has taken over failed")

    def close(self) -> None:
        self._ends.set()
        if self._thread is not None:
            self._thread.join()


def taken_over(index: Index, region: str, epoch: int) -> ReadOnly | None:
    """What is said to who would write at a home of this epoch, where the index has a later one."""
    entry = index.regions.get(region)
    if entry is None or entry.epoch <= epoch:
        return None
    at = f", at {', '.join(entry.write)}" if entry.write else ""
    return ReadOnly(
        f"region {region!r} is at home elsewhere since epoch {entry.epoch}{at}; this one is of epoch {epoch}, and only "
        "reads",
        home=list(entry.write),
        region=region,
    )
