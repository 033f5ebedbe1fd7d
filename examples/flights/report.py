"""What a run found out: one table for the terminal, one self-contained HTML page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from examples.flights.dataset import FORGOTTEN, MONTH_NAMES, MONTHS, moment
from examples.flights.drawn import drawn
from examples.flights.figures import Board, Figures, mean_arrival_delay
from examples.flights.plots import delays_plot, peaks_plot
from examples.flights.store import Stored

STAGES = ("written", "compacted, collected", f"history before {moment(FORGOTTEN)[:10]} forgotten")


@dataclass
class Outcome:
    """Everything that a run measured. Times are seconds."""

    flights: int = 0
    cores: int = 0
    updates: int = 0
    months_s: list[float] = field(default_factory=list)
    killed_in: str = ""
    down_s: float = 0.0
    listener: dict[str, float] = field(default_factory=dict)
    stored: list[Stored] = field(default_factory=list)
    maintenance_s: list[float] = field(default_factory=list)
    boards: dict[int, Figures] = field(default_factory=dict)
    spark_rows: int = 0
    spark_s: float = 0.0
    client_rows: int = 0
    client_s: float = 0.0
    snapshots: int = 0
    compared: int = 0
    failed: list[str] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    timeline: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def _rate(count: float, seconds: float) -> str:
    return f"{count / seconds:,.0f}/s" if seconds > 0 else "-"


def rows_of(found: Outcome) -> list[tuple[str, ...]]:
    """The table: name and value, or name and one value for each of STAGES."""
    median_s = statistics.median(found.months_s)
    rows: list[tuple[str, ...]] = [
        ("flights of 2013", f"{found.flights:,}"),
        ("updates in, 12 x compare-and-append", f"{found.updates:,}"),
        (
            f"  PySpark on {found.cores} cores",
            f"{_rate(found.updates / len(found.months_s), median_s)} in the median month",
        ),
        ("  all months, cold start and kill included", f"{sum(found.months_s):.1f} s"),
        ("updates out, listening while writing", f"{found.listener.get('updates', 0):,.0f}"),
        ("  in the time of the writes", _rate(found.listener.get("updates", 0), found.listener.get("seconds", 0.0))),
        (
            f"rows out, PySpark, {found.cores} splits",
            f"{_rate(found.spark_rows, found.spark_s)} of {found.spark_rows:,}",
        ),
        ("rows out, Arrow client", f"{_rate(found.client_rows, found.client_s)} of {found.client_rows:,}"),
        ("kill -9 of the server", f"while {found.killed_in} was written; ready again after {found.down_s:.1f} s"),
        ("snapshots checked", f"{found.snapshots}, {found.compared:,} figures compared"),
        ("whole run", f"{found.seconds:.1f} s"),
    ]
    return rows


def stage_rows(stored: Sequence[Stored]) -> list[tuple[str, ...]]:
    """What lay in the stores after each of STAGES."""
    mib = 1024 * 1024
    return [
        ("", *STAGES[: len(stored)]),
        ("batches", *(f"{one.batches:,}" for one in stored)),
        ("parts", *(f"{one.parts:,}" for one in stored)),
        ("updates kept", *(f"{one.updates:,}" for one in stored)),
        ("MiB of the batches", *(f"{one.live_bytes / mib:.2f}" for one in stored)),
        ("MiB in the blob store", *(f"{one.blob_bytes / mib:.2f}" for one in stored)),
        ("  of them still held, or rollups", *(f"{(one.blob_bytes - one.live_bytes) / mib:.2f}" for one in stored)),
        ("blobs", *(f"{one.blobs:,}" for one in stored)),
    ]


def verdict(found: Outcome) -> str:
    if found.failed:
        return f"{len(found.failed)} of {found.compared:,} figures differ"
    return f"all {found.compared:,} figures are equal to those computed from the CSV"


def text_table(found: Outcome) -> str:
    """The table for a terminal."""
    lines = [*_columns(rows_of(found), right=False), "", *_columns(stage_rows(found.stored), right=True)]
    return "\n".join([*lines, "", verdict(found)])


def _columns(rows: Sequence[tuple[str, ...]], right: bool) -> list[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [c.rjust(w) if right else c.ljust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


# --- the page

STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #5d6b7a; --faint: #dde3e9; --paper: #fbfcfd; --card: #fff;
  --curve: #1c6fb0; --area: #1c6fb01f; --mark: #d9560b; --late: #d9560b; --early: #1c8f6b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7ecf1; --soft: #9aa8b6; --faint: #2c3742; --paper: #12181e;
  --card: #1a222a; --curve: #5aaeea; --area: #5aaeea26; --mark: #ff9a57; --late: #f0854a; --early: #45c09a; } }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 900px; margin: 0 auto; padding: 32px 20px 56px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 0 0 2px; }
p { margin: 0 0 12px; color: var(--soft); } p.verdict { color: var(--ink); font-weight: 600; margin-bottom: 24px; }
section { background: var(--card); border: 1px solid var(--faint); border-radius: 10px; padding: 18px 20px;
  margin: 0 0 20px; }
svg { display: block; width: 100%; height: auto; }
text { font: 12px system-ui, sans-serif; fill: var(--soft); } .label { fill: var(--ink); font-weight: 600; }
.name { fill: var(--ink); } .grid { stroke: var(--faint); } .axis { stroke: var(--soft); stroke-opacity: .6; }
.curve { fill: none; stroke: var(--curve); stroke-width: 1.6; stroke-linejoin: round; } .area { fill: var(--area); }
.mark { fill: var(--mark); stroke: var(--card); stroke-width: 1.5; }
.late { fill: var(--late); } .early { fill: var(--early); }
div.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 8px; border-bottom: 1px solid var(--faint); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; white-space: normal; } td:first-child, th:first-child { text-align: left; }
ol { margin: 10px 0 0; padding-left: 24px; font-variant-numeric: tabular-nums; } ol span { color: var(--soft); }
.second { stroke: var(--ink); stroke-opacity: .7; } .heard { stroke: var(--mark); stroke-dasharray: 4 3; }
.event-line { stroke: var(--mark); stroke-opacity: .55; stroke-dasharray: 3 3; } .tick { stroke: var(--soft); }
.strong { fill: var(--ink); font-weight: 600; }
@media (max-width: 599px) { main { padding: 20px 12px 32px; } section { padding: 14px 12px; } }
tr:last-child td { border-bottom: 0; } table.pairs td { text-align: left; white-space: normal; }
"""


