"""How long a reader may count on its lease: from before it was asked for, since an earlier try may have taken it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import HandleSettings, Shard
from persist.client.snapshot import ReadLease, ReadSettings
from persist.client.transport import ForwardingTransport, Transport
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.errors import Indeterminate, Unavailable
from tests.support.examples import thinned
from tests.support.location import AscendingIds, TestClock, memory_location

SCHEMA = pa.schema([("k", pa.int64())])
LEASE_S = 60


class Away(ForwardingTransport):
    """The first answer to a registration is lost, and then nobody answers for `away_s` seconds. Commands are noted."""

    def __init__(self, inner: Transport, other: Shard, away_s: float) -> None:
        super().__init__(inner)
        self.sent: list[c.Command] = []
        self._other = other
        self._away_s = away_s
        self._until_s: float | None = None

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        self.sent.append(command)
        now_s = self.clock.monotonic()
        if isinstance(command, c.RegisterReader):
            if self._until_s is None:
                self._until_s = now_s + self._away_s
                self.inner.apply(name, command, caller)
                raise Indeterminate("the answer was lost")
            if now_s < self._until_s:
                self._other.insert([{"k": 0}])  # time goes on in the shard
                raise Unavailable("nobody answers")
        return self.inner.apply(name, command, caller)


def readers(away_s: float) -> tuple[Any, Shard, Shard, Away]:
    """The clock, a shard, the same shard over a transport whose server is away, and that transport."""
    blob, log, clock = MemoryBlob("mem:"), MemoryConsensus("mem:"), TestClock()

    def transport(origin: int) -> EmbeddedTransport:
        return EmbeddedTransport(memory_location(blob=blob, consensus=log, clock=clock, ids=AscendingIds(origin)))

    other = Client(transport(1)).create_shard("orders", SCHEMA, ["k"])
    away = Away(transport(2), other, away_s)
    settings = HandleSettings(read=ReadSettings(lease_ms=LEASE_S * 1000, retry_s=2 * LEASE_S))
    return clock, other, Client(away, settings).shard("orders"), away


@pytest.mark.parametrize("away_s", thinned([45, 0, 15, 70, 59, 110], 3))
def test_a_lease_that_is_kept_holds_however_late_it_was_answered(away_s: int) -> None:
    """It counted from the answer. With 45 of 60 seconds gone by then it lapsed, though it was kept every second."""
    clock, other, mine, _ = readers(away_s)
    reader = mine.open_reader()
    for _ in range(3 * LEASE_S):
        clock.advance_ms(1000)
        other.insert([{"k": 1}])
        reader.keep()


@pytest.mark.parametrize("away_s", thinned([45, 70, 110], 3))
def test_a_lease_is_whole_when_it_is_given(away_s: int) -> None:
    """Of what is left by a late answer nobody knows, so it is renewed at once, or taken anew."""
    clock, other, mine, _ = readers(away_s)
    reader = mine.open_reader()
    clock.advance_ms((LEASE_S - 1) * 1000)
    other.insert([{"k": 1}])
    reader.check()


def test_a_lease_that_was_answered_soon_is_not_renewed() -> None:
    clock, _, mine, away = readers(0)
    reader = mine.open_reader()
    clock.advance_ms(LEASE_S * 1000 // 4)
    reader.keep()
    assert not any(isinstance(command, c.HeartbeatReader) for command in away.sent)


def test_a_lease_of_another_process_is_renewed_before_it_is_counted_on() -> None:
    clock, other, mine, away = readers(0)
    held = mine.open_reader()
    clock.advance_ms((LEASE_S - 1) * 1000)
    same = ReadLease(away, "orders", held.reader, ReadSettings(lease_ms=LEASE_S * 1000), held.seqno)
    same.keep()
    clock.advance_ms(2000)
    other.insert([{"k": 1}])
    same.check()
