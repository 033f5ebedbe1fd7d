"""What is committed can be read: a command whose parts are not what they say is refused, and harms only itself."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest

from persist.client.shard import Shard
from persist.commit.blob_tasks import merged
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.batch import Part, Run
from persist.core.blob_keys import COMPACTOR, part_key
from persist.core.errors import Expired, InvalidUsage
from persist.core.frontier import Antichain
from persist.core.ids import PartId, Token, WriterId, mint
from persist.core.record import replace
from persist.core.state import Policy
from persist.core.transitions import part_admission
from persist.core.transitions.part_admission import DIFF_MAX, departed
from persist.parts.codec import encode_inline, encode_parquet
from tests.support.location import client_of, memory_location

ROWS = pa.table({"id": [1, 2, 3], "v": ["a", "b", "c"], "__diff": [1, 2, -1]})
SCHEMA = pa.schema([("id", pa.int64()), pa.field("v", pa.string(), nullable=False)])
BLOB, INLINE = Policy(inline_part_bytes_max=0), Policy()


def shard_of(policy: Policy) -> tuple[Location, Shard]:
    location = memory_location(policy=policy, small_merges=False)
    shard = client_of(location).create_shard("s", SCHEMA, key=["id"])
    return location, shard


def staged(shard: Shard, rows: pa.Table = ROWS) -> Part:
    """A part without a receipt, as a client sends it that is not trusted."""
    [run] = shard.open_writer().stage_for_one_commit(rows, None)
    return run.parts[0].without_receipt()


def insert_of(location: Location, *runs: Run) -> c.Insert:
    writer = mint(WriterId, location.ids)
    return c.Insert(writer, mint(Token, location.ids), runs)


def refused(location: Location, command: c.Command, message: str) -> None:
    """The command is refused with that message, writes nothing, and what is committed with it lands."""
    machine = location.machine("s")
    before, blobs = machine.state(), list(location.blob.list(""))
    with pytest.raises(InvalidUsage, match=message):
        machine.apply(command)
    assert machine.refresh() == before
    assert list(location.blob.list("")) == blobs
    outcomes: list[object] = []
    leads: list[Callable[[], None]] = []
    neighbour = insert_of(location, *location.machine("s").receipted([Run((encoded(location),))]))
    for one in (command, neighbour):
        machine.submit(one, leads.append, outcomes.append)
    for lead in leads:
        lead()
    assert isinstance(outcomes[0], InvalidUsage)
    assert isinstance(outcomes[1], c.Appended)
    client = client_of(location)
    assert {"id": 9, "v": "z"}.items() <= client.shard("s").snapshot().to_arrow().to_pylist()[-1].items()


def encoded(location: Location) -> Part:
    schema = client_of(location).shard("s").schema
    rows = schema.conform(pa.table({"id": [9], "v": ["z"]}), 0)
    return encode_inline(rows, schema, 1, mint(PartId, location.ids))


FALSE = {
    "rows": ({"rows": 4}, "rows"),
    "no rows": ({"rows": 0}, "no rows"),
    "size": ({"size": 7}, "but its size is 7|has .* bytes, not 7|blob is one"),
    "checksum": ({"checksum": 1}, "checksum"),
    "key_lower": ({"key_lower": b"\x01\x80\x00\x00\x00\x00\x00\x00\x02"}, "key_lower|key bounds"),
    "key_upper": ({"key_upper": b"\x01\x80\x00\x00\x00\x00\x00\x00\x02"}, "key_upper|key bounds"),
    "diff_min": ({"diff_min": 1}, "diff_min"),
    "diff_max": ({"diff_max": 1}, "diff_max"),
    "diff_sum": ({"diff_sum": 3}, "diff_sum"),
    "diff_sum unknown": ({"diff_sum": None}, "diff_sum"),
    "time": ({"time": 5, "time_min": 5, "time_max": 5}, "times in|with a time"),
    "clip": ({"clip": 0}, "a clip"),
    "schema": ({"schema_id": 2}, "no schema 2"),
    "format": ({"format": "avro"}, "'avro'"),
    "footer": ({"footer_size": 3, "footer_checksum": 3}, "footer"),
}


@pytest.mark.parametrize("policy", [INLINE, BLOB], ids=["inline", "blob"])
@pytest.mark.parametrize("what", FALSE)
def test_a_part_that_is_not_what_it_says_is_refused(policy: Policy, what: str) -> None:
    location, shard = shard_of(policy)
    changes, message = FALSE[what]
    refused(location, insert_of(location, Run((replace(staged(shard), **changes),))), message)


@pytest.mark.parametrize("policy", [INLINE, BLOB], ids=["inline", "blob"])
def test_a_part_that_is_what_it_says_is_taken_with_and_without_a_receipt(policy: Policy) -> None:
    location, shard = shard_of(policy)
    for run in (Run((staged(shard),)), *shard.open_writer().stage_for_one_commit(ROWS, None)):
        assert isinstance(location.machine("s").apply(insert_of(location, run)), c.Appended)
    assert all(not part.receipt for part in location.machine("s").state().trace.parts())
    assert shard.snapshot().to_arrow().num_rows == 3


def test_a_receipt_holds_for_exactly_what_it_was_given_for() -> None:
    location, shard = shard_of(BLOB)
    [run] = shard.open_writer().stage_for_one_commit(ROWS, None)
    [part] = run.parts
    assert part.receipt
    for changes in ({"rows": 4}, {"diff_sum": 9}, {"receipt": b"0" * 16}):
        if "receipt" in changes:  # a wrong one is no harm: the rows are read back
            location.machine("s").apply(insert_of(location, Run((replace(part, **changes),))))
        else:
            refused(location, insert_of(location, Run((replace(part, **changes),))), next(iter(changes)))


def test_a_part_whose_blob_is_gone_is_refused_also_with_a_receipt() -> None:
    location, shard = shard_of(BLOB)
    [run] = shard.open_writer().stage_for_one_commit(ROWS, None)
    location.blob.delete([part.key or "" for part in run.parts])
    for one in (run, Run(tuple(part.without_receipt() for part in run.parts))):
        refused(location, insert_of(location, one), "is not there")


@pytest.mark.parametrize("policy", [INLINE, BLOB], ids=["inline", "blob"])
def test_no_part_counts_twice(policy: Policy) -> None:
    location, shard = shard_of(policy)
    part = staged(shard)
    refused(location, insert_of(location, Run((part,)), Run((part,))), "twice in one command")
    location.machine("s").apply(insert_of(location, Run((part,))))
    refused(location, insert_of(location, Run((part,))), "is in shard 's' already")


def test_a_retry_is_answered_though_its_blob_is_gone_by_then() -> None:
    location, shard = shard_of(BLOB)
    command = insert_of(location, Run((staged(shard),)))
    answer = location.machine("s").apply(command)
    location.blob.delete([part.key or "" for part in command.runs[0].parts])
    assert location.machine("s").apply(command) == answer


def test_a_blob_of_another_part_or_of_a_merge_is_refused() -> None:
    location, shard = shard_of(BLOB)
    one, other = staged(shard), staged(shard)
    refused(location, insert_of(location, Run((replace(one, key=other.key),))), "is not that of part")
    key = part_key(location.machine("s").state().shard_id, COMPACTOR, one.id)
    refused(location, insert_of(location, Run((replace(one, key=key),))), "written by maintenance")


def test_bytes_that_are_no_rows_of_the_schema_are_refused() -> None:
    location, shard = shard_of(INLINE)
    schema = shard.schema
    text = pa.array([b"\xff\xfe"], pa.binary()).view(pa.string())
    bad = pa.table([pa.array([1]), text, pa.array([0]), pa.array([1])], schema=schema.updates_schema)
    refused(location, insert_of(location, Run((encode_inline(bad, schema, 1, mint(PartId, location.ids)),))), "UTF8")
    null = pa.table([pa.array([1]), pa.array([None], pa.string()), pa.array([0]), pa.array([1])], schema.updates_schema)
    refused(location, insert_of(location, Run((encode_inline(null, schema, 1, mint(PartId, location.ids)),))), "nulls")
    with pytest.raises(InvalidUsage, match="are invalid"):
        shard.insert(bad.drop_columns(["__time"]))
    writer, part_id = mint(WriterId, location.ids), mint(PartId, location.ids)
    part, data = encode_parquet(
        bad, schema, 1, part_id, part_key(location.machine("s").state().shard_id, writer, part_id)
    )
    location.blob.put(part.key or "", data)
    refused(location, insert_of(location, Run((part,))), "UTF8")


@pytest.mark.parametrize("policy", [INLINE, BLOB], ids=["inline", "blob"])
def test_an_insert_has_no_times(policy: Policy) -> None:
    location, shard = shard_of(policy)
    timed = ROWS.append_column("__time", pa.array([5, 5, 5]))
    with pytest.raises(InvalidUsage, match="leave the column out"):
        shard.insert(timed)
    [run] = shard.open_writer().stage_for_one_commit(timed, 5)
    refused(location, insert_of(location, run), "the service chooses the time")
    shard.compare_and_append(timed, shard.upper(), 6)


def test_sums_of_multiplicities_stay_exact() -> None:
    _location, shard = shard_of(INLINE)
    shard.insert([{"id": 1, "v": "a", "__diff": DIFF_MAX}])
    for much in (DIFF_MAX + 1, -DIFF_MAX - 1, 2**62):
        with pytest.raises(InvalidUsage, match="multiplicities"):
            shard.insert([{"id": 1, "v": "a", "__diff": much}])
    assert shard.snapshot().to_arrow().column("__diff").to_pylist() == [DIFF_MAX]


@pytest.mark.parametrize(("diffs", "is_taken"), [
    ([DIFF_MAX, -1], True), ([DIFF_MAX + 1, -1], True), ([2**62, -(2**62) + 5], True), ([2**62, -(2**62)], True),
    ([DIFF_MAX, 1], False), ([-DIFF_MAX] * 2, False), ([2**62] * 2, False),
])  # fmt: skip
def test_the_sum_of_equal_rows_is_bounded_however_they_come(diffs: list[int], is_taken: bool) -> None:
    """Inline each row was bounded, in a blob the sum: the same rows were taken by one call and refused by another."""
    _location, shard = shard_of(INLINE)
    rows = [{"id": 1, "v": "a", "__diff": diff} for diff in diffs]
    writer = shard.open_writer()
    for write in (lambda: writer.insert(rows), lambda: writer.commit_insert(writer.stage(rows, None))):
        if is_taken:
            write()
        else:
            with pytest.raises(InvalidUsage, match=r"multiplicities|sum to a number"):
                write()
    shard.advance_upper(9)
    found = shard.snapshot().to_arrow().column("__diff").to_pylist()
    assert found == ([2 * sum(diffs)] if is_taken and sum(diffs) else [])


def test_a_staged_part_that_left_the_shard_never_comes_back() -> None:
    location, shard = shard_of(BLOB)
    [first] = shard.open_writer().stage_for_one_commit(ROWS, None)
    machine = location.machine("s")
    machine.apply(insert_of(location, first))
    shard.insert([{"id": 7, "v": "x"}])
    merge(location)
    assert len(machine.state().left) == 2
    refused(location, insert_of(location, first), "was in shard 's' before")
    other = memory_location(blob=location.blob, consensus=location.consensus, policy=BLOB, ids=location.ids)
    refused(other, insert_of(other, Run(tuple(part.without_receipt() for part in first.parts))), "was in shard")


def test_what_is_remembered_is_bounded_and_what_was_forgotten_is_refused_by_its_age(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(part_admission, "LEFT_PARTS_MAX", 3)
    location, shard = shard_of(BLOB)
    ids = iter(range(1, 1000))
    for number in range(8):
        part = staged_at(location, shard, 1000 * (number + 1), next(ids))
        location.machine("s").apply(insert_of(location, Run((part,))))
    late, early = staged_at(location, shard, 9000, 500), staged_at(location, shard, 4000, 501)
    merge(location)
    state = location.machine("s").state()
    assert len(state.left) == 3
    assert state.left_before_ms == 5001
    with pytest.raises(Expired, match="no longer knows"):
        location.machine("s").apply(insert_of(location, Run((early,))))
    location.machine("s").apply(insert_of(location, Run((late,))))


def staged_at(location: Location, shard: Shard, born_ms: int, number: int) -> Part:
    writer, part_id = WriterId("w" + "1" * 32), PartId(f"p{born_ms:012x}{number:020x}")
    key = part_key(location.machine("s").state().shard_id, writer, part_id)
    rows = shard.schema.conform(pa.table({"id": [number], "v": ["a"]}), 0)
    part, data = encode_parquet(rows, shard.schema, 1, part_id, key)
    location.blob.put(key, data)
    return part


def merge(location: Location) -> None:
    """Merge all that the shard has into one part."""
    machine = location.machine("s")
    machine.apply(c.AdvanceUpper(Antichain((machine.state().upper.element or 0) + 1)))
    merge = merged(machine.state(), machine.state().trace.batches, location.blob, location.ids)
    assert merge is not None
    assert machine.apply(merge) == c.MergeApplied(True)


def test_what_maintenance_may_have_swept_need_not_be_remembered() -> None:
    """It is refused by its age."""
    location, shard = shard_of(BLOB)
    for number in range(3):
        part = staged_at(location, shard, 1000 * (number + 1), number + 1)
        location.machine("s").apply(insert_of(location, Run((part,))))
    merge(location)
    state = location.machine("s").state()
    assert [key[:6] for key in state.left] == [(1000 * n).to_bytes(6) for n in (1, 2, 3)]
    gone = [part_key(state.shard_id, WriterId("w" + "1" * 32), PartId(f"p{4000:012x}{9:020x}"))]
    later = departed(replace(state, swept_before_ms=2500), gone)
    assert [key[:6] for key in later.left] == [(1000 * n).to_bytes(6) for n in (3, 4)]
    assert later.left_before_ms == 0, "nothing that could still be committed was forgotten"


@pytest.mark.parametrize("walltime_ms", [0, 2_000_000, 4_070_908_800_000])
def test_what_is_forgotten_goes_by_the_births_of_parts_and_by_no_clock_of_a_committer(
    walltime_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a slow clock too little was refused, so a part came twice. By one of 2099 every new part was."""
    monkeypatch.setattr(part_admission, "LEFT_PARTS_MAX", 50)
    location, _ = shard_of(BLOB)
    state = replace(location.machine("s").state(), walltime_ms=walltime_ms)
    births = [4_070_908_800_000, *range(1_000_000, 1_000_050)]
    gone = [part_key(state.shard_id, WriterId("w" + "1" * 32), PartId(f"p{born:012x}{7:020x}")) for born in births]
    later = departed(state, gone)
    assert later.left_before_ms == 1_000_002, "the two that were minted first are forgotten"
    assert len(later.left) == 49
