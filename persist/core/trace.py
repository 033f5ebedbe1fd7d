"""The trace: the ordered hollow batches of a shard, which tile `[0, upper)` without gap or overlap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from persist.core.batch import (
    Batches,
    Description,
    HollowBatch,
    Part,
    Run,
    batch_of,
    batches_of,
    common_end,
    common_start,
)
from persist.core.frontier import MINIMUM, Antichain
from persist.core.persistent_map import Entries, watched, with_changes
from persist.core.record import Record, force_setattr


class Trace(Record, frozen=True, dict=True, gc=True):
    """Ordered batches and two sums that every append needs, kept along instead of counted anew.

    What a trace has in common with the one that it was made of is shared (`Batches`), whatever it is made from.
    """

    batches: Sequence[HollowBatch]
    inline_bytes: int  # of all inline parts
    rows: int  # updates, before consolidation

    def __post_init__(self) -> None:
        if type(self.batches) is not Batches:
            force_setattr(self, "batches", batches_of(self.batches))

    @property
    def upper(self) -> Antichain:
        return self.batches[-1].desc.upper if self.batches else MINIMUM

    @cached_property
    def blob_keys(self) -> frozenset[str]:
        return frozenset(self._keys.plain())

    @cached_property
    def _ids(self) -> Entries[str, int]:
        """How often each id of a part occurs. Handed on from trace to trace once it was asked for, as `_keys` is."""
        return watched(dict(Counter(part.id for part in self.parts())))

    @cached_property
    def _keys(self) -> Entries[str, int]:
        """How often each blob is named."""
        return watched(dict(Counter(key for batch in self.batches for key in batch.blob_keys())))

    def holds(self, part_id: str) -> bool:
        """Whether one of its parts has this id. Once this was asked, it costs what changes."""
        return part_id in self._ids

    def occurs_twice(self, part_id: str) -> bool:
        count: int = self._ids.get(part_id, 0)
        return count > 1

    def names(self, key: str) -> bool:
        """Whether it names this blob itself. Once this was asked, it costs what changes."""
        return key in self._keys

    def parts(self) -> Iterator[Part]:
        for batch in self.batches:
            yield from batch.parts()

    def beyond(self, lower: Antichain) -> tuple[HollowBatch, ...]:
        """The batches that reach beyond `lower`: the last ones, since they are in order."""
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
        """The trace with more runs in its last batch. Costs what is added, not what is there."""
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
        """These batches: what this trace holds, with what came and without what is gone."""
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

        None when any of the parts is not in the trace: a merge of parts that are gone must not be applied. The newest
        batches are looked at first, and no more of them than hold these parts.
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
        """What leads to a later trace: the batches at `[first, first + count)` are replaced by others. None: nothing.

        Of traces of which one was made from the other it costs what changed.
        """
        before, after = self.batches, later.batches
        if before is after:
            return None
        first = common_start(before, after)
        if first == len(before) == len(after):
            return None
        tail = common_end(before, after, min(len(before), len(after)) - first)
        return first, len(before) - first - tail, tuple(after[first : len(after) - tail])


def trace_of(batches: Iterable[HollowBatch]) -> Trace:
    """A trace with its sums worked out."""
    held = batches_of(batches)
    return Trace(held, sum(b.inline_size for b in held), sum(b.rows for b in held))


def _recounted(held: Entries[str, int], came: Sequence[str], gone: Sequence[str]) -> Entries[str, int]:
    """How often each name occurs when these have come, and those are gone."""
    counts: dict[str, int] = {}
    for name in came:
        counts[name] = counts.get(name, held.get(name, 0)) + 1
    for name in gone:
        counts[name] = counts.get(name, held.get(name, 0)) - 1
    left = {name: count for name, count in counts.items() if count}
    return with_changes(held, left, [name for name in counts if name not in left])


EMPTY_TRACE = Trace((), 0, 0)
