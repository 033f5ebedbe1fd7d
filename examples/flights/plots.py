"""The two plots of the page, as inline SVG: no script, no network. Colours come from the page's style sheet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from html import escape

from examples.flights.dataset import BOARD_TIMES, DAYS, MONTHS, day

WIDTH = 860
LEFT, RIGHT = 44, 16
LINE_HEIGHT = 260
BAR_STEP, BAR = 25, 15
NAME_WIDTH = 190
DAY_MINUTES = 24 * 60


def _svg(height: int, label: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">\n{body}\n</svg>'


def _text(x: float, y: float, text: str, kind: str = "tick", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _short(when: date) -> str:
    return f"{when.day} {when:%b}"


def peaks_plot(peaks: Sequence[int]) -> str:
    """The most flights in the air on each day; the days of the boards are marked, the extremes named."""
    top, bottom = 26, LINE_HEIGHT - 28
    step = 50
    ceiling = (max(peaks) // step + 1) * step

    def x(number: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * number / (DAYS - 1)

    def y(value: float) -> float:
        return bottom - (bottom - top) * value / ceiling

    parts = []
    for value in range(0, ceiling + 1, step):
        parts.append(_line("axis" if value == 0 else "grid", LEFT, y(value), WIDTH - RIGHT, y(value)))
        parts.append(_text(LEFT - 8, y(value) + 4, str(value), anchor="end"))
    for lower, _ in MONTHS:
        first = lower // DAY_MINUTES
        parts.append(_line("axis", x(first), bottom, x(first), bottom + 5))
        parts.append(_text(x(first) + 4, bottom + 18, f"{day(first):%b}"))
    points = " ".join(f"{x(number):.1f},{y(value):.1f}" for number, value in enumerate(peaks))
    parts.append(f'<polygon class="area" points="{x(0):.1f},{bottom} {points} {x(DAYS - 1):.1f},{bottom}"/>')
    parts.append(f'<polyline class="curve" points="{points}"/>')
    for number in sorted({time // DAY_MINUTES for time in BOARD_TIMES}):
        title = f"{_short(day(number))}: at most {peaks[number]} in the air; the board was checked on this day"
        parts.append(f'<circle class="mark" cx="{x(number):.1f}" cy="{y(peaks[number]):.1f}" r="4.5">')
        parts.append(f"<title>{title}</title></circle>")
    lowest, highest = peaks.index(min(peaks)), peaks.index(max(peaks))
    parts.append(_text(x(lowest) + 8, y(peaks[lowest]) + 14, f"{_short(day(lowest))}: {peaks[lowest]}", "label"))
    anchor = "start" if highest < DAYS // 2 else "end"
    parts.append(_text(x(highest), y(peaks[highest]) - 8, f"{_short(day(highest))}: {peaks[highest]}", "label", anchor))
    return _svg(LINE_HEIGHT, "Most flights in the air on each day of 2013", parts)


def delays_plot(delays: Mapping[str, tuple[int, float]], names: Mapping[str, str]) -> str:
    """Mean arrival delay of each carrier, the latest first. `delays`: carrier -> flights, minutes."""
    ordered = sorted(delays.items(), key=lambda item: -item[1][1])
    height = BAR_STEP * len(ordered) + 34
    least = min(0.0, *(mean for _, mean in delays.values()))
    most = max(0.0, *(mean for _, mean in delays.values()))
    room = 110  # for the labels at the ends of the bars
    scale = (WIDTH - NAME_WIDTH - RIGHT - 2 * room) / max(1.0, most - least)
    zero = NAME_WIDTH + room - least * scale
    parts = [_line("axis", zero, 4, zero, height - 26)]
    for row, (carrier, (flights, mean)) in enumerate(ordered):
        middle = 14 + BAR_STEP * row
        kind = "late" if mean > 0 else "early"
        start, end = sorted((zero, zero + mean * scale))
        name = names.get(carrier, carrier).removesuffix(".").removesuffix(" Inc").removesuffix(" Co")
        parts.append(_text(NAME_WIDTH - 8, middle + 4, name, "name", "end"))
        parts.append(
            f'<rect class="{kind}" x="{start:.1f}" y="{middle - BAR / 2}" width="{max(1.0, end - start):.1f}" '
            f'height="{BAR}" rx="2"><title>{escape(name)}: {flights:,} flights landed, {mean:+.1f} min on average'
            "</title></rect>"
        )
        at, anchor = (end + 6, "start") if mean > 0 else (start - 6, "end")
        parts.append(_text(at, middle + 4, f"{mean:+.1f}", "label", anchor))
    parts.append(_text(zero - 8, height - 8, "← early", anchor="end"))
    parts.append(_text(zero + 8, height - 8, "late, minutes →"))
    return _svg(height, "Mean arrival delay by carrier", parts)


__all__ = ["delays_plot", "peaks_plot"]
