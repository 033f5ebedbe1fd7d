"""Deadlines: what a call with a time-out is told, with a clock that stands still or moves by hand."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import persist
from blob import Blob, Unfinished
from blob.interface import SignedPut
from blob.memory_blobs import MemoryBlob
from blob.metrics import ForwardingBlob
from persist.client import deadlines
from persist.client.deadlines import INNER, UNBOUNDED, Deadline, Patience, Timeable, timed
from persist.client.idempotency import send
from persist.client.listen import Listen
from persist.client.pipelined import PipelinedWriter
from persist.client.shard import Shard
from persist.client.snapshot import ReadLease, Snapshot
from persist.client.write import WriteHandle
from persist.core.errors import Indeterminate, InvalidUsage, PersistError, Unavailable
from tests.support.location import TestClock
from tests.support.waiting import WAIT_S
from tests.unit.client.test_retry import READ, WRITE, Scripted

HANDLES = [persist.Client, Shard, Snapshot, Listen, WriteHandle, PipelinedWriter, ReadLease, persist.Changes]
S = 2.0


def outcome(answers: str, passed_s: float = 0.0, command: Any = WRITE) -> tuple[str, int]:
    """What a command comes to under a deadline of S seconds, and how often it was asked."""
    transport = Scripted(answers)
    deadline = Deadline(S, transport.clock)
    transport.clock.sleep(passed_s)
    with deadlines.within(deadline):
        try:
            send(transport, "orders", command, 1_000.0)
            told = "done"
        except PersistError as error:
            told = type(error).__name__
    assert transport.clock.monotonic() - transport.times[0] <= S if transport.times else True
    return told, len(transport.asked)


@pytest.mark.parametrize(
    ("answers", "told"),
    [("done", "done"), ("away", "Unavailable"), ("busy", "Overloaded"), ("unknown", "Indeterminate"),
     ("unknown, away", "Indeterminate"), ("away, unknown, away", "Indeterminate"), ("away, done", "done")],
)  # fmt: skip
def test_a_command_is_repeated_until_the_deadline_and_its_error_is_true(answers: str, told: str) -> None:
    assert outcome(answers)[0] == told


def test_what_comes_after_the_deadline_is_not_asked_at_all() -> None:
    assert outcome("done", S) == ("Unavailable", 0)


def test_a_read_is_never_indeterminate() -> None:
    assert outcome("unknown", command=READ)[0] == "Unavailable"


class Telling(MemoryBlob):
    """A store that has an answer to everything."""

    def presign_get(self, key: str, expires_s: int) -> str | None:
        return f"https://store/{key}"

    def presign_put(self, key: str, expires_s: int) -> SignedPut | None:
        return SignedPut(f"https://store/{key}", {})

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        return iter([Unfinished("aside", 1, 2, prefix)])

    def local_path(self, key: str) -> str | None:
        return f"/store/{key}"


def test_a_store_within_a_deadline_answers_as_it_does_without() -> None:
    """The defaults of the interface answered in its place."""
    store = Telling()
    with deadlines.within(Deadline(S, TestClock())):
        timed_store = Patience().blob(store)
        assert timed_store is not store
        store.put("k", b"x")
        for blob in (store, timed_store):
            assert blob.presign_get("k", 1) == "https://store/k"
            assert blob.presign_put("k", 1) == SignedPut("https://store/k", {})
            assert [one.token for one in blob.unfinished("k")] == ["k"]
            assert blob.local_path("k") == "/store/k"
            assert (blob.url, blob.put_here("k")) == (store.url, store.put_here("k"))
            blob.abandon([])
    methods = {name for name in vars(Blob) if not name.startswith("_")}
    assert methods <= vars(ForwardingBlob).keys(), "nor does a store that is added to the interface"


def test_without_a_deadline_nothing_is_bounded() -> None:
    assert deadlines.at_most(7.0) == 7.0
    assert not deadlines.has_passed()
    assert Patience().ask("it", lambda: deadlines.current()) is None


def test_a_deadline_bounds_what_is_asked_within_it() -> None:
    clock = TestClock()
    with deadlines.within(Deadline(S, clock)):
        assert deadlines.at_most(math.inf) == S
        clock.sleep(1.5)
        assert deadlines.at_most(math.inf) == pytest.approx(0.5)
        clock.sleep(1.5)
        assert deadlines.at_most(math.inf) == 0
        with pytest.raises(Unavailable, match=r"it was not begun: the time-out of 2 s had passed"):
            deadlines.check("it")
    assert deadlines.at_most(math.inf) == math.inf


class Hanging:
    """An operation that hangs until it is let go. Clocks stand still here: there is time to begin on any machine."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.done = threading.Event()

    def __call__(self) -> str:
        self.go.wait()
        self.done.set()
        return "late"


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    made = Hanging()
    yield made
    made.go.set()
    assert made.done.wait(WAIT_S)


