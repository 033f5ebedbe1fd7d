"""Who sends no request, half of one, or far too much of one."""

from __future__ import annotations

import signal
import time

import pytest

from tests.attacks.harness import LOW, Evil, House, answered, is_ended, pushed, statuses

LONG = b"a" * (256 * 1024)
TIMES = 100  # 25 MB: far more than any of the limits
ROUNDS_MAX = 20


def refusal(evil: Evil, begin: bytes, more: bytes) -> tuple[int, str]:
    opened = evil.connect()
    opened.sendall(begin)
    pushed(opened, more, TIMES)
    status, told = answered(opened)
    return status, told.get("kind", "")


def test_one_long_url(house: House) -> None:
    """It was appended to itself, byte by byte: 60 MB kept the event loop from everybody for 27 seconds."""

    def attack(_: House, evil: Evil) -> None:
        assert refusal(evil, b"GET /", LONG) == (414, "invalid_usage")
        assert refusal(evil, b"GET /?where=" + LONG + b" HTTP/1.1\r\n", b"") == (414, "invalid_usage")

    house.withstands(attack)


MANY = b"".join(b"x-%d: y\r\n" % n for n in range(20_000))
LARGE = b"".join(b"x-%d: %s\r\n" % (n, b"y" * 4_000) for n in range(60))


def test_endless_headers(house: House) -> None:
    """400 MB of them were taken, and kept: many, large ones, or one without an end."""

    def attack(_: House, evil: Evil) -> None:
        for more in (MANY, LARGE, LONG):
            assert refusal(evil, b"GET /healthz HTTP/1.1\r\nhost: a\r\nx: ", more) == (431, "invalid_usage")

    house.withstands(attack)


@pytest.mark.smoke
@pytest.mark.proof
def test_endless_trailers(house: House) -> None:
    def attack(_: House, evil: Evil) -> None:
        path = f"/v1/shards/{evil.shard}/insert"
        begin = evil.head("POST", path, "transfer-encoding: chunked") + b"1\r\nx\r\n0\r\nx: "
        for more in (MANY, LONG):
            assert refusal(evil, begin, more) == (431, "invalid_usage")

    house.withstands(attack)


def test_half_requests(house: House) -> None:
    """Each was waited for, for ever."""

    def attack(_: House, evil: Evil) -> None:
        opened = [evil.connect() for _ in range(100)]
        for one in opened:
            one.sendall(b"GET /healthz HTTP/1.1\r\nhost: a\r\n"[: 10 + opened.index(one) % 30])
        house.others_work()
        for one in opened:
            status, told = answered(one)
            assert (status, told["kind"]) == (408, "unavailable")
            assert "headers took longer than 1 s" in told["detail"]

    house.withstands(attack)


@pytest.mark.smoke
@pytest.mark.proof
def test_many_large_halves_of_requests(house: House) -> None:
    """None of them is too long by itself."""

    def attack(_: House, evil: Evil) -> None:
        opened = [evil.connect() for _ in range(80)]
        for one in opened:
            one.sendall(b"GET /healthz HTTP/1.1\r\nx: " + b"a" * 60_000)
        house.others_work()
        found = statuses(opened)
        assert set(found) == {408, 429}

    house.withstands(attack)


def test_many_connections_of_one_address(house: House) -> None:
    def attack(_: House, evil: Evil) -> None:
        opened = [evil.connect() for _ in range(130)]
        for one in opened:
            one.sendall(evil.head("GET", "/healthz", token=None))
        found = statuses(opened)
        assert (found.count(200), found.count(429)) == (120, 10)
        told = evil.connect()
        told.sendall(evil.head("GET", "/healthz", token=None))
        status, problem = answered(told)
        assert (status, problem["kind"]) == (429, "overloaded")
        assert "the address 127.0.0.2 has 120 connections" in problem["detail"]

    house.withstands(attack)


