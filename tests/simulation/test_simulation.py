"""Seeds of the simulation, and the broken builds that it must catch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.simulation.batch import run_batch
from tests.simulation.controls import caught
from tests.simulation.mutations import MUTATIONS
from tests.simulation.runner import Plan, run_plan
from tests.simulation.world import FAULTS

SEEDS = 2_000 if os.environ.get("CI") == "true" else 100
# What a hundred seeds together must have walked through; each of them checks that its own faults struck.
PATHS = (
    "append acknowledged",
    "attribute mismatch",
    "attributes flushed",
    "attributes read",
    "blob collected",
    "blob part appended",
    "chunks saved",
    "damage noticed",
    "drop answered",
    "fenced",
    "group commit",
    "listen step",
    "log truncated",
    "maintenance interrupted",
    "merge applied",
    "orphan deleted",
    "pipe fenced",
    "read expired",
    "read too early",
    "reader gone",
    "retry answered",
    "rollup forgotten",
    "schema evolved",
    "shard finalised",
    "since moved",
    "snapshot read",
    "upper mismatch",
    "write unavailable",
    "write unknown",
    "writer expired",
)


@pytest.mark.slow
def test_every_seed_keeps_every_promise() -> None:
    totals = run_batch(range(SEEDS), os.cpu_count() or 1)
    print(totals)
    assert not totals.failures, "\n\n".join(totals.failures)
    assert totals.runs == SEEDS
    assert [path for path in PATHS if not totals.paths[path]] == []
    assert [fault for fault in FAULTS if not totals.faults[fault]] == []


@pytest.mark.slow
@pytest.mark.parametrize("mutation", sorted(MUTATIONS))
def test_a_broken_build_is_caught(mutation: str) -> None:
    count, check = caught(mutation)
    print(f"{mutation}: caught by {check!r} after {count} seeds")
    assert count, f"{mutation} survives"


def test_a_run_is_a_function_of_its_seed() -> None:
    """Also in another process, with other hash seeds."""
    program = (
        "from tests.simulation.runner import Plan, run_plan; print([run_plan(Plan.of(s)).digest for s in (1, 2, 3)])"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1]
    assert str([run_plan(Plan.of(seed)).digest for seed in (1, 2, 3)]).encode() == told[0].strip()


def test_the_command_of_a_plan_replays_it() -> None:
    assert Plan.of(17).command() == "python -m tests.simulation 17"
