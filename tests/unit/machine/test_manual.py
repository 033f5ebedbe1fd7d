"""The loop in the manual of the commit path commits: it is run here, over the real parts of a machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from persist.attributes.attribute_index import AttributeIndex
from persist.attributes.node_store import NodeCache
from persist.commit.background_duties import Upkeep
from persist.commit.blob_tasks import BlobWorker
from persist.commit.cached_state import CachedState
from persist.commit.clocks_and_ids import System
from persist.commit.command_queue import CommandQueue, Pending
from persist.commit.commit_plan import Outcome, PlanInput, plan_commit, supplied
from persist.commit.log_writer import LogWriter
from persist.commit.spill_files import SpillWriter
from persist.core import commands as c
from persist.core.frontier import Antichain
from persist.core.state import Policy, initial_state
from persist.core.transitions.context import SOUND, Context
from persist.telemetry.metrics import MachineMetrics
from tests.support.location import memory_location
from tests.support.shard import NAME, SCHEMA

MANUAL = Path(__file__).parents[3] / "persist/commit/README.md"
POLICY = Policy(rollup_every=3)


def manual_lead() -> Any:
    [source] = re.findall(r"```python\n(.*?)```", MANUAL.read_text(encoding="utf-8"), re.DOTALL)
    assert source.count("\n") <= 30
    names = {"PlanInput": PlanInput, "Context": Context, "Pending": Pending, "SOUND": SOUND}
    names |= {"plan_commit": plan_commit, "supplied": supplied}
    exec(source, names)
    return names["lead"]


def test_the_loop_of_the_manual_commits() -> None:
    location = memory_location()
    location.machine(NAME).create(initial_state(NAME, SCHEMA, 0))
    system, metrics = System(location.clock, location.ids, location.background), MachineMetrics()
    cached = CachedState(NAME, location.versions, location.clock)
    queue, upkeep = CommandQueue(NAME, 10, 2), Upkeep(POLICY, merges=True)
    index = AttributeIndex(location.blob, location.ids, NodeCache())
    parts = (queue, cached, LogWriter(NAME, location.versions, system, metrics))
    spilled = SpillWriter(location.versions, location.ids, NodeCache())
    parts += (
        BlobWorker(location.versions, index, spilled, location.ids, metrics, POLICY),
        upkeep,
        system,
        POLICY,
    )
    lead = manual_lead()
    outcomes: list[Outcome] = []
    for upper in range(1, 8):
        queue.enqueue(Pending(c.AdvanceUpper(Antichain(upper)), outcomes.append, lambda: lead(*parts)))
    lead(*parts)
    assert outcomes == [c.Appended(Antichain(upper - 1), Antichain(upper)) for upper in range(1, 8)]
    assert not queue.is_led
    assert cached.refresh().upper == Antichain(7)
    assert max(cached.state().rollups) > 1, "the duties were done too"
