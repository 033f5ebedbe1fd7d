"""README.md and bench/results/README.md say what the results in bench/results say."""

from __future__ import annotations

import pytest

from bench import figures

RESULT = figures.Result(
    date="2026-01-02",
    commit="0123abcd",
    machine="2 cores",
    command="python -m bench.service --only kill",
    seconds=9,
    bars=(
        figures.Bar("errors when one of two servers is killed", 0, "<= 0"),
        figures.Bar("acknowledged rows lost or doubled", 3, "<= 0"),
        figures.Bar("longest insert, s", 0.0612, "<= 1"),
    ),
    printed=("1,000 inserts, the longest took 61 ms",),
)


def test_the_pages_are_written_from_the_results() -> None:
    kept = figures.results()
    readme = figures.README.read_text(encoding="utf-8")
    assert figures.PAGE.read_text(encoding="utf-8") == figures.page(kept), "run `make figures ARGS=--pages`"
    assert readme == figures.readme(readme, kept), "run `make figures ARGS=--pages`"


def test_each_line_of_readme_names_bars_that_its_run_has() -> None:
    for line in figures.LINES:
        assert line.run in {run.name for run in figures.RUNS}
        assert line.figure.count("{}") == len(line.bars)
        if kept := figures.results().get(line.run):
            assert [kept.value(name) for name in line.bars]


def test_what_a_benchmark_prints_is_read() -> None:
    printed = ["10 inserts", "BAR SQLite: append / listen: 1.2e+03 (want <= 2) short", "BAR b: nan (want) ok"]
    assert list(figures.bars_of(printed)) == [figures.Bar("SQLite: append / listen", 1200.0, "<= 2")]


def test_a_figure_that_misses_its_aim_is_marked() -> None:
    page = figures.page({"kill": RESULT})
    assert "| acknowledged rows lost or doubled | 3 | <= 0, short |" in page
    assert "| longest insert, s | 0.061 | <= 1 |" in page
    assert "    1,000 inserts, the longest took 61 ms\n" in page
    assert "`python -m bench.service --only kill`, 2026-01-02, commit `0123abcd`; 2 cores." in page


def test_the_table_of_readme_is_replaced_and_the_rest_stays() -> None:
    before, after = "# persist\n", "## Two commands\n"
    text = f"{before}{figures.MARKS[0]}old\n{figures.MARKS[1]}{after}"
    written = figures.readme(text, {"kill": RESULT})
    assert written.startswith(before)
    assert written.endswith(after)
    assert "old" not in written
    assert "0 errors, 3 rows lost; the slowest insert took 0.061 s" in written
    assert figures.readme(written, {"kill": RESULT}) == written
    with pytest.raises(ValueError, match="no place"):
        figures.readme("# persist\n", {"kill": RESULT})
