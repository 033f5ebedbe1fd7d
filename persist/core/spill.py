"""Files of entries that were moved out of the State: outcomes of tokens, and the commit history.

For each kind the State holds recent entries and names a few immutable blobs with older ones, oldest first. A file is a
sorted run (`persist.formats.spill_frames`). A flush merges the newest files while they are not much larger than the new
one, so an entry is written a few times. A file leaves the State as a whole, once all its entries are old enough.
"""

from __future__ import annotations

from typing import Literal

from persist.core.record import Record

SpillKind = Literal["outcomes", "entries"]  # named as the field of the State with the recent entries
OUTCOMES: SpillKind = "outcomes"
ENTRIES: SpillKind = "entries"
FILE_GROWTH = 4  # a file is merged unless it has this many times the entries of all newer ones together
FILE_BYTES_MAX = 12 * 1024 * 1024  # a larger file is not merged
FILE_SPAN_PART = 8  # a file older than this part of its retention is not merged
FILES_MAX = 1_000  # of the commit history in one State: beyond that the oldest is forgotten


class SpillFile(Record, frozen=True):
    """A blob with `count` outcomes, or entries, whose numbers are from `first` to `last`, both inclusive.

    The number of an entry is the seqno of its commit. That of an outcome is when its token was minted; `unnumbered`:
    the file also has free-form tokens, which have no such time. The index of the blob begins at `index_at`.

    `begun_ms` is when its oldest entry was moved out of the State, and all were committed by `until_ms`: by the lease
    clock for outcomes, by a checked clock for entries. 0: not known yet.
    """

    key: str
    size: int
    index_at: int
    count: int
    first: int
    last: int
    unnumbered: bool = False
    begun_ms: int = 0
    until_ms: int = 0

    def may_hold(self, number: int | None) -> bool:
        """Whether an entry with this number may be in the file; None: an unnumbered one."""
        return self.unnumbered if number is None else self.first <= number <= self.last

    def is_outlived(self, before_ms: int) -> bool:
        """Whether all entries of the file are older than this, by the clock of its kind."""
        return 0 < self.until_ms < before_ms


def files_to_merge(files: tuple[SpillFile, ...], count: int, now_ms: int, kept_ms: int | None) -> tuple[SpillFile, ...]:
    """The newest files to merge into a new one with `count` further entries.

    `now_ms` is by the clock of their kind, or 0. `kept_ms` is their retention; None: unlimited.
    """
    first, size = len(files), 0
    while first:
        file = files[first - 1]
        age_ms = now_ms - file.begun_ms if file.begun_ms else 0
        is_old = kept_ms is not None and age_ms > kept_ms // FILE_SPAN_PART
        if is_old or file.count >= FILE_GROWTH * count or size + file.size > FILE_BYTES_MAX:
            break
        first, count, size = first - 1, count + file.count, size + file.size
    return files[first:]
