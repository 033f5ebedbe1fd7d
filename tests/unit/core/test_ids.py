"""Ids and frontiers."""

from __future__ import annotations

import os
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.commit.clocks_and_ids import SystemIds
from persist.core.blob_keys import belongs_to, bundle_key, chunk_key, is_key_of, part_key, rollup_key, shard_prefix
from persist.core.errors import InvalidUsage
from persist.core.frontier import EMPTY, MINIMUM, TIME_MAX, Antichain, frontier, join, meet
from persist.core.ids import (
    CriticalReaderId,
    PartId,
    ReaderId,
    SeqNo,
    ShardId,
    Token,
    WriterId,
    check_shard_name,
    critical_reader_id_of,
    mint,
    parse,
    shard_id_of,
    written,
)
from tests.conftest import SeededIds
from tests.unit.core.strategies import antichains, times

KINDS: dict[Any, str] = {ShardId: "s", WriterId: "w", ReaderId: "r", CriticalReaderId: "c", PartId: "p", Token: "i"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_minted_id_reads_back(kind: Any, ids: SeededIds) -> None:
    minted = mint(kind, ids)
    assert minted[0] == KINDS[kind]
    assert parse(kind, minted) == minted
    assert mint(kind, ids) != minted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text",
    ["", "s", "x" + "0" * 32, "0" * 33, "{}" + "0" * 31, "{}" + "0" * 33, "{}" + "G" * 32, "{}" + "0" * 32 + "\n"],
)
def test_what_is_no_id(kind: Any, text: str) -> None:
    given = text.replace("{}", KINDS[kind])
    with pytest.raises(InvalidUsage, match=kind.__name__):
        parse(kind, given)
    with pytest.raises(InvalidUsage):
        parse(kind, None)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(given, Annotated[str, written(kind)])


@pytest.mark.parametrize("name", ["a", "orders.v2", "eu-west_1/orders", "x" * 128, "x" * 128 + "/" + "y" * 127, "a..b"])
def test_shard_names(name: str) -> None:
    assert check_shard_name(name) == name


@pytest.mark.parametrize("name", [
    "", "/", "a/", "/a", "a/b/c", "x" * 129, "a b", "ä", "..", ".", "a/..", "a\n", "-", "-rf", "--help", "-a/b",
    None, 7,
])  # fmt: skip
def test_what_is_no_shard_name(name: object) -> None:
    with pytest.raises(InvalidUsage, match="shard name"):
        check_shard_name(name)


@given(st.from_regex(r"[a-c./-]{1,3}", fullmatch=True), st.from_regex(r"[a-c./-]{1,3}", fullmatch=True))
def test_an_id_follows_from_the_name(left: str, right: str) -> None:
    assert (shard_id_of(left) == shard_id_of(right)) == (left == right)
    assert (critical_reader_id_of(left) == critical_reader_id_of(right)) == (left == right)
    assert parse(ShardId, shard_id_of(left)) == shard_id_of(left)


def test_blob_keys_belong_to_one_shard(ids: SeededIds) -> None:
    ours, other = shard_id_of("ours"), shard_id_of("other")
    keys = [
        part_key(ours, mint(WriterId, ids), mint(PartId, ids)),
        rollup_key(ours, SeqNo(7), ids),
        chunk_key(ours, ids),
    ]
    assert len(set(keys)) == 3
    for key in keys:
        assert key.startswith(shard_prefix(ours))
        assert belongs_to(key, ours)
        assert not belongs_to(key, other)
        assert not belongs_to(key + "x", ours)
        assert not belongs_to(f"{shard_prefix(ours)}../{key}", ours)


def test_the_key_of_a_part_is_that_of_one_part_of_one_shard(ids: SeededIds) -> None:
    ours, other, writer = shard_id_of("ours"), shard_id_of("other"), mint(WriterId, ids)
    part, another = mint(PartId, ids), mint(PartId, ids)
    key = part_key(ours, writer, part)
    assert is_key_of(key, ours, part)
    wrong = [
        is_key_of(key, other, part),
        is_key_of(key, ours, another),
        is_key_of(part_key(ours, writer, another), ours, part),
        is_key_of(bundle_key(ours, writer, part), ours, part),
        is_key_of(part_key(ours, WriterId("w" + "g" * 32), part), ours, part),
        is_key_of(part_key(ours, writer, PartId("../x")), ours, PartId("../x")),
        is_key_of(key + "x", ours, part),
        is_key_of(f"{part}.parquet", ours, part),
        is_key_of("", ours, part),
    ]
    assert not any(wrong)


