"""Batches that hold pointers, not rows: shard > batch > run > part.

A batch covers the times `[lower, upper)`; its runs are sequences of parts whose keys ascend and do not
overlap from one part to the next; a part is one blob (Parquet) or, when small, inline bytes (Arrow IPC). Where a batch
has very many parts, bundles stand in their place: a bundle is a blob that lists parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Literal

from persist.core.antichain import Antichain
from persist.core.ids import PartId
from persist.core.record import Record, replace

FORMAT_PARQUET: Final = "parquet"  # one Parquet file in the blob store
FORMAT_IPC: Final = "ipc"  # one Arrow IPC record batch message, without its schema, inline in the State
FORMAT_BUNDLE: Final = "bundle"  # a list of runs of other parts in the blob store


class Description(Record, frozen=True):
    """The times `[lower, upper)` that a batch covers, and the since to which its times were advanced.

    `kept` are times before that since which the merge told apart from later ones of the batch, as tags asked for it.
    """

    lower: Antichain
    upper: Antichain
    since: Antichain
    kept: tuple[int, ...] = ()

    @property
    def is_empty_interval(self) -> bool:
        return not self.lower < self.upper

    def __str__(self) -> str:
        return f"{self.lower}{self.upper}{self.since}"


class Bundle(Record, frozen=True):
    """What a State knows of a bundle, besides what it has in common with parts.

    `parts` and `runs` are listed in it; the longest run has `run_rows` rows. `size` is that of its own blob.
    """

    parts: int
    runs: int
    run_rows: int
    size: int


class Part(Record, frozen=True):
    """One blob of rows, or inline rows. Exactly one of `key` and `data` is set; `id` is used once, for ever.

    `key_lower`/`key_upper` bound the keys in the order-preserving encoding of `persist.parts.keycodec`
    (both inclusive; `key_upper` None = unbounded), so that planning needs no Arrow. `time`, when set,
    replaces the time of every row (the service chose it at commit, after the part was written); then
    `time_min`/`time_max` equal it. `size` counts encoded bytes. `checksum` is the CRC-32 of all bytes,
    `footer_size`/`footer_checksum` that of the file's tail, so that a pruned read is checked as well.
    `sorted` says that rows are ordered by key and no (key, value, time) occurs twice. `clip`, when set, hides
    the rows before that time (a replicated append of which the shard had the beginning already).
    `diff_sum` is None where it is not known (clipped parts), or takes more than 64 bits. `receipt` says that the other
    fields were checked against the rows (`persist.commit.receipts`); what the State holds was, and needs none. `given`
    is set until the part is committed, where it counts for another number of updates than `rows`. `rows_digest` is set
    until then too, for a command with a token (`persist.parts.digest`); no receipt covers it.

    With `bundle` it is none of these. It stands for all the parts that the blob at `key` lists: `rows`, `size` and
    `diff_sum` are sums over them, and the bounds hold all of theirs. `checksum` is that of the list.
    """

    id: PartId
    key: str | None
    data: bytes | None
    format: Literal["parquet", "ipc", "bundle"]
    schema_id: int
    rows: int
    size: int
    checksum: int
    footer_size: int
    footer_checksum: int
    key_lower: bytes
    key_upper: bytes | None
    time: int | None
    time_min: int
    time_max: int
    diff_min: int
    diff_max: int
    diff_sum: int | None
    sorted: bool
    clip: int | None = None
    receipt: bytes = b""
    given: int | None = None
    bundle: Bundle | None = None
    rows_digest: int | None = None

    @property
    def blob_size(self) -> int:
        """Bytes of the blob at `key`: of a bundle those of the list, not of what it lists."""
        return self.size if self.bundle is None else self.bundle.size

    @property
    def updates(self) -> int:
        """The updates that an append of this part counts for: as they were given, and without those it hides."""
        return self.rows if self.given is None else self.given

    @property
    def is_inline(self) -> bool:
        return self.data is not None

    def at(self, time: int) -> Part:
        """The same rows, all at `time`."""
        return replace(self, time=time, time_min=time, time_max=time, receipt=b"")

    def as_staged(self) -> Part:
        """The part as it was when it got its receipt: before a time was chosen for rows that were staged without."""
        if self.time is None:
            return self.without_receipt()
        return replace(self, receipt=b"", rows_digest=None, time=None, time_min=0, time_max=0)

    def without_receipt(self) -> Part:
        """The part without what only a command needs."""
        return replace(self, receipt=b"", rows_digest=None) if self.receipt or self.rows_digest is not None else self


class Run(Record, frozen=True):
    """Parts in key order that do not overlap. An unsorted part is a run of its own.

    A bundle of several runs is alone in its run. Several bundles in one run list the parts of one run, in key order.
    """

    parts: tuple[Part, ...]

    @property
    def longest(self) -> int:
        """Rows of the longest run that it stands for: itself, where it is not a bundle of several."""
        return sum(part.rows if part.bundle is None else part.bundle.run_rows for part in self.parts)

    @property
    def run_count(self) -> int:
        """How many runs it stands for: itself, where it is not a bundle of several."""
        return max((part.bundle.runs for part in self.parts if part.bundle is not None), default=1)


class Listing(Record, frozen=True):
    """What a bundle holds: parts that no State names otherwise while the bundle is named."""

    runs: tuple[Run, ...]


class HollowBatch(Record, frozen=True):
    """A batch that holds pointers. `rows` counts updates before consolidation across runs."""

    desc: Description
    runs: tuple[Run, ...]
    rows: int

    def parts(self) -> Iterator[Part]:
        for run in self.runs:
            yield from run.parts

    @property
    def part_count(self) -> int:
        """The parts, those listed in bundles among them."""
        return sum(1 if part.bundle is None else part.bundle.parts for part in self.parts())

    @property
    def run_count(self) -> int:
        """The runs, those listed in bundles among them."""
        return sum(run.run_count for run in self.runs)

    @property
    def size(self) -> int:
        """Encoded bytes of all parts."""
        return sum(part.size for part in self.parts())

    @property
    def inline_size(self) -> int:
        return sum(part.size for part in self.parts() if part.data is not None)

    @property
    def diff_sum(self) -> int | None:
        """Sum of the diffs of all rows, or None where a part's is not known."""
        return diff_sum_of(self.parts())

    def blob_keys(self) -> Iterator[str]:
        """The blobs that it names itself. What its bundles list is named as well, and is not told here."""
        for part in self.parts():
            if part.key is not None:
                yield part.key


def batch_of(desc: Description, runs: tuple[Run, ...]) -> HollowBatch:
    """A batch with its row count worked out."""
    return HollowBatch(desc, runs, sum(part.rows for run in runs for part in run.parts))


def diff_sum_of(parts: Iterable[Part]) -> int | None:
    """Sum of the parts' diffs, or None where one is not known."""
    total = 0
    for part in parts:
        if part.diff_sum is None:
            return None
        total += part.diff_sum
    return total
