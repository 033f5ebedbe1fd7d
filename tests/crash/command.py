"""The `persist` command as users run it, with small settings, a clock that may be wrong, and a fuse in its stores.

python -m tests.crash.command JOURNAL NUMBER POINT:CALLS CLOCK serve --blob URL --consensus URL --port N
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import compactor.cli.maintain
import compactor.loop
import compactor.worker
import persist.commit.location
import persist.core.merge_plan
import persist.maintenance.collector
import rpc.cli.serve
from blob import open_blob
from compactor.tasks import gc_task
from consensus import open_consensus
from rpc.cli.program import main as persist_command
from rpc.config_file import LoadedConfig
from tests.crash.actor import Journal
from tests.crash.clocks import set_clock
from tests.crash.fuses import Fuse, FusedBlob, FusedConsensus
from tests.crash.small import CLAIM_LEASE_MS, IDLE_MS, INLINE_FLUSH_BYTES, LOOK_EVERY_S, POLICY, ROLLUP_AFTER, WORKER


def run(journal: Journal, fuse: Fuse, arguments: list[str]) -> int:
    """The command's exit code, if it lives to tell."""
    load = rpc.cli.serve.load

    def worker_settings(**_: Any) -> Any:
        return WORKER

    def loaded(*sources: Any) -> LoadedConfig:
        usual = load(*sources)
        return LoadedConfig(replace(usual.settings, policy=POLICY), usual.sources)

    def opened(url: str, *, makes: bool = True) -> FusedBlob:
        journal.say("up")
        return FusedBlob(open_blob(url, makes=makes), fuse)

    with (
        patch.object(persist.commit.location, "open_blob", opened),
        patch.object(persist.commit.location, "open_consensus", lambda url: FusedConsensus(open_consensus(url), fuse)),
        patch.object(rpc.cli.serve, "load", loaded),
        patch.object(compactor.loop, "RESCAN_WITHOUT_PUSH_S", LOOK_EVERY_S),
        patch.object(compactor.cli.maintain, "WorkerSettings", worker_settings),
        patch.multiple(compactor.worker, CLAIM_LEASE_MS=CLAIM_LEASE_MS, IDLE_MS=IDLE_MS),
        patch.object(persist.core.merge_plan, "INLINE_FLUSH_BYTES", INLINE_FLUSH_BYTES),
        patch.object(persist.maintenance.collector, "ROLLUP_LEAST", ROLLUP_AFTER),
        patch.object(compactor.cli.maintain, "gc_task", partial(gc_task, every_s=LOOK_EVERY_S)),
    ):
        return persist_command(arguments)


def main(words: Sequence[str]) -> int:
    path, number, point, clock, *arguments = words
    role = arguments[1] if arguments[0] == "maintain" else arguments[0]
    journal = Journal(path, f"{role} {number}")
    set_clock(clock, journal.say)
    return run(journal, Fuse.of(point), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
