"""The trace: the ordered hollow batches of a shard, which tile `[0, upper)` without gap or overlap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from persist.core.antichain import MINIMUM, Antichain
from persist.core.batch import Description, HollowBatch, Part, Run, batch_of
from persist.core.record import Record

RECENT_MAX = 128  # ids that are kept beside the others, so that an append makes no set of all ids


class Trace(Record, frozen=True, dict=True, gc=True):
    """Ordered batches and two sums that every append needs, kept along instead of counted anew."""

    batches: tuple[HollowBatch, ...]
    inline_bytes: int  # of all inline parts
    rows: int  # updates, before consolidation

    @property
    def upper(self) -> Antichain:
        return self.batches[-1].desc.upper if self.batches else MINIMUM

    @cached_property
    def blob_keys(self) -> frozenset[str]:
        return frozenset(key for batch in self.batches for key in batch.blob_keys())

    @cached_property
    def _ids(self) -> tuple[frozenset[str], frozenset[str]]:
        """The ids of all parts: most of them, and those that were appended since."""
        return frozenset(part.id for part in self.parts()), frozenset()

    def holds(self, part_id: str) -> bool:
        """Whether one of its parts has this id. Costs what was appended since somebody asked last."""
        most, recent = self._ids
        return part_id in recent or part_id in most

    def parts(self) -> Iterator[Part]:
        for batch in self.batches:
            yield from batch.parts()

    def push(self, batch: HollowBatch) -> Trace:
        """The trace with one more batch at its end; an empty batch fuses with an empty one before it."""
        last = self.batches[-1] if self.batches else None
        if last is not None and not last.runs and not batch.runs:
            fused = HollowBatch(Description(last.desc.lower, batch.desc.upper, last.desc.since), (), 0)
            return Trace((*self.batches[:-1], fused), self.inline_bytes, self.rows)
        return self._grown((*self.batches, batch), batch)

    def extend_last(self, runs: tuple[Run, ...]) -> Trace:
        """The trace with more runs in its last batch. Costs what is added, not what is there."""
        last, added = self.batches[-1], batch_of(self.batches[-1].desc, runs)
        joined = HollowBatch(last.desc, (*last.runs, *runs), last.rows + added.rows)
        return self._grown((*self.batches[:-1], joined), added)

    def append(self, batches: tuple[HollowBatch, ...]) -> Trace:
        """The trace with these batches at its end, as they are."""
        trace = self
        for batch in batches:
            trace = trace._grown((*trace.batches, batch), batch)
        return trace

    def _grown(self, batches: tuple[HollowBatch, ...], added: HollowBatch) -> Trace:
        """These batches, which hold what this trace holds and what was added; the ids are handed on."""
        grown = Trace(batches, self.inline_bytes + added.inline_size, self.rows + added.rows)
        if "_ids" in self.__dict__:
            most, recent = self._ids
            recent = recent.union(part.id for part in added.parts())
            grown.__dict__["_ids"] = (most, recent) if len(recent) <= RECENT_MAX else (most | recent, frozenset())
        return grown

    def splice(self, first: int, count: int, replacement: Sequence[HollowBatch]) -> Trace:
        """The trace with `count` batches from index `first` replaced."""
        return trace_of((*self.batches[:first], *replacement, *self.batches[first + count :]))

    def covering(self, part_ids: frozenset[str]) -> tuple[int, int] | None:
        """Index and count of the contiguous batches that hold exactly these parts among others.

        None when any of the parts is not in the trace: a merge of parts that are gone must not be applied.
        """
        missing = set(part_ids)
        first = last = -1
        for index, batch in enumerate(self.batches):
            held = {part.id for part in batch.parts()}
            if missing.isdisjoint(held):
                continue
            missing -= held
            first = index if first < 0 else first
            last = index
        if missing or first < 0:
            return None
        return first, last - first + 1


def trace_of(batches: Iterable[HollowBatch]) -> Trace:
    """A trace with its sums worked out."""
    held = tuple(batches)
    return Trace(held, sum(b.inline_size for b in held), sum(b.rows for b in held))


EMPTY_TRACE = Trace((), 0, 0)
