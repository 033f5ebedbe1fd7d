"""Metric families and their text in Prometheus' exposition format (version 0.0.4)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COUNTER = "counter"
GAUGE = "gauge"
HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Spread:
    """The number of values in each bucket, and their sum.

    `counts` is one longer than `bounds`: bucket i counts values in (bounds[i - 1], bounds[i]], the last one the rest.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)


Labelled = tuple[tuple[str, ...], "float | Spread"]  # label values, and the value of the series


@dataclass(frozen=True, slots=True)
class Family:
    """All series of one name. `labels` are the label names; the values of a histogram are Spreads."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...] = ()
    samples: Sequence[Labelled] = field(default_factory=list)


def single_series(name: str, kind: str, text: str, value: float) -> Family:
    """A family of one series without labels."""
    return Family(name, kind, text, (), [((), value)])


def exposition(families: Iterable[Family]) -> bytes:
    """The text of all families."""
    lines: list[str] = []
    for family in families:
        lines.append(f"# HELP {family.name} {family.text}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        lines += (f"{series} {_number(value)}" for series, value in _series(family, buckets=True))
    return "".join(f"{line}\n" for line in lines).encode()


def figures(families: Iterable[Family]) -> dict[str, float]:
    """The value of each series by its name in the text; of a histogram the sum and the count."""
    return {series: value for family in families for series, value in _series(family, buckets=False)}


def _series(family: Family, *, buckets: bool) -> Iterator[tuple[str, float]]:
    for values, value in family.samples:
        labels = list(zip(family.labels, values, strict=True))
        if not isinstance(value, Spread):
            yield f"{family.name}{_labels(labels)}", float(value)
            continue
        cumulative = 0
        if buckets:
            for bound, count in zip((*value.bounds, math.inf), value.counts, strict=True):
                cumulative += count
                yield f"{family.name}_bucket{_labels([*labels, ('le', _number(bound))])}", float(cumulative)
        yield f"{family.name}_sum{_labels(labels)}", float(value.total)
        yield f"{family.name}_count{_labels(labels)}", float(value.count)


def _labels(pairs: Sequence[tuple[str, str]]) -> str:
    if not pairs:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in sorted(pairs)) + "}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    return "+Inf" if value == math.inf else "-Inf" if value == -math.inf else repr(float(value))
