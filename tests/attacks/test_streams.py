"""Who asks for much and takes nothing, or asks for everything at once."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.attacks import harness
from tests.attacks.harness import Evil, House, reset, statuses
from tests.support.waiting import wait_until

SHARE = 4  # half of snapshots_max


def asking(
    evil: Evil, path: str, count: int, *, token: str = "evil", receives: int | None = 4096
) -> list[socket.socket]:
    opened = [evil.connect(receives=receives) for _ in range(count)]
    for one in opened:
        one.sendall(evil.head("GET", path, token=token))
    return opened


@pytest.mark.smoke
@pytest.mark.proof
def test_stalled_snapshots(house: House) -> None:
    """Eight of one token for reading kept all others from theirs, and were never cut off."""

    def attack(_: House, evil: Evil) -> None:
        evil.fill(8 << 20)
        path = f"/v1/shards/{evil.shard}/snapshot?format=csv"
        opened = asking(evil, path, 2 * SHARE, token="evil-reader")
        found = statuses(opened)
        assert (found.count(200), found.count(429)) == (SHARE, SHARE)
        house.others_work()
        while house.pools()["snapshots"] >= SHARE:
            house.others_work()
        again = asking(evil, path, 1, token="evil-reader")
        assert statuses(again) == [200], "it can ask anew"
        told = "the client read the response slower than 8192 bytes/s for 1 s"
        wait_until(lambda: told in house.server.said_so_far(), "the log tells of it")

    house.withstands(attack)


def test_stalled_listeners(house: House) -> None:
    def attack(_: House, evil: Evil) -> None:
        opened = asking(evil, f"/v1/shards/{evil.shard}/listen", 20, token="evil-reader")
        assert set(statuses(opened)) == {200}
        evil.fill(4 << 20)
        while house.pools()["listeners"] > 1:  # that of the other tenant
            house.others_work()

    house.withstands(attack)


@pytest.mark.smoke
@pytest.mark.proof
def test_parts_that_nobody_takes(house: House) -> None:
    """Each was in memory as a whole."""

    def attack(_: House, evil: Evil) -> None:
        key = f"/v1/blobs/{evil.ask('GET', f'/v1/shards/{evil.shard}')[1]['shard_id']}/w{'0' * 32}/p{7:032x}.parquet"
        status, told = evil.ask("PUT", key, b"\1" * (8 << 20))
        assert status == 204, told
        opened = asking(evil, key, 60, token="evil-reader")
        house.others_work()
        for one in opened:
            reset(one)

    house.withstands(attack)


@pytest.mark.smoke
@pytest.mark.proof
def test_hundreds_of_requests_of_one_token_at_once(house: House) -> None:
    """The rest of a token's work waits for its own, not that of others."""

    def attack(_: House, evil: Evil) -> None:
        for _round in range(2):
            opened = [evil.connect() for _ in range(100)]
            for number, one in enumerate(opened):
                kind = ("snapshot?format=ndjson", "count", "listen?until=1", "history")[number % 4]
                one.sendall(evil.head("GET", f"/v1/shards/{evil.shard}/{kind}"))
            assert set(statuses(opened)) <= {200, 429}
            for one in opened:
                reset(one)
        house.others_work()

    house.withstands(attack)


@pytest.mark.proof
def test_large_snapshots_by_the_limits_that_servers_have(tmp_path: Path) -> None:
    def attack(house: House, evil: Evil) -> None:
        evil.fill(192 << 20)
        asking(evil, f"/v1/shards/{evil.shard}/snapshot?format=csv", 2 * SHARE, token="evil-reader")
        asking(evil, f"/v1/shards/{evil.shard}/listen", 20, token="evil-reader")
        house.others_work()

    with harness.house(tmp_path, {}) as house:
        house.withstands(attack)
