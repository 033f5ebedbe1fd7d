"""The simulation for as long as asked: `make soak SECONDS=600`. Prints seeds a minute and faults by kind."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time

from tests.simulation.batch import run_batch


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long (default 600)")
    parser.add_argument("--seeds", type=int, help="stop after so many")
    parser.add_argument("--first", type=int, help="the first seed; by default one that was never used")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    first = int(time.time()) * 1_000 if options.first is None else options.first
    seeds = itertools.islice(itertools.count(first), options.seeds)
    totals = run_batch(seeds, options.jobs, seconds=options.seconds)
    print(f"seeds from {first} on")
    print("\n\n".join([*totals.failures, str(totals)]))
    return 1 if totals.failures else 0


if __name__ == "__main__":
    sys.exit(main())
