"""Where blocking work runs: bounded pools of threads, so that the event loop never waits for a store."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from persist.commit.commit_plan import Outcome
from persist.commit.inspector import BRINGING, is_at_once
from persist.commit.machine import Machine
from persist.core import commands as c
from persist.core.errors import Unavailable
from persist.core.recorded import NOBODY, Caller
from persist.core.transitions.context import SOUND, Verdict
from rpc.settings import Limits
from rpc.slots import SharedSlots, Slots, Turns, share

T = TypeVar("T")
IO_QUEUE_MAX = 2_000  # work that waits for a thread
IO_SHARE_PERCENT = 25  # of these threads for one caller: each that works keeps the event loop waiting, too
WORKED_BYTES_MAX = 128 * 1024 * 1024  # of bodies that are whole, in memory to be worked on; others wait
DECODING_PERCENT = 133  # of what one body may decode to: what all those take that are worked on
DOWNLOADS_BYTES_MAX = 64 * 1024 * 1024  # of parts that are sent; others wait


class Work:
    """Two pools: commits (`lead`) and everything else (`run`). Used from the event loop's thread.

    A commit waits `linger_s` for more commands; one that is begun while another is under way waits for that as well.
    """

    def __init__(self, limits: Limits, linger_s: float = 0.0) -> None:
        self._linger_s = linger_s
        self.lead_threads = max(1, limits.io_threads // 2)
        self._leads = ThreadPoolExecutor(self.lead_threads, thread_name_prefix="persist-commit")
        self._io = ThreadPoolExecutor(limits.io_threads, thread_name_prefix="persist-io")
        self._answers: _Answers | None = None
        self.leads = 0  # commits that are queued or run now
        self._counting = threading.Lock()
        self.limits = limits
        self.io_queued = Slots(IO_QUEUE_MAX, "much work queued", share(IO_QUEUE_MAX))
        # What all may have of the threads, the queue bounds.
        self._io_turns = Turns(IO_QUEUE_MAX, share(limits.io_threads, IO_SHARE_PERCENT))
        self.commands = Slots(limits.commands_max, "many commands queued", share(limits.commands_max))
        self.body_bytes = Slots(limits.bodies_bytes_max, "many request bodies", share(limits.bodies_bytes_max))
        self.spooled = Slots(limits.spool_bytes_max, "many large request bodies", share(limits.spool_bytes_max))
        self.worked = Turns(WORKED_BYTES_MAX, share(WORKED_BYTES_MAX))
        # Each has room for one whole body: its rows are counted bit by bit, and would never fit else.
        decoding = limits.decoded_bytes_max * DECODING_PERCENT // 100
        most = max(share(decoding), limits.decoded_bytes_max)
        self.decoded = SharedSlots(decoding, "many rows to work on", most)
        self.downloads = Turns(DOWNLOADS_BYTES_MAX, share(DOWNLOADS_BYTES_MAX))

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Run blocking work on another thread, as a part of this request. Overloaded when too much is queued.

        One caller has a share of the threads: the rest of its work waits, while that of others goes on.
        """
        with self.io_queued:
            await self._io_turns.take()
            try:
                return await asyncio.get_running_loop().run_in_executor(self._io, copy_context().run, work, *args)
            except RuntimeError as error:
                raise _closing(error) from error
            finally:
                self._io_turns.give_back()

    async def apply(
        self, machine: Machine, command: c.Command, caller: Caller = NOBODY, admitted: Callable[[], None] | None = None
    ) -> c.Result:
        """Commit a command. The caller may go away meanwhile: the commit goes on.

        `admitted` is called once its parts are what it says; the command is not committed where that raises.
        """
        with self.commands:
            verdict = SOUND
            if isinstance(command, BRINGING):
                known = is_at_once(command) and machine.knows(command)
                verdict = machine.verdict(command) if known else await self.run(machine.verdict, command)
            if admitted is not None and not verdict.kind:
                admitted()
            return await self._committed(machine, command, verdict, caller)

    async def commit(self, machine: Machine, command: c.Command, verdict: Verdict, caller: Caller = NOBODY) -> c.Result:
        """As `apply`, of a command that was looked at."""
        with self.commands:
            return await self._committed(machine, command, verdict, caller)

    async def _committed(self, machine: Machine, command: c.Command, verdict: Verdict, caller: Caller) -> c.Result:
        loop = asyncio.get_running_loop()
        if self._answers is None or self._answers.loop is not loop:
            self._answers = _Answers(loop)
        waiter: asyncio.Future[c.Result] = loop.create_future()
        machine.submit(command, partial(self._lead_soon, loop), partial(self._answers.give, waiter), verdict, caller)
        return await waiter

    def close(self) -> None:
        """Finish what runs, drop what is queued."""
        self._leads.shutdown(wait=True)
        self._io.shutdown(wait=True, cancel_futures=True)

    def _lead_soon(self, loop: asyncio.AbstractEventLoop, lead: Callable[[], None]) -> None:
        """Have a commit run once the loop has looked at what has come meanwhile, which then is committed with it.

        Called from any thread. A commit takes far longer than a turn of the loop, whatever it commits. It waits for
        longer where the server is told to linger.
        """
        try:
            if self._linger_s:
                loop.call_soon_threadsafe(loop.call_later, self._linger_s, self._lead, lead)
            else:
                loop.call_soon_threadsafe(loop.call_soon, self._lead, lead)
        except RuntimeError:  # the loop is closed: what is queued must still be answered
            self._lead(lead)

    def _lead(self, lead: Callable[[], None]) -> None:
        def counted() -> None:
            try:
                lead()
            finally:
                self._count(-1)

        self._count(1)
        try:
            self._leads.submit(counted)
        except RuntimeError:  # shutting down: what is queued must still be answered
            counted()

    def _count(self, more: int) -> None:
        with self._counting:
            self.leads += more


class _Answers:
    """Outcomes on their way to those who wait for them on an event loop. A group of them wakes it up once.

    Each wake-up would have the thread that commits wait for the interpreter, which the loop takes at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._given: deque[tuple[asyncio.Future[c.Result], Outcome]] = deque()
        self._is_woken = False

    def give(self, waiter: asyncio.Future[c.Result], outcome: Outcome) -> None:
        """From any thread."""
        self._given.append((waiter, outcome))
        if not self._is_woken:  # else it has not begun to look: it finds this one, too
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self.loop.call_soon_threadsafe(self._settle_all)

    def _settle_all(self) -> None:
        self._is_woken = False  # before the first look: who gives from now on wakes it up again
        while self._given:
            _settle(*self._given.popleft())


def _settle(waiter: asyncio.Future[c.Result], outcome: Outcome) -> None:
    if waiter.done():  # the asker has gone away
        return
    if isinstance(outcome, BaseException):
        waiter.set_exception(outcome)
    else:
        waiter.set_result(outcome)


def _closing(error: RuntimeError) -> Exception:
    if "shutdown" in str(error):
        return Unavailable("the server is shutting down; ask another one, or again")
    return error
