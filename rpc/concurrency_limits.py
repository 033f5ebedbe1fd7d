"""Limits of concurrent work: slots of all and of each caller, bounded thread pools, and leases of each token."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from persist.commit.commit_plan import Outcome
from persist.commit.machine import Machine
from persist.commit.part_validator import BRINGING, is_at_once
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.errors import Indeterminate, Overloaded, PersistError, Unavailable
from persist.core.ids import ReaderId
from persist.core.state import State
from persist.core.transitions.context import SOUND, Verdict
from rpc.settings import Limits

# Counting what is under way at once against limits: of all, and of each caller.
#
# What is taken is given back by a `with`, however it ends. All of it is used from the event loop's thread, except for
# `SharedSlots`.


RETRY_AFTER_S = 0.1
SHARE_PERCENT = 50  # of what is bounded, that one token or address may have
CALLER: ContextVar[str] = ContextVar("persist.caller", default="")
"""For whom the current task works: a token, or without tokens an address. Empty: the server, or this machine's own
processes where nobody has a token; for these there is no share, only the whole."""


def share(most: int, percent: int = SHARE_PERCENT) -> int:
    """How much of `most` one caller may have: always something."""
    return max(1, most * percent // 100)


class Slots:
    """`taken` of `most` are in use, at most `share` by one caller; `what` is what there are too many of."""

    def __init__(self, most: int, what: str, share: int | None = None) -> None:
        self.taken = 0
        self.most = most
        self._share = most if share is None else share
        self._what = what
        self._by_caller: dict[str, int] = {}  # of those who have some

    def take(self, count: int = 1) -> None:
        """Raises Overloaded beyond the limit; then nothing was taken."""
        caller = CALLER.get()
        if self.taken + count > self.most:
            raise Overloaded(f"the server has too {self._what}; slow down", retry_after_s=RETRY_AFTER_S)
        if caller:
            mine = self._by_caller.get(caller, 0) + count
            if mine > self._share and mine > count:
                raise Overloaded(
                    f"{caller} has too {self._what}: one caller gets {self._share} of {self.most}; slow down",
                    retry_after_s=RETRY_AFTER_S,
                )
            self._by_caller[caller] = mine
        self.taken += count

    def give_back(self, count: int = 1) -> None:
        self.taken -= count
        caller = CALLER.get()
        if caller:
            _less(self._by_caller, caller, count)

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.give_back()


class SharedSlots(Slots):
    """The same, used from any thread."""

    def __init__(self, most: int, what: str, share: int | None = None) -> None:
        super().__init__(most, what, share)
        self._lock = threading.Lock()

    def take(self, count: int = 1) -> None:
        with self._lock:
            super().take(count)

    def give_back(self, count: int = 1) -> None:
        with self._lock:
            super().give_back(count)


class CommandTurns:
    """As Slots, but who finds no room waits: callers are served in turn, what one asks for in order.

    More than `most`, or than a share, gets its turn when nothing else is held: of all, or by that caller.
    """

    def __init__(self, most: int, share: int) -> None:
        self.taken = 0
        self.most = most
        self._share = share
        self._by_caller: dict[str, int] = {}
        self._waiting: OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(self, count: int = 1) -> AsyncIterator[None]:
        await self.take(count)
        try:
            yield
        finally:
            self.give_back(count)

    async def take(self, count: int = 1) -> None:
        caller = CALLER.get()
        if not self._waiting and not self._is_full(count) and not self._has_enough(caller, count):
            self._grant(caller, count)
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (count, waiter)
        self._waiting.setdefault(caller, deque()).append(entry)
        self._admit()  # those who wait may all have their share, and this caller not
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give_back(count)
            else:
                self._forget(caller, entry)
                self._admit()
            raise

    def give_back(self, count: int = 1) -> None:
        self.taken -= count
        _less(self._by_caller, CALLER.get(), count)
        self._admit()

    def _is_full(self, count: int) -> bool:
        return bool(self.taken) and self.taken + count > self.most

    def _has_enough(self, caller: str, count: int) -> bool:
        if not caller:
            return False
        mine = self._by_caller.get(caller, 0)
        return bool(mine) and mine + count > self._share

    def _grant(self, caller: str, count: int) -> None:
        self.taken += count
        self._by_caller[caller] = self._by_caller.get(caller, 0) + count

    def _admit(self) -> None:
        """Let those go whose turn it is. Who needs more than there is holds up the rest, or would never get it."""
        passed = 0  # callers in a row of whom nobody can go now
        while passed < len(self._waiting):
            caller, queue = next(iter(self._waiting.items()))
            count, waiter = queue[0]
            is_waiting = not waiter.done()  # else it is being cancelled
            if is_waiting and not self._has_enough(caller, count) and self._is_full(count):
                return
            self._waiting.move_to_end(caller)
            if is_waiting and self._has_enough(caller, count):
                passed += 1
                continue
            passed = 0
            self._forget(caller, (count, waiter))
            if is_waiting:
                self._grant(caller, count)
                waiter.set_result(None)

    def _forget(self, caller: str, entry: tuple[int, asyncio.Future[None]]) -> None:
        queue = self._waiting.get(caller)
        if queue is not None and entry in queue:
            queue.remove(entry)
            if not queue:
                del self._waiting[caller]


def _less(counts: dict[str, int], caller: str, count: int) -> None:
    left = counts.get(caller, 0) - count
    if left > 0:
        counts[caller] = left
    else:
        counts.pop(caller, None)


# Where blocking work runs: bounded pools of threads, so that the event loop never waits for a store.


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
        self._io_turns = CommandTurns(IO_QUEUE_MAX, share(limits.io_threads, IO_SHARE_PERCENT))
        self.commands = Slots(limits.commands_max, "many commands queued", share(limits.commands_max))
        self.body_bytes = Slots(limits.bodies_bytes_max, "many request bodies", share(limits.bodies_bytes_max))
        self.spooled = Slots(limits.spool_bytes_max, "many large request bodies", share(limits.spool_bytes_max))
        self.worked = CommandTurns(WORKED_BYTES_MAX, share(WORKED_BYTES_MAX))
        # Each has room for one whole body: its rows are counted bit by bit, and would never fit else.
        decoding = limits.decoded_bytes_max * DECODING_PERCENT // 100
        most = max(share(decoding), limits.decoded_bytes_max)
        self.decoded = SharedSlots(decoding, "many rows to work on", most)
        self.downloads = CommandTurns(DOWNLOADS_BYTES_MAX, share(DOWNLOADS_BYTES_MAX))

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
        self,
        machine: Machine,
        command: c.Command,
        caller: Caller = NOBODY,
        admitted: Callable[[Verdict], None] | None = None,
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
                admitted(verdict)
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
        answers = self._answers
        lead = partial(self._lead_soon, loop)
        machine.submit(command, lead, partial(answers.give, waiter), verdict, caller, answers.wake)
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

    def give(self, waiter: asyncio.Future[c.Result], outcome: Outcome) -> None:
        """From any thread. `wake` follows."""
        self._given.append((waiter, outcome))

    def wake(self) -> None:
        """From any thread: have those told to whom something was given."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._settle_all)

    def _settle_all(self) -> None:
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


