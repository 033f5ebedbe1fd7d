"""The settled compare-and-set: a diff is in the log, or not, or the caller hears that nobody knows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from blob.memory_blobs import MemoryBlob
from consensus import (
    ConsensusDamaged,
    ConsensusError,
    ConsensusIndeterminate,
    ConsensusMisconfigured,
    ConsensusNotWritable,
    ConsensusUnavailable,
    Entry,
)
from consensus.memory_logs import MemoryConsensus
from consensus.metrics import ForwardingConsensus
from persist.commit.clocks_and_ids import System
from persist.commit.location_identity import Identity
from persist.commit.log_writer import LogWriter, TooLarge
from persist.commit.state_loader import Versions
from persist.core.errors import Indeterminate, PersistError, Unavailable
from persist.core.ids import SeqNo
from persist.core.state_diff import StateDiff
from persist.formats.state_frames import THIS_BUILD
from persist.telemetry.metrics import MachineMetrics
from tests.support.location import AscendingIds, InlineBackground, TestClock
from tests.support.shard import NAME

RETRY_S = 5.0
PARENT = "parent"


def lands(real: Callable[[], bool]) -> bool:
    return real()


def lands_unseen(real: Callable[[], bool]) -> bool:
    real()
    raise ConsensusIndeterminate("the answer was lost")


def is_lost(real: Callable[[], bool]) -> bool:
    raise ConsensusIndeterminate("the request was lost")


def is_away(real: Callable[[], bool]) -> bool:
    raise ConsensusUnavailable("nobody answers")


def is_full(real: Callable[[], bool]) -> bool:
    raise ConsensusNotWritable("the disk is full")


def is_read_only(real: Callable[[], bool]) -> bool:
    raise ConsensusNotWritable("the disk is read-only", is_read_only=True)


def is_refused(real: Callable[[], bool]) -> bool:
    raise ConsensusMisconfigured("password authentication failed")


def is_damaged(real: Callable[[], bool]) -> bool:
    raise ConsensusDamaged("a page is torn")


class Scripted(ForwardingConsensus):
    """A store whose next compare-and-sets go as the test says, and whose reads may fail."""

    def __init__(self, *fates: Callable[[Callable[[], bool]], bool], value_bytes_max: int = 1 << 20) -> None:
        super().__init__(MemoryConsensus("mem:", value_bytes_max=value_bytes_max))
        self.fates = list(fates)
        self.unread = 0
        self.unreadable: ConsensusError = ConsensusUnavailable("nobody answers")

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        fate = self.fates.pop(0) if self.fates else lands
        return fate(lambda: self._inner.compare_and_set(key, seqno, data, after))

    def scan(self, key: str, from_seqno: int, limit: int) -> list[Entry]:
        if self.unread:
            self.unread -= 1
            raise self.unreadable
        return self._inner.scan(key, from_seqno, limit)

    def entries(self) -> list[Entry]:
        """The log as it is, whatever may fail."""
        return self._inner.scan(NAME, 1, 10)


class Log:
    """A writer over such a store, and the time that it takes."""

    def __init__(self, consensus: Scripted) -> None:
        self.clock, self.metrics, self.consensus = TestClock(), MachineMetrics(), consensus
        ids = AscendingIds()
        blob = MemoryBlob("mem:")
        identity = Identity(blob, consensus, ids, self.clock)
        fates, consensus.fates = consensus.fates, []
        identity.check()
        self.versions = Versions(blob, consensus, ids, THIS_BUILD, identity)
        self.first = self.versions.encode(change("first", 0))
        assert consensus.compare_and_set(NAME, 1, self.first)
        consensus.fates = fates
        self.writer = LogWriter(NAME, self.versions, System(self.clock, ids, InlineBackground()), self.metrics)

    def write(self, commit_id: str, seqno: int = 1) -> bool:
        """Write the `seqno`-th diff after the first one, on the State before it, which has just been read."""
        entries = self.consensus.entries()
        before = next((entry.data for entry in entries if entry.seqno == seqno), self.first)
        self.versions.ends(NAME, PARENT, before)
        return self.writer.write(change(commit_id, seqno), self.clock.monotonic() + RETRY_S)

    def entries(self) -> int:
        return len(self.consensus.entries()) - 1


def change(commit_id: str, seqno: int = 1) -> StateDiff:
    return StateDiff(SeqNo(seqno + 1), 0, commit_id, SeqNo(1), "key", parent_id=PARENT)


@pytest.mark.parametrize("fates", [[lands_unseen], [is_lost], [is_away] * 3, [is_lost, is_away, lands_unseen, is_lost]])
def test_an_unknown_outcome_is_settled(fates: list[Callable[[Callable[[], bool]], bool]]) -> None:
    log = Log(Scripted(*fates))
    assert log.write("a")
    assert log.entries() == 1
    assert log.metrics.retries == len(fates)


def test_nothing_is_written_on_a_state_that_is_not_the_one_that_was_read_last() -> None:
    """The end of another history, which somebody else in the process had read meanwhile, was taken for its parent."""
    log = Log(Scripted())
    log.versions.ends(NAME, "another", log.first)
    assert not log.writer.write(change("a"), log.clock.monotonic() + RETRY_S)
    assert log.entries() == 0


def test_a_full_disk_is_not_waited_for() -> None:
    """A collector that waited for room at every commit never came to the deletions that make it."""
    log = Log(Scripted(*[is_full] * 100))
    begun = log.clock.monotonic()
    with pytest.raises(Unavailable, match="the disk is full"):
        log.write("a")
    assert log.clock.monotonic() == begun
    assert log.metrics.retries == 0


def test_a_full_disk_after_an_unknown_try_settles_nothing() -> None:
    log = Log(Scripted(is_lost, is_full, lands))
    assert log.write("a")
    assert log.entries() == 1


def test_a_read_only_disk_is_not_waited_for_even_after_an_unknown_try() -> None:
    log = Log(Scripted(is_lost, is_read_only, lands))
    begun = log.clock.monotonic()
    with pytest.raises(Indeterminate, match="read-only"):
        log.write("a")
    assert log.clock.monotonic() - begun < 1
    assert log.entries() == 0


@pytest.mark.parametrize(("first", "entries"), [(lands_unseen, 1), (is_lost, 0)])
def test_one_unknown_try_makes_the_whole_unknown(first: Callable[[Callable[[], bool]], bool], entries: int) -> None:
    log = Log(Scripted(first, *[is_away] * 100))
    with pytest.raises(Indeterminate):
        log.write("a")
    assert log.entries() == entries


@pytest.mark.parametrize("then", [is_refused, is_damaged])
@pytest.mark.parametrize(("first", "entries"), [(lands_unseen, 1), (is_lost, 0)])
def test_a_definite_error_after_an_unknown_try_leaves_the_whole_unknown(
    first: Callable[[Callable[[], bool]], bool], entries: int, then: Callable[[Callable[[], bool]], bool]
) -> None:
    """It was told as InvalidUsage, "did not happen", though the first try was in the log."""
    log = Log(Scripted(first, is_away, then))
    with pytest.raises(Indeterminate, match="a commit to shard 'orders' may have happened"):
        log.write("a")
    assert log.entries() == entries


@pytest.mark.parametrize("error", [ConsensusMisconfigured("no rights"), ConsensusDamaged("a page is torn")])
def test_an_unknown_try_whose_log_cannot_be_read_stays_unknown(error: ConsensusError) -> None:
    log = Log(Scripted(lands_unseen))
    log.consensus.unread, log.consensus.unreadable = 1, error
    with pytest.raises(Indeterminate, match=f"stays unread: {error}"):
        log.write("a")
    assert log.entries() == 1


def test_a_log_that_is_not_readable_for_a_while_is_read_again() -> None:
    log = Log(Scripted(lands_unseen))
    log.consensus.unread = 3
    assert log.write("a")
    log.consensus.fates, log.consensus.unread = [lands_unseen], 100
    with pytest.raises(Indeterminate, match="the outcome of a commit to shard 'orders' stays unread"):
        log.write("b", 2)


def test_a_log_that_was_truncated_meanwhile_tells_nothing() -> None:
    log = Log(Scripted())
    for seqno in range(1, 4):
        assert log.write(str(seqno), seqno)
    log.consensus.truncate(NAME, 4)
    log.consensus.fates = [is_lost]
    with pytest.raises(Indeterminate, match="moved far beyond v3"):
        log.write("late", 2)


def test_a_diff_that_the_store_cannot_take_is_refused_before_it_is_sent() -> None:
    log = Log(Scripted(value_bytes_max=100))
    with pytest.raises(TooLarge, match=r"a command on shard 'orders' takes \d+ bytes in its log, of which 100 are"):
        log.write("a" * 150)


def test_what_no_repetition_can_mend_is_told_at_once() -> None:
    def misconfigured(real: Callable[[], bool]) -> bool:
        raise ConsensusMisconfigured("no such table")

    log = Log(Scripted(misconfigured))
    with pytest.raises(PersistError, match="no such table") as told:
        log.write("a")
    assert isinstance(told.value.__cause__, ConsensusError)
    assert log.metrics.retries == 0
