"""Holds of native reads: each is renewed for as long as a plan of Spark reads the files, and then lapses.

Spark never says that it has finished with a plan. But a DataFrame that reads the files, one that was derived from it, a
view or a cache refers to one object of the JVM that lists them. When the JVM has collected that, only an RDD or an
iterator can still read them, which refer to no such object. So from then on the hold is renewed no more, and lapses.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import DataFrame

from persist.client.lease import LEASE_RENEWED_AFTER, ReadLease
from persist.core.errors import Expired, PersistError

log = logging.getLogger("persist.spark")
HOLDS_MAX = 256  # reads of one process that are kept at the same time
HELD_MAX_S = 86_400.0  # however long the JVM takes to collect a plan
LOOKS_S_MIN = 0.05  # between two looks, however short a lease is
IsGone = Callable[[], bool]


@dataclass(frozen=True)
class _Hold:
    lease: ReadLease
    lease_s: float
    are_gone: Sequence[IsGone]  # of each list of files
    until_s: float


class Holds:
    """The leases of the native reads of one process, which a thread renews while there are some. Thread-safe."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._held: list[_Hold] = []
        self._is_watched = False

    @property
    def is_full(self) -> bool:
        return len(self._held) >= HOLDS_MAX

    def keep(self, lease: ReadLease, lease_s: float, are_gone: Sequence[IsGone]) -> None:
        """Keep a lease of so many seconds until all of `are_gone` say so, at most HELD_MAX_S; then it lapses by itself.

        Beyond HOLDS_MAX it is not kept.
        """
        with self._lock:
            if self.is_full:
                log.warning("persist: %d native reads are held already; this one lapses in %g s", HOLDS_MAX, lease_s)
                return
            self._held.append(_Hold(lease, lease_s, are_gone, self._monotonic() + HELD_MAX_S))
            starts, self._is_watched = not self._is_watched, True
        if starts:
            threading.Thread(target=self._watch, name="persist-native-holds", daemon=True).start()

    def look(self) -> float | None:
        """Renew what is still read and let go of the rest. Returns: seconds until the next look; None: none is needed.

        A lease that could not be renewed is tried again by the next look; one that has lapsed is told and left.
        """
        for hold in tuple(self._held):
            if not self._is_kept(hold):
                with self._lock:
                    self._held.remove(hold)
        with self._lock:
            if not self._held:
                self._is_watched = False
                return None
            return max(LOOKS_S_MIN, min(hold.lease_s for hold in self._held) / (2 * LEASE_RENEWED_AFTER))

    def _is_kept(self, hold: _Hold) -> bool:
        if self._monotonic() >= hold.until_s or all(is_gone() for is_gone in hold.are_gone):
            return False
        try:
            hold.lease.keep()
        except Expired as error:
            log.warning("persist: a native read is not held any more, and may not find its files: %s", error.message)
            return False
        except PersistError:  # the lease has two thirds left: the next look tries again
            pass
        return True

    def _watch(self) -> None:
        while (pause_s := self.look()) is not None:
            time.sleep(pause_s)


def holds() -> Holds:
    """Those of this process."""
    return _holds(os.getpid())


@lru_cache(maxsize=1)
def _holds(pid: int) -> Holds:
    """By process: a forked child must not go on with what its parent keeps."""
    return Holds()


def file_lists(spark: Any, frame: DataFrame) -> list[IsGone]:
    """Whether the JVM has collected each list of files that the plan of a frame reads."""
    leaves = frame._jdf.queryExecution().analyzed().collectLeaves()
    found = (leaves.apply(number) for number in range(leaves.size()))
    return [
        _gone(spark._jvm.java.lang.ref.WeakReference(leaf.relation().location()))
        for leaf in found
        if leaf.getClass().getSimpleName() == "LogicalRelation"
    ]


def _gone(reference: Any) -> IsGone:
    def is_gone() -> bool:
        try:
            return bool(reference.refersTo(None))
        except (Py4JError, OSError):  # the JVM has ended
            return True

    return is_gone
