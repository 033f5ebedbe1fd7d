"""State diffs lead from one State to the next, and both survive their durable bytes; damaged bytes never do."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from consensus import ENDED
from persist.core import commands as c
from persist.core import transitions
from persist.core.batch import Description, batch_of
from persist.core.errors import Corruption, InvalidUsage, PersistError, UpgradeNeeded
from persist.core.frontier import Antichain
from persist.core.ids import SeqNo, critical_reader_id_of
from persist.core.record import replace
from persist.core.state import State
from persist.core.state_diff import StateDiff, apply, diff, in_blob
from persist.formats.http_messages import decode_command, decode_result
from persist.formats.records import encoded
from persist.formats.state_frames import Build, decode_diff, decode_state, encode_diff, encode_state
from tests.support.shard import NAME, SCHEMA, Shard, make_part, make_run
from tests.unit.core.strategies import states, successors

Decode = Callable[[bytes], object]
pairs = states().flatmap(lambda old: st.tuples(st.just(old), successors(old)))


@given(pairs)
def test_a_state_diff_leads_from_one_state_to_the_next(pair: tuple[State, State]) -> None:
    old, new = pair
    change = diff(old, new, "commit")
    assert apply(change, old) == replace(new, commit_id="commit")
    assert set(change.gone) == set(old.blob_keys()) - set(new.blob_keys())


@given(pairs)
def test_a_state_diff_in_a_blob_leads_to_the_state_that_names_the_blob(pair: tuple[State, State]) -> None:
    old, new = pair
    change = in_blob(diff(old, new, "commit"), "key")
    named = replace(new, commit_id="commit", long_diffs={**new.long_diffs, new.seqno: "key"})
    assert apply(change, old) == named
    assert change == diff(old, named, "commit"), "as if it had been planned so"


@given(states())
def test_a_state_diff_of_nothing_is_empty(state: State) -> None:
    change = diff(state, replace(state, seqno=SeqNo(state.seqno + 1)), "commit")
    assert change == StateDiff(change.seqno, change.walltime_ms, "commit", change.rollup_seqno, change.rollup_key)


@given(pairs)
def test_a_state_diff_survives_its_bytes(pair: tuple[State, State]) -> None:
    change = diff(*pair, "commit")
    assert decode_diff(encode_diff(change)) == change


@given(states())
def test_a_state_survives_its_bytes(state: State) -> None:
    copy = decode_state(encode_state(state))
    assert copy == state
    assert encode_state(copy) == encode_state(state)


def test_a_state_diff_that_does_not_follow_is_refused() -> None:
    state = Shard().state
    change = diff(state, replace(state, seqno=SeqNo(2)), "commit")
    with pytest.raises(Corruption, match="does not follow"):
        apply(change, replace(state, seqno=SeqNo(2)))


def _some_bytes() -> tuple[bytes, bytes]:
    old = Shard().state
    batch = batch_of(
        Description(Antichain(0), Antichain(5), Antichain(0)),
        (make_run(make_part(1, inline=5), make_part(2)),),
    )
    new = replace(old, seqno=SeqNo(2), trace=old.trace.push(batch), schemas={1: SCHEMA, 2: SCHEMA})
    return encode_diff(diff(old, new, "commit")), encode_state(new)


DIFF_BYTES, STATE_BYTES = _some_bytes()


@pytest.mark.parametrize(("data", "decode"), [(DIFF_BYTES, decode_diff), (STATE_BYTES, decode_state)])
class TestDamage:
    def test_every_flipped_bit_is_noticed(self, data: bytes, decode: Decode) -> None:
        assert decode(data)
        for at in range(len(data)):
            for bit in range(8):
                damaged = bytearray(data)
                damaged[at] ^= 1 << bit
                with pytest.raises(Corruption):
                    decode(bytes(damaged))

    def test_every_missing_and_extra_byte_is_noticed(self, data: bytes, decode: Decode) -> None:
        for size in range(len(data)):
            with pytest.raises(Corruption):
                decode(data[:size])
        with pytest.raises(Corruption):
            decode(data + b"\0")


def test_one_is_not_taken_for_the_other() -> None:
    with pytest.raises(Corruption, match="no rollup"):
        decode_state(DIFF_BYTES)
    with pytest.raises(Corruption, match="no state diff"):
        decode_diff(STATE_BYTES)
    assert decode_state(STATE_BYTES).name == NAME


# --- what a newer build wrote: refused by name, never dropped, never called damage

HEAD = 10  # bytes before the body of a frame


def reframed(data: bytes, body: bytes | None = None, version: int = 1) -> bytes:
    """The frame with another body or format version, and a checksum that fits."""
    kind, body = data[4:5], data[HEAD:] if body is None else body
    return struct.pack("<4scBI", data[:4], kind, version, zlib.crc32(body, zlib.crc32(kind + bytes([version])))) + body


def longer(value: object) -> Iterator[object]:
    """The value with one field more in one of its records: in each of them, one after the other."""
    if isinstance(value, list):
        yield [*value, None]
        for at, item in enumerate(value):
            yield from ([*value[:at], other, *value[at + 1 :]] for other in longer(item))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from ({**value, key: other} for other in longer(item))


def test_an_entry_after_which_the_shard_is_dropped_begins_otherwise() -> None:
    old = Shard().state
    change = diff(old, replace(old, seqno=SeqNo(2)), "commit")
    assert encode_diff(change, ends=True).startswith(ENDED)
    assert not encode_diff(change).startswith(ENDED)
    assert decode_diff(encode_diff(change, ends=True)) == change


BOTH = pytest.mark.parametrize(("data", "decode"), [(DIFF_BYTES, decode_diff), (STATE_BYTES, decode_state)])


@BOTH
def test_a_field_more_is_refused_in_every_record(data: bytes, decode: Decode) -> None:
    """A list of records may have an item more, and that is none of the kind: then it is damage."""
    told = {UpgradeNeeded: 0, Corruption: 0}
    for body in longer(msgpack.decode(data[HEAD:])):
        with pytest.raises((UpgradeNeeded, Corruption)) as refused:
            decode(reframed(data, msgpack.encode(body)))
        told[refused.type] += 1
    assert told[UpgradeNeeded] > told[Corruption] > 0


@BOTH
@pytest.mark.parametrize("version", [0, 2, 7, 255])
def test_another_format_version_is_refused(data: bytes, decode: Decode, version: int) -> None:
    with pytest.raises(UpgradeNeeded, match=f"has format version {version}; this version reads format version 1:"):
        decode(reframed(data, version=version))
    build = Build(formats=(1, version))
    assert (decode_diff if decode is decode_diff else decode_state)(reframed(data, version=version), build)


def test_a_part_of_another_format_is_refused() -> None:
    fields = msgpack.decode(DIFF_BYTES[HEAD:])
    assert b"parquet" in DIFF_BYTES
    body = msgpack.encode(fields).replace(b"parquet", b"lancedb")
    with pytest.raises(UpgradeNeeded, match="'lancedb'"):
        decode_diff(reframed(DIFF_BYTES, body))


def test_a_feature_that_is_not_known_is_refused() -> None:
    old = Shard().state
    new = replace(old, seqno=SeqNo(2), features=("colours", "sounds"))
    build = Build(features=frozenset({"colours", "sounds"}))
    for data, decode in (
        (encode_diff(diff(old, new, "commit")), decode_diff),
        (encode_state(new), decode_state),
    ):
        with pytest.raises(UpgradeNeeded, match="needs sounds, "):
            decode(data, Build(features=frozenset({"colours"})))
        with pytest.raises(UpgradeNeeded, match="needs colours, sounds"):
            decode(data)
        assert decode(data, build)


ONE_OF_EACH: list[tuple[c.Command | c.Result, Callable[[bytes], object], type[PersistError]]] = [
    (c.Drop(True), decode_command, InvalidUsage),
    (c.Finalise(), decode_command, InvalidUsage),
    (c.Appended(Antichain(1), Antichain(2)), decode_result, Corruption),
    (c.Done(), decode_result, Corruption),
]


@pytest.mark.parametrize(("record", "decode", "bad"), ONE_OF_EACH, ids=lambda value: type(value).__name__)
def test_messages(record: c.Command | c.Result, decode: Decode, bad: type[PersistError]) -> None:
    data = encoded(record)
    assert decode(data) == record
    fields = msgpack.decode(data)
    for newer in ([*fields, 7], ["fly", *fields[1:]]):
        with pytest.raises(UpgradeNeeded, match="newer version"):
            decode(msgpack.encode(newer))
    for wrong in (b"", data[:-1], data + b"\0", b"\xc1", b"\x91" * 100_000, msgpack.encode([1]), b"{}"):
        with pytest.raises(bad):
            decode(wrong)


def test_what_cannot_be_written_is_the_callers_mistake() -> None:
    for command in (
        c.AdvanceUpper(Antichain(2**64)),
        c.RegisterCriticalReader(critical_reader_id_of("job"), "\ud800"),
        c.Drop({1}.pop),
    ):
        with pytest.raises(InvalidUsage, match="cannot be written"):
            encoded(command)  # type: ignore[arg-type]


@pytest.mark.parametrize("base", [c.Command, c.Result])
def test_names_of_messages_are_their_own(base: type) -> None:
    names = [kind.__struct_config__.tag for kind in c.kinds(base)]
    assert len(set(names)) == len(names) > 10


def test_every_command_has_one_transition_and_a_scope() -> None:
    assert set(transitions._TRANSITIONS) == set(c.kinds(c.Command))
    assert {scope for kind in c.kinds(c.Command) for scope in kind.scopes} == set(c.SCOPES)