# How many leased readers each token has taken through this server: on one shard, and on all of them.
#
# A token that may only read holds back collection with every lease, and each costs every writer of the shard a little.
# Another server counts for itself; one that has just started knows of no earlier leases until they are renewed.


LEASE_RETRY_AFTER_S = 5.0
RENEWED_S = 3600.0  # for so long a lease counts of which only the renewal was seen here
ABOUT = frozenset({c.RegisterReader, c.DowngradeSince, c.ExpireReader})


class _Lease(NamedTuple):
    lapses_s: float
    lease_s: float


@dataclass(slots=True)
class _Taken:
    """The leases of one token, and how many of them each shard has; also those that have lapsed since it was full."""

    leases: dict[tuple[str, ReaderId], _Lease] = field(default_factory=dict)
    by_shard: Counter[str] = field(default_factory=Counter)

    def forget(self, shard: str, reader: ReaderId) -> None:
        """A lease is not counted any more. Does nothing where it was not."""
        if self.leases.pop((shard, reader), None) is not None:
            self.by_shard[shard] -= 1
            if not self.by_shard[shard]:
                del self.by_shard[shard]


class TokenLeases:
    """Not thread-safe: it belongs to the event loop."""

    def __init__(self, of_shard_max: int, of_all_max: int, now_s: Callable[[], float]) -> None:
        self._of_shard_max = of_shard_max
        self._of_all_max = of_all_max
        self._now_s = now_s
        self._taken: dict[str, _Taken] = {}

    def count(self, token: str) -> int:
        """How many leases of a token are counted."""
        found = self._taken.get(token)
        return 0 if found is None else len(found.leases)

    @contextmanager
    def counted(
        self, token: str, shard: str, command: c.Command, known_state: Callable[[], State | None]
    ) -> Iterator[None]:
        """Count what a command, one of `ABOUT`, takes, renews or gives back. Raises Overloaded where it takes too much.

        A lease that was refused is not counted. One that is given up counts for as long as the shard's State, which
        `known_state` tells once the command is done, has it: a command for another life of the shard ends nothing.
        """
        reader: ReaderId = command.reader  # type: ignore[attr-defined]
        known = self._taken.get(token)
        is_new = known is None or (shard, reader) not in known.leases
        if isinstance(command, c.RegisterReader):
            self._take(token, shard, reader, command.lease_ms / 1000)
        try:
            yield
        except Indeterminate:
            raise
        except PersistError:
            if is_new:
                self._give_back(token, shard, reader)
            raise
        if isinstance(command, c.DowngradeSince):
            self._renew(token, shard, reader)
        elif isinstance(command, c.ExpireReader):
            state = known_state()
            if state is not None and reader not in state.leased_readers:
                self._give_back(token, shard, reader)

    def _take(self, token: str, shard: str, reader: ReaderId, seconds: float) -> None:
        """One that is taken again for less is not shortened: the shard may keep the longer."""
        taken = self._taken.setdefault(token, _Taken())
        known, lapses_s = taken.leases.get((shard, reader)), self._now_s() + seconds
        if known is None:
            if self._is_full(taken, shard):
                self._forget_lapsed(taken)
            if self._is_full(taken, shard):
                raise Overloaded(
                    f"the token {token!r} holds {taken.by_shard[shard]} leases on shard {shard!r} and "
                    f"{len(taken.leases)} in all; close readers, or wait: it may hold {self._of_shard_max} on one "
                    f"shard and {self._of_all_max} in all",
                    retry_after_s=LEASE_RETRY_AFTER_S,
                )
            taken.by_shard[shard] += 1
        if known is None or known.lapses_s <= lapses_s:
            taken.leases[shard, reader] = _Lease(lapses_s, seconds)

    def _is_full(self, taken: _Taken, shard: str) -> bool:
        return len(taken.leases) >= self._of_all_max or taken.by_shard[shard] >= self._of_shard_max

    def _renew(self, token: str, shard: str, reader: ReaderId) -> None:
        taken = self._taken.get(token)
        held = None if taken is None else taken.leases.get((shard, reader))
        if held is not None:
            self._take(token, shard, reader, held.lease_s)
        elif taken is None or not self._is_full(taken, shard):  # of another server, or of before this one started
            self._take(token, shard, reader, RENEWED_S)

    def _give_back(self, token: str, shard: str, reader: ReaderId) -> None:
        taken = self._taken.get(token)
        if taken is not None:
            taken.forget(shard, reader)
            if not taken.leases:
                del self._taken[token]

    def _forget_lapsed(self, taken: _Taken) -> None:
        now_s = self._now_s()
        for (shard, reader), lease in list(taken.leases.items()):
            if lease.lapses_s <= now_s:
                taken.forget(shard, reader)
