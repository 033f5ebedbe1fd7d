"""The attribute index against a dict: random batches, crashes between any two blob writes, reopening and collecting."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blob import Blob, BlobUnavailable
from blob.memory_blobs import MemoryBlob
from persist.attributes.btree import LEAVES_A_MOVE
from persist.attributes.node_codec import Shape
from persist.attributes.node_store import ChunkReader
from persist.copies.shard_checks import check_tree
from persist.core.errors import Unavailable
from tests.conftest import SeededIds
from tests.support.examples import examples, size
from tests.support.indexed import Indexed, key_of

# Tiny nodes and chunks make deep trees and many chunks of few attributes.
SHAPE = Shape(leaf_entries_max=4, index_entries_max=5, chunk_bytes_target=400, chunks_max=30)
LEAF_BYTES, NODE_BYTES = 20 + 24 * SHAPE.leaf_entries_max, 24 + 34 * SHAPE.index_entries_max  # the longer format's

BATCH_MAX = 25

numbers = st.integers(0, 150)
batches = st.dictionaries(numbers, st.none() | st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=BATCH_MAX)


class Dying(MemoryBlob):
    """Writes `left` more blobs, then crashes: with the next one written, if `lands`, or not."""

    left = -1
    lands = False

    def put(self, key: str, data: bytes | memoryview) -> None:
        if self.left == 0:
            if self.lands:
                super().put(key, data)
            raise BlobUnavailable("the process crashed")
        self.left -= 1
        super().put(key, data)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, object]]:
    """Flushes, crashed flushes, commits that lost a race, reopenings, collections, and flushes of an older build."""
    crash = st.tuples(st.just("crash"), st.tuples(batches, st.integers(0, 6), st.booleans()))
    steps = st.one_of(
        *[st.tuples(st.just("flush"), batches)] * 5,
        crash,
        st.tuples(st.just("race"), st.tuples(batches, batches)),
        st.tuples(st.just("reopen"), st.none()),
        st.tuples(st.just("collect"), st.none()),
    )
    return draw(st.lists(steps, min_size=1, max_size=40))


def values_of(batch: dict[int, int | None]) -> dict[bytes, int | None]:
    return {key_of(number): value for number, value in batch.items()}


def reopened(indexed: Indexed, blob: Blob, origin: int) -> Indexed:
    fresh = Indexed(blob, SeededIds(origin), cache_bytes=0, shape=SHAPE)
    fresh.state = indexed.state
    return fresh


def bytes_bound(indexed: Indexed, written: int) -> int:
    """Bytes that the index may take when no flush wrote more than `written` leaves.

    A flush that writes u leaves for their updates moves m = max(1, u / 4) more from the front, so it writes at most 8 m
    (u <= 4 m + 3), each with all nodes above it. Once as many were moved as there are live leaves, all that was there
    before is gone. The oldest chunk may be one flush older still.
    """
    leaves = len(indexed.leaves(ChunkReader(indexed.blob, indexed.state.attribute_chunks, indexed.cache)))
    path = LEAF_BYTES + (indexed.state.attribute_root.height + 1) * NODE_BYTES
    return 8 * (leaves + 2 * written) * path


@examples(2, of_a_proof=120)
@given(histories())
def test_the_index_is_a_dict_whatever_happens(history: list[tuple[str, object]]) -> None:
    blob = Dying()
    origin = itertools.count()
    indexed = reopened(Indexed(blob, SeededIds(0)), blob, next(origin))
    model: dict[bytes, int] = {}
    for what, argument in history:
        if what == "flush":
            indexed.flush(values_of(argument))  # type: ignore[arg-type]
            update(model, values_of(argument))  # type: ignore[arg-type]
        elif what == "crash":
            batch, blob.left, blob.lands = argument  # type: ignore[misc]
            crashed(indexed, values_of(batch), model)
            blob.left = -1
            indexed = reopened(indexed, blob, next(origin))
        elif what == "race":
            first, second = (indexed.write(values_of(batch)) for batch in argument)  # type: ignore[attr-defined]
            assert indexed.commit(second)
            assert indexed.commit(first) == (not first.chunks and not second.chunks)  # both trees are empty
            update(model, values_of(argument[1]))  # type: ignore[index]
        elif what == "reopen":
            indexed = reopened(indexed, blob, next(origin))
        else:
            indexed.collect()
        assert indexed.contents() == model
        check_tree(indexed.state, blob)
        assert indexed.state.attribute_root.count == len(model)
        assert indexed.get(*range(0, 150, 7)) == [model.get(key_of(number)) for number in range(0, 150, 7)]
        assert len(indexed.state.attribute_chunks) <= 60
        assert indexed.span <= bytes_bound(indexed, BATCH_MAX)
    indexed.collect()
    indexed = reopened(indexed, blob, next(origin))
    assert indexed.contents() == model, "a node that is reachable was deleted"


def long_history(seed: int, batch: int, flushes: int, compact: bool) -> Iterator[Indexed]:
    """Flushes that never touch the lower half of the keys, whose leaves were written first."""
    generator = random.Random(seed)
    indexed = reopened(Indexed(MemoryBlob(), SeededIds(seed)), MemoryBlob(), seed)
    indexed.flush({key_of(number): number for number in range(150)})
    for _ in range(flushes):
        values = {key_of(generator.randrange(75, 150)): generator.getrandbits(62) for _ in range(batch)}
        indexed.flush(values, compact=compact)
        yield indexed


@examples(0.15)
@given(st.integers(0, 1000), st.integers(1, BATCH_MAX))
def test_garbage_is_bounded(seed: int, batch: int) -> None:
    assert LEAVES_A_MOVE == 4, "the bound was worked out for this"
    for indexed in long_history(seed, batch, size(120, 250), compact=True):
        assert indexed.span <= bytes_bound(indexed, BATCH_MAX)


@pytest.mark.proof
def test_without_compaction_it_is_not() -> None:
    *_, indexed = long_history(1, BATCH_MAX, 1_400, compact=False)
    assert indexed.span > 2 * bytes_bound(indexed, BATCH_MAX)
    assert len(indexed.state.attribute_chunks) > 700


def crashed(indexed: Indexed, values: dict[bytes, int | None], model: dict[bytes, int]) -> None:
    try:
        indexed.flush(values)
    except Unavailable:
        return
    update(model, values)


def update(model: dict[bytes, int], values: dict[bytes, int | None]) -> None:
    for key, value in values.items():
        if value is None:
            model.pop(key, None)
        else:
            model[key] = value
