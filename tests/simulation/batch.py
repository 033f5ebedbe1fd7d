"""Many seeds on several processors, and what they add up to."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.simulation.runner import Outcome, Plan, report, run_plan, shrink

SEEDS_AHEAD_MAX = 64  # seeds that wait for a processor


@dataclass
class Totals:
    """Sums over runs. `failures` are reports that are ready to be printed."""

    runs: int = 0
    steps: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.runs += 1
        self.steps += outcome.steps
        self.faults += outcome.faults
        self.paths += outcome.paths

    @property
    def per_minute(self) -> float:
        return 60 * self.runs / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        lines = [
            f"{self.runs} seeds, {len(self.failures)} failures, {self.steps} steps, {self.seconds:.0f} s, "
            f"{self.per_minute:.0f} seeds/minute",
            "faults injected: " + ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults.items())),
            "paths walked: " + ", ".join(f"{path} {count}" for path, count in sorted(self.paths.items())),
        ]
        return "\n".join(lines)


def _one(seed: int) -> tuple[Outcome, str]:
    outcome = run_plan(Plan.of(seed))
    said = "" if outcome.violation is None else report(shrink(outcome))
    # Only sums travel: logs are long, and errors of all kinds need not be picklable.
    return Outcome(outcome.plan, None, outcome.faults, outcome.paths, outcome.steps), said


def run_here(seeds: Iterable[int], *, failures_max: int = 5) -> Totals:
    """Run seeds in this process, one after the other, until they or the patience with failures run out."""
    totals = Totals()
    started = time.monotonic()
    for outcome, said in map(_one, seeds):
        totals.add(outcome)
        totals.failures += [said] if said else []
        if len(totals.failures) >= failures_max:
            break
    totals.seconds = time.monotonic() - started
    return totals


def run_batch(seeds: Iterable[int], jobs: int, *, seconds: float | None = None, failures_max: int = 5) -> Totals:
    """Run seeds on `jobs` processors until they, the seconds, or the patience with failures run out."""
    totals = Totals()
    started = time.monotonic()
    room = threading.Semaphore(SEEDS_AHEAD_MAX)
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=200) as pool:
        for outcome, said in pool.imap_unordered(_one, _while_time(seeds, room, started, seconds)):
            room.release()
            totals.add(outcome)
            if said:
                totals.failures.append(said)
                if len(totals.failures) >= failures_max:
                    break
            if seconds is not None and time.monotonic() - started > seconds:
                break
        totals.seconds = time.monotonic() - started
        pool.terminate()
    return totals


def _while_time(
    seeds: Iterable[int], room: threading.Semaphore, started: float, seconds: float | None
) -> Iterator[int]:
    """The pool takes as many as it is given, so it is given few at a time."""
    for seed in seeds:
        room.acquire()
        if seconds is not None and time.monotonic() - started > seconds:
            return
        yield seed


__all__ = ["Totals", "run_batch"]
