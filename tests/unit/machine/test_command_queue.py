"""The queue always has a leader while it has commands, and tells every caller once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from persist.commit.command_queue import CommandQueue, Pending, Waiter
from persist.commit.commit_plan import Outcome
from persist.core import commands as c
from persist.core.antichain import Antichain
from persist.core.attribute import IndexRoot
from persist.core.errors import Overloaded, Unavailable


def pending(upper: int = 1, answer: Callable[[Outcome], None] = print, lead: Callable[[], None] = print) -> Pending:
    return Pending(c.AdvanceUpper(Antichain(upper)), answer, lead)


FLUSH = Pending(c.FlushAttributes(IndexRoot(), IndexRoot(), {}, {}), print, print)


@pytest.fixture
def queue() -> CommandQueue:
    return CommandQueue("orders", queue_max=5, group_max=3)


def test_the_first_leads_and_the_others_wait(queue: CommandQueue) -> None:
    assert not queue.is_led
    assert [queue.enqueue(pending(upper)) for upper in range(3)] == [True, False, False]
    assert queue.is_led


def test_the_lead_goes_to_the_first_that_is_left(queue: CommandQueue) -> None:
    told: list[int] = []
    queued = [pending(upper, lead=lambda upper=upper: told.append(upper)) for upper in range(5)]  # type: ignore[misc]
    for each in queued:
        queue.enqueue(each)
    assert queue.next_group() == queued[:3]
    queue.answer([c.Done()] * 3)
    queue.hand_over()
    assert told == [3]
    assert not queue.enqueue(pending()), "the queue is led by the one that was handed the lead"
    assert queue.next_group()[:2] == queued[3:]
    queue.answer([c.Done()] * 3)
    queue.hand_over()
    assert told == [3]
    assert not queue.is_led
    assert queue.enqueue(pending())


def test_a_full_queue_refuses_at_once(queue: CommandQueue) -> None:
    for upper in range(5):
        queue.enqueue(pending(upper))
    with pytest.raises(Overloaded, match="shard 'orders' has 5 commands queued; slow down"):
        queue.enqueue(pending())
    queue.next_group()
    queue.enqueue(pending())


def test_a_flush_ends_its_group(queue: CommandQueue) -> None:
    queued = [pending(), FLUSH, pending(), FLUSH]
    for each in queued:
        queue.enqueue(each)
    assert queue.next_group() == queued[:2]
    queue.answer([c.Done()] * 2)
    assert queue.next_group() == queued[2:]


def test_a_waiting_caller_is_told_that_it_is_answered() -> None:
    waiter = Waiter()
    threading.Thread(target=waiter.answer, args=(c.Done(),)).start()
    assert not waiter.must_lead()
    assert waiter.result() == c.Done()


def test_a_waiting_caller_is_told_to_lead_and_answers_itself() -> None:
    waiter = Waiter()
    threading.Thread(target=waiter.lead).start()
    assert waiter.must_lead()
    waiter.answer(Unavailable("away"))
    with pytest.raises(Unavailable, match="away"):
        waiter.result()
