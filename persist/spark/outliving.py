"""Reads of plans whose lease has lapsed: DataFrames, views and caches live longer than what was held for them.

A time that can still be read shows the same rows for ever. So whoever finds the lease of its split gone holds the time
anew, once a process for all splits of a plan, and reads its own range of keys from what lies there now.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

import pyarrow as pa

from persist.client.changes import Between, PairSplit
from persist.client.changes import ChangesSplit as PastSplit
from persist.client.snapshot import Held, SnapshotSplit, check_held, holding, leased_blobs, part_reader
from persist.client.transport import OneShard
from persist.core.errors import Expired, NotReadable
from persist.core.ids import ShardId
from persist.core.state import SchemaRecord
from persist.parts import KeyRange, current_schema, overlapping
from persist.spark import executors
from persist.spark.going_on import check_means, names_in
from persist.spark.options import WAIT_S, Target

HOLDS_MAX = 64  # times of shards that one process holds anew
Schemas = Mapping[int, SchemaRecord]
_Split = TypeVar("_Split", bound=SnapshotSplit)


def outliving(pieces: Iterator[pa.Table], anew: Callable[[], Iterator[pa.Table]]) -> Iterator[pa.Table]:
    """The pieces of a split, or, where its lease is gone before the first one, those that `anew` reads.

    Raises Expired (the time was forgotten, or the lease lapsed between two pieces: a task that is tried again reads).
    """
    try:
        first = next(pieces, None)
    except Expired:
        pieces = anew()
        first = next(pieces, None)
    if first is None:
        return
    yield first
    try:
        yield from pieces
    except Expired as error:
        raise Expired(
            f"{error.message}. This task took longer than leaseSeconds between two batches of rows; Spark tries it "
            "again from the beginning where it may. Give a longer leaseSeconds if it does not come through"
        ) from error


def check_same(target: Target, names: Iterable[str] | None, planned: Schemas, now: Schemas) -> None:
    """Raise InvalidUsage where a column of a plan (None: all) is called otherwise by now: it goes by its names."""
    number, schema = current_schema(planned)
    whose = f"which this DataFrame of shard {target.shard!r} has or selects by"
    remedy = "its lease has lapsed, so load() again"
    check_means(schema.arrow.names if names is None else names, number, now, whose, remedy)


def snapshot_again(target: Target, split: SnapshotSplit) -> SnapshotSplit:
    """The split with parts and a lease as of now. Raises Expired where its time was forgotten, UnknownShard."""
    held = held_again(target, split.shard_id, split.as_of)
    names = None if split.columns is None else (*split.columns, *names_in(split.where))
    if split.schema_id is None:  # the names of then stay what they are
        check_same(target, names, split.schemas, held.view.schemas)
    with leased_blobs(held.lease):
        reader = part_reader(held.transport, held.view, split.settings)[1]
        runs = overlapping(reader.expanded(held.runs, split.key_range), split.key_range)
    seqno, reader_id = held.lease.seqno, held.lease.reader
    return replace(split, runs=runs, schemas=held.view.schemas, reader=reader_id, seqno=seqno)


def past_again(target: Target, split: PastSplit | PairSplit) -> PastSplit | PairSplit:
    """The same for what changed between two times, or between two shards."""
    if isinstance(split, PairSplit):
        sides = (split.earlier, split.later)
        earlier, later = (snapshot_again(replace(target, shard=side.shard), side) for side in sides)
        return replace(split, earlier=earlier, later=later)
    low, high = sorted((split.start, split.as_of))
    held = held_again(target, split.shard_id, low)
    check_same(target, split.columns, split.schemas, held.view.schemas)
    if held.lease.is_point:
        with forgotten(target, high):
            check_held(held.view, high)
    [found] = Between(held, split.start, split.as_of).splits(1, split.columns)
    return carrying(replace(found, key_range=split.key_range), split.key_range)


def carrying(split: PastSplit, wanted: KeyRange) -> PastSplit:
    """The split with only those parts that may have keys of the range."""
    return replace(lighter(split, wanted), gone=overlapping(split.gone, wanted))


def lighter(split: _Split, wanted: KeyRange) -> _Split:
    """The same for any split of one shard."""
    return replace(split, runs=overlapping(split.runs, wanted))


def held_again(target: Target, shard: ShardId | None, at: int) -> Held:
    """A hold on a time of the shard, or on history from there on, that this process keeps.

    Raises Expired where the time was forgotten, UnknownShard where the shard was dropped.
    """
    return _kept(target, shard or executors.view_of(target).shard_id, at, os.getpid()).held()


class _Kept:
    """One hold for all splits of a plan that this process reads; opened when it is asked for, and when it lapsed."""

    def __init__(self, target: Target, shard: ShardId, at: int) -> None:
        self._target = target
        self._shard = shard
        self._at = at
        self._lock = threading.Lock()
        self._held: Held | None = None

    def held(self) -> Held:
        with self._lock:
            if self._held is not None:
                try:
                    self._held.lease.check()
                except Expired:
                    self._held = None
            if self._held is None:
                self._held = self._opened()
            return self._held

    def _opened(self) -> Held:
        target, settings = self._target, self._target.connection.handles.read
        shard = OneShard(executors.transport(target.connection), self._shard)
        with (
            forgotten(target, self._at),
            holding(shard, target.shard, self._at, "spark read again", WAIT_S, settings) as held,
        ):
            return held


@lru_cache(maxsize=HOLDS_MAX)
def _kept(target: Target, shard: ShardId, at: int, pid: int) -> _Kept:
    """By process: a forked child must not go on with its parent's connections."""
    return _Kept(target, shard, at)


@contextmanager
def forgotten(target: Target, at: int) -> Iterator[None]:
    """What says that a time was forgotten, as Expired, with what the user of a DataFrame can do."""
    try:
        yield
    except (NotReadable, Expired) as error:
        raise Expired(
            f"this DataFrame of shard {target.shard!r} as of {at} has outlived its lease, and the time was forgotten "
            f"meanwhile ({error.message}): load() again; a longer leaseSeconds, a tag or more history keep it readable"
        ) from error
