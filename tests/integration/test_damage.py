"""Damage in the bytes of the stores: the checker finds each kind of it, at the depth that the page names."""

from __future__ import annotations

import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import persist.parts.reader
from persist.commit.blob_tasks import keys_in
from persist.copies.shard_facts import Fault, FaultKind, all_parts
from persist.copies.verify import Depth, Sample, verify_shards
from persist.core.attribute import KEY_BYTES
from persist.core.batch import HollowBatch, Part, Run
from persist.core.errors import InvalidUsage
from persist.core.frontier import Antichain
from persist.core.named_holds import LentKeys
from persist.core.record import replace
from persist.core.spill import ENTRIES, OUTCOMES
from persist.core.state import Claim, CriticalReader, State
from persist.formats.state_frames import Listing, decode_lent, decode_listing, encode_lent, encode_listing
from persist.parts import DIFF, newest, valid_schemas
from persist.parts.row_stats import digest_of_rows
from tests.support.damaged import SCHEMA, Damaged, healthy, opened, with_part
from tests.support.naive_reader import Contents, NaiveReader
from tests.support.pages import ROOT
from tests.support.read_comparison import reader_differences

FULL, DEEP = "full", "deep"
DEPTHS = {FULL: Depth(), DEEP: Depth(deep=True)}
Plant = Callable[[Damaged], str | None]  # the key of the blob that is at fault; none where it is of no blob


@dataclass(frozen=True)
class Case:
    """What is planted, and the first depth that finds it. `says` is a pattern of the sentence."""

    depth: str
    kind: FaultKind
    plant: Plant
    says: str
    shard: str = "orders"


CASES: dict[str, Case] = {}


def case(name: str, depth: str, kind: FaultKind, says: str, shard: str = "orders") -> Callable[[Plant], Plant]:
    """Adds what is planted to the cases."""

    def added(plant: Plant) -> Plant:
        CASES[name] = Case(depth, kind, plant, says, shard)
        return plant

    return added


# --- the log


def last(place: Damaged, name: str = "orders") -> int:
    return max(place.entries(name))


