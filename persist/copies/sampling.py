"""Samples: which parts are looked at tonight, so that all of them are once in so many nights."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

from persist.core.errors import InvalidUsage

OF_MAX = 10_000  # samples into which a location can be cut: 0.01% each
DAY_MS = 24 * 3600 * 1000
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,4})?)%\Z")


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample `number` of `of` that together are everything. Numbers count round, so any number means one."""

    number: int
    of: int

    def takes(self, name: str) -> bool:
        """Whether what has this name is in it. The same for ever, on any machine."""
        return zlib.crc32(name.encode()) % self.of == self.number % self.of


def samples_of(text: str) -> int:
    """How many samples of this share, such as `1%`, are everything. Raises InvalidUsage."""
    match = _SHARE.match(text.strip())
    share = float(match.group(1)) if match else 0.0
    if not 100 / OF_MAX <= share <= 100:
        raise InvalidUsage(f"a sample of {text!r:.40} is none; give a share from {100 / OF_MAX:g}% to 100%, such as 1%")
    return round(100 / share)


def number_of_day(now_ms: int) -> int:
    """The number of the sample of that day: each day takes the next one."""
    return now_ms // DAY_MS
