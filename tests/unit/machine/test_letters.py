"""A process commits for others that wait: each caller is answered as if it had committed itself, exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pyarrow as pa
import pytest

from blob.memory import MemoryBlob
from consensus.errors import ConsensusUnavailable
from consensus.memory import MemoryConsensus
from consensus.turns import Had, Left, Letter, Turn
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.commit.letters import COMMANDS_MAX, DECLINED, UNKNOWN
from persist.commit.machine import Machine
from persist.core import commands as c
from persist.core.antichain import Antichain
from persist.core.errors import Indeterminate, PersistError, UpperMismatch
from persist.formats.letters import decode_answer, decode_letter
from tests.support.location import AscendingIds, memory_location

SCHEMA = pa.schema([("id", pa.int64())])


class Posting(MemoryConsensus):
    """A store of which `waits` says what comes of a letter; letters in `lie` are taken by whoever has the next turn."""

    def __init__(self) -> None:
        super().__init__("mem:")
        self.lie: list[bytes] = []
        self.answers: list[bytes] = []
        self.asked: list[bytes | None] = []
        self.waits: Callable[[bytes], Had] | None = None

    def turn_or_answer(self, key: str, wait_s: float, letter: Letter) -> AbstractContextManager[Had]:
        waits = self.waits
        if waits is not None:
            data = letter.data()
            self.asked.append(data)
            if data is not None:
                self.waits = None
                return nullcontext(waits(data))
        return nullcontext(Had(Turn.AT_ONCE, letters=self._taken))

    def _taken(self, most: int) -> list[Left]:
        taken, self.lie = self.lie[:most], self.lie[most:]
        return [Left(data, False, self.answers.append) for data in taken]


class Place:
    """Two processes on one shard. What the first one does waits for the second, where a test says so."""

    def __init__(self) -> None:
        self.log = Posting()
        blob = MemoryBlob("mem:")
        self.locations = [
            memory_location(blob=blob, consensus=self.log, ids=AscendingIds(origin), small_merges=False)
            for origin in (1, 2)
        ]
        one, two = (Client(EmbeddedTransport(location)) for location in self.locations)
        self.theirs = two.create_shard("orders", SCHEMA, ["id"])
        self.ours = one.shard("orders")
        self.writer = self.ours.open_writer()
        self.leader = self.theirs.open_writer()
        for writer in (self.writer, self.leader):
            writer.insert([])  # by which it is registered

    def machine(self, which: int = 0) -> Machine:
        return self.locations[which].machine("orders")

    def commits_ours(self, key: int) -> Callable[[bytes], Had]:
        """The second process inserts that row, and commits the letter with it."""

        def wait(data: bytes) -> Had:
            self.log.lie.append(data)
            self.leader.insert([{"id": key}])
            return Had(Turn.NONE, self.log.answers.pop())

        return wait

    def rows(self) -> list[int]:
        found = self.theirs.snapshot().to_arrow()
        assert set(found["__diff"].to_pylist()) <= {1}
        return sorted(found["id"].to_pylist())


@pytest.fixture
def place() -> Iterator[Place]:
    found = Place()
    yield found
    for location in found.locations:
        location.close()


def test_one_commit_is_for_both_and_each_is_answered(place: Place) -> None:
    before = place.machine(1).metrics.commits
    place.log.waits = place.commits_ours(1)
    told = place.writer.insert([{"id": 2}])
    assert place.machine(1).metrics.commits == before + 1
    assert place.rows() == [1, 2]
    assert told.lower == Antichain(0)
    assert [row["id"] for row in place.ours.snapshot().to_arrow().to_pylist()] == [1, 2], "its caller reads its own"


def test_what_was_told_is_no_older_than_the_state_that_is_kept(place: Place) -> None:
    place.log.waits = place.commits_ours(1)
    place.writer.insert([{"id": 2}])
    machine = place.machine()
    assert machine.is_behind
    assert machine.state().upper == Antichain(1)
    assert not machine.is_behind


def test_a_refusal_goes_to_the_caller_whose_command_it_is(place: Place) -> None:
    place.theirs.advance_upper(3)
    place.log.waits = place.commits_ours(1)
    with pytest.raises(UpperMismatch) as told:
        place.writer.compare_and_append([{"id": 2}], 0, 1)
    assert (told.value.details["expected"], told.value.details["actual"]) == ([0], [4])
    assert place.rows() == [1], "who led has written"


def test_the_leaders_own_refusal_is_not_told_to_others(place: Place) -> None:
    def wait(data: bytes) -> Had:
        place.log.lie.append(data)
        with pytest.raises(UpperMismatch):
            place.leader.compare_and_append([{"id": 1}], 7, 8)
        return Had(Turn.NONE, place.log.answers.pop())

    place.log.waits = wait
    place.writer.insert([{"id": 2}])
    assert place.rows() == [2]


def test_what_was_committed_and_not_answered_is_answered_as_the_first_time(place: Place) -> None:
    """Whoever led was killed between its commit and its answers."""

    def wait(data: bytes) -> Had:
        place.log.lie.append(data)
        place.leader.insert([{"id": 1}])
        return Had(Turn.WAITED, is_doubtful=True)

    place.log.waits = wait
    told = place.writer.insert([{"id": 2}])
    assert told.lower == Antichain(0)
    assert place.rows() == [1, 2]


def test_what_was_taken_and_committed_late_lands_once(place: Place) -> None:
    """Whoever led was stopped before its commit, and goes on after the caller has gone on."""
    taken: list[bytes] = []

    def wait(data: bytes) -> Had:
        taken.append(data)
        return Had(Turn.NONE, is_doubtful=True)

    place.log.waits = wait
    place.writer.insert([{"id": 2}])
    place.writer.insert([{"id": 3}])
    place.log.lie = taken
    place.leader.insert([{"id": 1}])
    assert place.rows() == [1, 2, 3]


def test_a_refusal_is_unknown_where_whoever_took_the_letter_may_still_commit_it(place: Place) -> None:
    taken: list[bytes] = []

    def wait(data: bytes) -> Had:
        taken.append(data)
        return Had(Turn.WAITED, is_doubtful=True)

    place.log.waits = wait
    with pytest.raises(Indeterminate) as told:
        place.writer.compare_and_append([{"id": 2}], 1, 2)  # the shard is at 0 yet
    assert told.value.details["refused"] == "upper_mismatch"
    place.theirs.advance_upper(1)
    place.log.lie = taken
    place.leader.insert([])
    assert place.rows() == [2], "it has happened, as the caller was told it may"


def test_a_refusal_that_stays_is_told_all_the_same(place: Place) -> None:
    place.theirs.advance_upper(3)
    place.log.waits = lambda _: Had(Turn.WAITED, is_doubtful=True)
    with pytest.raises(UpperMismatch):
        place.writer.compare_and_append([{"id": 2}], 0, 1)


@pytest.mark.parametrize("answer", [UNKNOWN, DECLINED, b"nonsense"])
def test_who_is_told_nothing_commits_itself(place: Place, answer: bytes) -> None:
    place.log.waits = lambda _: Had(Turn.NONE, answer)
    place.writer.insert([{"id": 2}])
    assert place.rows() == [2]


@pytest.mark.parametrize("letter", [b"", b"nonsense", bytes(1000)])
def test_what_is_no_letter_is_declined_and_harms_nobody(place: Place, letter: bytes) -> None:
    place.log.lie = [letter]
    place.leader.insert([{"id": 1}])
    assert (place.rows(), place.log.answers) == ([1], [DECLINED])


def test_a_leader_that_fails_leaves_others_to_themselves(place: Place) -> None:
    """It could not reach the store: what it was told is no news of theirs."""
    real = place.log.compare_and_set

    def away(key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        raise ConsensusUnavailable("it is away")

    def wait(data: bytes) -> Had:
        place.log.lie.append(data)
        place.log.compare_and_set = away  # type: ignore[method-assign]
        with pytest.raises(PersistError):
            place.leader.insert([{"id": 1}])
        place.log.compare_and_set = real  # type: ignore[method-assign]
        return Had(Turn.NONE, place.log.answers.pop())

    place.log.waits = wait
    place.writer.insert([{"id": 2}])
    assert place.rows() == [2]


def test_what_the_log_does_not_take_is_declined_and_whoever_led_goes_on(place: Place) -> None:
    """Together they are too long for one entry; each alone is not."""
    many = pa.table({"id": range(1_000)})
    place.log.waits = place.commits_ours(-1)
    limit = type(place.log).value_bytes_max
    try:
        type(place.log).value_bytes_max = property(lambda _: 6_000)  # type: ignore[assignment,method-assign]
        place.writer.insert(many)
    finally:
        type(place.log).value_bytes_max = limit  # type: ignore[method-assign]
    assert place.rows() == list(range(-1, 1_000))


def test_only_what_has_a_token_is_left_and_only_so_many(place: Place) -> None:
    shard: Shard = place.ours
    place.log.waits = lambda _: Had(Turn.NONE, DECLINED)
    shard.advance_upper(5)
    assert place.log.asked == [None]
    place.writer.insert([{"id": 1}])
    data = place.log.asked[-1]
    assert data is not None
    assert [type(one) for one in decode_letter(data).commands] == [c.Insert]
    assert COMMANDS_MAX < 100


def test_all_letters_that_lie_there_are_taken_whoever_came_first(place: Place) -> None:
    """So nobody starves: whoever waits is in the next commit."""
    letters = []
    for number in range(20):
        place.log.waits = lambda data: (letters.append(data), Had(Turn.NONE, DECLINED))[1]
        place.ours.open_writer().insert([{"id": number}])
    place.log.lie = letters
    place.leader.insert([{"id": 99}])
    assert len(place.log.answers) == 20
    told = [decode_answer(answer)[1] for answer in place.log.answers]
    assert all(isinstance(one, c.Appended) for [one] in told), "they had landed, and are answered as the first time"
    assert place.rows() == [*range(20), 99]
