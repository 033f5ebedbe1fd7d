"""What every benchmark prints at its end: one line per bar."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def elsewhere(checkout: Path, program: str, *arguments: str) -> dict[str, float]:
    """What a program, this file, prints as JSON at its end with the modules of another checkout, which may lack it."""
    command = [sys.executable, program, *arguments, "--once"]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def bar(name: str, value: float, want: str) -> bool:
    """Print `BAR <name>: <value> (want <bound>) ok|short`; `want` is like `<= 1.3` or `>= 0.8`. Whether it holds."""
    relation, bound = want.split()
    holds = value <= float(bound) if relation == "<=" else value >= float(bound)
    print(f"BAR {name}: {value:.3g} (want {want}) {'ok' if holds else 'short'}", flush=True)
    return holds


def percentile(samples: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` of the samples lie."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * fraction))]


def timed(work: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def interleaved(rounds: int, *works: Callable[[], object]) -> list[list[float]]:
    """Seconds of every call of each work, taken in turns so that a drifting machine slows all of them alike."""
    samples: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for index, work in enumerate(works):
            samples[index].append(timed(work))
    return samples


def median(samples: Sequence[float]) -> float:
    return statistics.median(samples)


class Percentiles:
    """What is asked of the `latencies` of a run, in seconds."""

    latencies: Sequence[float]

    @property
    def p50_s(self) -> float:
        return percentile(self.latencies, 0.5)

    @property
    def p99_s(self) -> float:
        return percentile(self.latencies, 0.99)
