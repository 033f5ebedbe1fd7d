"""Who sends few bytes that become many, many times at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from rpc.rows import MEDIA_TYPES
from tests.attacks import harness
from tests.attacks.harness import Evil, House
from tests.support.bombs import file, named, stream, viewed, zeros
from tests.support.waiting import WAIT_S

MIB = 1 << 20
ARROW, PARQUET, NDJSON, CSV = MEDIA_TYPES.values()
CALLERS, MANY_CALLERS = 2, 6
Body = tuple[str, bytes]


def bombs(rows: int) -> list[Body]:
    """Bodies of less than 4 MiB that become far more: `rows` of 8 bytes, or as many bytes for each of 2,000."""
    many = pa.table({"id": zeros(rows), "text": pa.nulls(rows, pa.string())})
    texts = pa.table({"id": zeros(2_000), "text": named(2_000, rows // 20)})
    views = pa.table({"id": zeros(2_000), "text": viewed(2_000, rows // 20)})
    return [
        (ARROW, stream(many)),
        (ARROW, stream(texts)),
        (ARROW, stream(views)),
        (PARQUET, file(many)),
        (PARQUET, file(texts, store_schema=False)),
        (NDJSON, b'{"id":1,"text":' + b"[" * 3 * MIB),
        (NDJSON, b'{"id":1,"text":[' + b"{}," * MIB + b"{}]}\n"),
        (CSV, b"id,text\n" + b"1,\n" * MIB),
    ]


def posted(evil: Evil, bodies: Sequence[Body], count: int = CALLERS) -> list[int]:
    """The statuses of all of them, sent from several threads, each beginning with another one."""
    told: list[int] = []
    path = f"/v1/shards/{evil.shard}/insert"

    def post(first: int) -> None:
        for number in range(len(bodies)):
            media, body = bodies[(first + number) % len(bodies)]
            told.append(evil.ask("POST", path, body, {"content-type": media})[0])

    callers = [threading.Thread(target=post, args=(first,)) for first in range(count)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(WAIT_S)
    assert len(told) == count * len(bodies)
    return told


def test_bodies_that_become_large(house: House) -> None:
    """37 kB took 1.3 GB, and 32 such at once were allowed."""

    def attack(house: House, evil: Evil) -> None:
        assert set(posted(evil, bombs(4_000_000))) <= {413, 429}
        house.others_work()
        assert house.pools()["decoded_bytes"] == 0

    house.withstands(attack)


def test_bodies_as_large_as_they_may_be(house: House) -> None:
    """They are written, some at a time, and others' rows are never kept out."""

    def attack(house: House, evil: Evil) -> None:
        rows = pa.table({"id": zeros(90_000), "text": ["x"] * 90_000})
        found = posted(evil, [(ARROW, stream(rows)), (PARQUET, file(rows))])
        assert set(found) <= {200, 429}
        assert 200 in found
        house.others_work()

    house.withstands(attack)


@pytest.mark.proof
def test_large_rows_by_the_limits_that_servers_have(tmp_path: Path) -> None:
    """As many as there may be are decoded, sorted and written at once, beside parts and bodies that are refused."""

    def attack(house: House, evil: Evil) -> None:
        rows = pa.table({"id": zeros(1_500_000), "text": ["x"] * 1_500_000})
        large = [(ARROW, stream(rows, None)), (PARQUET, file(rows)), *bombs(4_900_000)]
        found = posted(evil, large, MANY_CALLERS)
        assert set(found) <= {200, 413, 429}
        assert 200 in found
        house.others_work()

    with harness.house(tmp_path, {}) as house:
        house.withstands(attack)
