"""What a drop took away is not counted among the rows that are there: a policy would take more than half unasked."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from persist.core.errors import InvalidUsage
from tests.support.clocks import START_MS, World

SCHEMA = pa.schema([("id", pa.int64()), ("t", pa.timestamp("us", "UTC"))])
NEW = datetime.fromtimestamp(START_MS / 1000, UTC)
OLD = NEW - timedelta(days=300)


@pytest.mark.parametrize("mode", ["retract", "drop"])
@pytest.mark.parametrize("history", ["forever", "none"])
def test_a_policy_that_takes_more_than_half_needs_confirm(mode: str, history: str) -> None:
    machine = World().machine()
    shard = machine.client.create_shard("orders", SCHEMA, ["id"], history=history)
    for start in range(0, 60, 10):
        shard.insert([{"id": start + number, "t": OLD} for number in range(10)])
    shard.truncate(5, mode=mode)
    shard.insert([{"id": 1_000 + number, "t": NEW} for number in range(8)])
    assert shard.retention().rows in (18, None)
    with pytest.raises(InvalidUsage, match="take away 10"):
        shard.retain({"column": "t", "column_age": "30d"})
    assert shard.retain({"column": "t", "column_age": "30d"}, confirm=True).policy is not None
