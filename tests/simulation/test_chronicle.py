"""The commit history in the simulation: a seed that keeps one, and broken builds that it must catch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import pytest

import persist.commit.commit_plan
from persist.core.audit_log import CommandEntry, Committed
from persist.core.ids import SeqNo
from persist.core.state import Policy, State
from persist.formats.state_frames import FileWriter
from tests.simulation.runner import Plan, run_plan

SEED = 4  # its plan has chroniclers


def test_a_run_keeps_a_history_and_tells_it_as_it_landed() -> None:
    outcome = run_plan(Plan.of(SEED))
    assert outcome.violation is None
    assert outcome.paths["history told"] == 1
    assert outcome.paths["entries in files"] > 0


def a_file_loses_entries() -> Any:
    real = FileWriter.add

    def add(self: FileWriter, commits: Iterable[tuple[SeqNo, Committed]]) -> None:
        real(self, [(seqno, commit) for seqno, commit in commits if seqno % 3])

    return patch.object(FileWriter, "add", add)


def entries_are_told_twice() -> Any:
    real = persist.commit.commit_plan.recorded

    def recorded(state: State, entries: Iterable[CommandEntry], policy: Policy) -> State:
        told = list(entries)
        return real(state, [*told, *told], policy)

    return patch.object(persist.commit.commit_plan, "recorded", recorded)


@pytest.mark.proof
@pytest.mark.parametrize(
    "broken", [pytest.param(a_file_loses_entries, marks=pytest.mark.smoke), entries_are_told_twice]
)
def test_a_broken_build_is_caught(broken: Any) -> None:
    with broken():
        outcome = run_plan(Plan.of(SEED))
    assert outcome.check == "told", outcome.violation
