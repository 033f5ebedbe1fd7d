"""A merge that comes too late gives its claim up at once: found by simulation."""

from __future__ import annotations

import pyarrow as pa

from compactor.embedded import maintain
from compactor.worker import MergeOutcome, Worker
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.location import open_stores

SCHEMA = pa.schema([pa.field("k", pa.string())])


def test_a_refused_merge_leaves_no_claim_behind() -> None:
    location = open_stores("mem:refused", "mem:refused")
    with Client(EmbeddedTransport(location, maintain)) as client:
        shard = client.create_shard("orders", SCHEMA, ["k"])
        for key in "abcd":
            shard.insert([{"k": key}])
        slow, quick = Worker(location), Worker(location)
        [late, *_] = slow.due("orders", idle=True)
        assert quick.run("orders", idle=True) == 1
        assert slow.merge("orders", late) is MergeOutcome.REFUSED
        assert location.machine("orders").refresh().claims == {}
