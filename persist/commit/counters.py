"""What a machine counts, and what a location counts of the calls to its stores."""

from __future__ import annotations

import threading
from functools import partial

from blob.metrics import Observe
from persist.core import commands as c


class StoreCalls:
    """Calls to the two stores of a location, by store, verb and outcome. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[tuple[str, str, str], tuple[int, float, int]] = {}

    def observer(self, store: str) -> Observe:
        """What counts one call to `store`: called with its verb, its outcome (`ok`, or why not), seconds and bytes."""
        return partial(self._observe, store)

    def totals(self) -> dict[tuple[str, str, str], tuple[int, float, int]]:
        """(store, verb, outcome) -> calls, their seconds, the bytes that they moved."""
        with self._lock:
            return dict(self._totals)

    def _observe(self, store: str, verb: str, outcome: str, seconds: float, nbytes: int) -> None:
        key = (store, verb, outcome)
        with self._lock:
            calls, total_s, total_bytes = self._totals.get(key, (0, 0.0, 0))
            self._totals[key] = (calls + 1, total_s + seconds, total_bytes + nbytes)


class MachineMetrics:
    """Counters of one machine; read without locks, so a reader may see one commit half counted."""

    def __init__(self) -> None:
        self.commits = 0
        self.commands = 0
        self.races_lost = 0
        self.retries = 0
        self.spills = 0
        self.flushes = 0
        self.reliefs = 0
        self.upkeep_bytes = 0
        self.upkeep_failed = 0
        self.upkeep_refused = 0
        self.group_max = 0

    def committed(self, commands: int, lost: int) -> None:
        self.commits += 1
        self.commands += commands
        self.races_lost += lost
        self.group_max = max(self.group_max, commands)

    def upkept(self, result: c.Result) -> None:
        if isinstance(result, c.MergeApplied):
            self.flushes += result.applied
            self.upkeep_refused += not result.applied
