"""Sums of bytes of which some pieces are summed up already."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from persist.parts import codec
from persist.parts.codec import SUMMED_AGAIN_MAX, Checksums, joined


@given(st.binary(), st.binary())
def test_two_sums_become_that_of_both(first: bytes, second: bytes) -> None:
    assert joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@given(st.binary(max_size=60), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=6))
def test_the_sum_of_a_body_is_the_same_whatever_was_asked_for_before(body: bytes, asked: list[tuple[int, int]]) -> None:
    least, codec.SUMMED_AGAIN_MAX = codec.SUMMED_AGAIN_MAX, 0
    try:
        sums = Checksums(memoryview(body))
        for start, size in asked:
            piece = body[start : start + size]
            assert sums.of(start, len(piece)) == zlib.crc32(piece)
        assert sums.whole() == zlib.crc32(body)
    finally:
        codec.SUMMED_AGAIN_MAX = least


def test_a_large_body() -> None:
    body = bytes(range(256)) * (SUMMED_AGAIN_MAX // 64)
    sums = Checksums(memoryview(body))
    sums.of(5, SUMMED_AGAIN_MAX + 1)
    sums.of(2 * SUMMED_AGAIN_MAX, 2 * SUMMED_AGAIN_MAX)
    assert sums.whole() == zlib.crc32(body)
