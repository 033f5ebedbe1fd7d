"""The queue of commands that wait for their commit, and the leader election among their callers.

One caller at a time leads: it takes a group of queued commands and commits them together. Then it hands the lead to
the caller of the next queued command. So a commit needs no thread of its own, and a queued command always has a leader.

An exception may interrupt a caller at any moment (Ctrl-C). What it still had to do for others is recorded in the queue,
not in its frames: `abandon` finds it there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from msgspec import Struct

from persist.commit.commit_plan import Outcome
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.errors import Overloaded
from persist.core.transitions.context import RETRY_SOON_S, UNCHECKED, Verdict
from persist.telemetry.metrics import Origin

# These invalidate what was read for the group, or remove parts from the State. So each is the last of its group.
ENDING = (c.FlushAttributes, c.Flush, c.MergeResult, c.BundleParts, c.ReplacePart, c.Finalise, c.Recreate)


class Pending(Struct, frozen=True, eq=False):
    """A queued command, and callbacks to its caller, which run on any thread.

    `answer(outcome)` and `lead()` may be called again after an interruption: only the first call of each counts. If
    `lead()` is called before `answer`, the caller has to commit the queue. `all_answered()` follows the last answer of
    a group: callers that share it are woken once.
    """

    command: c.Command
    answer: Callable[[Outcome], None]
    lead: Callable[[], None]
    verdict: Verdict = UNCHECKED  # of the parts that the command brings
    caller: Caller = NOBODY
    origin: Origin | None = None  # of the request, for traces; None: it is not traced
    all_answered: Callable[[], None] | None = None


class Waiter:
    """A caller that waits on its thread until its command is answered, or until it has to lead."""

    __slots__ = ("_outcome", "_wake")

    def __init__(self) -> None:
        self._outcome: Outcome | None = None
        self._wake = threading.Lock()  # held until the caller is woken; an Event costs ten times as much
        self._wake.acquire()

    def answer(self, outcome: Outcome) -> None:
        self._outcome = self._outcome or outcome
        self.lead()

    def lead(self) -> None:
        if self._wake.locked():
            self._wake.release()

    def must_lead(self) -> bool:
        """Wait to be woken; return whether this caller has to lead. If not, its command is answered."""
        self._wake.acquire()
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
        self._leader: Pending | None = None
        self._group: deque[Pending] = deque()  # what the leader commits, until it is answered

    @property
    def queued(self) -> int:
        return len(self._queue) + len(self._group)

    @property
    def is_led(self) -> bool:
        return self._leader is not None

    @property
    def group_size(self) -> int:
        """Number of commands that the leader commits now."""
        return len(self._group)

    def enqueue(self, pending: Pending) -> bool:
        """Queue a command; return whether its caller has to lead at once. Overloaded if the queue is full."""
        with self._lock:
            if len(self._queue) >= self._queue_max:
                raise Overloaded(
                    f"shard {self._name!r} has {self._queue_max} commands queued; slow down", retry_after_s=RETRY_SOON_S
                )
            self._queue.append(pending)
            self._leader = self._leader or pending
            return self._leader is pending

    def next_group(self) -> list[Pending]:
        """Take the commands to commit together, in order. One of ENDING ends its group.

        The commit that begins the next life of a name does nothing else.
        """
        with self._lock:
            while self._queue and len(self._group) < self._group_max:
                following = self._queue[0]
                if self._group and isinstance(following.command, c.Recreate):
                    break
                self._group.append(following)
                self._queue.popleft()
                if isinstance(following.command, ENDING):
                    break
            return list(self._group)

    def halve_group(self) -> list[Pending]:
        """Return the second half of a group of at least two to the head of the queue; the result is the first half."""
        with self._lock:
            for _ in range(len(self._group) // 2):
                self._queue.appendleft(self._group[-1])
                self._group.pop()
            return list(self._group)

    def answer(self, outcomes: Iterable[Outcome]) -> None:
        """Answer the callers of the group, in order."""
        wakers: set[Callable[[], None]] = set()
        try:
            for outcome in outcomes:
                pending = self._group[0]
                pending.answer(outcome)
                if pending.all_answered is not None:
                    wakers.add(pending.all_answered)
                self._group.popleft()
        finally:
            for wake in wakers:
                wake()

    def hand_over(self) -> None:
        """End the lead. The caller of the next queued command, if there is one, leads next."""
        with self._lock:
            self._leader = following = self._queue[0] if self._queue else None
        if following is not None:
            following.lead()

    def abandon(self, pending: Pending, outcome: Outcome) -> None:
        """Remove the command of an interrupted caller. If it led, its group receives `outcome`, and another one leads.

        A command that is still queued is removed: it definitely does not happen.
        """
        with self._lock:
            if self._group and self._queue and self._queue[0] is self._group[-1]:
                self._queue.popleft()
            if pending in self._queue:
                self._queue.remove(pending)
            leader = self._leader
        if leader is pending:
            self.answer([outcome] * len(self._group))
            self.hand_over()
        elif leader is not None:
            leader.lead()  # the interrupted caller may have been about to do so
