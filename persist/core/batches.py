"""The batches of a trace: a sequence that shares what did not change.

A shard may have thousands, and a commit adds one.

It is made of blocks of at most BLOCK_MAX batches, and of the newest ones. Adding one batch copies the newest ones, and
now and then the list of blocks; so does telling two sequences apart of which one came from the other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import overload

from persist.core.batch import HollowBatch

BLOCK_MAX = 64  # batches; with 10,000 of them, which is the most, there are about as many blocks

_Block = tuple[HollowBatch, ...]


class Batches(Sequence[HollowBatch]):
    """An immutable sequence. A slice of it is a tuple, and it equals a tuple of the same batches."""

    __slots__ = ("_blocks", "_length", "_newest", "_starts")

    def __init__(self, blocks: tuple[_Block, ...], starts: tuple[int, ...], newest: _Block, length: int) -> None:
        """`starts` has the index of the first batch of each block. `newest` is empty only where there are none."""
        self._blocks = blocks
        self._starts = starts
        self._newest = newest
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> HollowBatch: ...
    @overload
    def __getitem__(self, index: slice) -> _Block: ...
    def __getitem__(self, index: int | slice) -> HollowBatch | _Block:
        if isinstance(index, slice):
            first, end, step = index.indices(self._length)
            return self._between(first, end) if step == 1 else tuple(self)[index]
        at = index + self._length if index < 0 else index
        if not 0 <= at < self._length:
            raise IndexError(f"there are {self._length} batches, and none at {index}")
        start = self._length - len(self._newest)
        if at >= start:
            return self._newest[at - start]
        block = bisect_right(self._starts, at) - 1
        return self._blocks[block][at - self._starts[block]]

    def _between(self, first: int, end: int) -> _Block:
        """The batches at `[first, end)`, which lie within the sequence."""
        start = self._length - len(self._newest)
        if first >= start:
            return self._newest[first - start : max(0, end - start)]
        found: list[HollowBatch] = []
        block = bisect_right(self._starts, first) - 1
        while block < len(self._blocks) and self._starts[block] < end:
            at = self._starts[block]
            found.extend(self._blocks[block][max(0, first - at) : end - at])
            block += 1
        found.extend(self._newest[: max(0, end - start)])
        return tuple(found)

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

    def with_more(self, batch: HollowBatch) -> Batches:
        """The sequence with one more batch at its end."""
        if len(self._newest) < BLOCK_MAX:
            return Batches(self._blocks, self._starts, (*self._newest, batch), self._length + 1)
        starts = (*self._starts, self._length - BLOCK_MAX)
        return Batches((*self._blocks, self._newest), starts, (batch,), self._length + 1)

    def with_last(self, batch: HollowBatch) -> Batches:
        """The sequence with another batch in the place of its last one."""
        return Batches(self._blocks, self._starts, (*self._newest[:-1], batch), self._length)

    def spliced(self, first: int, count: int, replacement: Iterable[HollowBatch]) -> Batches:
        """The sequence with `count` batches from index `first` replaced.

        Blocks before and after them stay. What is left of the others goes together with small neighbours.
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
    """The same batches as such a sequence."""
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
    """How many batches the two begin with alike. Blocks that they share are not looked into."""
    old_blocks, new_blocks = batches_of(before)._all_blocks(), batches_of(after)._all_blocks()
    same = blocks = 0
    for one, other in zip(old_blocks, new_blocks, strict=False):
        if one is not other:
            break
        same += len(one)
        blocks += 1
    left, right = (chain.from_iterable(held[blocks:]) for held in (old_blocks, new_blocks))
    if blocks < min(len(old_blocks), len(new_blocks)):
        one, other = old_blocks[blocks], new_blocks[blocks]
        if one == other[: len(one)]:  # nearly always: one more batch. Told by identity, in C
            same += len(one)
            left = chain.from_iterable(old_blocks[blocks + 1 :])
            right = chain.from_iterable((other[len(one) :], *new_blocks[blocks + 1 :]))
    for first, second in zip(left, right, strict=False):
        if first is not second and first != second:
            break
        same += 1
    return same


def common_end(before: Iterable[HollowBatch], after: Iterable[HollowBatch], most: int) -> int:
    """How many batches the two end with alike, at most `most`."""
    old, new = batches_of(before), batches_of(after)
    same = blocks = 0
    old_blocks, new_blocks = old._all_blocks(), new._all_blocks()
    while blocks < min(len(old_blocks), len(new_blocks)) and old_blocks[-1 - blocks] is new_blocks[-1 - blocks]:
        same += len(old_blocks[-1 - blocks])
        blocks += 1
    if same >= most:
        return most
    left, right = (
        chain.from_iterable(map(reversed, reversed(held[: len(held) - blocks]))) for held in (old_blocks, new_blocks)
    )
    for first, second in zip(left, right, strict=False):
        if same >= most or (first is not second and first != second):
            break
        same += 1
    return same
