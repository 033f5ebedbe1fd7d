"""A compare-and-set that is lost is counted, also where its command is then refused."""

from __future__ import annotations

import pyarrow as pa
import pytest

from persist.core.errors import UpperMismatch
from tests.support.clocks import World

SCHEMA = pa.schema([("id", pa.int64())])


def test_a_race_whose_loser_is_refused_is_counted() -> None:
    """It was counted only where the loser committed something in the end: 33 races looked like one."""
    world = World()
    winner, loser = world.machine(), world.machine()
    winner.client.create_shard("orders", SCHEMA, ["id"])
    ahead, behind = (machine.client.shard("orders") for machine in (winner, loser))
    behind.upper()
    ahead.compare_and_append([{"id": 1}], 0, 1)
    with pytest.raises(UpperMismatch):
        behind.compare_and_append([{"id": 2}], 0, 1)
    assert loser.location.machine("orders").metrics.races_lost == 1