@pytest.mark.parametrize(("safe", "error"), [(True, Unavailable), (False, Indeterminate)])
def test_an_operation_that_hangs_is_given_up_and_goes_on(
    hanging: Hanging, safe: bool, error: type[PersistError]
) -> None:
    with deadlines.within(Deadline(0.05, TestClock())), pytest.raises(error, match=r"not answered within 0.05 s"):
        Patience().ask("it", hanging, safe=safe)


def test_operations_that_hang_are_bounded_and_one_that_was_not_begun_did_not_happen(hanging: Hanging) -> None:
    patience = Patience(at_once_max=1)
    with deadlines.within(Deadline(0.05, TestClock())), pytest.raises(Indeterminate):
        patience.ask("it", hanging, safe=False)
    with deadlines.within(Deadline(0.05, TestClock())), pytest.raises(Unavailable, match="not begun"):
        patience.ask("it", hanging, safe=False)


def test_what_an_operation_raises_is_what_its_caller_hears() -> None:
    def fails() -> None:
        raise persist.UpperMismatch("no", expected=[1], actual=[2])

    with deadlines.within(Deadline(60.0, TestClock())), pytest.raises(persist.UpperMismatch):
        Patience().ask("it", fails, safe=False)


def test_a_blob_that_hangs_is_given_up_on_threads_that_help_too(hanging: Hanging) -> None:
    class Slow(MemoryBlob):
        def get(self, key: str) -> bytes:
            return hanging().encode()

    with deadlines.within(Deadline(0.05, TestClock())):
        store = Patience().blob(Slow())
    errors: list[BaseException] = []

    def help_it() -> None:
        try:
            store.get("a")
        except BaseException as error:
            errors.append(error)

    helper = threading.Thread(target=help_it)
    helper.start()
    helper.join(WAIT_S)
    assert [type(error).__name__ for error in errors] == ["BlobUnavailable"]


# --- handles


class Probe(Timeable):
    """A handle that tells how much time its calls have."""

    def __init__(self, clock: TestClock) -> None:
        self._transport = type("T", (), {"clock": clock})()
        self.state = 0

    def left(self) -> float:
        self.state += 1
        return deadlines.at_most(math.inf)

    def other(self) -> Probe:
        return Probe(self._transport.clock)

    def nested(self) -> float:
        self._transport.clock.sleep(0.5)
        return self.left()

    def steps(self, timeout_s: float = 0.0) -> Iterator[float]:
        for _ in range(3):
            yield self.left()


def test_each_call_of_a_view_has_the_whole_time_and_the_handle_itself_none() -> None:
    clock = TestClock()
    probe = Probe(clock)
    view = probe.with_timeout(S)
    assert isinstance(view, Probe)
    assert (view.left(), view.left(), probe.left()) == (S, S, math.inf)
    assert view.nested() == S - 0.5
    assert view.other().left() == S
    assert view.with_timeout(1).left() == 1
    assert probe.state == view.state > 0, "they are one handle"


def test_each_step_of_an_iterator_has_the_whole_time_and_the_first_one_its_wait() -> None:
    clock = TestClock()
    view = Probe(clock).with_timeout(S)
    found = []
    for left in view.steps(timeout_s=30.0):
        found.append(left)
        clock.sleep(100.0)
    assert found == [S + 30.0, S, S]


@pytest.mark.parametrize("kind", HANDLES, ids=lambda kind: kind.__name__)
def test_every_public_method_of_a_handle_is_bounded(kind: type[Any]) -> None:
    view = timed(object.__new__(kind), S)
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        if inspect.isfunction(method) and (name[0] != "_" or name in INNER) and name not in UNBOUNDED:
            assert name in vars(type(view)), name
    assert isinstance(view, kind)
    assert type(view).__name__ == kind.__name__


BAD: list[tuple[object, str]] = [
    (0, "timeout_s is 0; it must be a number of seconds, more than 0"),
    (-1.0, "timeout_s is -1.0"),
    (float("nan"), "timeout_s is nan"),
    (float("inf"), "timeout_s is inf"),
    ("1", "timeout_s is '1'; it must be int or float"),
    (None, "timeout_s is None"),
    (True, "timeout_s is True"),
]


@pytest.mark.parametrize(("value", "sentence"), BAD)
def test_a_bad_time_out_is_refused(value: Any, sentence: str) -> None:
    calls: list[Callable[[], object]] = [lambda: Probe(TestClock()).with_timeout(value)]
    if value is not None:
        calls.append(lambda: persist.connect("mem:", timeout_s=value))
    for call in calls:
        with pytest.raises(InvalidUsage, match=sentence):
            call()
