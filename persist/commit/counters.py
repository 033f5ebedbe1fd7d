"""What a machine counts, and what a location counts of the calls to its stores."""

from __future__ import annotations

from functools import partial

from blob.metrics import Observe
from persist.commit.durations import Durations
from persist.commit.tracing import Tracer
from persist.core import commands as c


class StoreCalls:
    """Calls to the two stores of a location, by store, verb and outcome. Thread-safe.

    With a tracer each call is a span as well, below the one under way.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self.durations = Durations()
        self._tracer = tracer

    def observer(self, store: str) -> Observe:
        """What counts one call to `store`: called with its verb, its outcome (`ok`, or why not), seconds and bytes."""
        return partial(self._observe if self._tracer is None else self._traced, store)

    def totals(self) -> dict[tuple[str, ...], tuple[int, float, int]]:
        """(store, verb, outcome) -> calls, their seconds, the bytes that they moved."""
        return self.durations.totals()

    def _observe(self, store: str, verb: str, outcome: str, seconds: float, nbytes: int) -> None:
        self.durations.observe((store, verb, outcome), seconds, nbytes)

    def _traced(self, store: str, verb: str, outcome: str, seconds: float, nbytes: int) -> None:
        self._observe(store, verb, outcome, seconds, nbytes)
        if self._tracer is not None and self._tracer.current() is not None:  # background looks are nobody's
            told: dict[str, str | int] = {"persist.store": store, "persist.outcome": outcome, "persist.bytes": nbytes}
            failed = "" if outcome in ("ok", "lost") else outcome
            self._tracer.passed(f"persist.{store}.{verb}", seconds, told, failed=failed)


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
        self.queued_s = 0.0
        self.commit_s = 0.0
        self.upkeep_s = 0.0

    def add(self, other: MachineMetrics) -> None:
        """Count also what `other` has counted."""
        for name, count in vars(other).items():
            mine = getattr(self, name)
            setattr(self, name, max(mine, count) if name == "group_max" else mine + count)

    def committed(self, commands: int) -> None:
        self.commits += 1
        self.commands += commands
        self.group_max = max(self.group_max, commands)

    def upkept(self, result: c.Result) -> None:
        if isinstance(result, c.MergeApplied):
            self.flushes += result.applied
            self.upkeep_refused += not result.applied
