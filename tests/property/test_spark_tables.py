"""Two Spark jobs and two Python writers on one table: as if one had run after the other. No update is lost, none made.

The jobs run through the very classes that Spark calls, by `ShardTable` on a session without a JVM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from persist.spark import upsert
from tests.support.examples import seeds, thinned
from tests.support.rivals import caught_within
from tests.support.spark_rivals import SparkRivals

STEPS = 5
SEEDS = thinned(range(6), 3)
PROOF_SEEDS = seeds(40)
BROKEN_SEEDS = range(100)


def check(seed: int) -> SparkRivals:
    with SparkRivals(seed) as rivals:
        for _ in range(STEPS):
            rivals.act()
        rivals.check()
    return rivals


@pytest.mark.parametrize("seed", SEEDS)
def test_jobs_and_writers_are_as_if_each_had_run_alone_at_its_time(seed: int) -> None:
    check(seed)


@pytest.mark.proof
def test_jobs_and_writers_are_as_if_each_had_run_alone_in_many_stories() -> None:
    found: Counter[str] = Counter()
    for seed in PROOF_SEEDS:
        found += check(seed).counts
    for what in ("retries", "refused", "skipped", "unheard", "reads", "job done", "job abandoned"):
        assert found[what], what


def without_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persist.spark.options._expected_upper", lambda options: None)


def with_conditions_looked_at_only_when_a_job_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    real = upsert.Replacement.publish
    monkeypatch.setattr(
        upsert.Replacement, "publish", lambda self, *given: real(self, *given[:3], replace(given[3], alone=False))
    )


def without_a_look_at_what_others_wrote_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persist.spark.upsert.Replacement._retract_between", lambda *_: ())


def without_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persist.spark.batch_io.progress_of", lambda txn: None)


@pytest.mark.parametrize(
    "breaks",
    thinned(
        [
            without_conditions,
            with_conditions_looked_at_only_when_a_job_begins,
            without_a_look_at_what_others_wrote_meanwhile,
            without_transactions,
        ],
        4,
    ),
)
def test_a_build_is_caught(breaks: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch)
    assert caught_within(check, BROKEN_SEEDS) is not None
