"""Publications in the simulation: who publishes, what copies of the blob store tell, and a recovery from one alone.

A copier takes some blobs now and then, in any order, as a replication does that is never done. What such a copy tells
of a shard has to be a State that the shard had. At the end everything that was committed has to be told.
"""

from __future__ import annotations

import itertools
import random
from typing import Any
from unittest.mock import patch

from blob.errors import BlobError
from blob.memory_blobs import MemoryBlob
from compactor.tasks import names_dropped
from consensus.memory_logs import MemoryConsensus
from persist.client.client import Client
from persist.commit.location import Location
from persist.commit.log_writer import LogWriter
from persist.copies import blob_store_scan
from persist.copies.blob_store_scan import BlobStoreScan, Evidence
from persist.copies.recovery import RecoveryRequest, plan, run_recovery
from persist.core.state import State
from persist.maintenance.journal_keeper import Published
from persist.maintenance.journal_writer import Publisher, PublishSettings
from tests.simulation.breaking import Broken, every
from tests.simulation.host import Host, weathered
from tests.simulation.maintenance import maintaining, some_shard
from tests.simulation.oracle import Contents, Oracle, ShardTruth, expect
from tests.simulation.readers import gather
from tests.simulation.world import SimBackground
from tests.support.location import client_of

PUBLISHED_SHARE = 0.5  # of the runs that may have publications
SETTINGS = PublishSettings(every_s=1.0)
BEAT_S = 6.0
KEEP_S = 4.0  # of journals
COPIED_SHARE = 0.4  # of all blobs, each time
LOOKS = 8  # of maintenance, in which all that was committed is published
GAP = 1_000


def publisher(host: Host) -> None:
    """Publishes what its process has committed, as the thread of a process does."""
    assert host.location.publisher is not None
    while not host.run.over:
        try:
            with weathered(host, "publication failed"):
                if host.location.publisher.publish() is not None:
                    host.run.path("journal published")
        except BlobError:
            host.run.path("publication failed")
        host.sleep(0.6)


def announcer(host: Host) -> None:
    """Publishes what others lost, and tidies up."""
    published = Published(host.location, SETTINGS)
    while not host.run.over:
        with maintaining(host):
            name = some_shard(host)
            published.visit(name, host.location.machine(name).refresh())
            if published.is_time():
                published.round(names_dropped(host.location))
                host.run.path("publications tidied up")
        host.sleep(0.5)


def copier(host: Host) -> None:
    """Copies some blobs as they are; now and then looks at what the copy tells, or at one of a single instant."""
    while not host.run.over:
        stored, copy = host.run.world.blobs, host.run.copy
        keys = [stat.key for stat in stored.list("") if host.random.random() < COPIED_SHARE]
        host.random.shuffle(keys)
        for key in keys:
            if stored.stat(key) is not None:
                copy.put(key, stored.get(key))
            if host.random.random() < 0.05:
                host.sleep(0.2)
        if host.random.random() < 0.1:
            check_copy(host.run.oracle, copy)
            check_copy(host.run.oracle, whole_copy(host))
            host.run.path("copy looked at")
        host.sleep(2.0)


def whole_copy(host: Host) -> MemoryBlob:
    """The blobs of this instant."""
    copy, stored = MemoryBlob("mem:copied"), host.run.world.blobs
    for stat in list(stored.list("")):
        copy.put(stat.key, stored.get(stat.key))
    return copy


def check_copy(oracle: Oracle, copy: MemoryBlob) -> dict[str, State]:
    """What each shard shows is a State that it had. These, by name."""
    told: dict[str, State] = {}
    for found in BlobStoreScan(copy).shards():
        if found.state is None:
            expect(bool(found.why), "published", f"nothing is told of {found.name}, and not why")
            continue
        had = oracle.states.get(found.state.name, {}).get(int(found.state.seqno))
        same = had is not None and had == found.state
        expect(same, "published", f"a copy tells of v{found.state.seqno} of {found.name}, which it never was")
        lacking = sorted(key for key in _needed(found.state) if copy.stat(key) is None)
        expect(not lacking, "published", f"v{found.state.seqno} of {found.name} is told as whole without {lacking[:3]}")
        told[found.state.name] = found.state
    return told


