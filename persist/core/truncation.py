"""What a shard was truncated to: before which time it lets no row come that was to go. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from persist.core.record import Record


class Truncation(Record, frozen=True):
    """At the time `at` the rows were taken away that were there before the time `before` and still were. 0: none were.

    It makes a truncation to the same time, or to an earlier one, change nothing when it comes again. `removed` rows
    went by it and by those before it.
    """

    levels: ClassVar[Mapping[str, int]] = dict.fromkeys(("before", "at", "removed"), 4)

    before: int = 0
    at: int = 0
    removed: int = 0


NOT_TRUNCATED = Truncation()
