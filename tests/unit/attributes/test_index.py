"""The index: how it grows, what it costs to read, how it frees its front, and its cache."""

from __future__ import annotations

import random

import pytest

from blob.memory_blobs import MemoryBlob
from persist.attributes.attribute_index import AttributeIndex
from persist.attributes.node_codec import LEAF_ENTRIES_MAX, Shape
from persist.attributes.node_store import ChunkReader, NodeCache, StaleIndex
from persist.core import commands as c
from persist.core.attribute import AttributeKey, AttributeUpdate
from persist.core.errors import Corruption
from persist.core.ids import Token, WriterId
from persist.core.state import Policy
from persist.core.transitions import Context, step
from tests.conftest import SeededIds
from tests.support.indexed import Indexed, key_of
from tests.support.shard import numbered

MANY = 30_000


@pytest.fixture
def indexed(ids: SeededIds) -> Indexed:
    return Indexed(MemoryBlob(), ids)


def in_order(indexed: Indexed, count: int, batch: int) -> None:
    for first in range(0, count, batch):
        indexed.flush({key_of(n): n for n in range(first, min(first + batch, count))})


def test_keys_inserted_in_order_fill_their_leaves(indexed: Indexed) -> None:
    in_order(indexed, MANY, 700)
    root = indexed.state.attribute_root
    leaves = indexed.leaves(ChunkReader(indexed.blob, indexed.state.attribute_chunks, indexed.cache))
    assert (root.count, root.height) == (MANY, 2)
    assert leaves == [LEAF_ENTRIES_MAX] * 30


def test_an_emptied_index_names_no_blob_and_can_be_filled_again(indexed: Indexed) -> None:
    in_order(indexed, 5_000, 1_000)
    indexed.flush({key_of(n): None for n in range(5_000)})
    assert (indexed.state.attribute_root.height, indexed.state.attribute_root.count) == (0, 0)
    assert not indexed.state.attribute_chunks
    assert (indexed.contents(), indexed.get(3)) == ({}, [None])
    indexed.flush({key_of(3): 33})
    assert indexed.contents() == {key_of(3): 33}


def test_a_tree_of_one_leaf_again_has_one_level_again(indexed: Indexed) -> None:
    in_order(indexed, 5_000, 1_000)
    indexed.flush({key_of(n): None for n in range(100, 5_000)})
    assert indexed.state.attribute_root.height == 1
    assert len(indexed.contents()) == 100


def test_a_cold_lookup_reads_one_blob_range_a_level_and_a_warm_one_at_most_one(indexed: Indexed) -> None:
    in_order(indexed, 1_000_000, 100_000)
    assert indexed.state.attribute_root.height == 3  # 960 leaves of 1,000 are what one index node holds
    cold = NodeCache(1 << 20)
    index = AttributeIndex(indexed.blob, SeededIds(), cold)
    key = AttributeKey(key_of(500_000).hex())
    assert index.lookup(indexed.state, [key]) == {key: 500_000}
    assert cold.reads == 3
    for number in (500_001, 700_000, 123_456):
        before = cold.reads
        assert index.lookup(indexed.state, [AttributeKey(key_of(number).hex())])
        assert cold.reads - before <= 1


def test_the_cache_keeps_to_its_bound(indexed: Indexed) -> None:
    in_order(indexed, MANY, 1_000)
    small = NodeCache(100_000)
    index = AttributeIndex(indexed.blob, SeededIds(), small)
    for number in random.Random(2).sample(range(MANY), 200):
        key = AttributeKey(key_of(number).hex())
        assert index.lookup(indexed.state, [key]) == {key: number}
        assert 0 < small.bytes_held <= 100_000


def test_the_state_names_a_bounded_number_of_chunks(ids: SeededIds) -> None:
    indexed = Indexed(MemoryBlob(), ids, shape=Shape(chunks_max=20))
    in_order(indexed, MANY, 1_000)
    for number in range(300):
        indexed.flush({key_of(number): number})
        assert len(indexed.state.attribute_chunks) <= 20 + 1
    assert len(indexed.contents()) == MANY


def test_a_flush_that_lost_the_race_changes_nothing(indexed: Indexed) -> None:
    first, second = indexed.write({key_of(1): 1}), indexed.write({key_of(2): 2})
    assert indexed.commit(first)
    assert not indexed.commit(second)
    assert indexed.commit(first)  # its answer was lost
    assert indexed.contents() == {key_of(1): 1}


def test_a_flush_from_before_everything_was_deleted_is_refused(indexed: Indexed) -> None:
    late = indexed.write({key_of(1): 1})
    indexed.flush({key_of(1): 2})
    indexed.flush({key_of(1): None})
    assert not indexed.commit(late)


def test_scans_stop_at_their_upper(indexed: Indexed) -> None:
    in_order(indexed, 3_000, 500)
    lower, upper = (AttributeKey(key_of(number).hex()) for number in (990, 1_010))
    page = indexed.index.page(indexed.state, lower, upper, 1_000)
    assert (list(page.values.values()), page.following) == (list(range(990, 1_010)), None)
    page = indexed.index.page(indexed.state, lower, None, 5)
    assert page.following is not None
    assert list(page.values.values())[:5] == [990, 991, 992, 993, 994]


def test_an_old_version_whose_chunks_are_gone_is_stale(indexed: Indexed) -> None:
    in_order(indexed, 3_000, 500)
    old = indexed.state
    indexed.flush({key_of(n): None for n in range(3_000)})
    indexed.collect()
    index = AttributeIndex(indexed.blob, SeededIds(), NodeCache())
    with pytest.raises(StaleIndex):
        index.lookup(old, [AttributeKey(key_of(1).hex())])


def test_a_damaged_chunk_is_noticed(indexed: Indexed) -> None:
    in_order(indexed, 3_000, 3_000)
    [chunk] = indexed.state.attribute_chunks.values()
    damaged = bytearray(indexed.blob.get(chunk.key))
    damaged[len(damaged) // 2] ^= 1
    other = MemoryBlob()
    other.put(chunk.key, bytes(damaged))
    index = AttributeIndex(other, SeededIds(), NodeCache())
    with pytest.raises(Corruption):
        index.lookup(indexed.state, [AttributeKey(key_of(number).hex()) for number in range(3_000)])


def test_a_step_sees_what_was_read_in_the_index(indexed: Indexed) -> None:
    indexed.flush({key_of(70_005): 5})
    writer = WriterId(numbered("w", 1))
    state = indexed.state
    update = AttributeUpdate.accumulate(key_of(70_005), 10)
    command = c.UpdateAttributes(writer, Token(numbered("i", 1)), (update,))
    context = Context(0, Policy(), indexed=indexed.index.indexed(state, [command]))
    state, _ = step(state, command, context)
    assert state.attributes == {update.key: 15}
    with pytest.raises(RuntimeError, match="not the State's"):  # a bug of the committer, never an answer
        step(indexed.state, c.ReadAttributes((update.key,)), Context(0, Policy()))
