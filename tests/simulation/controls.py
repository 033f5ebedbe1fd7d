"""How many seeds each broken build survives: `python -m tests.simulation.controls [first_seed [seeds_max]]`."""

from __future__ import annotations

import itertools
import multiprocessing
import sys

from tests.simulation.mutations import MEANT_FOR, MUTATIONS, NEEDED, mutated
from tests.simulation.runner import Plan, run_plan

SEEDS_MAX = 500


def caught(name: str, first: int = 0, seeds_max: int = SEEDS_MAX) -> tuple[int, str]:
    """Seeds until the broken build was caught (0: never), and the check that caught it."""
    plans = (Plan.of(seed) for seed in itertools.count(first))
    needed = (plan for plan in plans if NEEDED.get(name) in (None, *plan.faults))
    with mutated(name):
        for count, plan in enumerate(itertools.islice(needed, seeds_max), 1):
            outcome = run_plan(plan)
            if outcome.violation is None or outcome.check == "vacuity":  # that tells of the run, not of the build
                continue
            if MEANT_FOR.get(name) in (None, outcome.check):
                return count, outcome.check
    return 0, ""


def main() -> int:
    first = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    seeds_max = int(sys.argv[2]) if len(sys.argv) > 2 else SEEDS_MAX
    names = list(MUTATIONS)
    missed = 0
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        tasks = [(name, pool.apply_async(caught, (name, first, seeds_max))) for name in names]
        for name, task in tasks:
            count, check = task.get()
            missed += not count
            print(f"| `{name}` | {count or 'never'} | {check} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
