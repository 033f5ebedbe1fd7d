"""How much a file takes once it is decoded is known before, and never told as less; a hostile one ends no process."""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest

from blob.memory_blobs import MemoryBlob
from persist.core.batch import Part
from persist.core.blob_keys import part_key
from persist.core.errors import Corruption, InvalidUsage
from persist.core.ids import PartId, WriterId, shard_id_of
from persist.core.record import replace
from persist.parts import DIFF, TIME, ShardSchema, codec
from persist.parts.codec import encode_parquet
from persist.parts.part_files import DecodeLimit, PartFile, PartFiles
from persist.parts.part_validation import PartCheck
from tests.support.examples import thinned

KEY = part_key(shard_id_of("orders"), WriterId("w" + "1" * 32), PartId(f"p{1:032x}"))
MANY = thinned([range(at, at + 120) for at in range(0, 600, 120)], 5)  # seeds
FEW = thinned([range(at, at + 50) for at in range(0, 150, 50)], 3)
ENOUGH = 128 << 20
BOUND = bytes(range(1, 9))


def part_of(kind: pa.DataType, values: list[Any] | pa.Array) -> tuple[ShardSchema, Part, bytes]:
    schema = ShardSchema(pa.schema([pa.field("id", pa.int64()), pa.field("v", kind)]), ("id",))
    count = len(values)
    column = values if isinstance(values, pa.Array) else pa.array(values, kind)
    columns = {"id": range(count), "v": column, TIME: [0] * count, DIFF: [1] * count}
    rows = pa.table({name: columns[name] for name in schema.updates_schema.names}, schema=schema.updates_schema)
    part, data = encode_parquet(rows, schema, 1, PartId(f"p{1:032x}"), KEY)
    return schema, part, data


def opened(schema: ShardSchema, part: Part, data: bytes, most: int) -> PartFile:
    blob = MemoryBlob()
    blob.put(KEY, data)
    return PartFiles(blob, {1: schema}, bound=DecodeLimit(most, 2 * most), are_foreign=True).open(part)


def _by_name() -> pa.Array:
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 2_000, pa.int8()), pa.array(["x" * 20_000]))
    return texts.cast(pa.string())


BOMBS: dict[str, tuple[pa.DataType, Callable[[], Any]]] = {
    "a text that all rows name": (pa.string(), _by_name),
    "texts that zstd makes small": (pa.string(), lambda: ["x" * 200_000 + str(n) for n in range(200)]),
    "nulls within lists": (pa.list_(pa.int64()), lambda: [[None] * 3_000_000]),
    "null lists of a fixed size": (pa.list_(pa.float32(), 4_000), lambda: [None] * 3_000),
}


@pytest.mark.parametrize("name", BOMBS)
def test_few_bytes_that_become_many_are_refused_before_they_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """3,632 bytes of a staged part took 2 GiB when they were committed, and 3 at each snapshot."""
    monkeypatch.setattr(codec, "ROW_GROUP_BYTES", 1 << 40)  # as a hostile writer does
    kind, values = BOMBS[name]
    schema, part, data = part_of(kind, values())
    assert len(data) < 1 << 18
    for act in (lambda file: file.read([0], ["v"]), lambda file: list(file.batches([0], ["v"], 10))):
        with pytest.raises(InvalidUsage, match="may take more than 8388608 bytes decoded"):
            act(opened(schema, part, data, 8 << 20))
    assert len(opened(schema, part, data, ENOUGH).read([0], ["id"])) == part.rows, "other columns are read"


@pytest.mark.parametrize("seeds", MANY, ids=str)
def test_a_hostile_part_ends_no_process_and_is_read_where_it_was_taken(seeds: range) -> None:
    """Of some footers pyarrow ends the process when it is asked for what they say of a column."""
    schema, part, data = part_of(pa.string(), [f"text {number % 7}" for number in range(200)])
    check, taken = PartCheck(schema, DecodeLimit(ENOUGH, ENOUGH)), 0
    body, tail = data[: -part.footer_size], data[-part.footer_size :]
    for seed in seeds:
        chance = random.Random(seed)
        changed = bytearray(tail)
        for _ in range(chance.choice([1, 1, 2, 8])):
            at = chance.randrange(len(changed))
            changed[at] = chance.choice([0, 255, changed[at] ^ (1 << chance.randrange(8)), chance.randrange(256)])
        whole = body + bytes(changed)
        evil = replace(part, checksum=zlib.crc32(whole), footer_checksum=zlib.crc32(changed))
        blob = MemoryBlob()
        blob.put(KEY, whole)
        try:
            check.blob(evil, blob)
        except InvalidUsage:
            continue
        taken += 1
        file = PartFiles(blob, {1: schema}, keeps=lambda statistics: bool(statistics) or True).open(evil)
        assert len(file.read(range(len(file.groups)), ["id", "v"])) == part.rows
        assert all(file._statistics(group) is not None for group in range(len(file.groups)))
    assert taken


@pytest.mark.parametrize("seeds", MANY, ids=str)
def test_pages_that_cannot_be_read_are_an_error_of_the_tree(seeds: range) -> None:
    schema, part, data = part_of(pa.string(), [f"text {number % 7}" for number in range(2_000)])
    for seed in seeds:
        chance = random.Random(seed)
        changed = bytearray(data)
        for _ in range(chance.choice([1, 2, 8])):
            at = chance.randrange(len(data) - part.footer_size)
            changed[at] = chance.randrange(256)
        file = opened(schema, part, data, ENOUGH)
        file._whole = bytes(changed)
        with suppress(Corruption, InvalidUsage):
            file.read([0], ["v"])


