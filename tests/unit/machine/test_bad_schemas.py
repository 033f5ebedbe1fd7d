"""A shard gets no schema that its rows cannot be read by. One that has such a schema of old stays as good as it was."""

from __future__ import annotations

import pyarrow as pa
import pytest

from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.commit.command_queue import Pending
from persist.commit.location import Location
from persist.commit.part_validator import Inspector
from persist.copies.shard_checks import byte_faults
from persist.core import commands as c
from persist.core.batch import Run
from persist.core.blob_keys import belongs_to
from persist.core.errors import Corruption, InvalidUsage, SchemaMismatch, ShardExists, UnknownShard
from persist.core.ids import Token, WriterId, mint, shard_id_of
from persist.core.state import SchemaRecord
from persist.core.transitions.context import SOUND
from persist.parts import ShardSchema, valid_schemas
from tests.support.location import client_of, memory_location

ID = pa.field("id", pa.int64(), nullable=False)
SCHEMA = pa.schema([ID, ("v", pa.string())])
WIDER = pa.schema([ID, ("v", pa.string()), ("w", pa.int64())])
DEEP = pa.int8()
for _ in range(40):
    DEEP = pa.list_(DEEP)


def record(*fields: object, key: tuple[str, ...] = ("id",)) -> SchemaRecord:
    return SchemaRecord(pa.schema(fields).serialize().to_pybytes(), key)


def not_utf8() -> SchemaRecord:
    good = record(ID, ("v", pa.string()), ("name", pa.int64()))
    return SchemaRecord(good.arrow.replace(b"name", b"n\xff\xfee"), good.key)


NO_SCHEMA = {
    "garbage": SchemaRecord(b"garbage", ("id",)),
    "no bytes": SchemaRecord(b"", ("id",)),
    "cut": SchemaRecord(record(*SCHEMA).arrow[:-40], ("id",)),
    "a name that is not UTF-8": not_utf8(),
    "a key that is no column": record(*SCHEMA, key=("ix",)),
    "no key": record(*SCHEMA, key=()),
    "a reserved name": record(*SCHEMA, ("__time", pa.int64())),
    "a column twice": record(*SCHEMA, ("w", pa.int64()), ("w", pa.int64())),
    "a type that cannot be stored": record(*SCHEMA, ("w", pa.month_day_nano_interval())),
    "nested too deep": record(*SCHEMA, ("w", DEEP)),
}
NO_FIT = {
    "another key": record(ID, ("v", pa.string()), key=("id", "v")),
    "a key renamed": record(pa.field("ix", pa.int64(), nullable=False), ("v", pa.string()), key=("ix",)),
    "another type": record(pa.field("id", pa.string(), nullable=False), ("v", pa.string())),
    "columns gone": record(ID),
    "a new column without nulls": record(*SCHEMA, pa.field("w", pa.int64(), nullable=False)),
    "another order": record(("v", pa.string()), ID),
}


@pytest.fixture
def location() -> Location:
    return memory_location(small_merges=False)


def made(location: Location) -> Shard:
    shard = client_of(location).create_shard("s", SCHEMA, ["id"])
    shard.insert([{"id": 1, "v": "a"}])
    return shard


def as_of_old(location: Location, schema: SchemaRecord) -> None:
    """Register a schema as builds did that looked at none."""
    machine = location.machine("s")
    evolve = c.EvolveSchema(machine.state().schema_id, schema)
    machine.submit(evolve, lambda lead: lead(), lambda _: None, SOUND)
    assert machine.refresh().schemas[machine.state().schema_id] == schema


