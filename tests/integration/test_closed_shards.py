"""A shard that nobody can read any more still takes writes and is still merged: they stopped at `batches_max`."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import persist
from compactor.worker import Worker
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import HandleSettings
from persist.client.write import WriteSettings
from persist.commit.collector import Collector
from persist.commit.location import LocationSettings
from persist.commit.machine import MachineSettings
from persist.core.state import Policy

SCHEMA = pa.schema([("k", pa.string())])
BATCHES_MAX = 50
INSERTS = 130


@pytest.mark.parametrize("inline", [0, 64 * 1024], ids=["blob", "inline"])
@pytest.mark.parametrize("small_merges", [True, False], ids=["writer merges", "worker merges"])
def test_writes_go_on(tmp_path: Path, inline: int, small_merges: bool) -> None:
    settings = LocationSettings(
        policy=Policy(inline_part_bytes_max=inline, batches_max=BATCHES_MAX),
        machine=MachineSettings(small_merges=small_merges),
    )
    handles = HandleSettings(WriteSettings(retry_s=2.0))
    with persist.connect(f"persist://{tmp_path}/d", location=settings, handles=handles) as client:
        assert isinstance(client.transport, EmbeddedTransport)
        location = client.transport.location
        shard = client.create_shard("orders", SCHEMA, ["k"])
        shard.downgrade_since(None)
        for number in range(INSERTS):
            shard.insert([{"k": f"k{number}"}])
            if number % 20 == 19:
                Worker(location).run("orders", idle=True)
                Collector(location).run("orders")
        state = location.machine("orders").refresh()
        assert state.upper.element == INSERTS
        assert state.trace.rows == INSERTS
        assert sum(1 for batch in state.trace.batches if batch.runs) < BATCHES_MAX
        assert shard.since().is_empty
