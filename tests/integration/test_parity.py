"""Coming from Delta or Iceberg, in docs/tables.md: the last cell of every row is run on a shard of its own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pyarrow as pa
import pytest

import persist

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tables.md"
COLUMNS = 4


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def table() -> dict[str, str]:
    section = PAGE.read_text(encoding="utf-8").partition("## Coming from Delta or Iceberg")[2]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    found = [cells(line) for line in lines if not line.startswith("| ---")][1:]
    assert all(len(row) == COLUMNS for row in found), "a row has another number of cells"
    return {row[0]: row[-1].strip("`") for row in found}


ROWS = table()


@pytest.fixture
def client() -> Iterator[persist.Client]:
    with persist.connect(blob="mem:", consensus="mem:") as opened:
        yield opened


@pytest.mark.parametrize("what", ROWS)
def test_a_row_of_the_page_runs(client: persist.Client, what: str) -> None:
    columns = pa.schema([("id", pa.int64()), ("state", pa.string()), ("amount", pa.int64())])
    shard = client.create_shard("orders", columns, key=["id"])
    for number in range(3):
        shard.insert([{"id": number, "state": "new", "amount": 3 * number}])
    new = [{"id": 9, "state": "new", "amount": 90}]
    with shard.snapshot() as read:
        pass
    names = {"pa": pa, "persist": persist, "datetime": datetime, "timedelta": timedelta, "timezone": timezone}
    try:
        result = eval(ROWS[what], {"client": client, "shard": shard, "new": new, "read": read, **names})
    except persist.NotReadable:
        assert what == "by wall clock", "the shard is younger than that"
        return
    assert result is not None or what == "drop"


@pytest.mark.parametrize("what", ["append unless changed since a read", "delete unless changed since a read"])
def test_what_somebody_wrote_since_the_read_is_not_overlooked(client: persist.Client, what: str) -> None:
    shard = client.create_shard("orders", pa.schema([("id", pa.int64())]), key=["id"])
    shard.insert([{"id": 1}])
    read = shard.snapshot()
    shard.insert([{"id": 2}])
    with pytest.raises(persist.UpperMismatch):
        eval(ROWS[what], {"shard": shard, "new": [{"id": 9}], "read": read})
    assert shard.count() == 2


def test_a_job_that_is_run_again_changes_nothing(client: persist.Client) -> None:
    shard = client.create_shard("orders", pa.schema([("id", pa.int64()), ("n", pa.int64())]), key=["id"])
    job = {"persist": persist, "shard": shard, "new": [{"id": 9, "n": 1}]}
    eval(ROWS["idempotent write"], job)
    shard.upsert([{"id": 9, "n": 2}])
    eval(ROWS["idempotent write"], job)
    assert [row["n"] for row in shard.get(9)] == [2]


def test_the_page_has_the_verbs() -> None:
    said = " ".join(ROWS.values())
    for verb in ("insert", "upsert", "merge", "delete", "update", "replace_where", "overwrite", "get", "count", "head"):
        assert f"shard.{verb}(" in said
