"""Ages, sizes and counts in words."""

from __future__ import annotations

from collections.abc import Sequence

from persist.check.limits import KEYS_TOLD_MAX
from persist.inspect.documents import instant

_UNITS = ((86_400_000, "day"), (3_600_000, "hour"), (60_000, "minute"), (1_000, "second"))
_SIZES = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def age(ms: int) -> str:
    """Such as `9 days`, `3 hours` or `1 minute`: in whole units of the largest that fits twice, or once exactly."""
    for unit_ms, name in _UNITS:
        count = ms // unit_ms
        if count >= 2 or (count == 1 and ms % unit_ms == 0):
            return many(count, name)
    return many(max(0, ms) // 1_000, "second")


def many(count: int, name: str) -> str:
    """`1 blob`, `2 blobs`, `3 entries`, `4,000 batches`."""
    if count != 1:
        name = f"{name[:-1]}ies" if name.endswith("ry") else f"{name}es" if name.endswith("ch") else f"{name}s"
    return f"{count:,} {name}"


def size(count: int) -> str:
    """`2.1 MiB`."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_SIZES) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} bytes" if not unit else f"{value:.1f} {_SIZES[unit]}"


def at(ms: int | None) -> str:
    """The wall clock in RFC 3339, to the second."""
    told = instant(ms)
    return "a time that is not known" if told is None else f"{told.partition('.')[0].rstrip('Z')}Z"


def some(keys: Sequence[str]) -> str:
    """The first of these, and how many more there are."""
    told, more = ", ".join(keys[:KEYS_TOLD_MAX]), len(keys) - KEYS_TOLD_MAX
    return f"{told} and {more} more" if more > 0 else told


def is_or_are(count: int) -> str:
    return "is" if count == 1 else "are"
