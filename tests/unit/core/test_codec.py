"""State diffs lead from one State to the next, and both survive their durable bytes; damaged bytes never do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.core.antichain import Antichain
from persist.core.batch import Description, batch_of
from persist.core.errors import Corruption
from persist.core.ids import SeqNo
from persist.core.record import replace
from persist.core.state import State
from persist.core.state_diff import StateDiff, apply, diff
from persist.formats.state_frames import decode_diff, decode_state, encode_diff, encode_state
from tests.support.shard import NAME, SCHEMA, Shard, make_part, make_run
from tests.unit.core.strategies import states, successors

Decode = Callable[[bytes], object]
pairs = states().flatmap(lambda old: st.tuples(st.just(old), successors(old)))


@given(pairs)
def test_a_state_diff_leads_from_one_state_to_the_next(pair: tuple[State, State]) -> None:
    old, new = pair
    change = diff(old, new, "commit")
    assert apply(change, old) == new
    assert set(change.gone) == set(old.blob_keys()) - set(new.blob_keys())


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


@given(st.binary(max_size=64))
def test_noise_is_neither(noise: bytes) -> None:
    with pytest.raises(Corruption):
        decode_diff(noise)
    with pytest.raises(Corruption):
        decode_state(noise)


def test_one_is_not_taken_for_the_other() -> None:
    with pytest.raises(Corruption, match="no rollup"):
        decode_state(DIFF_BYTES)
    with pytest.raises(Corruption, match="no state diff"):
        decode_diff(STATE_BYTES)
    assert decode_state(STATE_BYTES).name == NAME
