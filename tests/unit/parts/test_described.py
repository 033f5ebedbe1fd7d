"""What a schema says beyond columns and key, as it is kept."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest

from persist.core.errors import Corruption, InvalidUsage
from persist.core.state import SchemaRecord
from persist.parts import ShardSchema
from persist.parts.shard_schema import DEFAULT_BYTES_MAX, GUARD, Check, Details, decode_value, encode_value

COLUMNS = pa.schema([("k", pa.int64()), ("a", pa.string()), ("b", pa.int32())])
PLAIN = ShardSchema(COLUMNS, ("k",))


def test_a_plain_schema_is_kept_as_it_always_was() -> None:
    assert PLAIN.to_record() == SchemaRecord(COLUMNS.serialize().to_pybytes(), ("k",))
    assert ShardSchema.from_record(PLAIN.to_record()) == PLAIN


def test_ids_defaults_and_constraints_come_back_as_they_were() -> None:
    schema = PLAIN.with_details(
        ids=(3, 1, 7), next_id=9, defaults=((7, encode_value(pa.scalar(5, pa.int32()))),), unique=True,
        checks=(Check("positive", "b > 0"),),
    )  # fmt: skip
    record = schema.to_record()
    found = ShardSchema.from_record(record)
    assert found == schema
    assert hash(found) == hash(schema)
    assert found.to_record() == record
    assert found.defaults == {"b": pa.scalar(5, pa.int32())}
    assert found.arrow.metadata is None
    assert found.arrow.field("a").metadata is None


def test_a_client_that_knows_no_ids_refuses_the_schema_and_names_the_remedy() -> None:
    """It took columns by their names, and the last field for one of them, of a type that no shard can store."""
    record = PLAIN.with_details(unique=True).to_record()
    with pytest.raises(InvalidUsage, match="'__upgrade_persist_to_read_this' has type null"):
        ShardSchema(pa.ipc.read_schema(pa.py_buffer(record.arrow)), record.key)
    bare = PLAIN.arrow.with_metadata({"persist.next_id": "4"})
    with pytest.raises(Corruption, match="its last field is not __upgrade_persist_to_read_this"):
        ShardSchema.from_record(SchemaRecord(bare.serialize().to_pybytes(), ("k",)))


def test_a_schema_that_says_anything_has_ids() -> None:
    schema = ShardSchema(COLUMNS, ("k",), Details(unique=True))
    assert schema.ids == (1, 2, 3)
    assert schema.details.next_id == 4
    assert not schema.is_plain


def test_rows_are_sorted_by_the_ids_of_their_columns_wherever_these_stand() -> None:
    moved = ShardSchema(pa.schema([("b", pa.int32()), ("k", pa.int64()), ("a", pa.string())]), ("k",))
    assert moved.order == ("k", "b", "a")
    assert moved.with_details(ids=(3, 1, 2)).order == ("k", "a", "b")


@pytest.mark.parametrize("value", [
    pa.scalar(None, pa.string()),
    pa.scalar(float("-0.0"), pa.float32()),
    pa.scalar(Decimal("-1.20"), pa.decimal128(38, 2)),
    pa.scalar([{"x": None}, {"x": 1}], pa.list_(pa.struct([("x", pa.int8())]))),
    pa.scalar([("a", None)], pa.map_(pa.string(), pa.int64())),
    pa.scalar(1, pa.timestamp("us", "Europe/Berlin")),
], ids=lambda value: str(value.type))  # fmt: skip
def test_a_value_of_any_type_is_kept_exactly(value: pa.Scalar) -> None:
    found = decode_value(encode_value(value), value.type)
    assert found.type == value.type
    assert repr(found) == repr(value)


@pytest.mark.parametrize(("metadata", "of_columns"), [
    ({"persist.next_id": "x"}, {}),
    ({"persist.next_id": "9"}, {"persist.id": "1"}),
    ({"persist.next_id": "3"}, {}),
    ({"persist.next_id": "9", "persist.checks": '[{"name": 1}]'}, {}),
    ({"persist.next_id": "9", "persist.checks": "{"}, {}),
    ({"persist.next_id": "9"}, {"persist.default": "no base64"}),
    ({"persist.next_id": "9"}, {"persist.default": "AAAA"}),
], ids=["no number", "ids twice", "taken", "checks", "no JSON", "no base64", "no value"])  # fmt: skip
def test_metadata_that_cannot_be_is_damage(metadata: dict[str, str], of_columns: dict[str, str]) -> None:
    fields = [
        field.with_metadata({"persist.id": str(number), **of_columns}) for number, field in enumerate(COLUMNS, start=1)
    ]
    record = SchemaRecord(pa.schema([*fields, GUARD], metadata).serialize().to_pybytes(), ("k",))
    with pytest.raises(Corruption, match="the shard's schema"):
        ShardSchema.from_record(record)


@pytest.mark.parametrize("what", ["compressed", "many rows", "a dictionary", "null", "another type"])
def test_a_default_that_was_made_by_hand_is_damage_before_it_takes_memory(what: str) -> None:
    values = {
        "compressed": pa.array(["x" * 100_000]),
        "many rows": pa.array(["x", "y"]),
        "a dictionary": pa.array(["x"]).dictionary_encode(),
        "null": pa.nulls(1, pa.string()),
        "another type": pa.array([{"x": 1}]),
    }[what]
    sink, options = (
        pa.BufferOutputStream(),
        pa.ipc.IpcWriteOptions(compression="zstd" if what == "compressed" else None),
    )
    batch = pa.record_batch([values], names=[""])
    with pa.ipc.new_stream(sink, batch.schema, options=options) as stream:
        stream.write_batch(batch)
    schema = PLAIN.with_details(defaults=((2, bytes(sink.getvalue())),))
    assert len(schema.details.defaults[0][1]) <= DEFAULT_BYTES_MAX
    with pytest.raises(Corruption, match="the shard's schema"):
        ShardSchema.from_record(schema.to_record())


def test_ids_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidUsage, match="are not valid for 3 columns"):
        ShardSchema(COLUMNS, ("k",), Details(ids=(1, 2, 2)))
