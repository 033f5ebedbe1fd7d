"""Batches of pointers to rows (shard > batch > run > part), and the trace of a shard, which lists them.

A batch covers the times `[lower, upper)`; its runs are sequences of parts whose keys ascend and do not overlap from
one part to the next; a part is one blob (Parquet) or, when small, inline bytes (Arrow IPC). If a batch has very many
parts, it names bundles instead: a bundle is a blob that lists parts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import Final, Literal, overload

from persist.core.frontier import MINIMUM, Antichain
from persist.core.ids import PartId
from persist.core.persistent_map import Entries, watched, with_changes
from persist.core.record import Record, force_setattr, replace

FORMAT_PARQUET: Final = "parquet"  # one Parquet file in the blob store
FORMAT_IPC: Final = "ipc"  # one Arrow IPC record batch message, without its schema, inline in the State
FORMAT_BUNDLE: Final = "bundle"  # a list of runs of other parts in the blob store


class Description(Record, frozen=True):
    """The times `[lower, upper)` that a batch covers, and the since to which its times were advanced.

    `kept` are times before that since which the merge kept distinct from later ones, for tags.
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
    """The fields of a bundle that other parts do not have.

    It lists `parts` parts in `runs` runs; the longest run has `run_rows` rows. `size` is that of its own blob.
    """

    parts: int
    runs: int
    run_rows: int
    size: int


class Part(Record, frozen=True):
    """One blob of rows, or inline rows. Exactly one of `key` and `data` is set; an `id` is never reused.

    `key_lower`/`key_upper` bound the keys in the order-preserving encoding of `persist.parts.key_encoding`
    (both inclusive; `key_upper` None = unbounded), so that planning needs no Arrow. `time`, when set,
    replaces the time of every row (the service chose it at commit, after the part was written); then
    `time_min`/`time_max` equal it. `size` counts encoded bytes. `checksum` is the CRC-32 of all bytes,
    `footer_size`/`footer_checksum` that of the file's tail, so that a pruned read is checked as well.
    `sorted` says that rows are ordered by key and no (key, value, time) occurs twice. `clip`, when set, hides
    the rows before that time (a replicated append of which the shard had the beginning already).
    `diff_sum` is None if it is unknown (clipped parts), or takes more than 64 bits.

    Three fields are of staged parts only; in a State they have their defaults (`as_durable`). `receipt` proves that
    the other fields were checked against the rows (`persist.commit.validation_receipts`). `given`: it counts as
    another number of updates than `rows`. `rows_digest`: of its rows, for a command with a token
    (`persist.parts.row_stats`); no receipt covers it.

    With `bundle` it represents all the parts that the blob at `key` lists: `rows`, `size` and `diff_sum` are sums over
    them, and the bounds include theirs. `checksum` is that of the list.
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
        """Bytes of the blob at `key`; for a bundle those of the list, not of the listed parts."""
        return self.size if self.bundle is None else self.bundle.size

    @property
    def updates(self) -> int:
        """The updates that an append of this part counts: as they were given, without hidden ones."""
        return self.rows if self.given is None else self.given

    @property
    def is_inline(self) -> bool:
        return self.data is not None

    def at(self, time: int) -> Part:
        """The same rows, all at `time`."""
        return replace(self, time=time, time_min=time, time_max=time, receipt=b"")

    def as_staged(self) -> Part:
        """The part as it was when its receipt was issued: without a time that was chosen at the commit."""
        if self.time is None:
            return self.without_receipt()
        return replace(self, receipt=b"", rows_digest=None, time=None, time_min=0, time_max=0)

    @property
    def is_staged(self) -> bool:
        """Whether it has fields that only staged parts have."""
        return bool(self.receipt) or self.given is not None or self.rows_digest is not None

    def as_durable(self) -> Part:
        """The part as a State stores it, without the fields of staged parts."""
        return replace(self, receipt=b"", given=None, rows_digest=None) if self.is_staged else self

    def without_receipt(self) -> Part:
        """The part as a receipt covers it."""
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
    """The contents of a bundle: parts that no State names directly while the bundle is named."""

    runs: tuple[Run, ...]


class HollowBatch(Record, frozen=True):
    """A batch that holds pointers. `rows` counts updates before consolidation across runs."""

    desc: Description
    runs: tuple[Run, ...]
    rows: int

    def parts(self) -> Iterator[Part]:
        return parts_of(self.runs)

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
        """The blobs that it names directly, without the parts that its bundles list."""
        for part in self.parts():
            if part.key is not None:
                yield part.key


def parts_of(runs: Iterable[Run]) -> Iterator[Part]:
    return (part for run in runs for part in run.parts)


def batch_of(desc: Description, runs: tuple[Run, ...]) -> HollowBatch:
    return HollowBatch(desc, runs, sum(part.rows for part in parts_of(runs)))


def diff_sum_of(parts: Iterable[Part]) -> int | None:
    """Sum of the parts' diffs, or None where one is not known."""
    total = 0
    for part in parts:
        if part.diff_sum is None:
            return None
        total += part.diff_sum
    return total


