"""What a write of a `ShardTable` came to."""

from __future__ import annotations

from dataclasses import dataclass

from persist.client.telling import HistoryEntry


@dataclass(frozen=True)
class Written:
    """What became of a write.

    `time` is where its rows are (None: it wrote none, or that is not known any more), `rows` and `retractions` are what
    the commit history tells of it. `skipped`: its transaction was committed before, and so it wrote nothing now; the
    others are of that commit, where the commit history has it still.
    """

    time: int | None
    rows: int = 0
    retractions: int | None = 0
    skipped: bool = False

    @classmethod
    def of(cls, entry: HistoryEntry | None, *, skipped: bool = False) -> Written:
        """As the entry of the commit history tells; None: there is none."""
        if entry is None:
            return cls(None, skipped=skipped)
        return cls(None if entry.lower == entry.upper else entry.lower, entry.rows, entry.retractions, skipped)
