"""Limits of concurrent work: slots in total and per caller, bounded thread pools, and leases per token."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, NamedTuple, TypeVar

from persist.commit.commit_plan import Outcome
from persist.commit.committer import Machine
from persist.commit.part_validator import BRINGING, is_at_once
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.errors import Indeterminate, Overloaded, PersistError, Unavailable
from persist.core.ids import ReaderId
from persist.core.state import State
from persist.core.transitions.context import SOUND, Verdict
from rpc.settings import Limits

# Slots are limited in total and per caller. What is taken is always given back by a `with` block.


K = TypeVar("K")
RETRY_AFTER_S = 0.1
SHARE_PERCENT = 50  # of a limit that one token or address may use
CALLER: ContextVar[str] = ContextVar("persist.caller", default="")
"""For whom the current task works: a token or, without tokens, an address. Empty: the server itself, or a process of
this machine at a server without tokens; only the total limits apply to these."""


def share(most: int, percent: int = SHARE_PERCENT) -> int:
    """The part of `most` that one caller may use, at least 1."""
    return max(1, most * percent // 100)


class Slots:
    """`taken` of `most` slots are in use, at most `share` by one caller. Thread-safe. `what` is for errors."""

    def __init__(self, most: int, what: str, share: int | None = None) -> None:
        self.taken = 0
        self.most = most
        self._share = most if share is None else share
        self._what = what
        self._lock = threading.Lock()
        self._by_caller: dict[str, int] = {}  # callers with at least one slot

    def take(self, count: int = 1) -> None:
        """Raises Overloaded beyond a limit; then nothing was taken."""
        caller = CALLER.get()
        with self._lock:
            if self.taken + count > self.most:
                raise Overloaded(f"the server has too {self._what}; slow down", retry_after_s=RETRY_AFTER_S)
            if caller:
                mine = self._by_caller.get(caller, 0) + count
                if mine > self._share and mine > count:
                    raise Overloaded(
                        f"{caller} has too {self._what}: one caller may use {self._share} of {self.most}; slow down",
                        retry_after_s=RETRY_AFTER_S,
                    )
                self._by_caller[caller] = mine
            self.taken += count

    def give_back(self, count: int = 1) -> None:
        with self._lock:
            self.taken -= count
            decrease(self._by_caller, CALLER.get(), count)

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.give_back()


class CommandTurns:
    """Slots that are waited for: callers are served round-robin, the requests of each in order.

    A request for more than `most`, or than a share, is granted when nothing else is taken: in total, or by that caller.
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
        self._admit()  # the callers that wait may have used up their shares, and this one not
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
        decrease(self._by_caller, CALLER.get(), count)
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
        """Grant what is possible. A request that exceeds the free slots blocks those behind it, or it would starve."""
        passed = 0  # consecutive callers that have used up their shares
        while passed < len(self._waiting):
            caller, queue = next(iter(self._waiting.items()))
            count, waiter = queue[0]
            is_waiting = not waiter.done()  # else it is cancelled
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


def decrease(counts: dict[K, int], key: K, count: int = 1) -> None:
    """Subtract from a count, and remove it at zero."""
    left = counts.get(key, 0) - count
    if left > 0:
        counts[key] = left
    else:
        counts.pop(key, None)


# Bounded thread pools for blocking work, so that the event loop never waits for a store.

T = TypeVar("T")
IO_QUEUE_MAX = 2_000  # work that waits for a thread
IO_SHARE_PERCENT = 25  # of the threads for one caller: each busy thread also delays the event loop
WORKED_BYTES_MAX = 128 * 1024 * 1024  # of complete bodies in memory that are processed; others wait
DECODING_PERCENT = 133  # of the decoded size of one body: the limit for all bodies together
DOWNLOADS_BYTES_MAX = 64 * 1024 * 1024  # of parts that are sent; others wait


