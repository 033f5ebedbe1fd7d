"""How many bytes rows take: what is seen at a glance is never less than what a closer look says."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from persist.parts.memory_size import is_within, row_bytes, working_bytes

TEXTS = st.lists(st.none() | st.text(max_size=300), max_size=40)
TYPES: dict[str, tuple[Any, Any]] = {
    # what rows come as -> what the shard has
    "text": (pa.string(), pa.string()),
    "large": (pa.large_string(), pa.string()),
    "view": (pa.string_view(), pa.string()),
    "names": (pa.dictionary(pa.int32(), pa.string()), pa.string()),
    "bytes": (pa.binary(), pa.binary()),
    "none": (pa.null(), pa.decimal256(70, 3)),
    "lists": (pa.list_(pa.string()), pa.list_(pa.string())),
}


def table_of(texts: list[str | None], kinds: list[str]) -> tuple[pa.Table, pa.Schema]:
    columns, fields = {}, []
    for place, kind in enumerate(kinds):
        came, there = TYPES[kind]
        values: list[Any] = list(texts)
        if kind == "bytes":
            values = [None if text is None else text.encode() for text in texts]
        elif kind == "none":
            values = [None] * len(texts)
        elif kind == "lists":
            values = [None if text is None else [text] for text in texts]
        columns[f"{kind}{place}"] = (
            pa.array(values, pa.string()).cast(came) if kind == "names" else pa.array(values, came)
        )
        fields.append(pa.field(f"{kind}{place}", there))
    numbers = pa.array(range(len(texts)), pa.int8())
    return pa.table({"id": numbers, **columns}), pa.schema([pa.field("id", pa.decimal128(30, 2)), *fields])


@given(TEXTS, st.lists(st.sampled_from(sorted(TYPES)), max_size=4))
def test_what_is_seen_at_a_glance_is_never_too_little(texts: list[str | None], kinds: list[str]) -> None:
    table, schema = table_of(texts, kinds)
    exact = working_bytes(table, schema)
    assert not is_within(table, row_bytes(schema), exact - 1)


def test_small_rows_of_plain_types_are_seen_at_a_glance() -> None:
    table, schema = table_of(["a"] * 100, ["text", "bytes"])
    assert is_within(table, row_bytes(schema), 64 * 1024)


def test_a_few_bytes_that_stand_for_many_are_looked_at() -> None:
    table, schema = table_of(["a" * 1_000], ["names"])
    many = pa.table(
        {"id": table["id"].take(pa.array([0] * 10_000)), "names0": table["names0"].take(pa.array([0] * 10_000))}
    )
    assert not is_within(many, row_bytes(schema), 256 * 1024)
