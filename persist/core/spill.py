"""Files of what has moved out of the State: outcomes of tokens, and entries of the commit history.

Of each kind the State holds what is recent and names a few immutable blobs with what is older, oldest first. A file is
a sorted run (`persist.formats.spill_frames`). A new one takes in the newest of those before it while these are not much
larger, so all are written a few times. A file leaves the State as a whole, once all that it holds is old enough.
"""

from __future__ import annotations

from typing import Literal

from persist.core.record import Record

SpillKind = Literal["outcomes", "entries"]  # each is called as the field of the State that holds what is recent
OUTCOMES: SpillKind = "outcomes"
ENTRIES: SpillKind = "entries"
FILE_GROWTH = 4  # a file takes in the newer ones while it does not hold this many times as much as they do together
FILE_BYTES_MAX = 12 * 1024 * 1024  # of a file that takes in more
FILE_SPAN_PART = 8  # a file takes in no more once it was begun this part ago of the time for which it is kept
FILES_MAX = 1_000  # of the commit history that one State names: beyond that the oldest is forgotten


class SpillFile(Record, frozen=True):
    """A blob with `count` outcomes, or entries, whose numbers are from `first` to `last`, both inclusive.

    The number of an entry is the seqno of its commit. That of an outcome is when its token was minted; `unnumbered`:
    the file has free-form tokens too, which do not tell. The index of the blob begins at `index_at`.

    `begun_ms` is when the oldest of it moved out of the State, and all was committed by `until_ms`: by the lease clock
    for outcomes, by a checked clock for entries. 0: not known yet.
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
        """Whether something with this number may be in the file; None: with none."""
        return self.unnumbered if number is None else self.first <= number <= self.last

    def is_outlived(self, before_ms: int) -> bool:
        """Whether all of the file is older than this, by the clock of its kind."""
        return 0 < self.until_ms < before_ms


def files_to_merge(files: tuple[SpillFile, ...], count: int, now_ms: int, kept_ms: int | None) -> tuple[SpillFile, ...]:
    """The newest files that a new one takes in, which holds `count` besides theirs.

    `now_ms` is by the clock of their kind, or 0. `kept_ms` is how long they are kept; None: for ever.
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
