"""Which seed shows each broken build: `python -m tests.simulation.controls [first_seed [seeds_max]]`.

`caught.txt` remembers the seed that showed each one last, so that tests begin there. A change of the code deals other
runs to the seeds; then the search goes on from seed 0. `--write` makes the file anew.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.simulation import sharing
from tests.simulation.cloning import CLONES_FROM
from tests.simulation.ingesting import INGESTED
from tests.simulation.mutations import MEANT_FOR, MUTATIONS, NEEDED, mutated
from tests.simulation.runner import Plan, run_plan
from tests.simulation.sharing import SHARED_FROM

SEEDS_MAX = 500
OUTGROWN = (TypeError, AttributeError, NameError)  # raised by a patch that does not fit what it replaces
REMEMBERED = Path(__file__).with_name("caught.txt")


def remembered() -> dict[str, int]:
    """The seed that showed each broken build when the file was made; those that no seed showed are not in it."""
    lines = (line.split() for line in REMEMBERED.read_text().splitlines() if not line.startswith("#"))
    return {name: int(seed) for name, seed, _ in lines if seed != "never"}


def caught(name: str, first: int | None = None, seeds_max: int = SEEDS_MAX) -> tuple[int | None, str]:
    """The first seed that catches the broken build (None: no seed does), and the check that caught it.

    Without `first` the remembered seed is tried, then those from 0 on.
    """
    with mutated(name):
        for seed in itertools.islice(_seeds(name, first), seeds_max):
            outcome = run_plan(Plan.of(seed))
            if outcome.violation is None or outcome.check == "vacuity":  # that tells of the run, not of the build
                continue
            if isinstance(outcome.violation, OUTGROWN):
                raise AssertionError(f"{name} no longer fits the code that it breaks") from outcome.violation
            if MEANT_FOR.get(name) in (None, outcome.check):
                return seed, outcome.check
    return None, ""


def _seeds(name: str, first: int | None) -> Iterator[int]:
    known = remembered().get(name) if first is None else None
    if known is not None:
        yield known
    needed = NEEDED.get(name, set())
    begins = INGESTED.start if "ingester" in needed else CLONES_FROM if needed & {"cloner", "publisher"} else 0
    if name in {broken.__name__ for broken in sharing.BROKEN}:
        begins = SHARED_FROM
    for seed in itertools.count(first or begins):
        plan = Plan.of(seed)
        if NEEDED.get(name, set()) <= {*plan.faults, *(role for share in plan.roles for role in share)}:
            yield seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.controls", description=__doc__)
    parser.add_argument("first", type=int, nargs="?", help="begin here, whatever is remembered")
    parser.add_argument("seeds_max", type=int, nargs="?", default=SEEDS_MAX)
    parser.add_argument("--write", action="store_true", help="remember what is found")
    options = parser.parse_args()
    lines = []
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        tasks = [(name, pool.apply_async(caught, (name, options.first, options.seeds_max))) for name in MUTATIONS]
        for name, task in tasks:
            seed, check = task.get()
            lines.append(f"{name} {'never' if seed is None else seed} {check or '-'}")
            print(lines[-1], flush=True)
    if options.write:
        head = "# broken build, seed that showed it, check that caught it: python -m tests.simulation.controls --write"
        REMEMBERED.write_text("\n".join([head, *lines]) + "\n")
    return 1 if any(" never " in line for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
