"""The commands that wait for their commit, and who leads.

One caller at a time leads: it takes a group of queued commands and commits them together. Then it hands the lead to
the caller of the next queued command. So a commit needs no thread of its own, and nobody waits without a leader.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from persist.commit.commit_plan import Outcome
from persist.core import commands as c
from persist.core.errors import Overloaded
from persist.core.transitions.context import RETRY_SOON_S


class Pending(Struct, frozen=True):
    """A queued command, and how to tell its caller, on any thread.

    `answer(outcome)` is called exactly once. `lead()` is called at most once, before that: it then falls to the caller
    to commit what is queued.
    """

    command: c.Command
    answer: Callable[[Outcome], None]
    lead: Callable[[], None]


class Waiter:
    """A caller that waits on its thread until its command is answered, or until it has to lead."""

    __slots__ = ("_outcome", "_untold")

    def __init__(self) -> None:
        self._outcome: Outcome | None = None
        self._untold = threading.Lock()  # held until the caller is told something; an Event costs ten times as much
        self._untold.acquire()

    def answer(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._untold.release()

    def lead(self) -> None:
        self._untold.release()

    def must_lead(self) -> bool:
        """Wait to be told. Whether it falls to this caller to lead; if not, its command is answered."""
        self._untold.acquire()
        return self._outcome is None

    def result(self) -> c.Result:
        """The result of the answered command. Raises the error with which it was refused."""
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome


class CommandQueue:
    """The queue of one shard: at most `queue_max` commands, of which at most `group_max` are committed together."""

    def __init__(self, name: str, queue_max: int, group_max: int) -> None:
        self._name = name
        self._queue_max = queue_max
        self._group_max = group_max
        self._lock = threading.Lock()
        self._queue: deque[Pending] = deque()
        self.is_led = False  # whether somebody leads now

    def enqueue(self, pending: Pending) -> bool:
        """Queue a command. Whether its caller has to lead, at once. Overloaded when the queue is full."""
        with self._lock:
            if len(self._queue) >= self._queue_max:
                raise Overloaded(
                    f"shard {self._name!r} has {self._queue_max} commands queued; slow down",
                    retry_after_s=RETRY_SOON_S,
                )
            self._queue.append(pending)
            lead = not self.is_led
            self.is_led = True
            return lead

    def next_group(self) -> list[Pending]:
        """Take the commands to commit together, in order.

        A flush of attributes is always the last of its group: what was read in the index before it is void after it.
        """
        group: list[Pending] = []
        with self._lock:
            while self._queue and len(group) < self._group_max:
                group.append(self._queue.popleft())
                if isinstance(group[-1].command, c.FlushAttributes):
                    break
        return group

    def hand_over(self) -> Pending | None:
        """End the lead. The command whose caller has to be told to lead next, if any is queued."""
        with self._lock:
            following = self._queue[0] if self._queue else None
            self.is_led = following is not None
            return following
