"""Any byte string gives a value or a clear error: never a hang, a crash, a stray exception or a wrong row."""

from __future__ import annotations

import itertools
import json
import struct
import zlib
from dataclasses import replace

import pyarrow as pa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blob.memory import MemoryBlob
from persist.core.batch import Part, Run
from persist.core.commands import Insert
from persist.core.errors import Corruption, PersistError
from persist.core.ids import PartId, ShardId, Token, WriterId
from persist.core.state import initial_state
from persist.core.state_diff import diff
from persist.formats.http_messages import command_from_frame, command_from_json, command_to_frame
from persist.formats.state_frames import decode_diff, decode_state, encode_diff, encode_state
from persist.parts import PartReader, ShardSchema, decode_inline, encode_inline, encode_parquet, stage
from tests.conftest import SeededIds

SCHEMA = ShardSchema(pa.schema([pa.field("k", pa.string()), pa.field("v", pa.int64())]), ("k",))
ROWS = pa.table(
    {"k": ["a", "b", None, "ccc"], "v": [1, None, 3, 4], "__time": [0, 1, 1, 2], "__diff": [1, 1, -1, 2]},
    schema=SCHEMA.updates_schema,
)
PART_ID = PartId("p" + "0" * 32)
KEY = f"s{'0' * 32}/w{'0' * 32}/{PART_ID}.parquet"
EXAMPLES = 300

state = initial_state("orders", SCHEMA.to_record(), 1)
later = replace(state, seqno=state.seqno.next(), walltime_ms=2)
ROLLUP = encode_state(state)
DIFF = encode_diff(diff(state, later, "0" * 32))
INLINE = encode_inline(ROWS, SCHEMA, 1, PART_ID)
PARQUET, FILE = encode_parquet(ROWS.sort_by([("k", "ascending")]), SCHEMA, 1, PART_ID, KEY)


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Bytes that began as `whole`: cut, grown, overwritten, or with pieces swapped; never `whole` itself."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(("flip", "cut", "grow", "write")))
        if kind == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[at : at + draw(st.integers(1, 64))]
        elif kind == "grow":
            data[at:at] = draw(st.binary(min_size=1, max_size=16))
        else:
            piece = draw(st.binary(min_size=1, max_size=16))
            data[at : at + len(piece)] = piece
    return bytes(data)


def framed(kind: bytes, head: bytes, payload: bytes) -> bytes:
    """A frame whose checksum is right, whatever is in it."""
    checksum = zlib.crc32(head + payload, zlib.crc32(kind + bytes([1])))
    return struct.pack("<4scBIII", b"PSST", kind, 1, len(head), len(payload), checksum) + head + payload


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=EXAMPLES)
@given(st.binary(max_size=200) | damaged(DIFF) | damaged(ROLLUP))
def test_frames(data: bytes) -> None:
    for decode, sound in ((decode_diff, DIFF), (decode_state, ROLLUP)):
        try:
            decode(data)
        except Corruption:
            continue
        assert data == sound


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_frames_that_were_written_by_somebody_else(data: st.DataObject) -> None:
    """The checksum is right and the JSON is not what it should be."""
    for kind, sound, decode in ((b"D", DIFF, decode_diff), (b"R", ROLLUP, decode_state)):
        size = struct.unpack_from("<I", sound, 6)[0]
        head = json.loads(sound[18 : 18 + size])
        name = data.draw(st.sampled_from(sorted(head)))
        head[name] = data.draw(json_values)
        try:
            decode(framed(kind, json.dumps(head).encode(), sound[18 + size :]))
        except Corruption:
            continue


@settings(max_examples=EXAMPLES)
@given(st.binary(max_size=200) | damaged(INLINE.data or b""), st.booleans())
def test_inline_rows(data: bytes, resealed: bool) -> None:
    """Also where somebody has put a right checksum on wrong bytes."""
    part = replace(INLINE, data=data)
    if resealed:
        part = replace(part, size=len(data), checksum=zlib.crc32(data))
    try:
        rows = decode_inline(part, {1: SCHEMA})
    except Corruption:
        return
    assert resealed or data == INLINE.data
    rows.validate(full=True)


def read(part: Part, file: bytes) -> pa.Table:
    blob = MemoryBlob()
    blob.put(KEY, file)
    pieces = list(PartReader(blob, {1: SCHEMA}, SCHEMA).read_range([Run((part,))], since=0))
    return pa.concat_tables(pieces) if pieces else SCHEMA.updates_schema.empty_table()


@settings(max_examples=EXAMPLES)
@given(st.binary(max_size=200) | damaged(FILE))
def test_part_files(file: bytes) -> None:
    try:
        found = read(PARQUET, file)
    except PersistError:
        return
    assert file == FILE or found.equals(read(PARQUET, FILE))


@settings(max_examples=100)
@given(damaged(FILE))
def test_part_files_with_a_checksum_put_right(file: bytes) -> None:
    """What no checksum of the whole tells is left to those of the row groups and pages: still no stray exception."""
    tail = file[max(0, len(file) - PARQUET.footer_size) :]
    part = replace(PARQUET, size=len(file), checksum=zlib.crc32(file), footer_checksum=zlib.crc32(tail))
    try:
        read(part, file).validate(full=True)
    except PersistError:
        return


@settings(max_examples=EXAMPLES)
@given(json_values | st.dictionaries(st.sampled_from(("command", "writer", "token", "runs", "since")), json_values))
@example({"command": {}})
@example({"command": "insert", "runs": [[[[]]]]})
def test_commands_from_the_wire(value: object) -> None:
    try:
        command_from_json(value)
    except PersistError:
        return


INSERT = Insert(WriterId("w" + "0" * 32), Token("i" + "0" * 32), (Run((INLINE,)), Run((PARQUET,))))
FRAME = command_to_frame(INSERT)


def test_a_commands_frame_comes_back() -> None:
    assert command_from_frame(FRAME) == INSERT


@settings(max_examples=EXAMPLES)
@given(st.binary(max_size=200) | damaged(FRAME))
def test_frames_of_commands(data: bytes) -> None:
    try:
        command_from_frame(data)
    except PersistError:
        return


@settings(max_examples=100)
@given(st.lists(st.tuples(st.text(max_size=3), st.integers(-3, 3)), max_size=30))
def test_staged_rows_come_back(rows: list[tuple[str, int]]) -> None:
    blob, ids = MemoryBlob(), SeededIds()
    table = pa.table({"k": [k for k, _ in rows], "v": [v for _, v in rows]}, schema=SCHEMA.arrow)
    for inline in (0, 10_000):
        runs = stage(
            table,
            schema=SCHEMA,
            schema_id=1,
            blob=blob,
            shard_id=ShardId.of("orders"),
            writer=WriterId("w" + "0" * 32),
            ids=ids,
            default_time=0,
            inline_bytes_max=inline,
        )
        pieces = PartReader(blob, {1: SCHEMA}, SCHEMA).read_range(runs, as_of=0)
        counts = {
            (row["k"], row["v"]): row["__diff"]
            for piece in pieces
            for row in piece.select(["k", "v", "__diff"]).to_pylist()
        }
        assert counts == {row: len(list(same)) for row, same in itertools.groupby(sorted(rows))}
