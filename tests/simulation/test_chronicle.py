"""The commit history in the simulation: a seed that keeps one, and broken builds that it must catch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from unittest.mock import patch

import pytest

import persist.commit.commit_plan
from persist.commit import spill_files
from persist.core.audit_log import CommandEntry
from persist.core.state import State
from persist.formats.spill_frames import Pair, RunLayout
from tests.simulation.runner import Plan, run_plan

SEED = 4  # its plan has chroniclers


def test_a_run_keeps_a_history_and_tells_it_as_it_landed() -> None:
    outcome = run_plan(Plan.of(SEED))
    assert outcome.violation is None
    assert outcome.paths["history told"] == 1
    assert outcome.paths["entries in files"] > 0


def a_file_loses_entries() -> Any:
    real = spill_files.encode_run

    def encode_run(pairs: Sequence[Pair], layout: RunLayout, version: int) -> tuple[bytes, int]:
        kept = [pair for number, pair in enumerate(pairs) if layout.is_random or number % 3 != 1]
        return real(kept, layout, version)

    return patch.object(spill_files, "encode_run", encode_run)


def entries_are_told_twice() -> Any:
    real = persist.commit.commit_plan.recorded

    def recorded(state: State, entries: Iterable[CommandEntry]) -> State:
        told = list(entries)
        return real(state, [*told, *told])

    return patch.object(persist.commit.commit_plan, "recorded", recorded)


@pytest.mark.proof
@pytest.mark.parametrize(
    "broken", [pytest.param(a_file_loses_entries, marks=pytest.mark.smoke), entries_are_told_twice]
)
def test_a_broken_build_is_caught(broken: Any) -> None:
    with broken():
        outcome = run_plan(Plan.of(SEED))
    assert outcome.check == "told", outcome.violation
