"""Answers of servers: bytes in, an answer or one error out, however the bytes are cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.http_client import http_connection
from persist.http_client.http_connection import Answer, Broken, Reply

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


def read(data: bytes, cuts: Sequence[int] = (), is_head: bool = False) -> tuple[int, dict[str, str], bytes, bool]:
    """Status, headers, body, and whether the connection may be used again. Then the connection ends."""
    answer, body, start = Answer(is_head), b"", 0
    for end in [*sorted(cuts), len(data)]:
        if end > start:
            answer.feed(data[start:end])
            body += answer.take()
            start = end
    if not answer.is_whole:
        answer.feed(b"")
    assert answer.reply is not None
    return answer.reply.status, answer.reply.headers, body, answer.keeps_alive


@pytest.mark.parametrize(("data", "status", "body", "again"), [
    (OK + b"content-length: 5\r\n\r\nhello", 200, b"hello", True),
    (OK + b"Content-Length:5\r\nConnection: close\r\n\r\nhello", 200, b"hello", False),
    (b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello", 200, b"hello", False),
    (OK + b"content-length: 0\r\n\r\n", 200, b"", True),
    (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
    (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n", 304, b"", True),
    (b"HTTP/1.1 503 \r\ncontent-length: 2\r\n\r\nno", 503, b"no", True),
    (CHUNKED + b"5\r\nhello\r\n1;a=b\r\n!\r\n0\r\n\r\n", 200, b"hello!", True),
    (CHUNKED + b"0\r\nx-trailer: is left out\r\n\r\n", 200, b"", True),
    (b"HTTP/1.1 100 Continue\r\n\r\n" * 3 + OK + b"content-length: 1\r\n\r\nx", 200, b"x", True),
    (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK + b"content-length: 1\r\n\r\nx", 200, b"x", True),
])  # fmt: skip
def test_what_an_answer_says(data: bytes, status: int, body: bytes, again: bool) -> None:
    found = read(data)
    assert (found[0], found[2], found[3]) == (status, body, again)
    assert read(data, range(len(data))) == found, "byte by byte"


def test_header_names_are_lower_case_and_repeated_ones_are_joined() -> None:
    data = OK + b"X-Name:  a b \r\nx-name: c\r\ncontent-length: 0\r\n\r\n"
    assert read(data)[1] == {"x-name": "a b, c", "content-length": "0"}


def test_headers_of_interim_answers_are_not_those_of_the_answer() -> None:
    data = b"HTTP/1.1 103 Early Hints\r\ncontent-length: 3\r\n\r\n" + OK + b"content-length: 1\r\n\r\nx"
    assert read(data)[1] == {"content-length": "1"}


@pytest.mark.parametrize("length", ["content-length: 5", "transfer-encoding: chunked", "content-length: 0", "x: y"])
def test_an_answer_to_head_has_no_body_whatever_its_length_says(length: str) -> None:
    data = OK + f"{length}\r\n\r\n".encode()
    assert read(data, is_head=True)[2] == b""
    with pytest.raises(Broken):
        read(data + b"hello", is_head=True)


def test_line_breaks_after_the_end_are_let_pass() -> None:
    data = OK + b"content-length: 5\r\n\r\nhello\r\n"
    assert read(data) == read(data, [45, 49]) == read(data, range(len(data)))


def test_a_connection_is_not_used_again_where_the_end_of_the_answer_is_not_sure() -> None:
    assert not read(OK + b"transfer-encoding: chunked\r\n\r\n", is_head=True)[3]


MALFORMED = {
    "a length that is no number": OK + b"content-length: abc\r\n\r\nhello",
    "a negative length": OK + b"content-length: -1\r\n\r\nhello",
    "a length with a sign": OK + b"content-length: +5\r\n\r\nhello",
    "a length beyond all bounds": OK + b"content-length: 99999999999999999999999\r\n\r\nhello",
    "a list of lengths": OK + b"content-length: 5, 5\r\n\r\nhello",
    "two lengths that contradict each other": OK + b"content-length: 2\r\ncontent-length: 5\r\n\r\nhello",
    "a length and chunks": OK + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "no length": OK + b"\r\nhello",
    "an encoding that nobody asked for": OK + b"transfer-encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "chunked, but not at the end": OK + b"transfer-encoding: chunked, gzip\r\n\r\nhello",
    "a chunk size that is no number": CHUNKED + b"zz\r\nhello\r\n0\r\n\r\n",
    "a negative chunk size": CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n",
    "a chunk size beyond all bounds": CHUNKED + b"fffffffffffffffff\r\nhello\r\n0\r\n\r\n",
    "a chunk longer than it says": CHUNKED + b"5\r\nhello!\r\n0\r\n\r\n",
    "too many interim answers": b"HTTP/1.1 100 Continue\r\n\r\n" * 1_500 + OK + b"content-length: 5\r\n\r\nhello",
    "another protocol": b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    "another protocol, unnamed": b"HTTP/1.1 101 Switching\r\n\r\n",
    "HTTP/2": b"HTTP/2.0 200 OK\r\ncontent-length: 5\r\n\r\nhello",
    "a request": b"GET / HTTP/1.1\r\n\r\n",
    "another protocol's banner": b"SSH-2.0-OpenSSH_9.7\r\n",
    "a status of two digits": b"HTTP/1.1 20 OK\r\ncontent-length: 5\r\n\r\nhello",
    "a status that there is not": b"HTTP/1.1 999 OK\r\ncontent-length: 5\r\n\r\nhello",
    "a header that does not end": OK + b"x: " + b"y" * 100_000,
    "a header that is too long": OK + b"x: y\r\n" * 20_000 + b"content-length: 5\r\n\r\nhello",
    "a trailer that does not end": CHUNKED + b"0\r\nx: " + b"y" * 300_000,
    "a trailer that is too long": CHUNKED + b"5\r\nhello\r\n0\r\nx: " + b"y" * 70_000 + b"\r\n\r\n",
    "an extension of a chunk that is too long": CHUNKED + b"5;x=" + b"y" * 70_000 + b"\r\nhello\r\n0\r\n\r\n",
    "a header with a zero byte": OK + b"x: a\0b\r\ncontent-length: 5\r\n\r\nhello",
    "a folded header": OK + b"content-length: 5\r\n folded\r\n\r\nhello",
    "an answer after its end": (OK + b"content-length: 5\r\n\r\nhello") * 2,
    "bytes after its end": OK + b"content-length: 5\r\n\r\nhello!",
    "bytes after its end and a close": OK + b"connection: close\r\ncontent-length: 5\r\n\r\nhello!",
    "bytes after its last chunk": CHUNKED + b"0\r\n\r\n!",
    "nothing": b"",
}
_FEW_CUTS = st.lists(st.integers(0, 200), max_size=3)


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_answer_is_one_error_in_one_sentence(name: str) -> None:
    with pytest.raises(Broken) as caught:
        read(MALFORMED[name])
    assert str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.sampled_from(sorted(MALFORMED)), _FEW_CUTS)
def test_a_malformed_answer_is_that_error_wherever_it_is_cut(name: str, cuts: list[int]) -> None:
    with pytest.raises(Broken):
        read(MALFORMED[name], cuts)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_cut_answer_is_never_taken_for_whole(is_chunked: bool) -> None:
    whole = CHUNKED + b"5\r\nhello\r\n0\r\n\r\n" if is_chunked else OK + b"content-length: 5\r\n\r\nhello"
    for size in range(len(whole)):
        with pytest.raises(Broken, match="closed the connection"):
            read(whole[:size])


def test_the_longest_header_is_read_and_one_byte_more_is_refused() -> None:
    end = b"\r\ncontent-length: 0\r\n\r\n"
    room = http_connection.HEADER_BYTES_MAX - len(OK) - len(b"x: ") - len(end)
    assert read(OK + b"x: " + b"y" * room + end)[0] == 200
    for cuts in ([], [1], [100, 40_000]):
        with pytest.raises(Broken, match="longer than"):
            read(OK + b"x: " + b"y" * (room + 1) + end, cuts)


def test_the_most_interim_answers_are_skipped_and_one_more_is_refused() -> None:
    interim, whole = b"HTTP/1.1 100 Continue\r\n\r\n", OK + b"content-length: 0\r\n\r\n"
    assert read(interim * http_connection.INTERIM_MAX + whole)[0] == 200
    with pytest.raises(Broken, match="100"):
        read(interim * (http_connection.INTERIM_MAX + 1) + whole)


def test_a_body_is_given_as_it_comes_and_need_not_fit_a_header() -> None:
    answer = Answer()
    answer.feed(OK + b"content-length: 1000000\r\n\r\n")
    assert isinstance(answer.reply, Reply)
    for _ in range(10):
        assert not answer.is_whole
        answer.feed(b"x" * 100_000)
        assert answer.take() == b"x" * 100_000
    assert answer.is_whole
    with pytest.raises(Broken):
        answer.feed(b"y")


_HEADERS = st.dictionaries(st.sampled_from(["x-a", "x-b", "etag"]), st.text('ab \t;"é', max_size=20), max_size=3)


@st.composite
def whole_answers(draw: st.DrawFn) -> tuple[bytes, int, bytes]:
    """The bytes of an answer, its status and its body."""
    status = draw(st.sampled_from([200, 201, 206, 400, 409, 429, 500, 504, 599]))
    headers = "".join(f"{name}: {value}\r\n" for name, value in draw(_HEADERS).items()).encode("latin-1")
    pieces = draw(st.lists(st.binary(min_size=1, max_size=50), max_size=4))
    body = b"".join(pieces)
    head = f"HTTP/1.1 {status} Said\r\n".encode() + headers
    if draw(st.booleans()):
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        sent = head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    else:
        sent = head + b"content-length: %d\r\n\r\n" % len(body) + body
    return b"HTTP/1.1 100 Continue\r\n\r\n" * draw(st.integers(0, 2)) + sent, status, body


@given(whole_answers(), st.lists(st.integers(0, 400), max_size=8))
def test_an_answer_is_the_same_wherever_it_is_cut(answer: tuple[bytes, int, bytes], cuts: list[int]) -> None:
    sent, status, body = answer
    found = read(sent, [cut for cut in cuts if cut < len(sent)])
    assert (found[0], found[2], found[3]) == (status, body, True)


@given(whole_answers(), st.integers(0, 400), st.binary(max_size=4), st.integers(0, 4))
def test_a_spoilt_answer_is_read_or_refused_and_nothing_else(
    answer: tuple[bytes, int, bytes], place: int, put_in: bytes, taken_out: int
) -> None:
    sent = answer[0]
    spoilt = sent[:place] + put_in + sent[place + taken_out :]
    outcomes = []
    for cuts in ([], [place], [len(spoilt) // 2], range(len(spoilt))):
        try:
            outcomes.append(read(spoilt, [cut for cut in cuts if cut < len(spoilt)]))
        except Broken:
            outcomes.append((0, {}, b"", False))
    assert all(outcome == outcomes[0] for outcome in outcomes)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    with pytest.raises(Broken):
        read(data)
