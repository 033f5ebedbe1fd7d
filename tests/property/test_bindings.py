"""Rivals mint bindings, are killed, and lose answers: each position has one time, which grows with it, for ever."""

from __future__ import annotations

import pytest

from tests.support.bound import Minters
from tests.support.examples import seeds

STEPS = 40
SEEDS = range(2)
PROOF_SEEDS = seeds(26)


def check(seed: int) -> Minters:
    story = Minters(seed)
    for _ in range(STEPS):
        story.act()
    story.check()
    return story


@pytest.mark.parametrize("seed", SEEDS)
def test_each_position_has_one_time_whoever_asks_when(seed: int) -> None:
    assert check(seed).model.minted


@pytest.mark.proof
def test_each_position_has_one_time_in_many_stories() -> None:
    assert sum(len(check(seed).model.minted) for seed in PROOF_SEEDS) > 200


def caught(seed: int) -> bool:
    try:
        check(seed)
    except AssertionError:
        return True
    return False


def test_a_build_that_takes_a_binding_of_a_rival_for_a_later_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persist.patterns.reclock.bisect_left", lambda found, at: min(len(found) - 1, len(found) // 2))
    assert any(caught(seed) for seed in range(20))
