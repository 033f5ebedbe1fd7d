"""The queue always has a leader while it has commands, and tells every caller once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from persist.commit.command_queue import CommandQueue, Pending
from persist.commit.commit_plan import Outcome
from persist.core import commands as c
from persist.core.attribute import IndexRoot
from persist.core.errors import Overloaded
from persist.core.frontier import Antichain
from persist.core.ids import PartId
from persist.core.spill import OUTCOMES, SpillFile
from tests.support.shard import SCHEMA


def pending(upper: int = 1, answer: Callable[[Outcome], None] = print, lead: Callable[[], None] = print) -> Pending:
    return Pending(c.AdvanceUpper(Antichain(upper)), answer, lead)


@pytest.fixture
def queue() -> CommandQueue:
    return CommandQueue("orders", queue_max=5, group_max=3)


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


ENDING = [
    c.FlushAttributes(IndexRoot(), IndexRoot(), {}, {}),
    c.Flush(OUTCOMES, (), (), SpillFile("key", 1, 0, 1, 0, 0)),
    c.MergeResult((), (), Antichain(0)),
    c.ReplacePart(PartId("p" + "1" * 32), None),
    c.Finalise(),
]


@pytest.mark.parametrize("command", ENDING, ids=[type(command).__name__ for command in ENDING])
def test_what_voids_what_was_read_ends_its_group(queue: CommandQueue, command: c.Command) -> None:
    ending = Pending(command, print, print)
    queued = [pending(), ending, pending(), ending]
    for each in queued:
        queue.enqueue(each)
    assert queue.next_group() == queued[:2]
    queue.answer([c.Done()] * 2)
    assert queue.next_group() == queued[2:]


def test_the_next_life_begins_in_a_commit_of_its_own(queue: CommandQueue) -> None:
    queued = [pending(), Pending(c.Recreate(SCHEMA), print, print), pending()]
    for each in queued:
        queue.enqueue(each)
    for each in queued:
        assert queue.next_group() == [each]
        queue.answer([c.Done()])