def _table(rows: Sequence[Sequence[str]], kind: str = "", head: bool = True) -> str:
    def line(row: Sequence[str], cell: str) -> str:
        return "<tr>" + "".join(f"<{cell}>{escape(text)}</{cell}>" for text in row) + "</tr>"

    body = [line(row, "th" if head and index == 0 else "td") for index, row in enumerate(rows)]
    return f'<div class="wide"><table class="{kind}">' + "\n".join(body) + "</table></div>"


def _section(title: str, text: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{escape(text)}</p>\n{content}\n</section>"


def _boards(boards: Mapping[int, Figures]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("as of (EST)", "scheduled", "in the air", "landed", "mean arrival delay, min")]
    for time, figures in sorted(boards.items()):
        board = Board.of(figures)
        late = sum(n * mean for n, mean in mean_arrival_delay(figures).values())
        mean = f"{late / board.landed:+.2f}" if board.landed else "-"
        rows.append((moment(time), f"{board.scheduled:,}", f"{board.in_the_air:,}", f"{board.landed:,}", mean))
    return rows


STORED = (
    "What compaction and garbage collection leave of the shard. A merge writes new blobs beside those that it "
    "replaces. These stay for as long as a reader may still ask for them: Spark's reads hold them until their leases "
    "lapse. So the store grows by a compaction at first, and shrinks when they have gone."
)


def _timeline(found: Outcome) -> list[str]:
    """What happened when, drawn by the console's own code; the words are there without it."""
    if not found.timeline.get("looks"):
        return []
    marks = [(at, words) for at, kind, words in found.timeline["marks"] if kind == "event"]
    listed = "".join(f"<li>{escape(words)} <span>{at:.1f} s</span></li>" for at, words in marks)
    text = "Numbers are what happened, ticks are commits. The gap between the curves is what the listener lags behind."
    return [_section("The run as it went", text, f"{drawn(found.timeline)}<ol>{listed}</ol>")]


def page(found: Outcome, names: Mapping[str, str]) -> str:
    """One HTML page that needs nothing else."""
    last = found.boards[max(found.boards)]
    months = zip(MONTH_NAMES, found.months_s, strict=False)
    slowest = ", ".join(f"{name[:3]} {seconds:.1f}" for name, seconds in months)
    parts = [
        "<h1>Flights from New York, 2013</h1>",
        f"<p>{found.flights:,} flights as {found.updates:,} updates of one shard, written with PySpark in "
        f"{len(MONTHS)} commits while a listener followed and the server was killed.</p>",
        f'<p class="verdict">{escape(verdict(found)[0].upper() + verdict(found)[1:])}.</p>',
        *_timeline(found),
        _section(
            "In the air",
            "The most flights that were in the air at the same minute, day by day, as the listener heard it. "
            "Dots: days on which a snapshot of the board was checked.",
            peaks_plot(found.peaks),
        ),
        _section(
            "Late or early",
            f"Mean arrival delay of the flights that had landed as of {moment(max(found.boards))}, by carrier, "
            "as PySpark read it from the shard.",
            delays_plot(mean_arrival_delay(last), names),
        ),
        _section("The board", "Snapshots that PySpark took, one split a core.", _table(_boards(found.boards))),
        _section("The run", f"Seconds to write each month: {slowest}.", _table(rows_of(found), "pairs", head=False)),
        _section("In the stores", STORED, _table(stage_rows(found.stored))),
    ]  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>persist: flights of 2013</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


__all__ = ["Outcome", "page", "rows_of", "stage_rows", "text_table", "verdict"]