def _with_footer(part: Part, data: bytes, changed: Callable[[bytes], bytes]) -> tuple[Part, bytes]:
    """The part with another Parquet footer."""
    length = int.from_bytes(data[-8:-4], "little")
    footer = changed(data[-8 - length : -8])
    whole = data[: -8 - length] + footer + len(footer).to_bytes(4, "little") + data[-4:]
    size = part.footer_size + len(footer) - length
    sums = {"checksum": zlib.crc32(whole), "footer_checksum": zlib.crc32(whole[-size:])}
    return replace(part, size=len(whole), footer_size=size, **sums), whole


@pytest.mark.parametrize("bound", [b"\x18\x04" + BOUND[:4], b"\x18\x00"], ids=["short", "empty"])
def test_a_statistic_that_is_too_short_is_refused(bound: bytes) -> None:
    """Arrow reads on where it ends."""
    schema, part, data = part_of(pa.int64(), [int.from_bytes(BOUND, "little")] * 5)
    evil, whole = _with_footer(part, data, lambda footer: footer.replace(b"\x18\x08" + BOUND, bound))
    assert whole != data
    blob = MemoryBlob()
    blob.put(KEY, whole)
    with pytest.raises(InvalidUsage, match="a bound of column v that is not of type INT64"):
        PartCheck(schema, DecodeLimit(ENOUGH, ENOUGH)).blob(evil, blob)
    same, whole = _with_footer(part, data, lambda footer: footer)
    assert (same, whole) == (part, data)


@pytest.mark.parametrize("count", [200, 300_000], ids=["small", "large"])
def test_rows_that_take_far_more_than_the_index_tells_are_refused(count: int) -> None:
    """By what it tells readers plan how many row groups they read together."""
    given = random.Random(1)
    schema, part, data = part_of(pa.int64(), [given.getrandbits(60) for _ in range(count)])
    start = len(data) - part.footer_size
    length = int.from_bytes(data[start + 8 : start + 12], "little")
    index = re.sub(rb'"nbytes":\d+', b'"nbytes":1', data[start + 12 : start + 12 + length])
    tail = data[start : start + 8] + len(index).to_bytes(4, "little") + index + data[start + 12 + length :]
    whole = data[:start] + tail
    evil = replace(
        part, size=len(whole), footer_size=len(tail), checksum=zlib.crc32(whole), footer_checksum=zlib.crc32(tail)
    )
    blob = MemoryBlob()
    blob.put(KEY, whole)
    bound = DecodeLimit(ENOUGH, ENOUGH)
    check, file = PartCheck(schema, bound), PartFiles(blob, {1: schema}, bound=bound).open(evil)
    if count < 1_000:  # within what nobody minds
        check.blob(evil, blob)
        assert len(file.read([0], ["v"])) == count
    else:
        with pytest.raises(InvalidUsage, match="may take more than"):
            file.read(range(len(file.groups)), ["id", "v"])


PAIR = pa.list_(pa.int16(), 2)
FIXED: dict[str, tuple[pa.DataType, list[Any]]] = {
    "pairs": (PAIR, [[1, 2], None, [3, 4], [None, 7]]),
    "of what is never null": (pa.list_(pa.field("item", pa.float32(), False), 3), [[1, 2, 3]]),
    "within lists": (pa.list_(PAIR), [[[1, 2], [3, 4]], [], None, [None, [5, 6]]]),
    "within each other": (pa.list_(PAIR, 2), [[[1, 2], [3, 4]], None, [None, [5, 6]]]),
    "within structs": (pa.struct([("x", PAIR), ("y", pa.int8())]), [{"x": [1, 2], "y": 1}, None, {"x": None}]),
    "of structs": (pa.list_(pa.struct([("x", pa.int8()), ("y", pa.string())]), 2), [[{"x": 1, "y": "a"}, None], None]),
    "in maps": (pa.map_(pa.string(), PAIR), [[("a", [1, 2]), ("b", None)], [], None]),
}


@pytest.mark.parametrize("seeds", FEW, ids=str)
@pytest.mark.parametrize("name", FIXED)
def test_lists_of_a_fixed_size_that_have_another_end_no_process(name: str, seeds: range) -> None:
    """Arrow ended it where the levels told of a null list that goes on; by the commit, or by each snapshot."""
    kind, values = FIXED[name]
    schema, part, data = part_of(kind, [values[number % len(values)] for number in range(60)])
    check, blob = PartCheck(schema, DecodeLimit(ENOUGH, ENOUGH)), MemoryBlob()
    blob.put(KEY, data)
    check.blob(part, blob)
    start = len(data) - part.footer_size
    length = int.from_bytes(data[start + 8 : start + 12], "little")
    index, refused = json.loads(data[start + 12 : start + 12 + length]), 0
    chunks = index["row_groups"][0]["chunks"]
    for seed in seeds:
        chance = random.Random(seed)
        body = bytearray(data[:start])
        first, size, _ = chunks[chance.randrange(1, len(chunks) - 2)]
        for _ in range(chance.choice([1, 1, 2, 3])):
            at = first + chance.randrange(size)
            body[at] = chance.choice([body[at] ^ (1 << chance.randrange(8)), chance.randrange(256)])
        for chunk in chunks:
            chunk[2] = zlib.crc32(body[chunk[0] : chunk[0] + chunk[1]])
        text = json.dumps(index, separators=(",", ":")).encode()
        tail = data[start : start + 8] + len(text).to_bytes(4, "little") + text + data[start + 12 + length :]
        whole = bytes(body) + tail
        sums = {"checksum": zlib.crc32(whole), "footer_checksum": zlib.crc32(tail)}
        evil, blob = replace(part, size=len(whole), footer_size=len(tail), **sums), MemoryBlob()
        blob.put(KEY, whole)
        try:
            check.blob(evil, blob)
        except InvalidUsage:
            refused += 1
    assert refused
