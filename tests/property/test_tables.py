"""Verbs that read before they write, by rivals who come between reads and commits: as if one ran after the other."""

from __future__ import annotations

import pytest

from tests.support.examples import seeds, thinned
from tests.support.rivals import STEPS, Rivals

SEEDS = thinned(range(6), 3)
PROOF_SEEDS = seeds(40)


def check(seed: int) -> Rivals:
    rivals = Rivals(seed)
    for _ in range(STEPS):
        rivals.act()
    rivals.check()
    return rivals


@pytest.mark.parametrize("seed", SEEDS)
def test_every_verb_is_as_if_it_had_run_alone_at_its_time(seed: int) -> None:
    check(seed)


@pytest.mark.proof
def test_every_verb_is_as_if_it_had_run_alone_in_many_stories() -> None:
    retries = refused = 0
    for seed in PROOF_SEEDS:
        found = check(seed)
        retries, refused = retries + found.story.retries, refused + found.refused
    assert retries
    assert refused


def test_a_build_that_does_not_look_at_what_others_changed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persist.client.dml_plans.BoundVerb.concerns", lambda *_: False)
    with pytest.raises(AssertionError):
        any(check(seed) is None for seed in range(200))
