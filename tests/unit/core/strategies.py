"""Hypothesis strategies for the core's values. States are well-formed; what parts say of rows is arbitrary."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hypothesis import strategies as st

from persist.core.attribute import AttributeKey, IndexChunk, IndexRoot
from persist.core.batch import (
    FORMAT_IPC,
    FORMAT_PARQUET,
    Description,
    HollowBatch,
    Part,
    Run,
    Trace,
    batch_of,
    trace_of,
)
from persist.core.blob_keys import part_key
from persist.core.clock_index import Mark, Seal
from persist.core.frontier import EMPTY, TIME_MAX, Antichain
from persist.core.ids import CriticalReaderId, PartId, ReaderId, SeqNo, Token, WriterId, mint, shard_id_of
from persist.core.record import replace
from persist.core.shard_settings import ShardSettings
from persist.core.state import (
    Claim,
    CriticalReader,
    LeasedReader,
    Rollup,
    SchemaRecord,
    State,
    WriterState,
)

T = TypeVar("T", bound=str)
K = TypeVar("K")
V = TypeVar("V")
NAME = "orders"
SHARD = shard_id_of(NAME)

times = st.integers(0, TIME_MAX) | st.integers(0, 20)
antichains = st.just(EMPTY) | st.builds(Antichain, st.integers(0, TIME_MAX + 1) | st.integers(0, 5))
millis = st.integers(0, 2**45)
counts = st.integers(0, 2**40)
int64s = st.integers(-(2**63), 2**63 - 1)
texts = st.text(max_size=10)


@dataclass
class Numbered:
    """A source of one id."""

    number: int

    def uuid7(self) -> str:
        return f"{self.number:032x}"


def ids_of(kind: Callable[[str], T]) -> st.SearchStrategy[T]:
    """Few of the possible ids, so that collections share some."""
    return st.integers(0, 12).map(lambda n: mint(kind, Numbered(n)))


@st.composite
def parts(draw: st.DrawFn, number: int) -> Part:
    part_id = PartId(f"p{number:032x}")
    data = draw(st.none() | st.binary(max_size=20))
    first, last = sorted(draw(st.tuples(times, times)))
    return Part(
        id=part_id,
        key=part_key(SHARD, draw(ids_of(WriterId)), part_id) if data is None else None,
        data=data,
        format=FORMAT_PARQUET if data is None else FORMAT_IPC,
        schema_id=draw(st.integers(1, 3)),
        rows=draw(st.integers(1, 2**40)),
        size=draw(counts) if data is None else len(data),
        checksum=draw(st.integers(0, 2**32 - 1)),
        footer_size=draw(counts),
        footer_checksum=draw(st.integers(0, 2**32 - 1)),
        key_lower=draw(st.binary(max_size=10)),
        key_upper=draw(st.none() | st.binary(max_size=10)),
        time=draw(st.none() | times),
        time_min=first,
        time_max=last,
        diff_min=draw(int64s),
        diff_max=draw(int64s),
        diff_sum=draw(st.none() | int64s),
        sorted=draw(st.booleans()),
        clip=draw(st.none() | times),
    )


@st.composite
def batches(draw: st.DrawFn, lower: Antichain, upper: Antichain, numbers: st.SearchStrategy[int]) -> HollowBatch:
    """A batch whose part ids come from `numbers`, which must not give one twice."""
    run_sizes = draw(st.lists(st.integers(1, 2), max_size=2))
    runs = tuple(Run(tuple(draw(parts(draw(numbers))) for _ in range(size))) for size in run_sizes)
    return batch_of(Description(lower, upper, draw(st.just(Antichain(0)) | st.just(Antichain(3)))), runs)


@st.composite
def traces(draw: st.DrawFn, first_part: int = 0) -> Trace:
    """Batches that tile `[0, upper)`, with part ids from `first_part` on."""
    cuts = sorted(draw(st.sets(st.integers(1, 30), max_size=6)))
    frontiers = [Antichain(0), *map(Antichain, cuts)]
    if draw(st.booleans()):
        frontiers.append(EMPTY)
    numbers = _ascending(first_part)
    return trace_of(draw(batches(lower, upper, numbers)) for lower, upper in itertools.pairwise(frontiers))


def _ascending(first: int) -> st.SearchStrategy[int]:
    taken = iter(range(first, first + 1000))
    return st.builds(lambda: next(taken))


def maps_of(keys: st.SearchStrategy[K], values: st.SearchStrategy[V], least: int = 0) -> st.SearchStrategy[dict[K, V]]:
    return st.dictionaries(keys, values, min_size=least, max_size=4)


schemas = maps_of(st.integers(1, 5), st.builds(SchemaRecord, st.binary(max_size=8), st.tuples(texts)), least=1)
writers = maps_of(
    ids_of(WriterId),
    st.builds(WriterState, millis, millis, st.none() | ids_of(Token), antichains, antichains),
)
leased = maps_of(
    ids_of(ReaderId), st.builds(LeasedReader, antichains, st.integers(1, 9).map(SeqNo), millis, millis, texts)
)
critical = maps_of(ids_of(CriticalReaderId), st.builds(CriticalReader, antichains, texts, texts))
rollups = maps_of(st.integers(1, 9).map(SeqNo), st.builds(Rollup, texts, counts))
claims = maps_of(
    texts,
    st.builds(
        Claim,
        texts,
        millis,
        millis,
        st.tuples(ids_of(PartId)),
        st.integers(9000, 9010).flatmap(parts).map(lambda part: (part,)),
        st.binary(max_size=8),
        antichains,
    ),
)

attributes = maps_of(st.integers(0, 12).map(lambda n: AttributeKey(f"{n:032x}")), st.none() | int64s)

index_roots = st.builds(IndexRoot, counts, counts, counts, counts, counts, counts, counts)
chunks = maps_of(counts, st.builds(IndexChunk, texts, counts))
marks = maps_of(millis, antichains)
seals = st.builds(
    Seal,
    millis,
    st.none() | st.builds(Mark, millis, antichains),
    st.tuples(st.tuples(millis, millis)) | st.just(()),
    st.none() | antichains,
)
settings = st.builds(ShardSettings, st.none() | millis, counts, counts)
left_parts = maps_of(st.binary(min_size=16, max_size=16), counts)


@st.composite
def states(draw: st.DrawFn, first_part: int = 0) -> State:
    return State(
        name=NAME,
        shard_id=SHARD,
        seqno=SeqNo(draw(st.integers(9, 2**40))),
        walltime_ms=draw(millis),
        since=draw(antichains),
        trace=draw(traces(first_part)),
        schemas=draw(schemas),
        writers=draw(writers),
        leased_readers=draw(leased),
        critical_readers=draw(critical),
        rollups=draw(rollups),
        claims=draw(claims),
        tombstone=draw(st.booleans()),
        attributes=draw(attributes),
        event_count=draw(counts),
        byte_count=draw(counts),
        attribute_root=draw(index_roots),
        attribute_chunks=draw(chunks),
        left=draw(left_parts),
        left_before_ms=draw(millis),
        seal=draw(seals),
        marks=draw(marks),
        settings=draw(settings),
        history_hold=draw(antichains),
    )


@st.composite
def successors(draw: st.DrawFn, old: State) -> State:
    """A State that follows `old`: any of its fields may be kept, any batches kept, replaced or appended."""
    other = draw(states(first_part=5000))
    kept = {
        name: getattr(old, name)
        for name in (
            "since", "schemas", "writers", "leased_readers", "critical_readers", "rollups", "claims", "attributes",
            "left", "seal", "marks", "settings", "history_hold",
        )
        if draw(st.booleans())
    }  # fmt: skip
    mixed = draw(st.sampled_from(["kept", "other", "prefix", "suffix", "middle"]))
    before, after = old.trace.batches, other.trace.batches
    middle = len(before) // 2
    trace = {
        "kept": old.trace,
        "other": other.trace,
        "prefix": trace_of((*before, *after)),
        "suffix": trace_of((*after, *before)),
        "middle": trace_of((*before[:middle], *after, *before[middle + 1 :])),
    }[mixed]
    return replace(other, seqno=SeqNo(old.seqno + 1), trace=trace, **kept)
