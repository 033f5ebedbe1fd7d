"""The example of a service: transfers land once, together or not at all, and old balances stay readable."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from examples.service import create_app


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[TestClient]:
    with TestClient(create_app(f"persist://{tmp_path}/bank")) as client:
        yield client


def send(bank: TestClient, key: str, amount: int, giver: str = "ann", taker: str = "bob") -> tuple[int, int | None]:
    sides: dict[str, str | int] = {"giver": giver, "taker": taker, "amount": amount}
    answer = bank.post("/transfers", params=sides, headers={"Idempotency-Key": key})
    return answer.status_code, answer.json().get("time")


def test_a_transfer_lands_once_and_the_time_before_it_stays(bank: TestClient) -> None:
    first = send(bank, "7f3a", 5)
    assert first[0] == 200
    assert [send(bank, "7f3a", 5) for _ in range(2)] == [first, first]
    assert bank.get("/accounts").json() == {"ann": 95, "bob": 105}
    assert bank.get("/accounts", params={"as_of": 0}).json() == {"ann": 100, "bob": 100}
    assert bank.get("/accounts", params={"as_of": 99}).status_code == 404


def test_a_transfer_that_cannot_be_made_changes_nothing(bank: TestClient) -> None:
    assert send(bank, "a", 101)[0] == 409
    assert send(bank, "b", 5, taker="eve")[0] == 409
    assert send(bank, "c", 5, giver="eve")[0] == 409
    assert send(bank, "d", 0)[0] == 422
    assert bank.get("/accounts").json() == {"ann": 100, "bob": 100}


def test_transfers_side_by_side_lose_nothing(bank: TestClient) -> None:
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda number: send(bank, f"side {number}", 1), range(8)))
    assert {status for status, _ in done} == {200}
    assert len({time for _, time in done}) == 8
    assert bank.get("/accounts").json() == {"ann": 92, "bob": 108}