@case("a bit of a log entry is flipped", FULL, FaultKind.LOG, r"log entry v36 .*checksum")
def _(place: Damaged) -> None:
    data = bytearray(place.entries("orders")[36])
    data[len(data) // 2] ^= 1
    place.set_entry("orders", 36, bytes(data))


case("a log entry is missing in the middle", FULL, FaultKind.LOG, r"from v35 to v37: entries are missing")(
    lambda p: p.set_entry("orders", 36, None)
)
case("a log entry stands twice", FULL, FaultKind.LOG, r"log entry v36 .*state diff v35")(
    lambda p: p.set_entry("orders", 36, p.entries("orders")[35])
)
case("a log entry is that of another shard", FULL, FaultKind.LOG, r"state diff v36 .*follows another v35")(
    lambda p: p.set_entry("orders", 36, p.entries("other")[36])
)


@case("the newest log entries are lost", FULL, FaultKind.LOG, r"ends at v30, but the blob store has a rollup of v33")
def _(place: Damaged) -> None:
    for seqno in range(31, last(place) + 1):
        place.set_entry("orders", seqno, None)


@case("the oldest log entries are lost", FULL, FaultKind.ROLLUP, r"begins at v3, for which the shard names no rollup")
def _(place: Damaged) -> None:
    for seqno in (1, 2):
        place.set_entry("orders", seqno, None)


# --- rollups


def rollup_keys(place: Damaged, name: str = "orders") -> list[str]:
    return [rollup.key for _, rollup in sorted(place.state(name).rollups.items())]


case("a bit of the newest rollup is flipped", FULL, FaultKind.ROLLUP, "newest rollup cannot be read: .*checksum")(
    lambda p: p.flip(rollup_keys(p)[-1])
)
case("a bit of an older rollup is flipped", FULL, FaultKind.ROLLUP, "rollup v17 cannot be read: .*checksum")(
    lambda p: p.flip(rollup_keys(p)[1])
)
case("a rollup is that of another shard", FULL, FaultKind.ROLLUP, "rollup v17 holds v17 of shard 'other'")(
    lambda p: p.write(rollup_keys(p)[1], p.read(rollup_keys(p, "other")[1]))
)
case("the newest rollup is that of another shard", FULL, FaultKind.ROLLUP, "newest rollup holds v33 of shard 'other'")(
    lambda p: p.write(rollup_keys(p)[-1], p.read(rollup_keys(p, "other")[-1]))
)


@case("a rollup is stale", FULL, FaultKind.ROLLUP, "rollup v17 holds v1 of")
def _(place: Damaged) -> str:
    keys = rollup_keys(place)
    return place.write(keys[1], place.read(keys[0]))


case("an older rollup holds another State than the log", FULL, FaultKind.ROLLUP, "v17 differs .*event_count")(
    lambda p: p.rollup("orders", lambda state: replace(state, event_count=state.event_count + 1), at=1)
)
case("the newest rollup holds another State than the log", FULL, FaultKind.ROLLUP, "v33 differs .*byte_count")(
    lambda p: p.rollup("orders", lambda state: replace(state, byte_count=state.byte_count + 1))
)


@case("the shard names a rollup of the future", FULL, FaultKind.LOG, "cannot be loaded: rollup .* holds v33, not v93")
def _(place: Damaged) -> None:
    def change(state: State) -> State:
        later = type(state.seqno)(state.seqno + 50)
        return replace(state, rollups={**state.rollups, later: state.rollups[max(state.rollups)]})

    place.commit("orders", change)


# --- States, with sound checksums


case("batches leave a hole", FULL, FaultKind.STATE, r"do not tile: \[6\]\[10\]\[0\] follows \[5\]")(
    lambda p: p.edit_batches("orders", lambda all_: [all_[0], _until(all_[1], 5), *all_[2:]])
)
case("upper was moved back", FULL, FaultKind.STEP, "upper of shard 'orders' would move back from")(
    lambda p: p.edit_batches("orders", lambda all_: all_[:-1])
)


def _until(batch: HollowBatch, upper: int) -> HollowBatch:
    return replace(batch, desc=replace(batch.desc, upper=Antichain(upper)))


@case("since was moved back", FULL, FaultKind.STEP, "since of shard 'orders' would move back from")
def _(place: Damaged) -> None:
    place.commit("orders", lambda state: replace(state, since=Antichain(3), history_hold=Antichain(3)))
    place.commit("orders", lambda state: replace(state, since=Antichain(2)))


case("since lies beyond upper", FULL, FaultKind.STATE, "beyond what its own history holds")(
    lambda p: p.commit("orders", lambda state: replace(state, since=Antichain(1_000)))
)


@case("since has passed what a reader holds", FULL, FaultKind.STATE, r"critical reader .* holds \[1\], which since")
def _(place: Damaged) -> None:
    hold = CriticalReader(Antichain(1), "x", "test")
    readers: Any = {"c" + "0" * 32: hold}
    place.commit("orders", lambda state: replace(state, critical_readers=readers))
    place.commit("orders", lambda state: replace(state, since=Antichain(2), history_hold=Antichain(2)))


case("a batch has a wrong number of rows", FULL, FaultKind.STATE, "claims 801 rows, and its parts have 800")(
    lambda p: p.edit_batches("orders", lambda all_: [replace(all_[0], rows=all_[0].rows + 1), *all_[1:]])
)


@case("a part stands in two batches", FULL, FaultKind.STATE, "occurs twice")
def _(place: Damaged) -> None:
    def twice(all_: list[HollowBatch]) -> list[HollowBatch]:
        more = (*all_[-1].runs, all_[0].runs[0])
        return [*all_[:-1], replace(all_[-1], runs=more, rows=all_[-1].rows + all_[0].rows)]

    place.edit_batches("orders", twice)


@case("the parts of a run are not in order", FULL, FaultKind.STATE, "its keys begin before")
def _(place: Damaged) -> str:
    place.edit_batches("orders", lambda all_: [all_[0], _with_run(all_[1], _swapped), *all_[2:]])
    return _middle(place).parts[1].key or ""


@case("the parts of a run overlap", FULL, FaultKind.STATE, "has keys that part .*, before it, has too")
def _(place: Damaged) -> str:
    following = _middle(place).parts[1]
    place.edit_part("orders", 1, key_upper=following.key_upper)
    return following.key or ""


def _middle(place: Damaged) -> Run:
    """The run of several parts."""
    return place.state("orders").trace.batches[1].runs[0]


def _with_run(batch: HollowBatch, edit: Callable[[Run], Run]) -> HollowBatch:
    return replace(batch, runs=(edit(batch.runs[0]),))


def _swapped(run: Run) -> Run:
    return Run((run.parts[1], run.parts[0], *run.parts[2:]))


case("a part names a schema that there is not", FULL, FaultKind.STATE, "names schema 7, which is not registered")(
    lambda p: p.edit_part("orders", schema_id=7)
)


@case("the keys of a part end before they begin", FULL, FaultKind.STATE, "has an upper key below its lower key")
def _(place: Damaged) -> str:
    part = place.state("orders").trace.batches[0].runs[0].parts[0]
    return place.edit_part("orders", key_lower=part.key_upper, key_upper=part.key_lower)


case(
    "a part has times beyond its batch", FULL, FaultKind.STATE, r"has times up to 90, beyond its batch \[0\]\[4\]\[0\]"
)(lambda p: p.edit_part("orders", time_max=90))
case("a part has times before its batch", FULL, FaultKind.STATE, r"has times from 0, before its batch \[4\]\[6\]\[0\]")(
    lambda p: p.edit_part("orders", 1, time_min=0)
)
case("a claim is for nothing", FULL, FaultKind.STATE, "the claim merge:.* has no inputs")(
    lambda p: p.commit("orders", lambda state: replace(state, claims={"merge:[0]": Claim("worker", 1, 60_000)}))
)


@case("a blob comes back that had left the shard", FULL, FaultKind.STEP, "names a blob that had left")
def _(place: Damaged) -> str:
    state = place.state("orders")
    part = list(state.trace.parts())[-1]
    place.commit("orders", lambda state: with_part(state, part.id, None))
    place.commit("orders", lambda now: replace(now, trace=state.trace))
    return part.key or ""


@case(
    "a part is that of another shard", FULL, FaultKind.STATE, "belongs to another shard, from which nothing is borrowed"
)
def _(place: Damaged) -> str:
    foreign = next(place.state("other").trace.parts())
    place.commit("orders", lambda state: with_part(state, next(state.trace.parts()).id, foreign))
    return foreign.key or ""


case("chunks of the index of attributes leave a hole", FULL, FaultKind.STATE, "nodes outside its chunks")(
    lambda p: p.commit("orders", lambda state: replace(state, attribute_chunks={}))
)


# --- loans


@case(
    "the lender does not know a loan", FULL, FaultKind.LOAN, "'orders', which has not lent it: .* has no loan", "copy"
)
def _(place: Damaged) -> str:
    place.commit("orders", lambda state: replace(state, loans={}))
    return place.keys("copy", ".parquet")[0]


@case("a loan is that of another borrower", FULL, FaultKind.LOAN, "'orders', which has not lent it", "copy")
def _(place: Damaged) -> str:
    def change(state: State) -> State:
        return replace(state, loans={name: replace(loan, borrower="other") for name, loan in state.loans.items()})

    place.commit("orders", change)
    return place.keys("copy", ".parquet")[0]


@case("the list of a loan lacks a blob", FULL, FaultKind.LOAN, "which has not lent it: no loan contains it", "copy")
def _(place: Damaged) -> str:
    [key] = place.keys("orders", ".loan")
    wanted = place.keys("copy", ".parquet")[0]
    kept = tuple(one for one in decode_lent(place.read(key)).keys if one != wanted)
    place.write(key, encode_lent(LentKeys(kept)))
    return wanted


case("a bit of the list of a loan is flipped", FULL, FaultKind.LOAN, "list .*checksum", "copy")(
    lambda p: p.flip(p.keys("orders", ".loan")[0])
)


# --- blobs


case("a part is missing", FULL, FaultKind.MISSING, "is missing")(
    lambda p: p.write(p.keys("orders", ".parquet")[0], None)
)
case("a part is cut short", FULL, FaultKind.SIZE, r"has \d+ bytes, not")(
    lambda p: p.cut(p.keys("orders", ".parquet")[0])
)
case("an older rollup is missing", FULL, FaultKind.MISSING, "is missing")(lambda p: p.write(rollup_keys(p)[1], None))
case("a chunk of the index of attributes is missing", FULL, FaultKind.MISSING, "is missing")(
    lambda p: p.write(p.keys("orders", ".nodes")[0], None)
)
case("a file of outcomes is cut short", FULL, FaultKind.SIZE, r"has \d+ bytes, not")(
    lambda p: p.cut(p.state("orders").files_of(OUTCOMES)[0].key)
)
case("a file of the commit history is extended", FULL, FaultKind.SIZE, r"has \d+ bytes, not")(
    lambda p: p.extend(p.state("orders").files_of(ENTRIES)[0].key)
)
case("the list of a loan is missing", FULL, FaultKind.MISSING, "of loan .* is missing", "copy")(
    lambda p: p.write(p.keys("orders", ".loan")[0], None)
)
case("a bit of a bundle is flipped", FULL, FaultKind.BUNDLE, "does not match its checksum", "bundled")(
    lambda p: p.flip(p.keys("bundled", ".bundle")[0])
)
case("a bundle lists a part that is missing", FULL, FaultKind.MISSING, "is missing", "bundled")(
    lambda p: p.write(listed(p)[0], None)
)


@case("a bundle lists other parts than the shard says", FULL, FaultKind.BUNDLE, "lists other parts", "bundled")
def _(place: Damaged) -> str:
    key = place.keys("bundled", ".bundle")[0]
    runs = decode_listing(place.read(key)).runs
    data = encode_listing(Listing(runs[:1]))
    part = next(part for part in place.state("bundled").trace.parts() if part.key == key)
    assert part.bundle is not None
    place.write(key, data)
    other = replace(part, checksum=zlib.crc32(data), bundle=replace(part.bundle, size=len(data)))
    place.commit("bundled", lambda state: with_part(state, part.id, other))
    return key


def listed(place: Damaged) -> list[str]:
    """The parts in bundles."""
    with closing(opened(place.root)) as location:
        return [one for key in place.keys("bundled", ".bundle") for one in keys_in(location.blob, key)]


# --- bytes and rows


case("a bit of a part is flipped", DEEP, FaultKind.PART, "does not match its checksum")(
    lambda p: p.flip(p.keys("orders", ".parquet")[0])
)


@case("two parts are swapped", DEEP, FaultKind.PART, "does not match its checksum", "bundled")
def _(place: Damaged) -> str:
    by_size: dict[int, str] = {}
    for key in listed(place):
        size = len(place.read(key))
        if size in by_size and place.read(by_size[size]) != place.read(key):
            return place.swap(by_size[size], key)
        by_size[size] = key
    raise AssertionError("no two parts have one size")


case("the State says a wrong number of rows of a part", DEEP, FaultKind.PART, "799|not have the 801 rows")(
    lambda p: p.edit_part("orders", rows=801)
)
case("the State says a wrong sum of diffs of a part", DEEP, FaultKind.PART, "has diff_sum 7, but its rows have 800")(
    lambda p: p.edit_part("orders", diff_sum=7)
)
case("the State says a wrong greatest diff of a part", DEEP, FaultKind.PART, "has diff_max 9, but its rows have 1")(
    lambda p: p.edit_part("orders", diff_max=9)
)


@case("the State says a wrong bound of keys of a part", DEEP, FaultKind.PART, "has other key bounds")
def _(place: Damaged) -> str:
    part = next(place.state("orders").trace.parts())
    return place.edit_part("orders", key_lower=part.key_lower + b"\x01")


case("the State says a wrong least time of a part", DEEP, FaultKind.PART, "has time_min 1, but its rows have 0")(
    lambda p: p.edit_part("orders", time_min=1)
)


@case(
    "a part lacks an update, and only its sum of diffs says so",
    DEEP,
    FaultKind.PART,
    "diff_sum 800, but .* 799",
    "other",
)
def _(place: Damaged) -> str:
    left = [*range(400), *range(401, 800)]  # neither the first row nor the last is lost: no bound differs
    return place.reencode("other", lambda rows: rows.take(left), rows=799)


@case("a diff of a part is another one", DEEP, FaultKind.PART, "has diff_max 1, but its rows have 2", "other")
def _(place: Damaged) -> str:
    def edit(rows: pa.Table) -> pa.Table:
        diffs = pa.array([2, *rows.column(DIFF).to_pylist()[1:]], pa.int64())
        return rows.set_column(rows.schema.get_field_index(DIFF), rows.schema.field(DIFF), diffs)

    return place.reencode("other", edit)


@case("the rows of a part are not sorted", DEEP, FaultKind.ORDER, "are not in order", "other")
def _(place: Damaged) -> str:
    order = [0, 2, 1, *range(3, 800)]
    return place.reencode("other", lambda rows: rows.take(order))


case("a part has an update twice", DEEP, FaultKind.ORDER, "has a duplicate update", "other")(
    lambda p: p.reencode("other", lambda rows: rows.take([0, 1, 1, *range(3, 800)]))
)


@case(
    "a part has the columns of another schema", DEEP, FaultKind.PART, "does not have the columns of schema 1", "other"
)
def _(place: Damaged) -> str:
    def edit(rows: pa.Table) -> pa.Table:
        return rows.set_column(1, "v", pc.cast(pc.utf8_length(rows.column("v")), pa.int64()))

    return place.reencode("other", edit)


@case("a bit of inline rows is flipped", DEEP, FaultKind.PART, "does not match its checksum", "inline")
def _(place: Damaged) -> str:
    data = bytearray(_inline(place).data or b"")
    data[-1] ^= 1
    return place.edit_part("inline", data=bytes(data))


case("the State says a wrong sum of diffs of inline rows", DEEP, FaultKind.PART, "has diff_sum 7, but", "inline")(
    lambda p: p.edit_part("inline", diff_sum=7)
)


def _inline(place: Damaged) -> Part:
    return next(place.state("inline").trace.parts())


case("a bit of a node of attributes is flipped", DEEP, FaultKind.INDEX, "does not match its checksum")(
    lambda p: p.flip(p.keys("orders", ".nodes")[0])
)


@case("the index of attributes has a key twice", DEEP, FaultKind.INDEX, "has duplicate keys")
def _(place: Damaged) -> None:
    place.leaf("orders", lambda keys: keys[:KEY_BYTES] + keys[:KEY_BYTES] + keys[2 * KEY_BYTES :])


@case("the index of attributes has keys out of order", DEEP, FaultKind.INDEX, "keys that do not ascend")
def _(place: Damaged) -> None:
    place.leaf("orders", lambda keys: keys[KEY_BYTES : 2 * KEY_BYTES] + keys[:KEY_BYTES] + keys[2 * KEY_BYTES :])


case("the State says a wrong number of attributes", DEEP, FaultKind.INDEX, r"attribute index has \d+ entries, not 99")(
    lambda p: p.commit("orders", lambda state: replace(state, attribute_root=replace(state.attribute_root, count=99)))
)
case("a bit of a file of outcomes is flipped", DEEP, FaultKind.BLOB, "is damaged")(
    lambda p: p.flip(p.state("orders").files_of(OUTCOMES)[0].key)
)
case("a bit of a file of the commit history is flipped", DEEP, FaultKind.BLOB, "is damaged")(
    lambda p: p.flip(p.state("orders").files_of(ENTRIES)[0].key, at=0.2)
)


# --- the tests


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return healthy(tmp_path_factory.mktemp("healthy") / "location")


@pytest.fixture
def place(sound: Path, tmp_path: Path) -> Damaged:
    shutil.copytree(sound, tmp_path / "location")
    return Damaged(tmp_path / "location")


def found_by(place: Damaged, how: Depth) -> Iterator[Fault]:
    with closing(opened(place.root)) as location:
        for result in verify_shards(location, location.all_names(with_dropped=False), how):
            yield from result.faults


@pytest.mark.parametrize("name", CASES)
def test_planted_damage_is_found_and_named(place: Damaged, name: str) -> None:
    """At the depth that the table says, and at deeper ones; not before."""
    planted = CASES[name]
    key = planted.plant(place) or ""
    depths = list(DEPTHS)
    with closing(opened(place.root)) as location:
        found = {
            depth: [fault for told in verify_shards(location, iter([planted.shard]), how) for fault in told.faults]
            for depth, how in DEPTHS.items()
        }
    for depth in depths[: depths.index(planted.depth)]:
        assert found[depth] == [], depth
    for depth in depths[depths.index(planted.depth) :]:
        faults = found[depth]
        meant = [fault for fault in faults if fault.kind is planted.kind and fault.shard == planted.shard]
        assert any(re.search(planted.says, fault.what) and fault.key == key for fault in meant), (depth, faults, key)
        assert all(repr(fault.shard) in str(fault) and str(fault.kind) in str(fault) for fault in meant)
        assert all(fault.key in str(fault) for fault in meant)


def test_a_healthy_location_has_no_fault_at_any_depth(place: Damaged) -> None:
    for how in (*DEPTHS.values(), *(Depth(sample=Sample(number, 3)) for number in range(3))):
        assert list(found_by(place, how)) == []
    assert differences_of(place) == []


def test_there_are_many_kinds_of_damage() -> None:
    assert len(CASES) >= 50
    assert {planted.kind for planted in CASES.values()} == set(FaultKind)


def test_the_page_has_each_kind_with_its_depth() -> None:
    page = (ROOT / "docs" / "check.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (full|deep) \| ", page, re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == {(str(one.kind), one.depth) for one in CASES.values()}


def test_a_location_whose_stores_do_not_belong_together_is_not_looked_at(place: Damaged, tmp_path: Path) -> None:
    """The marker in each store names the other: this one is that of another location."""
    other = healthy(tmp_path / "other", origin=100)
    shutil.rmtree(place.root / "blob")
    shutil.copytree(other / "blob", place.root / "blob")
    for how in DEPTHS.values():
        with pytest.raises(InvalidUsage, match="belong"):
            list(found_by(place, how))


def differences_of(place: Damaged) -> list[str]:
    with closing(opened(place.root)) as location:
        return reader_differences(location)


def test_a_reader_of_ours_that_loses_a_row_is_found(place: Damaged) -> None:
    """No checksum shows it: the bytes are sound, and our reader makes other rows of them than a naive one."""
    real = persist.parts.reader.PartReader.read_range

    def loses(reader: Any, *given: Any, **options: Any) -> Iterator[pa.Table]:
        for table in real(reader, *given, **options):
            if table.num_rows > 1:
                yield table.slice(1)

    with patch.object(persist.parts.reader.PartReader, "read_range", loses):
        differences = differences_of(place)
    assert {what.partition(":")[0] for what in differences} == {"bundled", "copy", "inline", "orders", "other"}
    assert all("a naive reader finds" in what for what in differences), differences


def test_a_reader_of_ours_that_does_not_add_up_is_found(place: Damaged) -> None:
    real = persist.parts.reader.PartReader.read_range

    def twice(reader: Any, *given: Any, **options: Any) -> Iterator[pa.Table]:
        for table in real(reader, *given, **options):
            taken = table.set_column(
                table.schema.get_field_index(DIFF), table.schema.field(DIFF), pc.negate(table.column(DIFF))
            )
            yield from (table, table, taken)

    with patch.object(persist.parts.reader.PartReader, "read_range", twice):
        differences = differences_of(place)
    assert differences
    assert all("our reader fails: it gives a row twice" in what for what in differences)


def test_the_naive_reader_counts_as_duckdb_does(place: Damaged) -> None:
    """On the files themselves, which DuckDB reads with a decoder of its own."""
    with closing(opened(place.root)) as location:
        for name in ("orders", "bundled"):
            state = place.state(name)
            schemas = valid_schemas(state.schemas)
            parts = [named.part for named in all_parts(state, location.blob) if named.part.bundle is None]
            found = Contents.of((state.upper.element or 0) - 1, 0)
            NaiveReader(location.blob, schemas, newest(schemas)[1]).read([(part, 0) for part in parts], (), found)
            with duckdb.connect() as connection:
                files = [str(place.path(part.key or "")) for part in parts]
                told = connection.sql(
                    "SELECT id, v, CAST(sum(__diff) AS BIGINT) AS __diff FROM read_parquet(?) GROUP BY ALL",
                    params=[files],
                ).to_arrow_table()
            rows = told.cast(pa.schema([*SCHEMA, pa.field(DIFF, pa.int64())]))
            assert found.snapshot.rows == pc.sum(rows.column(DIFF)).as_py() > 0
            assert found.snapshot.digest == digest_of_rows(rows)