class Work:
    """Two thread pools: commits (`lead`) and everything else (`run`). Used from the event loop's thread.

    A commit waits `linger_s` for more commands; one that begins while another is in progress also waits for that.
    """

    def __init__(self, limits: Limits, linger_s: float = 0.0) -> None:
        self._linger_s = linger_s
        self.leads = Slots(max(1, limits.io_threads // 2), "many commits")  # commits that are running
        self._leads = ThreadPoolExecutor(self.leads.most, thread_name_prefix="persist-commit")
        self._io = ThreadPoolExecutor(limits.io_threads, thread_name_prefix="persist-io")
        self._answers: _Answers | None = None
        self.io_queued = Slots(IO_QUEUE_MAX, "much work queued", share(IO_QUEUE_MAX))
        # The queue bounds the total.
        self._io_turns = CommandTurns(IO_QUEUE_MAX, share(limits.io_threads, IO_SHARE_PERCENT))
        self.commands = Slots(limits.commands_max, "many commands queued", share(limits.commands_max))
        self.body_bytes = Slots(limits.bodies_bytes_max, "many request bodies", share(limits.bodies_bytes_max))
        self.spooled = Slots(limits.spool_bytes_max, "many large request bodies", share(limits.spool_bytes_max))
        self.worked = CommandTurns(WORKED_BYTES_MAX, share(WORKED_BYTES_MAX))
        # One whole body must always fit: its rows are counted in pieces.
        decoding = limits.decoded_bytes_max * DECODING_PERCENT // 100
        most = max(share(decoding), limits.decoded_bytes_max)
        self.decoded = Slots(decoding, "many rows to work on", most)
        self.downloads = CommandTurns(DOWNLOADS_BYTES_MAX, share(DOWNLOADS_BYTES_MAX))

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Run blocking work on another thread, as a part of this request. Raises Overloaded if too much is queued.

        Each caller may use a share of the threads; the rest of its work waits while that of others proceeds.
        """
        with self.io_queued:
            await self._io_turns.take()
            try:
                return await asyncio.get_running_loop().run_in_executor(self._io, copy_context().run, work, *args)
            except RuntimeError as error:
                if "shutdown" not in str(error):
                    raise
                raise Unavailable("the server is shutting down; retry, or use another server") from error
            finally:
                self._io_turns.give_back()

    async def apply(
        self,
        machine: Machine,
        command: c.Command,
        caller: Caller = NOBODY,
        admitted: Callable[[Verdict], None] | None = None,
    ) -> c.Result:
        """Commit a command. It is committed even if the caller disconnects.

        `admitted` is called after its parts were validated; if it raises, the command is not committed.
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
        """Commit a command that was validated already."""
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
        """Finish running work and drop what is queued."""
        self._leads.shutdown(wait=True)
        self._io.shutdown(wait=True, cancel_futures=True)

    def _lead_soon(self, loop: asyncio.AbstractEventLoop, lead: Callable[[], None]) -> None:
        """Start a commit in the loop's next turn, or after `linger_s`, so that commands that arrived by then join it.

        Called from any thread. One turn of the loop is short compared to any commit.
        """
        try:
            if self._linger_s:
                loop.call_soon_threadsafe(loop.call_later, self._linger_s, self._lead, lead)
            else:
                loop.call_soon_threadsafe(loop.call_soon, self._lead, lead)
        except RuntimeError:  # the loop is closed: queued commands must still be answered
            self._lead(lead)

    def _lead(self, lead: Callable[[], None]) -> None:
        def counted() -> None:
            with self.leads:
                lead()

        try:
            self._leads.submit(counted)
        except RuntimeError:  # shutting down: queued commands must still be answered
            lead()


class _Answers:
    """Hands outcomes from commit threads to the event loop, with one wake-up per group of outcomes.

    At each wake-up the committing thread has to wait for the interpreter, which the loop takes at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._pending: deque[tuple[asyncio.Future[c.Result], Outcome]] = deque()

    def give(self, waiter: asyncio.Future[c.Result], outcome: Outcome) -> None:
        """From any thread; call `wake` afterwards."""
        self._pending.append((waiter, outcome))

    def wake(self) -> None:
        """From any thread: deliver the pending outcomes."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits for them
            self.loop.call_soon_threadsafe(self._settle_all)

    def _settle_all(self) -> None:
        while self._pending:
            waiter, outcome = self._pending.popleft()
            if waiter.done():  # the request was cancelled
                continue
            if isinstance(outcome, BaseException):
                waiter.set_exception(outcome)
            else:
                waiter.set_result(outcome)


# Leased readers of each token at this server: on one shard, and in total.
#
# Each lease of a read-only token holds back garbage collection and costs the writers of the shard a little. Each server
# counts separately; after a restart it learns of earlier leases only when they are renewed.

LEASE_RETRY_AFTER_S = 5.0
RENEWED_S = 3600.0  # how long a lease counts of which only the renewal was seen here
LEASE_COMMANDS = frozenset({c.RegisterReader, c.DowngradeSince, c.ExpireReader})


class _Lease(NamedTuple):
    lapses_s: float
    lease_s: float


class TokenLeases:
    """Counts leases by token. Lapsed ones are forgotten when a limit is reached. Belongs to the event loop."""

    def __init__(self, of_shard_max: int, of_all_max: int, now_s: Callable[[], float]) -> None:
        self._of_shard_max = of_shard_max
        self._of_all_max = of_all_max
        self._now_s = now_s
        self._leases: dict[str, dict[tuple[str, ReaderId], _Lease]] = {}  # by token
        self._by_shard: Counter[tuple[str, str]] = Counter()  # of each token

    def count(self, token: str) -> int:
        """The number of counted leases of a token."""
        return len(self._leases.get(token, ()))

    @contextmanager
    def counted(
        self, token: str, shard: str, command: c.Command, known_state: Callable[[], State | None]
    ) -> Iterator[None]:
        """Count what a command in `LEASE_COMMANDS` takes, renews or gives back. Raises Overloaded beyond a limit.

        A refused lease is not counted. An expired one counts until it is gone from the shard's State, which
        `known_state` returns after the command: a command for another incarnation of the shard ends nothing.
        """
        reader: ReaderId = command.reader  # type: ignore[attr-defined]
        is_new = (shard, reader) not in self._leases.get(token, ())
        if isinstance(command, c.RegisterReader):
            self._take(token, shard, reader, command.lease_ms / 1000)
        try:
            yield
        except Indeterminate:
            raise
        except PersistError:
            if is_new:
                self._forget(token, shard, reader)
            raise
        if isinstance(command, c.DowngradeSince):
            self._renew(token, shard, reader)
        elif isinstance(command, c.ExpireReader):
            state = known_state()
            if state is not None and reader not in state.leased_readers:
                self._forget(token, shard, reader)

    def _take(self, token: str, shard: str, reader: ReaderId, seconds: float) -> None:
        """Taking a lease again for a shorter time does not shorten it: the shard may keep the longer time."""
        known, lapses_s = self._leases.get(token, {}).get((shard, reader)), self._now_s() + seconds
        if known is None:
            if self._is_full(token, shard):
                self._forget_lapsed(token)
            if self._is_full(token, shard):
                raise Overloaded(
                    f"the token {token!r} holds {self._by_shard[token, shard]} leases on shard {shard!r} and "
                    f"{self.count(token)} in total; close readers, or wait: it may hold {self._of_shard_max} on one "
                    f"shard and {self._of_all_max} in total",
                    retry_after_s=LEASE_RETRY_AFTER_S,
                )
            self._by_shard[token, shard] += 1
        if known is None or known.lapses_s <= lapses_s:
            self._leases.setdefault(token, {})[shard, reader] = _Lease(lapses_s, seconds)

    def _is_full(self, token: str, shard: str) -> bool:
        return self.count(token) >= self._of_all_max or self._by_shard[token, shard] >= self._of_shard_max

    def _renew(self, token: str, shard: str, reader: ReaderId) -> None:
        known = self._leases.get(token, {}).get((shard, reader))
        if known is not None or not self._is_full(token, shard):  # None: taken at another server, or before a restart
            self._take(token, shard, reader, RENEWED_S if known is None else known.lease_s)

    def _forget(self, token: str, shard: str, reader: ReaderId) -> None:
        leases = self._leases.get(token, {})
        if leases.pop((shard, reader), None) is not None:
            decrease(self._by_shard, (token, shard))
            if not leases:
                del self._leases[token]

    def _forget_lapsed(self, token: str) -> None:
        now_s = self._now_s()
        for (shard, reader), lease in list(self._leases.get(token, {}).items()):
            if lease.lapses_s <= now_s:
                self._forget(token, shard, reader)