def _needed(state: State) -> set[str]:
    """The blobs without which rows, attributes, outcomes or the commit history of a State cannot be read."""
    aside = {rollup.key for rollup in state.rollups.values()} | {*state.long_diffs.values()}
    aside |= {part.key for claim in state.claims.values() for part in claim.done if part.key is not None}
    return {*state.blob_keys()} - aside - {loan.list_key for loan in state.loans.values()}


def check_recovered(host: Host) -> None:
    """All that was committed is told, and a location that is made of the blobs alone has the same rows."""
    if not any("publisher" in share for share in host.run.roles):
        return
    oracle, published = host.run.oracle, Published(host.location, SETTINGS)
    for _ in range(LOOKS):
        for name in sorted(oracle.shards):
            published.visit(name, host.location.machine(name).refresh())
        host.run.world.scheduler.sleep(SETTINGS.every_s / 2)
    copy = whole_copy(host)
    told = check_copy(oracle, copy)
    for name, truth in sorted(oracle.shards.items()):
        if name not in told:
            expect(truth.state.tombstone, "unpublished", f"nothing is told of {name}")
            continue
        seen = f"of {name} v{told[name].seqno} is told, and it is at v{truth.state.seqno}"
        expect(told[name] == truth.state, "unpublished", seen)
    background = SimBackground(host.run.world, host.process)
    again = Location(copy, MemoryConsensus(), clock=host.clock, ids=host.ids, background=background)
    lacking = [name for name in plan(again).lacking if name in oracle.shards]  # else blobs of what was never begun
    expect(not lacking, "recovered", f"{lacking} would not come back")
    run_recovery(again, RecoveryRequest(gap=GAP, accept_loss=True))
    client = client_of(again)
    for _, truth in sorted(oracle.shards.items()):
        if not truth.state.is_closed:
            _check_rows(client, truth)
            host.run.path("recovered")


def _check_rows(client: Client, truth: ShardTruth) -> None:
    upper, since = truth.state.upper.element, truth.state.since.element
    if not upper or since is None or since >= upper:
        return
    with client.shard(truth.name).snapshot(upper - 1) as snapshot:
        table = snapshot.to_arrow()
    found: Contents = {}
    gather(found, table, upper - 1)
    expect(found == truth.contents(upper - 1), "recovered", f"{truth.name} came back with other rows")


def is_published(seed: int) -> bool:
    return random.Random(f"publications {seed}").random() < PUBLISHED_SHARE


# --- broken builds


def published_before_it_is_settled() -> Broken:
    """A commit is published before the log has taken it."""
    real = LogWriter.compare_and_set

    def compare_and_set(self: LogWriter, seqno: int, data: bytes, *rest: Any, **named: Any) -> Any:
        if self._system.publisher is not None:
            self._system.publisher.add(self._name, data)
        return real(self, seqno, data, *rest, **named)

    return patch.object(LogWriter, "compare_and_set", compare_and_set)


def followed_without_parents() -> Broken:
    """Entries are put together by their seqnos alone, and of two of one seqno any is taken."""

    def following(self: Evidence, state: State) -> Any:
        return next(iter(self.changes.get(state.seqno + 1, {}).values()), None)  # type: ignore[call-overload]

    return every(
        patch.object(Evidence, "following", following),
        patch.object(Evidence, "forked_at", lambda self: None),
        published_before_it_is_settled(),
    )


def missing_blobs_overlooked() -> Broken:
    """A version is accepted although not all of its blobs have come."""
    return patch.object(BlobStoreScan, "missing", lambda self, state: [])


def lost_entries_stay_lost() -> Broken:
    """What a process did not publish before it was killed nobody publishes."""
    return every(patch.object(Published, "visit", lambda self, name, state: None), _lossy())


def _lossy() -> Broken:
    real, count = Publisher.add, itertools.count()

    def add(self: Publisher, name: str, entry: bytes) -> None:
        if next(count) % 5:
            real(self, name, entry)

    return patch.object(Publisher, "add", add)


def files_overlooked() -> Broken:
    """Of what a State needs besides parts nothing is looked for."""
    return patch.object(blob_store_scan, "needed_blobs", lambda state: {})


BROKEN = (
    published_before_it_is_settled,
    followed_without_parents,
    missing_blobs_overlooked,
    lost_entries_stay_lost,
    files_overlooked,
)