@given(st.integers(1, 2**60), st.integers(1, 2**60))
def test_rollup_keys_sort_as_their_seqnos(left: int, right: int) -> None:
    shard = shard_id_of("orders")
    keys = [rollup_key(shard, SeqNo(seqno), SeededIds()).rpartition("/")[0] for seqno in (left, right)]
    assert (keys[0] < keys[1]) == (left < right)


def test_uuids_ascend_and_a_child_makes_others() -> None:
    ids = SystemIds()
    made = [ids.uuid7() for _ in range(1_000)]
    assert made == sorted(set(made))
    assert all(len(text) == 32 and text[12] == "7" and text[16] in "89ab" for text in made)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, "".join(ids.uuid7()[16:] for _ in range(100)).encode())
        os._exit(0)
    mine = {ids.uuid7()[16:] for _ in range(200)}
    os.waitpid(child, 0)
    told = os.read(read, 10_000).decode()
    assert mine.isdisjoint(told[at : at + 16] for at in range(0, len(told), 16))


# --- frontiers are totally ordered, with the closed one greatest; meet and join are its lattice


@given(antichains, antichains, antichains)
def test_the_order_is_total(a: Antichain, b: Antichain, c: Antichain) -> None:
    assert (a < b) + (a == b) + (b < a) == 1
    assert MINIMUM <= a <= EMPTY
    assert (a <= b) == (not b < a)
    if a <= b and b <= c:
        assert a <= c


@given(antichains, antichains, antichains)
def test_the_lattice(a: Antichain, b: Antichain, c: Antichain) -> None:
    assert meet([a, b]) == meet([b, a])
    assert meet([a, meet([b, c])]) == meet([meet([a, b]), c]) == meet([a, b, c])
    assert join(a, b) == join(b, a)
    assert join(a, join(b, c)) == join(join(a, b), c)
    assert meet([a, join(a, b)]) == a == join(a, meet([a, b]))
    assert meet([a, a]) == a == join(a, a)


@given(st.lists(antichains))
def test_a_meet_is_the_greatest_lower_bound(held: list[Antichain]) -> None:
    lowest = meet(held)
    assert all(lowest <= a for a in held)
    assert lowest in held if held else lowest == EMPTY


@given(antichains, antichains, times)
def test_passing_a_frontier_agrees_with_the_order(a: Antichain, b: Antichain, time: int) -> None:
    assert a.less_equal(time) == (a <= Antichain(time))
    if a <= b and b.less_equal(time):
        assert a.less_equal(time)
    assert not EMPTY.less_equal(time)


@given(antichains)
def test_json_round_trip(a: Antichain) -> None:
    assert Antichain.from_json(a.to_json()) == a
    assert str(a) == str(a.to_json())
    assert frontier(a) is a
    assert frontier(a.element) == a


def test_the_last_time_can_be_passed_without_closing() -> None:
    assert Antichain(TIME_MAX + 1) < EMPTY
    assert not Antichain(TIME_MAX + 1).less_equal(TIME_MAX)


@pytest.mark.parametrize("element", [-1, TIME_MAX + 2, True, 1.0, "1"])
def test_what_is_no_time(element: object) -> None:
    with pytest.raises(InvalidUsage):
        frontier(element)  # type: ignore[arg-type]
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert([element], Antichain)


@pytest.mark.parametrize("value", [None, 7, "[7]", [7, 8], [None], ["7"], {}, [[7]], [7.0], (7,)])
def test_what_is_no_frontier(value: object) -> None:
    with pytest.raises(InvalidUsage):
        Antichain.from_json(value)


def test_a_frontier_of_no_time_is_no_frontier() -> None:
    with pytest.raises(InvalidUsage):
        frontier(Antichain(-1))
