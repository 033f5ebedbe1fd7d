"""Who sends bodies that do not end, or are larger than it may."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attacks import harness
from tests.attacks.harness import Evil, House, answered, is_ended, pushed, statuses

MIB = 1 << 20
SHORT = b"z" * MIB


def key_of(evil: Evil, number: int) -> str:
    shard = evil.ask("GET", f"/v1/shards/{evil.shard}")[1]["shard_id"]
    return f"/v1/blobs/{shard}/w{'0' * 32}/p{number:032x}.parquet"


@pytest.mark.smoke
@pytest.mark.proof
def test_stalled_bodies(house: House) -> None:
    """They were waited for, for ever."""

    def attack(_: House, evil: Evil) -> None:
        path = f"/v1/shards/{evil.shard}/insert?format=ndjson"
        opened = [evil.connect() for _ in range(40)]
        for one in opened:
            one.sendall(evil.head("POST", path, f"content-length: {2 * MIB}") + b" " * 200_000)
        house.others_work()
        found = statuses(opened)
        assert set(found) == {408, 429}, "some come too slowly, the rest are more than one token may have"

    house.withstands(attack)


def test_a_slow_body_is_told_what_was_wrong(house: House) -> None:
    def attack(_: House, evil: Evil) -> None:
        opened = evil.connect()
        path = f"/v1/shards/{evil.shard}/insert?format=ndjson"
        opened.sendall(evil.head("POST", path, "content-length: 1000") + b"{")
        status, told = answered(opened)
        assert (status, told["kind"]) == (408, "unavailable")
        assert "slower than 8192 bytes a second" in told["detail"]

    house.withstands(attack)


@pytest.mark.smoke
@pytest.mark.proof
def test_stalled_parts(house: House) -> None:
    """Two of 512 MiB filled what there was for all bodies, and stayed."""

    def attack(_: House, evil: Evil) -> None:
        opened = []
        for number in range(6):
            one = evil.connect()
            one.sendall(evil.head("PUT", key_of(evil, number), f"content-length: {8 * MIB}"))
            pushed(one, SHORT, 7)
            opened.append(one)
        house.others_work()
        found = statuses(opened)
        assert set(found) <= {408, 429, 0}, "slow, more than half of spool_bytes_max, or both"
        assert 408 in found
        assert house.pools()["spool_bytes"] == 0

    house.withstands(attack)


def test_bodies_that_a_token_may_not_send_are_not_taken_in(house: House) -> None:
    """A token for reading could have 16 MiB taken in for each command, on shards of others, too."""

    def attack(_: House, evil: Evil) -> None:
        length = f"content-length: {16 * MIB - 1}"
        wanted = [
            (f"/v1/shards/{evil.shard}/commands", "evil-reader", 413),
            (f"/v1/shards/{harness.GOOD_SHARD}/commands", "evil-reader", 403),
            (f"/v1/shards/{harness.GOOD_SHARD}/commands", "evil", 403),
            (f"/v1/shards/{evil.shard}/insert", "evil-reader", 403),
            (f"/v1/shards/{harness.GOOD_SHARD}/insert", "evil", 403),
            (f"/v1/shards/{evil.shard}/insert", "evil", 413),
        ]
        for path, token, status in wanted:
            opened = evil.connect()
            opened.sendall(evil.head("POST", path, length, token=token))
            assert statuses([opened]) == [status], path
        large = evil.connect()
        large.sendall(evil.head("POST", wanted[0][0], "transfer-encoding: chunked", token="evil-reader"))
        pushed(large, b"10000\r\n" + b"z" * 65536 + b"\r\n", 40)
        assert statuses([large]) == [413]
        assert house.pools()["body_bytes"] < 10_000, "of the other tenant"

    house.withstands(attack)


def test_a_body_that_goes_on_after_its_answer(house: House) -> None:
    def attack(_: House, evil: Evil) -> None:
        opened = evil.connect()
        opened.sendall(evil.head("POST", "/nowhere", "transfer-encoding: chunked", token=None))
        assert statuses([opened]) == [401]
        assert is_ended(opened)

    house.withstands(attack)


@pytest.mark.proof
def test_many_large_parts_by_the_limits_that_servers_have(tmp_path: Path) -> None:
    """Memory stays below the bound although each is half as large."""

    def attack(house: House, evil: Evil) -> None:
        opened = []
        for number in range(6):
            one = evil.connect()
            one.sendall(evil.head("PUT", key_of(evil, number), f"content-length: {240 * MIB}"))
            pushed(one, b"z" * (16 * MIB), 15)
            opened.append(one)
        house.others_work()
        assert set(statuses(opened)) == {204}

    with harness.house(tmp_path, {}) as house:
        house.withstands(attack)
