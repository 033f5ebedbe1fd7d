"""Seeds of the simulation, and the broken builds that it must catch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.simulation.batch import run_here
from tests.simulation.cloning import CLONES_FROM
from tests.simulation.controls import caught, remembered
from tests.simulation.ingesting import INGESTED
from tests.simulation.mutations import MUTATIONS, RARE, mutated
from tests.simulation.runner import Plan, run_plan
from tests.simulation.sharing import SHARED_FROM
from tests.simulation.world import FAULTS
from tests.support import naive_reader
from tests.support.examples import is_whole, seeds, size

FEW = range(7)
MANY = [range(160)]  # `python -m tests.simulation 0:20000` runs more
COPIED = range(CLONES_FROM, CLONES_FROM + size(2, 120))  # a clone after a drop happens in one of forty
SHARED = range(SHARED_FROM, SHARED_FROM + size(2, 40))
FED = range(INGESTED.start, INGESTED.start + size(2, 40))
OF_TODAY = seeds(80)
QUICK = ("merge_beyond_since", "splits_overlap", "tokens_made_anew")  # mutations that the first seed shows
# What all seeds of MANY together must have walked through; each of them checks that its own faults struck.
PATHS = (
    "append acknowledged", "attribute mismatch", "attributes flushed", "attributes read", "blob collected",
    "blob part appended", "bundle left", "chunks saved", "damage noticed", "dates forgotten", "dates told",
    "drop answered", "erased", "erased the gone", "erasure asked again", "fenced", "group commit",
    "history hold moved", "history forgotten by hand", "instant told", "lie refused", "listen step",
    "log truncated", "maintenance interrupted", "nothing to restore", "restore asked again", "restored",
    "tag read behind since", "tag removed", "tag set", "merge applied", "name used again", "orphan deleted",
    "parts bundled", "pipe fenced", "read expired", "receipt", "read too early", "reader gone", "retry answered",
    "rollup forgotten", "schema evolved", "long diff", "settings changed", "settings conflict", "shard finalised",
    "truncated", "dropped", "drop refused", "policy truncated", "policy followed", "since moved", "snapshot read",
    "upper mismatch", "verified", "wall clock answered", "wall clock forgotten", "wall clock read",
    "wall clock unanswered", "write unavailable", "write unknown", "writer expired",
)  # fmt: skip
COPY_PATHS = (
    "clone acknowledged", "clone after a drop", "clone of a clone", "copy looked at", "journal published",
    "loans ended", "publications tidied up", "recovered",
)  # fmt: skip


FED_PATHS = (
    "all ingested", "dropped with a pending erasure", "erasure pending", "erasure retracted", "ingested", "minted",
)  # fmt: skip


def test_a_few_seeds_keep_every_promise() -> None:
    totals = run_here(FEW)
    assert not totals.failures, "\n\n".join(totals.failures)
    assert totals.runs == len(FEW)


@pytest.mark.proof
@pytest.mark.parametrize("seeds", MANY, ids=lambda seeds: f"{seeds.start}:{seeds.stop}")
def test_every_seed_keeps_every_promise(seeds: range) -> None:
    totals = run_here(seeds)
    print(totals)
    assert not totals.failures, "\n\n".join(totals.failures)
    assert totals.runs == len(seeds)
    assert [path for path in PATHS if not totals.paths[path]] == []
    assert [fault for fault in FAULTS if not totals.faults[fault]] == []


@pytest.mark.proof
def test_seeds_that_differ_from_day_to_day_keep_every_promise() -> None:
    totals = run_here(OF_TODAY)
    print(totals)
    assert not totals.failures, "\n\n".join(totals.failures)


@pytest.mark.smoke
@pytest.mark.proof
@pytest.mark.parametrize(("seeds", "paths"), [
    pytest.param(COPIED, COPY_PATHS, id="clones and publications"),
    pytest.param(SHARED, (), id="reads that share leases"),
    pytest.param(FED, FED_PATHS, id="a source beside erasures"),
])  # fmt: skip
def test_seeds_of_their_own_keep_every_promise(seeds: range, paths: Sequence[str]) -> None:
    totals = run_here(seeds)
    print(totals)
    assert not totals.failures, "\n\n".join(totals.failures)
    assert not is_whole() or [path for path in paths if not totals.paths[path]] == []


@pytest.mark.parametrize(
    "mutation",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.proof)
        for name in sorted(MUTATIONS.keys() - RARE)
    ],
)
def test_a_broken_build_is_caught(mutation: str) -> None:
    seed, check = caught(mutation)
    print(f"{mutation}: caught by {check!r} at seed {seed}")
    assert seed is not None, f"{mutation} survives"


def test_every_broken_build_has_a_seed_to_begin_with() -> None:
    assert MUTATIONS.keys() - RARE <= remembered().keys() <= MUTATIONS.keys()


def test_every_broken_build_breaks_something_that_is_there() -> None:
    for mutation in MUTATIONS:
        with mutated(mutation):
            pass


def test_a_run_whose_shards_verify_finds_fault_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A naive reader that forgets the times before since finds other updates than ours."""
    monkeypatch.setattr(naive_reader, "_advanced", lambda table, since: table.slice(1))
    outcome = run_plan(Plan.of(0))
    assert (outcome.check, "a naive reader finds other updates" in str(outcome.violation)) == ("verify", True)


@pytest.mark.smoke
@pytest.mark.proof
@pytest.mark.parametrize("seed", range(1, size(2, 4)))
def test_a_run_is_a_function_of_its_seed(seed: int) -> None:
    """Also in another process, with another hash seed."""
    program = f"from tests.simulation.runner import Plan, run_plan; print(run_plan(Plan.of({seed})).digest)"
    elsewhere = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": "2"}, capture_output=True, check=True
    )
    assert run_plan(Plan.of(seed)).digest.encode() == elsewhere.stdout.strip()


def test_the_command_of_a_plan_replays_it() -> None:
    assert Plan.of(17).command() == "python -m tests.simulation 17"
