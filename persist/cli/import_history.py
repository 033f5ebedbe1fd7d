"""What later commits did to the rows of an import, as the commit history tells it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from persist.client.shard import Shard
from persist.client.telling import HistoryEntry
from persist.core.recorded import PAGE_MAX

INSERT, UPSERT, OVERWRITE = "insert", "upsert", "overwrite"
ENTRIES_MAX = 1_000_000  # that are read back; an import that lies further back counts as out of reach
TRUNCATIONS = ("truncate", "drop_before")
ADDING = ("insert", "append", "compare_and_append")
REPAIR = "repair"  # which may have lost rows
DIGEST = "digest"  # in what an overwrite by an import says of itself: stands for its files and how they are read
WITHOUT_COUNT = (OVERWRITE, "drop_before", REPAIR)  # operations that may change rows and add none


@dataclass(frozen=True)
class Fate:
    """What became of an import.

    `undone_by` is the commit that undid it as a whole. `removed_by` are commits that may have removed some of its rows,
    in their order. `is_known`: the history reaches back to the import. `overwrite` is the commit that put the rows of
    the same files in the place of everything, so that they are there since it.
    """

    undone_by: HistoryEntry | None = None
    removed_by: tuple[HistoryEntry, ...] = ()
    is_known: bool = True
    overwrite: HistoryEntry | None = None

    @property
    def is_whole(self) -> bool:
        """Whether no row of it was removed."""
        return self.is_known and self.undone_by is None and not self.removed_by


WHOLE = Fate()


def fate_of(shard: Shard, verb: str, landed: int, digest: str | None = None) -> Fate:
    """What became of an import by `verb` that is there as of the time `landed`. Raises what `Shard.history` does.

    `digest` stands for its files: an overwrite by the same ones leaves its rows there.
    """
    later: list[HistoryEntry] = []
    before: HistoryEntry | None = None
    for _ in range(0, ENTRIES_MAX, PAGE_MAX):
        page = shard.history(PAGE_MAX, before=before)
        for entry in page:
            if entry.operation == "create" or _is_until(entry, landed):
                return after(verb, landed, reversed(later), digest)
            if _changes_rows(entry):
                later.append(entry)
        if len(page) < PAGE_MAX:
            break
        before = page[-1]
    return Fate(is_known=False)


def after(verb: str, landed: int, later: Iterable[HistoryEntry], digest: str | None = None) -> Fate:
    """What became of the import by these commits, which came after it, in their order. Pure."""
    times, fates = [landed], [WHOLE]

    def at(time: int) -> Fate:
        """What had become of it as of a time that is not before it."""
        return fates[bisect_right(times, time) - 1]

    for entry in later:
        if _changes_rows(entry) and not _is_until(entry, landed):
            times.append(times[-1] if entry.operation == REPAIR else entry.lower or 0)
            is_same = entry.operation == OVERWRITE and digest is not None and (entry.info or {}).get(DIGEST) == digest
            fates.append(Fate(overwrite=entry) if is_same else _following(verb, landed, entry, fates[-1], at))
    return fates[-1]


def _following(verb: str, landed: int, entry: HistoryEntry, now: Fate, at: Callable[[int], Fate]) -> Fate:
    """What became of the import by this commit. What had become of it before was `now`."""
    undone = now if now.undone_by is not None else replace(now, undone_by=entry, removed_by=())
    partly = now if now.undone_by is not None else replace(now, removed_by=(*now.removed_by, entry))
    if entry.operation == "restore" and entry.point is not None:
        return undone if entry.point < landed else at(entry.point)
    if verb == OVERWRITE or entry.operation == OVERWRITE:
        return undone
    if entry.operation in TRUNCATIONS and entry.point is not None and "retention" not in (entry.info or {}):
        is_beyond = entry.point > landed and at(entry.point - 1).undone_by is None
        return undone if is_beyond else partly  # rows equal to these may have been there before the cut
    if entry.operation in ADDING and entry.retractions == 0:
        return now
    return partly


def _is_until(entry: HistoryEntry, landed: int) -> bool:
    """Whether the entry is of rows that were written by that time. A repair is of batches from before it."""
    is_repair = entry.operation == REPAIR
    return _changes_rows(entry) and not is_repair and entry.lower is not None and entry.lower <= landed


def _changes_rows(entry: HistoryEntry) -> bool:
    return bool(entry.rows) or entry.operation in WITHOUT_COUNT