def without_receipts(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """As a client sends them that is not trusted."""
    return tuple(Run(tuple(part.without_receipt() for part in run.parts)) for run in runs)


def rows(shard: Shard) -> list[dict[str, object]]:
    return [{k: v for k, v in row.items() if k != "__diff"} for row in shard.snapshot().to_arrow().to_pylist()]


@pytest.mark.parametrize("what", [*NO_SCHEMA, *NO_FIT])
def test_a_schema_that_the_shard_cannot_have_is_refused(location: Location, what: str) -> None:
    shard = made(location)
    before = location.machine("s").state()
    with pytest.raises(InvalidUsage):
        location.machine("s").apply(c.EvolveSchema(1, {**NO_SCHEMA, **NO_FIT}[what]))
    assert location.machine("s").refresh().schemas == before.schemas
    assert rows(shard) == [{"id": 1, "v": "a"}]


@pytest.mark.parametrize("what", NO_SCHEMA)
def test_no_shard_begins_with_a_schema_that_is_none(location: Location, what: str) -> None:
    with pytest.raises(InvalidUsage):
        EmbeddedTransport(location).create("new", NO_SCHEMA[what])
    assert location.names("", "", 10) == []
    made(location).drop()
    machine = location.machine("s")
    while machine.apply(c.Finalise()) != c.Finalised(done=True):
        pass
    with pytest.raises(InvalidUsage):
        machine.apply(c.Recreate(NO_SCHEMA[what], shard=machine.state().shard_id))
    assert machine.refresh().tombstone
    assert made(location).schema.arrow == SCHEMA


def test_a_retry_and_a_lost_race_are_told_as_before(location: Location) -> None:
    made(location)
    machine, wider = location.machine("s"), ShardSchema(WIDER, ("id",)).to_record()
    assert machine.apply(c.EvolveSchema(1, wider)) == c.SchemaRegistered(2)
    assert machine.apply(c.EvolveSchema(1, wider)) == c.SchemaRegistered(2)
    with pytest.raises(SchemaMismatch):
        machine.apply(c.EvolveSchema(1, record(*SCHEMA, ("x", pa.int64()))))


@pytest.mark.parametrize("what", ["garbage", "a key renamed", "another type", "columns gone"])
def test_a_shard_with_a_bad_schema_of_old_is_read_written_and_mended(location: Location, what: str) -> None:
    """It was Corruption for everybody, for ever."""
    made(location)
    as_of_old(location, {**NO_SCHEMA, **NO_FIT}[what])
    client = client_of(location)
    shard = client.shard("s")
    assert shard.schema.arrow == SCHEMA
    shard.insert([{"id": 2, "v": "b"}])
    assert rows(shard) == [{"id": 1, "v": "a"}, {"id": 2, "v": "b"}]
    assert sum(event.updates.num_rows for event in shard.listen(None, until=2)) == 2
    assert list(byte_faults(location.machine("s").state(), location.blob, deep=True)) == []
    assert client.create_shard("s", SCHEMA, ["id"]).schema.arrow == SCHEMA
    with pytest.raises(ShardExists):
        client.create_shard("s", WIDER, ["id"])

    shard.evolve_schema(SCHEMA)
    state = location.machine("s").state()
    assert (state.schema_id, list(valid_schemas(state.schemas))) == (3, [1, 3])
    shard.evolve_schema(WIDER)
    shard.insert([{"id": 3, "v": "c", "w": 7}])
    assert rows(client.shard("s"))[2] == {"id": 3, "v": "c", "w": 7}


def test_no_rows_are_written_by_a_bad_schema_of_old(location: Location) -> None:
    shard = made(location)
    as_of_old(location, NO_FIT["another type"])
    bad = ShardSchema(pa.schema([pa.field("id", pa.string(), nullable=False), ("v", pa.string())]), ("id",))
    writer = shard.open_writer()
    writer._schema = lambda: (2, bad)
    runs = without_receipts(writer.stage_for_one_commit([{"id": "x", "v": "a"}], None))
    with pytest.raises(InvalidUsage, match="names schema 2 of shard 's', which does not fit the one before it"):
        writer.commit_insert(runs)
    assert rows(shard) == [{"id": 1, "v": "a"}]


def test_a_shard_without_any_sound_schema_says_so() -> None:
    with pytest.raises(Corruption, match="schema cannot be read"):
        valid_schemas({1: NO_SCHEMA["garbage"]})
    with pytest.raises(Corruption, match="has no schema"):
        valid_schemas({})


@pytest.mark.parametrize("size", ["inline", "blob"])
def test_what_was_looked_at_for_one_life_of_a_name_is_not_committed_to_the_next_one(
    location: Location, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that had not heard of the next life looked at parts by the schemas of the last one, or at none."""
    made(location)
    late = memory_location(blob=location.blob, consensus=location.consensus, clock=location.clock)
    late.machine("s").refresh()
    client = client_of(location)
    client.shard("s").drop()
    client.create_shard("s", pa.schema([("id", pa.string()), ("q", pa.int8())]), ["id"])
    forged = ShardSchema(SCHEMA, ("id",))
    writer = client.shard("s").open_writer()
    writer._schema = lambda: (1, forged)
    stage = writer.stage if size == "blob" else writer.stage_for_one_commit
    runs = without_receipts(stage(pa.table({"id": [1], "v": ["a"]}), None))
    new = shard_id_of("s", 1)
    assert all(part.key is None or belongs_to(part.key, new) for run in runs for part in run.parts)
    token, own = mint(Token, location.ids), mint(WriterId, location.ids)
    for shard in (new, None):
        with pytest.raises(InvalidUsage):
            late.machine("s").apply(c.Insert(own, token, runs, shard=shard))
    assert location.machine("s").refresh().upper.to_json() == [0]


def test_a_verdict_on_another_life_is_refused(location: Location) -> None:
    made(location)
    verdict = Inspector(location.blob, location.versions.receipts, location.versions.bound).verdict(
        c.EvolveSchema(1, ShardSchema(WIDER, ("id",)).to_record()), location.machine("s").state()
    )
    client_of(location).shard("s").drop()
    made(location)
    told: list[object] = []
    evolve = c.EvolveSchema(1, ShardSchema(WIDER, ("id",)).to_record())
    location.machine("s").submit(evolve, lambda lead: lead(), told.append, verdict)
    assert isinstance(told[0], UnknownShard)
    assert Pending(evolve, told.append, lambda: None).verdict.kind, "nobody has looked at it"
