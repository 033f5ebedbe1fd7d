"""The demo's own reckoning: what a flight is at a time, when figures differ, and what the run leaves behind."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pyarrow as pa
import pytest

from examples.flights.__main__ import conclude
from examples.flights.dataset import BOARD_TIMES, COLUMNS, ROWS, checksum, minute
from examples.flights.expected import Expected, daily_peaks
from examples.flights.figures import Board, Checks
from examples.flights.listener import Contents
from examples.flights.progress import Progress
from examples.flights.report import Outcome, page, text_table
from examples.flights.store import Stored
from examples.flights.timeline import Timeline
from tests.integration.flights_sample import CSV
from tests.services.chromium import Browser
from tests.support.pages import ROOT
from tests.support.waiting import wait_until

PAGES = ("README.md", "docs/figures.md")
CANCELLED, DIVERTED, EARLY, SUMMER = 1, 2, 3, 4


def status_of(flight: int, time: int) -> list[tuple[str, int | None, int | None]]:
    rows = Expected(CSV).contents(time).to_pylist()
    return [(row["status"], row["dep_delay"], row["arr_delay"]) for row in rows if row["flight"] == flight]


def test_a_flight_is_planned_then_in_the_air_then_landed() -> None:
    departure = minute(2013, 2, 8, 9, 55)
    assert status_of(EARLY, minute(2013, 2, 7, 9, 59)) == []
    assert status_of(EARLY, minute(2013, 2, 7, 10)) == [("scheduled", None, None)]
    assert status_of(EARLY, departure - 1) == [("scheduled", None, None)]
    assert status_of(EARLY, departure) == [("in the air", -5, None)]
    assert status_of(EARLY, departure + 99) == [("in the air", -5, None)]
    assert status_of(EARLY, departure + 100) == [("landed", -5, -12)]
    assert status_of(EARLY, minute(2014, 1, 1)) == [("landed", -5, -12)]


def test_a_cancelled_flight_leaves_the_board_when_it_should_have_departed() -> None:
    assert status_of(CANCELLED, minute(2013, 1, 1)) == [("scheduled", None, None)]
    assert status_of(CANCELLED, minute(2013, 1, 1, 6, 29)) == [("scheduled", None, None)]
    assert status_of(CANCELLED, minute(2013, 1, 1, 6, 30)) == []


def test_a_flight_that_never_arrives_leaves_the_board_a_day_after_departure() -> None:
    departure = minute(2013, 1, 2, 0, 20)  # late, past midnight
    assert status_of(DIVERTED, departure - 1) == [("scheduled", None, None)]
    assert status_of(DIVERTED, departure + 24 * 60 - 1) == [("in the air", 30, None)]
    assert status_of(DIVERTED, departure + 24 * 60) == []


def test_in_summer_the_clocks_of_new_york_show_an_hour_more() -> None:
    assert status_of(SUMMER, minute(2013, 7, 1, 10, 59)) == [("scheduled", None, None)]
    assert status_of(SUMMER, minute(2013, 7, 1, 11)) == [("in the air", 0, None)]


def test_a_csv_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="line 4 of the CSV: dep_time"):
        Expected(CSV.replace(b"955,1000,-5", b"956,1000,-5"))
    twice = CSV + CSV.splitlines(keepends=True)[1]
    with pytest.raises(ValueError, match="the same key"):
        Expected(twice)


def test_a_checksum_is_that_of_the_multiset() -> None:
    rows = Expected(CSV).contents(minute(2013, 7, 1, 12))
    assert rows.num_rows > 1
    assert checksum(rows.take(pa.array(range(rows.num_rows - 1, -1, -1)))) == checksum(rows)
    assert checksum(rows.slice(1)) != checksum(rows)
    doubled = pa.table({**{n: rows[n] for n in COLUMNS.names}, "__diff": pa.array([2] * rows.num_rows)})
    assert checksum(doubled) != checksum(rows)


def test_the_pages_say_of_the_same_number_of_figures_that_they_are_compared() -> None:
    said = {name: set(re.findall(r"([0-9,]{5,}) figures", (ROOT / name).read_text())) for name in PAGES}
    assert said == {name: {"2,319"} for name in PAGES}


def test_a_listener_keeps_what_was_inserted_and_not_retracted() -> None:
    rows = Expected(CSV).contents(minute(2013, 7, 1, 12))
    minus = rows.slice(0, 1).set_column(len(ROWS) - 1, ROWS.field("__diff"), pa.array([-1], pa.int64()))
    contents = Contents()
    for update in (rows, minus):
        contents.add(update)
    assert checksum(contents.fold()) == checksum(rows.slice(1))


def test_peaks_are_the_most_at_any_minute_of_a_day() -> None:
    changes = [0] * (365 * 24 * 60)
    changes[10], changes[20], changes[2000] = 3, -2, 1
    assert daily_peaks(changes)[:3] == [3, 2, 2]


def test_figures_that_differ_are_named_and_fail_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = Expected(CSV).figures(minute(2013, 12, 31))
    carrier, status = next(iter(expected))
    flights, *rest = expected[carrier, status]
    checks = Checks()
    checks.figures("31 December", expected, expected)
    assert checks.failed == []
    checks.figures("31 December", {**expected, (carrier, status): (flights + 1, *rest)}, expected)
    assert conclude(outcome(failed=checks.failed), tmp_path) == 1
    assert f"DIFFERS 31 December, {carrier} {status}, flights: {flights + 1} in the shard" in capsys.readouterr().out
    assert conclude(outcome(), tmp_path) == 0


def test_a_figure_that_is_missing_differs() -> None:
    expected = Expected(CSV).figures(minute(2013, 12, 31))
    checks = Checks()
    checks.figures("31 December", {}, expected)
    assert checks.failed


def test_the_page_needs_nothing_but_itself() -> None:
    text = page(outcome(), {})
    assert len(ElementTree.fromstring(text.removeprefix("<!doctype html>\n")).findall(".//svg")) == 2
    assert not re.search(r"<script|<link|<img|https?:|url\(|@import", text)


RUN = {
    "looks": [[0, 0, 0, 0, 0, 0], [1, 0, 40, 3, 2_000, 3_000], [2, 10, 90, 1, 1_500, 4_000]],
    "heard": [[0.5, 0], [2, 90]],
    "marks": [[0.4, "commit", "January"], [1, "event", "kill -9 </script>"], [1.01, "event", "back again"]],
}


def test_the_timeline_is_told_in_words_and_drawn_by_what_the_page_holds() -> None:
    text = page(replace(outcome(), timeline=RUN), {})
    tree = ElementTree.fromstring(text.removeprefix("<!doctype html>\n"))
    assert [item.text for item in tree.findall(".//li")] == ["kill -9 </script> ", "back again "]
    [data, code] = tree.findall(".//script")
    assert json.loads(data.text or "") == RUN
    assert not re.search(r"^(import|export) ", code.text or "", re.MULTILINE)
    assert not re.search(r"<link|<img|https?:(?!//www.w3.org/2000/svg)|url\(|@import| src=", text)


@pytest.mark.parametrize("width", [360, 1280])
def test_the_timeline_is_drawn_in_a_browser_however_narrow(browser: Browser, tmp_path: Path, width: int) -> None:
    file = tmp_path / "flights.html"
    file.write_text(page(replace(outcome(), timeline=RUN), {}), encoding="utf-8")
    browser.open(file.as_uri(), width=width)
    wait_until(lambda: browser.run("return document.querySelector('#timeline svg')"), "the timeline is drawn")
    assert browser.run("return document.querySelectorAll('#timeline .event-line').length") == 2
    assert browser.run("return document.querySelector('#timeline').scrollWidth") <= width
    assert browser.problems() == []


def test_looks_and_marks_are_told_by_seconds_since_the_first_look() -> None:
    timeline = Timeline(lambda: [0, 1, 1, 10, 20])
    with timeline:
        wait_until(lambda: len(timeline.looks) >= 2, "it has looked twice")
        timeline.mark("event", "something")
    told = timeline.to_json()
    assert [look[1:] for look in told["looks"][:2]] == [[0, 1, 1, 10, 20]] * 2
    assert told["looks"][0][0] == 0
    assert told["marks"][0][1:] == ["event", "something"]


def test_the_table_names_every_stage() -> None:
    assert "history before 2013-08-01 forgotten" in text_table(outcome())


def test_progress_is_one_line_a_step_where_nobody_watches() -> None:
    stream = io.StringIO()
    with Progress(stream).step("Writing", 3) as step:
        for done in range(1, 4):
            step.advance(done, f"{done} of 3")
    assert re.fullmatch(r"Writing +\d+\.\d s  3 of 3\n", stream.getvalue())


def outcome(failed: list[str] | None = None) -> Outcome:
    expected = Expected(CSV)
    return Outcome(
        flights=4, cores=2, updates=14, months_s=[1.0] * 12, killed_in="July",
        listener={"updates": 14, "seconds": 2.0}, stored=[Stored(4, 8, 14, 2000, 10, 3000)] * 3,
        boards={time: expected.figures(time) for time in BOARD_TIMES}, compared=10, failed=failed or [],
        peaks=expected.peaks(), seconds=9.0,
    )  # fmt: skip


def test_the_board_counts_flights_by_status() -> None:
    expected = Expected(CSV)
    assert Board.of(expected.figures(minute(2013, 2, 8, 10))) == Board(scheduled=0, in_the_air=1, landed=0)