def test_many_connections_of_one_token(house: House) -> None:
    def attack(_: House, evil: Evil) -> None:
        opened = [evil.connect(f"127.0.0.{3 + n % 2}") for n in range(120)]
        for one in opened:
            one.sendall(evil.head("GET", f"/v1/shards/{evil.shard}"))
        found = statuses(opened)
        assert (found.count(200), found.count(429)) == (110, 10)

    house.withstands(attack)


def test_idle_connections_beyond_the_limit(house: House) -> None:
    """Whoever has been quiet makes room. Before, new clients were reset for as long as these stayed."""

    def attack(_: House, evil: Evil) -> None:
        for number in range(240):
            evil.connect(f"127.0.0.{2 + number % 4}")
        for number in range(ROUNDS_MAX):  # the other tenant may have had a connection more, whose place it keeps
            evil.connect(f"127.0.0.{6 + number % 4}")
            house.others_work()
            if cut(house, "quiet"):
                return
        raise AssertionError("there was room without them")

    house.withstands(attack, refusals=True)


@pytest.mark.smoke
@pytest.mark.proof
def test_far_more_connections_than_the_server_can_tell_so(house: House) -> None:
    def attack(_: House, evil: Evil) -> None:
        opened = [evil.connect() for _ in range(120 + 256 + 20)]
        assert all(map(is_ended, opened[-20:]))

    house.withstands(attack)


def test_thousands_of_requests_on_one_connection(house: House) -> None:
    """Each would be kept with all that belongs to it, while the first one is answered."""

    def attack(_: House, evil: Evil) -> None:
        opened = evil.connect()
        pushed(opened, evil.head("GET", "/openapi.json", token=None) * 3_000)
        assert is_ended(opened)

    house.withstands(attack)


@pytest.mark.smoke
@pytest.mark.proof
def test_answers_that_nobody_takes(house: House) -> None:
    def attack(_: House, evil: Evil) -> None:
        opened = [evil.connect(receives=4096) for _ in range(20)]
        for one in opened:
            one.sendall(evil.head("GET", "/openapi.json", token=None) * 60)
        house.others_work()
        while cut(house, "answer") == 0:  # within a bound of the harness: others go on
            house.others_work()

    house.withstands(attack)


@pytest.mark.smoke
@pytest.mark.proof
def test_a_server_that_was_stopped_does_not_take_it_out_on_its_clients(house: House) -> None:
    """The time for which it stood still counted against them: a stream was cut off, and an answer never came."""

    def attack(_: House, __: Evil) -> None:
        for _number in range(3):
            house.server.process.send_signal(signal.SIGSTOP)
            time.sleep(LOW["slow_reader_s"] + 0.2)
            house.server.process.send_signal(signal.SIGCONT)
            house.others_work()

    house.withstands(attack)


def cut(house: House, why: str) -> int:
    """How many connections the server has cut off for that reason."""
    status, text = house.ask("admin", "GET", "/metrics")
    if status == 503:  # there is no room for one more connection
        return 0
    lines = [
        line for line in text.decode().splitlines() if line.startswith(f'persist_connections_cut_total{{why="{why}"')
    ]
    return sum(int(float(line.split()[-1])) for line in lines)


@pytest.mark.parametrize("path", ["/v1/shards%2Ft", "/v1/%73hards/t", "/v1%2Fshards%2Ft/insert", "/v1/shards%2F"])
def test_a_path_that_is_a_shards_only_once_it_is_decoded(house: House, path: str) -> None:
    """It was 500."""
    assert house.ask("admin", "GET", path)[0] == 404


def test_what_is_no_request_is_told_so(house: House) -> None:
    tls = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"

    def attack(_: House, evil: Evil) -> None:
        for sent in (tls, b"GET / HTTP/9.9\r\n\r\n", b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n", b"\0" * 100):
            opened = evil.connect()
            opened.sendall(sent)
            status, told = answered(opened)
            assert (status, told["kind"]) == (400, "invalid_usage")

    house.withstands(attack)
