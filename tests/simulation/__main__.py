"""Replays seeds: `python -m tests.simulation 17`, or a range `0:500`; `--faults`, `--roles`, `--ops` cut a run down."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

from tests.simulation.batch import run_batch
from tests.simulation.mutations import MUTATIONS, mutated
from tests.simulation.runner import Plan, report, run_plan, shrink


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seeds", help="a seed, or first:last (without the last)")
    parser.add_argument("--faults", help="only these, with commas; or none")
    parser.add_argument("--roles", help="of each process with commas, processes with slashes")
    parser.add_argument("--ops", type=int)
    parser.add_argument("--mutation", choices=sorted(MUTATIONS), help="a build that is broken on purpose")
    parser.add_argument("--shrink", action="store_true", help="look for a smaller run that fails alike")
    parser.add_argument("--log", action="store_true", help="print the whole history")
    parser.add_argument("--jobs", type=int, help="run a range on so many processors and print sums")
    parser.add_argument("--lines", type=int, default=60)
    options = parser.parse_args()
    first, _, last = options.seeds.partition(":")
    if options.jobs and (options.mutation or options.faults or options.roles or options.ops):
        parser.error("--jobs runs whole seeds of the build as it is: leave out --mutation, --faults, --roles and --ops")
    if options.jobs:
        totals = run_batch(range(int(first), int(last)), options.jobs)
        print("\n\n".join([*totals.failures, str(totals)]))
        return 1 if totals.failures else 0
    failures = 0
    started = time.monotonic()
    for seed in range(int(first), int(last) if last else int(first) + 1):
        plan = Plan.of(seed)
        if options.faults:
            plan = replace(plan, faults=tuple(options.faults.split(",")) if options.faults != "none" else ())
        if options.roles:
            shares = options.roles.split("/")
            plan = replace(plan, roles=tuple(tuple(r for r in share.split(",") if r) for share in shares))
        if options.ops:
            plan = replace(plan, ops=options.ops)
        with mutated(options.mutation):
            outcome = run_plan(plan)
            if outcome.violation is not None:
                failures += 1
                outcome = shrink(outcome) if options.shrink else outcome
                print(report(outcome, options.lines))
        if options.log:
            print("\n".join(outcome.log))
        if not last:
            print(f"digest {outcome.digest}, {outcome.steps} steps")
            print(f"faults {dict(outcome.faults)}\npaths {dict(outcome.paths)}")
    print(f"{failures} failures, {time.monotonic() - started:.1f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