# The batches of a trace: a sequence that shares what did not change.
#
# A shard may have thousands, and a commit adds one.
#
# It consists of blocks of at most BLOCK_MAX batches, and of the newest ones. Adding one batch copies the newest ones,
# and now and then the list of blocks; so does comparing two sequences of which one was derived from the other.


BLOCK_MAX = 64  # batches; with 10,000 of them, which is the most, there are about as many blocks

_Block = tuple[HollowBatch, ...]


class Batches(Sequence[HollowBatch]):
    """An immutable sequence. A slice of it is a tuple, and it equals a tuple of the same batches."""

    __slots__ = ("_blocks", "_length", "_newest", "_newest_from", "_starts")

    def __init__(self, blocks: tuple[_Block, ...], starts: tuple[int, ...], newest: _Block, length: int) -> None:
        """`starts` has the index of the first batch of each block. `newest` is empty only where there are none."""
        self._blocks = blocks
        self._starts = starts
        self._newest = newest
        self._newest_from = length - len(newest)
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> HollowBatch: ...
    @overload
    def __getitem__(self, index: slice) -> _Block: ...
    def __getitem__(self, index: int | slice) -> HollowBatch | _Block:
        if type(index) is slice:  # called a hundred times in a commit
            first, end, step = index.indices(self._length)
            return self._between(first, end) if step == 1 else tuple(self)[index]
        at = index + self._length if index < 0 else index
        if not 0 <= at < self._length:
            raise IndexError(f"there are {self._length} batches, and none at {index}")
        if at >= self._newest_from:
            return self._newest[at - self._newest_from]
        block = bisect_right(self._starts, at) - 1
        return self._blocks[block][at - self._starts[block]]

    def _between(self, first: int, end: int) -> _Block:
        """The batches at `[first, end)`, which lie within the sequence."""
        start = self._newest_from
        if first >= start:
            return self._newest[first - start : max(0, end - start)]
        batches: list[HollowBatch] = []
        block = bisect_right(self._starts, first) - 1
        while block < len(self._blocks) and self._starts[block] < end:
            at = self._starts[block]
            batches.extend(self._blocks[block][max(0, first - at) : end - at])
            block += 1
        batches.extend(self._newest[: max(0, end - start)])
        return tuple(batches)

    def __iter__(self) -> Iterator[HollowBatch]:
        return chain.from_iterable(self._all_blocks())

    def __reversed__(self) -> Iterator[HollowBatch]:
        return chain.from_iterable(map(reversed, reversed(self._all_blocks())))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Batches | tuple):
            return len(self) == len(other) == common_start(self, other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Batches({tuple(self)})"

    def _all_blocks(self) -> tuple[_Block, ...]:
        return (*self._blocks, self._newest)

    def added_to(self, earlier: Batches) -> _Block | None:
        """The batches at its end that an earlier sequence, from which it was derived, did not have. None: unknown."""
        held = len(earlier._newest)
        if self._blocks is not earlier._blocks or self._newest[:held] != earlier._newest:  # by identity, in C
            return None
        return self._newest[held:]

    def with_more(self, batch: HollowBatch) -> Batches:
        if len(self._newest) < BLOCK_MAX:
            return Batches(self._blocks, self._starts, (*self._newest, batch), self._length + 1)
        starts = (*self._starts, self._length - BLOCK_MAX)
        return Batches((*self._blocks, self._newest), starts, (batch,), self._length + 1)

    def with_last(self, batch: HollowBatch) -> Batches:
        """The sequence with another batch in the place of its last one."""
        return Batches(self._blocks, self._starts, (*self._newest[:-1], batch), self._length)

    def spliced(self, first: int, count: int, replacement: Iterable[HollowBatch]) -> Batches:
        """The sequence with `count` batches from index `first` replaced.

        Blocks before and after them are shared. The rest is merged with small neighbours.
        """
        blocks = self._all_blocks()
        starts = (*self._starts, self._length - len(self._newest))
        low = max(0, bisect_right(starts, first) - 1)
        high = max(low, bisect_right(starts, first + count - 1) - 1) if count else low
        end = starts[high] + len(blocks[high])
        middle = [*self[starts[low] : first], *replacement, *self[first + count : end]]
        high += 1
        while low and len(blocks[low - 1]) + len(middle) <= BLOCK_MAX:
            low -= 1
            middle[:0] = blocks[low]
        while high < len(blocks) and len(middle) + len(blocks[high]) <= BLOCK_MAX:
            middle += blocks[high]
            high += 1
        cut = [tuple(middle[at : at + BLOCK_MAX]) for at in range(0, len(middle), BLOCK_MAX)]
        return _of_blocks([*blocks[:low], *cut, *blocks[high:]])


def batches_of(batches: Iterable[HollowBatch]) -> Batches:
    if isinstance(batches, Batches):
        return batches
    held = tuple(batches)
    return _of_blocks([held[at : at + BLOCK_MAX] for at in range(0, len(held), BLOCK_MAX)])


def _of_blocks(blocks: Sequence[_Block]) -> Batches:
    if not blocks:
        return Batches((), (), (), 0)
    *starts, length = accumulate(map(len, blocks), initial=0)
    return Batches(tuple(blocks[:-1]), tuple(starts[:-1]), blocks[-1], length)


def common_start(before: Iterable[HollowBatch], after: Iterable[HollowBatch]) -> int:
    """The number of equal batches at the beginning of both. Shared blocks are skipped."""
    old, new = batches_of(before), batches_of(after)
    return len(old) if new.added_to(old) is not None else _common(old._all_blocks(), new._all_blocks())


def common_end(before: Iterable[HollowBatch], after: Iterable[HollowBatch], most: int) -> int:
    """The number of equal batches at the end of both, at most `most`."""
    old, new = batches_of(before)._all_blocks(), batches_of(after)._all_blocks()
    return min(most, _common(old[::-1], new[::-1], -1))


def _common(old: Sequence[_Block], new: Sequence[_Block], step: int = 1) -> int:
    """The number of equal batches at the beginning of both; with -1 each block is in reverse."""
    same = blocks = 0
    for one, other in zip(old, new, strict=False):
        if one is not other:
            break
        same += len(one)
        blocks += 1
    left, right = (chain.from_iterable(block[::step] for block in held[blocks:]) for held in (old, new))
    for first, second in zip(left, right, strict=False):
        if first is not second and first != second:
            break
        same += 1
    return same


class Trace(Record, frozen=True, dict=True, gc=True):
    """Ordered batches and two running sums that every append needs.

    A trace shares unchanged batches with the one from which it was derived (`Batches`).
    """

    batches: Sequence[HollowBatch]
    inline_bytes: int  # of all inline parts
    rows: int  # updates, before consolidation

    def __post_init__(self) -> None:
        if type(self.batches) is not Batches:
            force_setattr(self, "batches", batches_of(self.batches))

    @cached_property
    def upper(self) -> Antichain:
        return self.batches[-1].desc.upper if self.batches else MINIMUM

    @cached_property
    def blob_keys(self) -> frozenset[str]:
        return frozenset(self._keys.plain())

    @cached_property
    def _ids(self) -> Entries[str, int]:
        """How often each part id occurs. Once computed, it is updated from trace to trace, as `_keys` is."""
        return watched(dict(Counter(part.id for part in self.parts())))

    @cached_property
    def _keys(self) -> Entries[str, int]:
        """How often each blob is named."""
        return watched(dict(Counter(key for batch in self.batches for key in batch.blob_keys())))

    def holds(self, part_id: str) -> bool:
        """Whether one of its parts has this id. After the first call it costs what changes."""
        return part_id in self._ids

    def occurs_twice(self, part_id: str) -> bool:
        count: int = self._ids.get(part_id, 0)
        return count > 1

    def names(self, key: str) -> bool:
        """Whether it names this blob directly. After the first call it costs what changes."""
        return key in self._keys

    def parts(self) -> Iterator[Part]:
        for batch in self.batches:
            yield from batch.parts()

    def beyond(self, lower: Antichain) -> tuple[HollowBatch, ...]:
        """The batches that extend beyond `lower`."""
        first = len(self.batches)
        for batch in reversed(self.batches):
            if not lower < batch.desc.upper:
                break
            first -= 1
        return tuple(self.batches[first:])

    def push(self, batch: HollowBatch) -> Trace:
        """The trace with one more batch at its end; an empty batch fuses with an empty one before it."""
        held = batches_of(self.batches)
        last = held[-1] if held else None
        if last is not None and not last.runs and not batch.runs:
            fused = HollowBatch(Description(last.desc.lower, batch.desc.upper, last.desc.since), (), 0)
            return self._following(held.with_last(fused), (), ())
        return self._following(held.with_more(batch), (batch,), ())

    def extend_last(self, runs: tuple[Run, ...]) -> Trace:
        """The trace with more runs in its last batch. Costs what is added."""
        last, added = self.batches[-1], batch_of(self.batches[-1].desc, runs)
        joined = HollowBatch(last.desc, (*last.runs, *runs), last.rows + added.rows)
        return self._following(batches_of(self.batches).with_last(joined), (added,), ())

    def append(self, batches: tuple[HollowBatch, ...]) -> Trace:
        """The trace with these batches at its end, as they are."""
        trace = self
        for batch in batches:
            trace = trace._following(batches_of(trace.batches).with_more(batch), (batch,), ())
        return trace

    def splice(self, first: int, count: int, replacement: Sequence[HollowBatch]) -> Trace:
        """The trace with `count` batches from index `first` replaced. Costs what is replaced."""
        held = batches_of(self.batches)
        return self._following(held.spliced(first, count, replacement), replacement, held[first : first + count])

    def _following(self, batches: Batches, came: Sequence[HollowBatch], gone: Sequence[HollowBatch]) -> Trace:
        """The trace of these batches: those of this trace with `came` and without `gone`."""
        inline = self.inline_bytes + sum(b.inline_size for b in came) - sum(b.inline_size for b in gone)
        trace = Trace(batches, inline, self.rows + sum(b.rows for b in came) - sum(b.rows for b in gone))
        if "_ids" in self.__dict__:
            ids = ([part.id for batch in side for part in batch.parts()] for side in (came, gone))
            trace.__dict__["_ids"] = _recounted(self._ids, *ids)
        if "_keys" in self.__dict__:
            keys = ([key for batch in side for key in batch.blob_keys()] for side in (came, gone))
            trace.__dict__["_keys"] = _recounted(self._keys, *keys)
        return trace

    def covering(self, part_ids: frozenset[str]) -> tuple[int, int] | None:
        """Index and count of the contiguous batches that hold exactly these parts among others.

        None if any of the parts is not in the trace: a merge of parts that are gone must not be applied. The search
        begins with the newest batches, and ends once all parts are found.
        """
        missing = set(part_ids)
        if not missing or not all(map(self.holds, missing)):
            return None
        first = end = len(self.batches)
        for batch in reversed(self.batches):
            first -= 1
            held = {part.id for part in batch.parts() if part.id in missing}
            end = first + 1 if held and len(missing) == len(part_ids) else end
            missing -= held
            if not missing:
                break
        return first, end - first

    def difference(self, later: Trace) -> tuple[int, int, tuple[HollowBatch, ...]] | None:
        """The change to a later trace: `(first, count, batches)` replaces the batches at `[first, first + count)`.

        None: they are equal. Costs what changed if one was derived from the other.
        """
        before, after = self.batches, later.batches
        if before is after:
            return None
        assert type(before) is type(after) is Batches  # `__post_init__` has seen to that
        added = after.added_to(before)
        if added is not None:  # nearly always: batches were appended
            return (len(before), 0, added) if added else None
        first = common_start(before, after)
        if first == len(before):
            return (first, 0, tuple(after[first:])) if first < len(after) else None
        tail = common_end(before, after, min(len(before), len(after)) - first)
        return first, len(before) - first - tail, tuple(after[first : len(after) - tail])


def trace_of(batches: Iterable[HollowBatch]) -> Trace:
    held = batches_of(batches)
    return Trace(held, sum(b.inline_size for b in held), sum(b.rows for b in held))


def _recounted(held: Entries[str, int], came: Sequence[str], gone: Sequence[str]) -> Entries[str, int]:
    """The counts of names with `came` added and `gone` removed."""
    counts: dict[str, int] = {}
    for name in came:
        counts[name] = counts.get(name, held.get(name, 0)) + 1
    for name in gone:
        counts[name] = counts.get(name, held.get(name, 0)) - 1
    left = {name: count for name, count in counts.items() if count}
    return with_changes(held, left, [name for name in counts if name not in left])


EMPTY_TRACE = Trace((), 0, 0)
