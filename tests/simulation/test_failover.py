"""Stores that are replaced under running processes: seeds, and builds that are broken on purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest

from persist.commit.location_identity import Identity
from persist.commit.log_writer import LogWriter
from persist.commit.state_loader import Versions
from persist.core.errors import Corruption
from persist.core.record import replace
from persist.core.state import State
from tests.simulation.breaking import every
from tests.simulation.failover import run
from tests.simulation.oracle_errors import Violation

FEW, SEEDS = 8, 40
HAPPENED = ("told of lost history", "told of swapped stores", "regress", "swap", "maintain", "listen")


@pytest.mark.parametrize("seeds", [FEW, pytest.param(SEEDS, marks=pytest.mark.proof)])
def test_seeds_keep_every_promise(seeds: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(seeds):
        total += run(seed)
    assert all(total[what] > seeds / 4 for what in HAPPENED), total


def parent_not_compared() -> AbstractContextManager[Any]:
    """What follows a State in the log is applied to it, whoever's it is."""

    real = Versions._tail

    def _tail(self: Versions, state: State, scans_max: int) -> State | None:
        return real(self, replace(state, commit_id=""), scans_max)

    return every(patch.object(Versions, "_tail", _tail), patch.object(Versions, "_check_log", lambda *_: None))


def head_not_compared() -> AbstractContextManager[Any]:
    """A commit is appended at its seqno, whatever lies before it."""
    real = LogWriter.compare_and_set
    return patch.object(LogWriter, "compare_and_set", lambda self, *given, **named: real(self, *given[:3], **named))


def identity_not_compared_again() -> AbstractContextManager[Any]:
    """Whoever deletes relies on what was compared when the stores were opened."""
    return patch.object(Identity, "confirm", lambda self: None)


@pytest.mark.parametrize("broken", [parent_not_compared, head_not_compared, identity_not_compared_again])
def test_a_broken_build_is_caught(broken: Callable[[], AbstractContextManager[Any]]) -> None:
    with broken():
        assert any(_fails(seed) for seed in range(SEEDS))


def _fails(seed: int) -> bool:
    try:
        run(seed)
    except (Violation, Corruption):
        return True
    return False
