"""Encoded keys: they order as parts are sorted, and decode to what they encode."""

from __future__ import annotations

import contextlib
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.core.errors import Corruption, InvalidUsage
from persist.parts import KeyRange, ShardSchema, consolidate, decode_key, encode_key
from persist.parts.key_encoding import BOUND_BYTES_MAX, SortedKeys, lower_bound, upper_bound
from persist.parts.value_order import extremes
from tests.support.examples import examples
from tests.unit.parts.strategies import FLAT, arrays

STRINGS = ShardSchema(pa.schema([("k", pa.string()), ("b", pa.binary())]), ("k", "b"))


def single(kind: Any) -> ShardSchema:
    return ShardSchema(pa.schema([("k", kind)]), ("k",))


@pytest.mark.parametrize("kind", FLAT, ids=str)
@examples(0.4)
@given(data=st.data())
def test_bytes_order_as_rows_are_sorted(kind: Any, data: st.DataObject) -> None:
    schema = single(kind)
    table = consolidate([schema.conform(pa.table({"k": data.draw(arrays(kind, 1))}), 0)], schema)
    keys = SortedKeys(table, schema.key)
    encoded = [keys[row] for row in range(len(table))]
    assert encoded == sorted(set(encoded))


@pytest.mark.parametrize("kind", FLAT, ids=str)
@examples(0.4)
@given(data=st.data())
def test_a_key_decodes_to_itself(kind: Any, data: st.DataObject) -> None:
    schema = single(kind)
    values = data.draw(arrays(kind, 1, 3))
    for scalar in values:
        encoded = encode_key(schema, (scalar,))
        (decoded,) = decode_key(encoded, schema)
        assert decoded.type == kind
        assert encode_key(schema, (decoded,)) == encoded
        assert decoded == scalar or pa.types.is_floating(kind)


@pytest.mark.parametrize("kind", [pa.int32(), pa.float64(), pa.decimal128(12, 2), pa.date32(), pa.bool_()], ids=str)
def test_numbers_order_by_value(kind: Any) -> None:
    values = [0, 1] if kind == pa.bool_() else [-300, -1, 0, 1, 2, 255, 256, 99999]
    schema = single(kind)
    array = pa.array(values, pa.int32()).cast(kind)
    encoded = [encode_key(schema, (scalar,)) for scalar in array]
    assert [encode_key(schema, (None,)), *encoded] == sorted([encode_key(schema, (None,)), *encoded])


@given(left=st.tuples(st.text(), st.binary()), right=st.tuples(st.text(), st.binary()))
def test_tuples_order_column_by_column(left: tuple[str, bytes], right: tuple[str, bytes]) -> None:
    def plain(key: tuple[str, bytes]) -> tuple[bytes, bytes]:
        return key[0].encode(), key[1]

    assert (encode_key(STRINGS, left) < encode_key(STRINGS, right)) == (plain(left) < plain(right))


@given(st.text(alphabet="aé\0\U0001f600", max_size=400), st.binary(max_size=400))
def test_long_bounds_are_short_and_enclose(text: str, raw: bytes) -> None:
    encoded = encode_key(STRINGS, (text, raw))
    lower, upper = lower_bound(encoded, STRINGS), upper_bound(encoded)
    assert len(lower) <= BOUND_BYTES_MAX
    assert lower <= encoded
    decode_key(lower, STRINGS)
    assert upper is None or (len(upper) <= BOUND_BYTES_MAX and upper >= encoded)


def test_a_wide_fixed_binary_bound_is_shortened() -> None:
    schema = single(pa.binary(400))
    encoded = encode_key(schema, (b"\xff" * 400,))
    lower, upper = lower_bound(encoded, schema), upper_bound(encoded)
    assert lower <= encoded
    assert upper is not None
    assert upper > encoded
    assert decode_key(lower, schema)[0].as_py().startswith(b"\xff" * 200)


@given(st.binary(max_size=12))
def test_any_bytes_decode_or_are_corrupt(bound: bytes) -> None:
    with contextlib.suppress(Corruption):
        decode_key(bound, STRINGS)


def test_a_value_of_another_type_is_refused() -> None:
    with pytest.raises(InvalidUsage, match="key column 'k'"):
        encode_key(STRINGS, (5, b""))


def test_key_ranges_are_half_open() -> None:
    key_range = KeyRange(b"\x01a", b"\x01c")
    assert key_range.overlaps(b"\x01c", None) is False
    assert key_range.overlaps(b"\x01", b"\x01a") is True
    assert key_range.covers(b"\x01a", b"\x01b") is True
    assert key_range.covers(b"\x01a", b"\x01c") is False
    assert KeyRange(b"b", b"b").overlaps(b"a", b"z") is False


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1), st.booleans())
def test_the_extremes_of_texts(texts: list[str], is_binary: bool) -> None:
    values: Any = pa.array([text.encode() for text in texts] if is_binary else texts)
    assert extremes(values, [len(texts)]) == [(encoded(min(texts)), encoded(max(texts)))]


def encoded(text: str) -> bytes:
    return b"\x01" + text.encode().replace(b"\x00", b"\x00\xff") + b"\x00\x00"
