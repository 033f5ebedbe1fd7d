"""Retries of commands: what the caller is told is true, whatever the tries before it came to."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.idempotency import BACKOFF_MAX_S, LAPSING, after_commit, send
from persist.client.shard import HandleSettings, Shard
from persist.client.snapshot import ReadLease, ReadSettings
from persist.client.transport import ForwardingTransport, Transport
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.errors import (
    AttributeMismatch,
    Conflict,
    Corruption,
    Expired,
    Forbidden,
    Indeterminate,
    InvalidUsage,
    NotReadable,
    OpaqueMismatch,
    Overloaded,
    PersistError,
    SchemaMismatch,
    Unauthorized,
    Unavailable,
    UnknownShard,
    UpgradeNeeded,
    UpperMismatch,
)
from persist.core.frontier import Antichain
from persist.core.ids import SeqNo
from persist.core.shard_settings import ShardSettings
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.state import Policy, SchemaRecord
from persist.telemetry.metrics import Storms
from tests.support.examples import thinned
from tests.support.location import AscendingIds, TestClock, memory_location

WRITE = c.Insert("w" + "0" * 32, "i" + "1" * 32, ())
READ = c.DowngradeSince("r" + "0" * 32, None, SeqNo(1))
RETIREMENT = c.ExpireWriter("w" + "0" * 32)
DONE = c.Appended(Antichain(0), Antichain(1))
RETRY_S = 10.0
DETAILS: dict[str, dict[str, Any]] = {
    "upper beyond": {"expected": [3], "actual": [4]},
    "upper before": {"expected": [3], "actual": [2]},
    "upper closed": {"expected": [3], "actual": []},
    "no time left": {"expected": None, "actual": []},
    "upper of another kind": {"expected": [3], "actual": "4"},
    "read-only": {"writable": False, "read_only": True},
}
ERRORS: dict[str, type[PersistError]] = {
    "away": Unavailable, "busy": Overloaded, "unknown": Indeterminate, "expired": Expired, "upper": UpperMismatch,
    "upper beyond": UpperMismatch, "upper before": UpperMismatch, "upper closed": UpperMismatch,
    "no time left": UpperMismatch, "upper of another kind": UpperMismatch, "attribute": AttributeMismatch,
    "opaque": OpaqueMismatch, "schema": SchemaMismatch, "usage": InvalidUsage, "nobody": UnknownShard,
    "forbidden": Forbidden, "not readable": NotReadable, "conflict": Conflict, "corrupt": Corruption,
    "no token": Unauthorized, "newer": UpgradeNeeded, "a bug": PersistError,
    "read-only": Unavailable,
}  # fmt: skip


class Scripted:
    """A transport that answers as it is told, the last answer for ever, and notes what it was asked and when."""

    def __init__(self, answers: str, *, retry_after_s: float | None = None) -> None:
        self.blob = MemoryBlob()
        self.clock = TestClock()
        self.ids = AscendingIds()
        self.policy = Policy()
        self.proof = ""
        self.storms = Storms(self.clock.monotonic)
        self.asked: list[c.Command] = []
        self.times: list[float] = []
        self._answers = answers.split(", ")
        self._details = {} if retry_after_s is None else {"retry_after_s": retry_after_s}

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        self.asked.append(command)
        self.times.append(self.clock.monotonic())
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer == "done":
            return DONE
        raise ERRORS[answer](answer, **self._details, **DETAILS.get(answer, {}))

    @property
    def pauses(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    def create(
        self, name: str, schema: SchemaRecord, follows: str | None = None, settings: ShardSettings | None = None
    ) -> ShardView:
        raise AssertionError

    def names(self, prefix: str, after: str, limit: int) -> list[str]:
        raise AssertionError

    def view(self, name: str, request: ViewRequest) -> ShardView:
        raise AssertionError

    def close(self) -> None:
        return


def outcome(answers: str, command: c.Command = WRITE) -> str:
    """What `send` comes to: "done", or the class of the error."""
    try:
        assert send(Scripted(answers), "orders", command, RETRY_S) is DONE
    except PersistError as error:
        return type(error).__name__
    return "done"


@pytest.mark.parametrize(("answers", "told"), [
    ("done", "done"),
    ("away, done", "done"),
    ("busy, busy, done", "done"),
    ("unknown, done", "done"),
    ("unknown, away, busy, unknown, done", "done"),
    # The deadline passes.
    ("away", "Unavailable"),
    ("busy", "Overloaded"),
    ("unknown", "Indeterminate"),
    ("busy, away", "Unavailable"),
    ("away, busy", "Overloaded"),
    ("unknown, away", "Indeterminate"),
    ("unknown, busy", "Indeterminate"),
    ("away, unknown, busy, away", "Indeterminate"),
    ("away, unknown", "Indeterminate"),
    ("unknown, read-only", "Indeterminate"),
    # The record of the token is gone, with the registration.
    ("expired", "Expired"),
    ("away, expired", "Expired"),
    ("busy, expired", "Expired"),
    ("unknown, expired", "Indeterminate"),
    ("unknown, away, expired", "Indeterminate"),
    # Commands without a token: a try that landed and was overtaken looks like one that lost.
    ("opaque", "OpaqueMismatch"),
    ("away, opaque", "OpaqueMismatch"),
    ("unknown, opaque", "Indeterminate"),
    ("schema", "SchemaMismatch"),
    ("unknown, away, schema", "Indeterminate"),
    # The rights, the shard or the version changed after a try that may have landed.
    ("no token", "Unauthorized"),
    ("away, no token", "Unauthorized"),
    ("unknown, no token", "Indeterminate"),
    ("unknown, busy, forbidden", "Indeterminate"),
    ("unknown, nobody", "Indeterminate"),
    ("unknown, usage", "Indeterminate"),
    ("unknown, newer", "Indeterminate"),
    ("unknown, not readable", "Indeterminate"),
    # An upper beyond the one that is needed never moves back: no try has landed, and none will.
    ("unknown, upper beyond", "UpperMismatch"),
    ("unknown, upper closed", "UpperMismatch"),
    ("unknown, no time left", "UpperMismatch"),
    # What these tell may change. Then the try lands that a stopped server or a proxy still holds.
    ("unknown, upper before", "Indeterminate"),
    ("unknown, upper", "Indeterminate"),
    ("unknown, upper of another kind", "Indeterminate"),
    ("unknown, attribute", "Indeterminate"),
    ("unknown, conflict", "Indeterminate"),
    ("attribute", "AttributeMismatch"),
    ("away, busy, attribute", "AttributeMismatch"),
    ("conflict", "Conflict"),
    # These do not say that it did not happen.
    ("unknown, corrupt", "Corruption"),
    ("unknown, a bug", "PersistError"),
])  # fmt: skip
def test_what_a_write_is_told(answers: str, told: str) -> None:
    assert outcome(answers) == told


@pytest.mark.parametrize("error", ["upper", "usage", "nobody", "forbidden", "not readable", "conflict", "corrupt"])
def test_what_a_retry_cannot_mend_is_told_at_once(error: str) -> None:
    transport = Scripted(f"{error}, done")
    with pytest.raises(ERRORS[error]):
        send(transport, "orders", WRITE, RETRY_S)
    assert len(transport.asked) == 1


@pytest.mark.parametrize("answers", ["read-only", "away, read-only", "unknown, read-only"])
def test_a_write_to_a_read_only_disk_is_not_retried(answers: str) -> None:
    """It was retried for two minutes, although the disk has to be repaired first."""
    transport = Scripted(answers)
    with pytest.raises((Unavailable, Indeterminate), match="read-only"):
        send(transport, "orders", WRITE, RETRY_S)
    assert len(transport.asked) == len(answers.split(", "))


@pytest.mark.parametrize(("answers", "told"), [
    ("unknown, done", "done"), ("unknown", "Unavailable"), ("unknown, away", "Unavailable"),
    ("unknown, busy", "Overloaded"), ("unknown, expired", "Expired"), ("unknown, no token", "Unauthorized"),
])  # fmt: skip
def test_a_read_is_never_told_that_it_may_have_happened(answers: str, told: str) -> None:
    assert outcome(answers, READ) == told
    assert outcome(answers, RETIREMENT) == told  # no row was sent: a registration lapses


@pytest.mark.parametrize("kind", sorted(c.ReadCommand.__subclasses__(), key=lambda kind: kind.__name__))
def test_every_command_that_needs_the_scope_read_alone_counts_as_a_read(kind: type[c.Command]) -> None:
    """A snapshot of a tag was told that it may have happened."""
    assert issubclass(kind, LAPSING)


def test_what_a_refusal_found_is_told_where_an_earlier_try_may_still_land() -> None:
    with pytest.raises(
        Indeterminate, match=r"one try was not answered.*refused \(upper before\).*with its token"
    ) as told:
        send(Scripted("unknown, upper before"), "orders", WRITE, RETRY_S)
    assert told.value.details == {"refused": "upper_mismatch", "expected": [3], "actual": [2]}
    with pytest.raises(Indeterminate, match="look at the shard before you continue"):
        send(Scripted("unknown, conflict"), "orders", c.Drop(), RETRY_S)


def test_every_try_is_the_same_command_with_the_same_token() -> None:
    transport = Scripted("unknown, away, busy, done")
    send(transport, "orders", WRITE, RETRY_S)
    assert [command is WRITE for command in transport.asked] == [True] * 4


def test_pauses_grow_up_to_a_bound_and_end_within_the_deadline() -> None:
    transport = Scripted("away")
    with pytest.raises(Unavailable):
        send(transport, "orders", WRITE, RETRY_S)
    assert transport.times[-1] - transport.times[0] <= RETRY_S
    assert sum(transport.pauses) > RETRY_S - 1.5 * BACKOFF_MAX_S, "it does not give up early"
    assert transport.pauses[0] < 0.1
    assert max(transport.pauses) <= 1.5 * BACKOFF_MAX_S


def test_an_overloaded_server_is_left_alone_for_as_long_as_it_asks() -> None:
    transport = Scripted("busy, busy, done", retry_after_s=3.0)
    send(transport, "orders", WRITE, RETRY_S)
    assert transport.pauses == [3.0, 3.0]


def test_without_time_to_retry_there_is_one_try() -> None:
    transport = Scripted("away, done")
    with pytest.raises(Unavailable):
        send(transport, "orders", WRITE, 0.0)
    assert len(transport.asked) == 1


# --- how long a reader may count on its lease: from before it was asked for, as an earlier try may have taken it

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
    """It counted from the answer. With 45 of 60 seconds gone by then it lapsed, though it was kept all the time."""
    clock, other, mine, _ = readers(away_s)
    reader = mine.open_reader()
    for _ in range(3 * LEASE_S // 5):
        clock.advance_ms(5000)
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
    assert not any(isinstance(command, c.DowngradeSince) for command in away.sent)


def test_a_lease_of_another_process_is_renewed_before_it_is_counted_on() -> None:
    clock, other, mine, away = readers(0)
    held = mine.open_reader()
    clock.advance_ms((LEASE_S - 1) * 1000)
    same = ReadLease(away, "orders", held.reader, ReadSettings(lease_ms=LEASE_S * 1000), held.seqno)
    same.keep()
    clock.advance_ms(2000)
    other.insert([{"k": 1}])
    same.check()


@pytest.mark.parametrize("error", [Unavailable("away"), Overloaded("busy"), InvalidUsage("this client was closed")])
def test_a_read_that_fails_after_a_commit_does_not_deny_it(error: PersistError) -> None:
    with pytest.raises(Indeterminate, match="is committed"), after_commit("the change"):
        raise error
