"""Settings so small that every path is walked within seconds."""

from __future__ import annotations

from compactor.engine import EngineSettings
from compactor.worker import WorkerSettings
from persist.client.shard import HandleSettings
from persist.client.snapshot import ReadSettings
from persist.client.write import WriteSettings
from persist.commit.location import LocationSettings
from persist.core.merge_plan import MergePolicy
from persist.core.state import Policy

POLICY = Policy(inline_part_bytes_max=1_500, inline_shard_bytes_max=20_000, rollup_every=32, inline_batches=16)
LOCATION = LocationSettings(policy=POLICY)
HANDLES = HandleSettings(
    write=WriteSettings(lease_ms=5_000, retry_s=4.0), read=ReadSettings(lease_ms=2_500, retry_s=4.0)
)
TIMEOUT_S = 3.0  # of a request to a server
MERGES = MergePolicy(fan_in=2, batches_soft=4)
INLINE_FLUSH_BYTES = 2_000
ENGINE = EngineSettings(memory_bytes=1 << 22, part_bytes_target=1 << 13)
WORKER = WorkerSettings(policy=MERGES, engine=ENGINE)
CLAIM_LEASE_MS = 2_000
IDLE_MS = 500
ROLLUP_AFTER = 8  # entries
# Who is silent for longer has lost them.
LEASES_S = max(HANDLES.write.lease_ms, HANDLES.read.lease_ms, CLAIM_LEASE_MS) / 1000
LOOK_EVERY_S = 0.3  # how often maintenance looks at all shards where nothing pushes

__all__ = [
    "CLAIM_LEASE_MS",
    "ENGINE",
    "HANDLES",
    "IDLE_MS",
    "INLINE_FLUSH_BYTES",
    "LEASES_S",
    "LOCATION",
    "LOOK_EVERY_S",
    "MERGES",
    "POLICY",
    "ROLLUP_AFTER",
    "TIMEOUT_S",
    "WORKER",
]
