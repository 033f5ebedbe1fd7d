"""Erased rows lie in no journal of publications once there is a receipt, also where one comes late."""

from __future__ import annotations

import pyarrow as pa
import pytest

from compactor.tasks import Eraser
from compactor.worker import Worker
from persist.client.shard import Shard
from persist.core.blob_keys import is_journal_key
from persist.core.state import Policy
from persist.maintenance.collector import Collector
from persist.maintenance.journal_writer import FAILED_TRIES_MAX, Publisher, PublishSettings
from tests.support.clocks import Machine, World
from tests.support.markers import in_memory, marker, uncompressed, where

NAME = "orders"
SCHEMA = pa.schema([("id", pa.string()), ("v", pa.string())])
SETTINGS = PublishSettings(every_s=5.0)
STEPS_MAX = 100


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    uncompressed(monkeypatch)


@pytest.fixture
def machine() -> Machine:
    return World(policy=Policy()).machine()


@pytest.fixture
def shard(machine: Machine) -> Shard:
    return machine.client.create_shard(NAME, SCHEMA, ["id"], history="7d")


def queued(machine: Machine) -> Publisher:
    """A process that has committed all that is in the log, and has not published it."""
    location = machine.location
    publisher = Publisher(location.blob, location.identity, location.clock, location.ids, SETTINGS)
    for entry in location.consensus.scan(NAME, 1, 1_000):
        publisher.add(NAME, entry.data)
    return publisher


def maintained(machine: Machine, published_within_s: float = 0.0) -> float | None:
    """One step of maintenance; in how many seconds to look again."""
    collector = Collector(machine.location)
    Worker(machine.location).run(NAME)
    wait = Eraser(machine.location, collector, published_within_s=published_within_s).run(NAME)
    collector.run(NAME)
    return wait


def journals(machine: Machine) -> list[str]:
    return [stat.key for stat in machine.location.blob.list("pub/") if is_journal_key(stat.key)]


def found(machine: Machine, wanted: str) -> list[str]:
    return where(in_memory(machine.world.blob, machine.world.consensus), wanted)


@pytest.mark.parametrize("failed", [0, 1, FAILED_TRIES_MAX - 1])
def test_a_receipt_waits_for_what_is_yet_to_be_published(machine: Machine, shard: Shard, failed: int) -> None:
    """The rows are erased within the interval in which they were committed; it is put as late as a process may."""
    secret = marker()
    shard.insert([{"id": secret, "v": "1"}, {"id": "kept", "v": "2"}])
    publisher = queued(machine)
    told = shard.erase(keys=[secret], deadline="30d", reason="dsr-1")
    late_ms = machine.location.clock.now_ms() + int((failed + 1) * SETTINGS.every_s * 1000) - 1
    for _ in range(STEPS_MAX):
        wait = maintained(machine, SETTINGS.within_s)
        if machine.location.clock.now_ms() >= late_ms and not publisher.is_idle:
            assert shard.erased(told.id).phase != "erased"
            publisher.publish(now=True)
            assert any(where_ in secret_at for secret_at in found(machine, secret) for where_ in journals(machine))
        if wait is None:
            break
        machine.world.pass_ms(1_000)
    assert shard.erased(told.id).phase == "erased"
    assert publisher.is_idle
    assert found(machine, secret) == []
    assert [row["id"] for row in shard.snapshot().to_arrow().to_pylist()] == ["kept"]


def test_where_nobody_publishes_no_receipt_waits(machine: Machine, shard: Shard) -> None:
    secret = marker()
    shard.insert([{"id": secret, "v": "1"}, {"id": "kept", "v": "2"}])
    told = shard.erase(keys=[secret], deadline="30d", reason="dsr-1")
    while maintained(machine) is not None:
        machine.world.pass_ms(1)
        assert machine.location.clock.now_ms() - told.requested_ms < 1_000
    assert shard.erased(told.id).phase == "erased"
