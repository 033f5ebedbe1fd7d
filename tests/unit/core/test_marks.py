"""Marks and grids: what a wall clock was told stays so when the grid changes, and refusals name the first instant."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from persist.core import commands as c
from persist.core.clock_index import GRIDS_MAX, Mark
from persist.core.commands import Command, kinds
from persist.core.errors import NotReadable
from persist.core.frontier import Antichain
from persist.core.shard_phases import Phase, phases_of
from tests.support.shard import Shard

GRIDS_MS = [400, 700, 1_000, 3_000, 3_700, 3_600_000]


@pytest.fixture
def shard() -> Shard:
    """Two writes within one cell of a grid of a second: the second of them is shown from 11 s on."""
    shard = Shard()
    shard.is_stamped = shard.is_checked = True
    shard.one(c.SetSettings(0, 3_600_000))
    for now_ms, upper in ((9_100, 1), (10_200, 2), (10_300, 3)):
        shard.now_ms = now_ms
        shard.one(c.AdvanceUpper(Antichain(upper)))
    return shard


def gridded(shard: Shard, every_ms: int) -> None:
    shard.one(c.SetSettings(shard.state.settings.version, 3_600_000, every_ms))


def told(shard: Shard) -> list[Any]:
    """All that is told of the instants that are settled, and of times."""
    instants = [shard.one(c.ResolveTime(at_ms)) for at_ms in (9_000, 9_999, 10_000, 10_350, 10_999)]
    return [*instants, *(shard.one(c.TimesShown(time, time)) for time in (0, 1, 2))]


@pytest.mark.parametrize("every_ms", GRIDS_MS)
def test_what_was_told_stays_when_the_grid_changes(shard: Shard, every_ms: int) -> None:
    """Of the last cell too, and for how long ever. A time that was said to be shown from an instant on, is."""
    before = told(shard)
    marks = Mark(11_000, Antichain(3)), Mark(10_000, Antichain(1)), Mark(0, Antichain(0))
    shown = [c.MarksShown(marks[1:], None), *[c.MarksShown(marks[:2], None)] * 2]
    assert before[3:] == [c.TimeResolved(Antichain(1), 10_000)] * 2 + shown
    gridded(shard, every_ms)
    assert told(shard) == before
    for now_ms in (11_000, 11_001, 14_500, 8_000_000):
        shard.now_ms = now_ms
        shard.one(c.AdvanceUpper(Antichain((shard.state.upper.element or 0) + 1)))
        assert told(shard) == before
        assert shard.one(c.ResolveTime(11_000)) == c.TimeResolved(Antichain(3), 11_000)
        assert shard.one(c.ResolveTime(10_999)) == before[4]


def test_changes_within_one_cell_wait_for_its_end(shard: Shard) -> None:
    before = told(shard)
    for every_ms in (3_000, 700, 60_000, 1_000, 400):
        gridded(shard, every_ms)
        assert told(shard) == before
    shard.now_ms = 11_900
    shard.one(c.AdvanceUpper(Antichain(4)))
    assert told(shard) == before
    assert shard.one(c.ResolveTime(11_900)) == c.TimeResolved(Antichain(3), 11_600)


def test_a_grid_of_a_day_that_is_made_finer_is_no_spoilt_clock(shard: Shard) -> None:
    """No instant is settled before it has come, so nothing has to be taken back."""
    gridded(shard, 86_400_000)
    shard.now_ms = 12_000
    shard.one(c.AdvanceUpper(Antichain(4)))
    gridded(shard, 1_000)
    assert shard.state.seal.sealed_ms == 12_000
    assert shard.one(c.LowerSeal()) == c.SealLowered(12_000, None)


def test_an_instant_that_a_repair_left_an_answer_keeps_it_when_the_grid_changes(shard: Shard) -> None:
    """Where a mark lies exactly at its point."""
    for now_ms, upper in ((30_100, 4), (31_200, 5), (8_000_000, 6)):
        shard.now_ms = now_ms
        shard.one(c.AdvanceUpper(Antichain(upper)))
    shard.now_ms = 20_000
    assert shard.one(c.LowerSeal()) == c.SealLowered(20_000, 8_000_999)
    before = shard.one(c.ResolveTime(31_700))
    assert before == c.TimeResolved(Antichain(4), 31_000)
    for every_ms in GRIDS_MS:
        gridded(shard, every_ms)
        assert shard.one(c.ResolveTime(31_700)) == before
        assert isinstance(shard.commit(c.ResolveTime(33_000))[0], NotReadable)


def test_so_many_grids_of_before_are_remembered_at_most(shard: Shard) -> None:
    """An instant of an older one goes by the oldest that is known: it names the same time."""
    before = told(shard)
    for number in range(2 * GRIDS_MAX):
        gridded(shard, 500 + number)
        shard.now_ms += 20_000
        shard.one(c.AdvanceUpper(Antichain(4 + number)))
    assert len(shard.state.seal.grids) == GRIDS_MAX
    assert [found.upper for found in told(shard)[:5]] == [found.upper for found in before[:5]]
    assert told(shard)[5:] == before[5:]


# --- docs/internals.md shows the table that `step` checks

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "internals.md"
HEAD, END = "(`persist/core/shard_phases.py`):\n\n", "\n\nFurther rules:"


def listed() -> str:
    """The commands of each set of phases, as a list; the largest set is that of all others."""
    by_phases: dict[frozenset[Phase], list[str]] = {}
    for command in kinds(Command):
        by_phases.setdefault(frozenset(phases_of(command)), []).append(f"`{command.__name__}`")
    lines: list[str] = []
    largest = max(by_phases.values(), key=len)
    for phases, commands in sorted(by_phases.items(), key=lambda item: -len(item[0])):
        names = (
            "every phase" if len(phases) == len(Phase) else ", ".join(phase.value for phase in Phase if phase in phases)
        )
        shown = "all others" if commands is largest else ", ".join(commands)
        lines += textwrap.wrap(f"- **{names}**: {shown}", 110, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def test_the_document_shows_the_table(pytestconfig: pytest.Config) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    start = text.index(HEAD) + len(HEAD)
    end = text.index(END, start)
    if pytestconfig.getoption("--rewrite"):
        DOCUMENT.write_text(text[:start] + listed() + text[end:], encoding="utf-8")
        return
    assert text[start:end] == listed(), "run this test with --rewrite"
