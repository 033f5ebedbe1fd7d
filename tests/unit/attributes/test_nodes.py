"""Nodes of the attribute index: their bytes, their sizes, and damage."""

from __future__ import annotations

import struct
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.attributes.node_codec import (
    HEADER_BYTES,
    INDEX_ENTRIES_MAX,
    LEAF_ENTRIES_MAX,
    NODE_BYTES_MAX,
    Leaf,
    NodeIndex,
    check_nodes,
    decode,
    pack_column,
    packed_bytes,
    unpack_column,
)
from persist.core.errors import Corruption, UpgradeNeeded
from tests.support.indexed import key_of

keys = st.integers(0, 60).map(key_of) | st.binary(min_size=16, max_size=16)
int64s = st.integers(-(2**63), 2**63 - 1)
offsets = st.integers(0, 2**63)


def leaf_of(entries: dict[bytes, int]) -> Leaf:
    return Leaf(b"".join(sorted(entries)), b"".join(struct.pack("<q", entries[key]) for key in sorted(entries)))


@given(st.dictionaries(keys, int64s), offsets)
def test_a_leaf_survives_its_bytes(entries: dict[bytes, int], offset: int) -> None:
    read = decode(leaf_of(entries).encode(offset), offset)
    assert isinstance(read, Leaf)
    assert dict(read.entries()) == entries
    assert all(read.get(key) == entries.get(key) for key in [*entries, key_of(7), bytes(16), b"\xff" * 16])


@given(st.lists(st.tuples(keys, offsets, offsets, st.integers(0, 65535)), unique_by=lambda c: c[0]), offsets)
def test_an_index_node_survives_its_bytes(children: list[tuple[bytes, int, int, int]], offset: int) -> None:
    children.sort()
    read = decode(NodeIndex.of(children).encode(offset), offset)
    assert isinstance(read, NodeIndex)
    assert [read.child(at) for at in range(len(read))] == children


@given(st.dictionaries(keys, int64s), st.dictionaries(keys, st.none() | int64s))
def test_updating_a_leaf_is_updating_a_dict(entries: dict[bytes, int], updates: dict[bytes, int | None]) -> None:
    updated, grown = leaf_of(entries).updated(sorted(updates.items()))
    after = {key: value for key, value in {**entries, **updates}.items() if value is not None}
    assert list(updated.entries()) == sorted(after.items())
    assert grown == len(after) - len(entries)


@given(st.sets(keys), keys)
def test_a_key_is_located_where_it_belongs(known: set[bytes], key: bytes) -> None:
    ordered = sorted(known)
    assert Leaf(b"".join(ordered), b"").locate(key) == sum(1 for other in ordered if other < key)


def test_full_nodes_have_at_most_32_kib() -> None:
    leaf = leaf_of({key_of(n): n for n in range(LEAF_ENTRIES_MAX)})
    index = NodeIndex.of([(key_of(n), n, n, NODE_BYTES_MAX) for n in range(INDEX_ENTRIES_MAX)])
    assert max(len(leaf.encode(0)), len(index.encode(0))) <= NODE_BYTES_MAX == 32 * 1024


@pytest.mark.parametrize("node", [leaf_of({key_of(1): 5, key_of(2): -5}), NodeIndex.of([(key_of(1), 2, 3, 4)])])
def test_every_flipped_bit_and_cut_is_noticed(node: Leaf | NodeIndex) -> None:
    data = node.encode(77)
    assert decode(data, 77)
    for at in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            with pytest.raises(Corruption):
                decode(bytes(damaged), 77)
        with pytest.raises(Corruption):
            decode(data[:at], 77)


def test_a_node_that_was_written_elsewhere_is_another() -> None:
    with pytest.raises(Corruption, match="checksum or offset"):
        decode(leaf_of({key_of(1): 5}).encode(77), 78)


def test_a_later_format_asks_for_an_upgrade() -> None:
    with patch("persist.attributes.node_codec.VERSION", 3):
        data = leaf_of({}).encode(0)
    with pytest.raises(UpgradeNeeded, match="version 3"):
        decode(data, 0)


# --- packing


widths = st.integers(1, 16)
columns = widths.flatmap(lambda width: st.tuples(st.just(width), st.lists(st.binary(min_size=width, max_size=width))))


@given(columns, st.binary(max_size=9), st.binary(max_size=9))
def test_a_column_survives_packing_wherever_it_lies(
    given_column: tuple[int, list[bytes]], before: bytes, after: bytes
) -> None:
    width, entries = given_column
    data = pack_column(b"".join(entries), width)
    assert len(data) == packed_bytes(data, 0, len(entries), width) <= len(entries) * width + 2
    found, end = unpack_column(before + data + after, len(before), len(entries), width)
    assert bytes(found) == b"".join(entries)
    assert end == len(before) + len(data)


@given(columns)
def test_a_column_is_packed_as_a_plain_loop_would(given_column: tuple[int, list[bytes]]) -> None:
    width, entries = given_column
    moving = [at for at in range(width) if len({entry[at] for entry in entries}) > 1]
    expected = struct.pack("<H", sum(1 << at for at in moving))
    expected += bytes(entries[0][at] for at in range(width) if at not in moving) if entries else b""
    expected += b"".join(bytes(entry[at] for entry in entries) for at in moving)
    assert pack_column(b"".join(entries), width) == (expected if entries else b"")


@given(st.binary(max_size=40), st.integers(0, 30), widths)
def test_any_bytes_are_a_column_or_corruption(data: bytes, entries: int, width: int) -> None:
    try:
        column, end = unpack_column(data, 0, entries, width)
    except Corruption:
        return
    assert len(column) == entries * width
    assert end <= len(data)


def test_bytes_that_are_alike_are_written_once() -> None:
    leaf = leaf_of({key_of(n << 32): 7 for n in range(LEAF_ENTRIES_MAX)})
    assert len(leaf.encode(0)) < 2_100 < HEADER_BYTES + 24 * LEAF_ENTRIES_MAX
    index = NodeIndex.of([(key_of(n << 64), n, n, 2_000) for n in range(INDEX_ENTRIES_MAX)])
    assert len(index.encode(0)) < 4 * INDEX_ENTRIES_MAX + 60


def test_a_chunk_is_checked_node_by_node() -> None:
    nodes: list[Leaf | NodeIndex] = [
        leaf_of({key_of(n): n for n in range(30)}),
        NodeIndex.of([(key_of(1), 2, 1, 4), (key_of(2), 9, 9, 4)]),
        leaf_of({}),
    ]  # fmt: skip
    chunk = b""
    for node in nodes:
        chunk += node.encode(500 + len(chunk))
    check_nodes(chunk, 500)
    for at in range(0, len(chunk), 7):
        with pytest.raises(Corruption):
            check_nodes(chunk[:at] + bytes([chunk[at] ^ 1]) + chunk[at + 1 :], 500)
    with pytest.raises(Corruption, match="are not a node"):
        check_nodes(chunk + b"more", 500)
