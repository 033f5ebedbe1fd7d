"""Any byte string gives a value or a clear error: never a hang, a crash, a stray exception or a wrong row."""

from __future__ import annotations

import struct
import zlib

import pyarrow as pa
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import msgpack

from blob.memory_blobs import MemoryBlob
from persist.core.batch import Part, Run
from persist.core.commands import Insert
from persist.core.errors import Corruption, InvalidUsage, PersistError, UpgradeNeeded
from persist.core.ids import PartId, SeqNo, Token, WriterId
from persist.core.record import replace
from persist.core.state import initial_state
from persist.core.state_diff import diff
from persist.formats.http_messages import decode_command, decode_result, decode_view
from persist.formats.records import encoded
from persist.formats.state_frames import decode_diff, decode_state, encode_diff, encode_state
from persist.parts import PartReader, ShardSchema, decode_inline, encode_inline, encode_parquet
from tests.support.examples import examples

SCHEMA = ShardSchema(pa.schema([pa.field("k", pa.string()), pa.field("v", pa.int64())]), ("k",))
ROWS = pa.table(
    {"k": ["a", "b", None, "ccc"], "v": [1, None, 3, 4], "__time": [0, 1, 1, 2], "__diff": [1, 1, -1, 2]},
    schema=SCHEMA.updates_schema,
)
PART_ID = PartId("p" + "0" * 32)
KEY = f"s{'0' * 32}/w{'0' * 32}/{PART_ID}.parquet"
TIMES = 3  # as many examples as of other laws
HEAD = 10  # bytes before the body of a frame

state = initial_state("orders", SCHEMA.to_record(), 1)
later = replace(state, seqno=SeqNo(state.seqno + 1), walltime_ms=2)
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


def framed(kind: bytes, body: bytes) -> bytes:
    """A frame whose checksum is right, whatever is in it."""
    return struct.pack("<4scBI", b"PSST", kind, 2, zlib.crc32(body, zlib.crc32(kind + bytes([2])))) + body


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@examples(TIMES)
@given(st.binary(max_size=200) | damaged(DIFF) | damaged(ROLLUP))
def test_frames(data: bytes) -> None:
    for decode, sound in ((decode_diff, DIFF), (decode_state, ROLLUP)):
        try:
            decode(data)
        except Corruption:
            continue
        assert data == sound


@examples(TIMES)
@given(st.data())
def test_frames_that_were_written_by_somebody_else(data: st.DataObject) -> None:
    """The checksum is right and the record is not what it should be."""
    for kind, sound, decode in ((b"D", DIFF, decode_diff), (b"R", ROLLUP, decode_state)):
        fields = msgpack.decode(sound[HEAD:])
        fields[data.draw(st.integers(0, len(fields) - 1))] = data.draw(values)
        try:
            decode(framed(kind, msgpack.encode(fields)))
        except (Corruption, UpgradeNeeded):
            continue


@examples(TIMES)
@given(st.binary(max_size=200) | damaged(DIFF[HEAD:]) | damaged(ROLLUP[HEAD:]))
def test_frames_with_a_checksum_put_right(body: bytes) -> None:
    for kind, decode in ((b"D", decode_diff), (b"R", decode_state)):
        try:
            decode(framed(kind, body))
        except (Corruption, UpgradeNeeded):
            continue


@examples(TIMES)
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


@examples(TIMES)
@given(st.binary(max_size=200) | damaged(FILE))
def test_part_files(file: bytes) -> None:
    try:
        found = read(PARQUET, file)
    except PersistError:
        return
    assert file == FILE or found.equals(read(PARQUET, FILE))


@given(damaged(FILE))
@example(FILE.replace(b"a", b"\xe1", 1))
def test_part_files_with_a_checksum_put_right(file: bytes) -> None:
    """Such a file was never committed: its texts may be no UTF-8. Still there is no stray exception, or offset."""
    tail = file[max(0, len(file) - PARQUET.footer_size) :]
    part = replace(PARQUET, size=len(file), checksum=zlib.crc32(file), footer_checksum=zlib.crc32(tail))
    try:
        rows = read(part, file)
    except PersistError:
        return
    for column in rows.columns:
        (column.cast(pa.binary()) if pa.types.is_string(column.type) else column).validate(full=True)


INSERT = Insert(WriterId("w" + "0" * 32), Token("i" + "1" * 32), (Run((INLINE,)), Run((PARQUET,))))
COMMAND = encoded(INSERT)


@examples(TIMES)
@given(st.binary(max_size=200) | damaged(COMMAND) | values.map(msgpack.encode))
@example(b"\x91" * 100_000)
@example(msgpack.encode(["insert", 1, 2, [[[]]]]))
@example(msgpack.encode(["insert", b"\xff"]))
@example(b"\x92\xa6insert\xa1\xff")
def test_commands_from_the_wire(data: bytes) -> None:
    try:
        decode_command(data)
    except (InvalidUsage, UpgradeNeeded):
        return


@examples(TIMES)
@given(st.binary(max_size=200) | values.map(msgpack.encode))
def test_answers_from_the_wire(data: bytes) -> None:
    for decode in (decode_result, decode_view):
        try:
            decode(data)
        except (Corruption, UpgradeNeeded):
            continue
