"""How far a micro-batch reaches: at most so many rows or bytes, but always at least one time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from persist.client.snapshot import part_reader
from persist.core.antichain import Antichain
from persist.core.batch import HollowBatch
from persist.core.view import ShardView
from persist.parts import TIME
from persist.spark import executors
from persist.spark.changes import Interval, overlapping_batches
from persist.spark.options import Target

Ints = npt.NDArray[np.int64]


class Admission:
    """Remembers the times of the batch that it looked into last, so that a large one is looked into once."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._looked: tuple[tuple[str, ...], Ints, Ints] | None = None

    def end(self, view: ShardView, interval: Interval, rows_max: int | None, bytes_max: int | None) -> Antichain | None:
        """The upper of the next micro-batch, at most the interval's; None when nothing was written in it.

        With a limit a drop is a micro-batch of its own, however many rows it took away.
        """
        drops = interval.drops(view)
        if not drops or (rows_max is None and bytes_max is None):
            found = self._end(view, interval, rows_max, bytes_max)
            return interval.upper if found is None and drops else found
        at = drops[0].at
        before = None
        if interval.lower < at:
            before = self._end(view, replace(interval, upper=Antichain(at)), rows_max, bytes_max)
        return Antichain(at + 1) if before is None else before

    def _end(
        self, view: ShardView, interval: Interval, rows_max: int | None, bytes_max: int | None
    ) -> Antichain | None:
        """The same for what was written.

        Batches are taken whole while they fit; the first that does not is cut between two of its times. Rows are
        counted before consolidation, so a micro-batch may turn out smaller. Errors of the blob store pass through.
        """
        batches = overlapping_batches(view.batches, interval)
        if not batches:
            return None
        if rows_max is None and bytes_max is None:
            return interval.upper
        used = 0
        least = Antichain(interval.lower + 1) if interval.snapshot else None  # a snapshot is not cut
        end: Antichain | None = None
        for batch in batches:
            weight = batch.rows if rows_max is not None else batch.size
            limit = rows_max if rows_max is not None else bytes_max
            assert limit is not None
            if used + weight > limit:
                scale = weight / max(1, batch.rows)
                cut = self._cut(view, batch, interval, int((limit - used) / scale), first=end is None)
                end = cut if cut is not None else end
                break
            used += weight
            end = batch.desc.upper
        assert end is not None
        if least is not None:
            end = max(end, least)
        return min(end, interval.upper)

    def _cut(
        self, view: ShardView, batch: HollowBatch, interval: Interval, rows_max: int, first: bool
    ) -> Antichain | None:
        """The latest time before which the batch has at most `rows_max` rows of the interval; None when there is none

        (but of the `first` batch at least one time is taken).
        """
        times, counts = self._times(view, batch)
        keep = times >= (0 if interval.snapshot else interval.lower)
        times, counts = times[keep], counts[keep]
        if not len(times):
            return batch.desc.upper
        fitting = int(np.searchsorted(np.cumsum(counts), rows_max, side="right"))
        if fitting == 0:
            return Antichain(int(times[0]) + 1) if first else None
        return Antichain(int(times[fitting - 1]) + 1)

    def _times(self, view: ShardView, batch: HollowBatch) -> tuple[Ints, Ints]:
        """The distinct times of a batch's rows, ascending, and how many rows each has."""
        ids = tuple(str(part.id) for part in batch.parts())
        if self._looked is None or self._looked[0] != ids:
            transport = executors.transport(self._target.connection)
            _, reader = part_reader(transport, view, self._target.connection.handles.read)
            found: dict[int, int] = {}
            for table in reader.read_updates(list(batch.parts()), Antichain(0), batch.desc.upper, columns=()):
                times, counts = np.unique(table.column(TIME).to_numpy(), return_counts=True)
                for time, count in zip(times.tolist(), counts.tolist(), strict=True):
                    found[time] = found.get(time, 0) + count
            ordered = sorted(found)
            self._looked = (
                ids,
                np.array(ordered, dtype=np.int64),
                np.array([found[time] for time in ordered], dtype=np.int64),
            )
        return self._looked[1], self._looked[2]
