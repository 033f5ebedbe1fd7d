"""Waits for shards to advance, for thousands of waiters on the event loop without a thread each.

Each shard with waiters is watched once. Local commits wake its waiters at once, the store's push channel soon (through
`Location`), and polling covers the rest: one round-robin over all watched shards, so that idle shards together cost a
fixed rate of reads if the store pushes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from persist.commit.committer import Machine
from persist.commit.location import POLL_WITHOUT_PUSH_S, Location
from persist.core.errors import PersistError
from persist.core.shard_view import ViewRequest
from persist.core.state import State
from rpc.concurrency_limits import CALLER, Work

WAITS_MAX = 20_000  # requests that wait for a shard to advance
POLLS_PER_S_WITH_PUSH = 2.0  # of all watched shards together, in case the push channel misses something
POLLS_PER_S_WITHOUT_PUSH = 500.0


class _Watched:
    """One shard with waiters."""

    def __init__(self, machine: Machine, stop: Callable[[], None]) -> None:
        self.machine = machine
        self.stop = stop
        self.users = 0
        self.moved = asyncio.Event()
        self.woken = False  # a wake-up is queued on the loop


class ShardWatcher:
    """Waits for shards of one location. All methods belong to the event loop's thread."""

    def __init__(self, location: Location, work: Work) -> None:
        self._location = location
        self._work = work
        self._watched: dict[str, _Watched] = {}
        self._poller: asyncio.Task[None] | None = None
        self.stopping = asyncio.Event()

    @property
    def waiting(self) -> int:
        """The number of waits in progress."""
        return sum(watched.users for watched in self._watched.values())

    async def state(self, name: str, request: ViewRequest) -> State:
        """The State that a view request asks for, as `persist.client.embedded.view_state` does."""
        machine = self._location.machine(name)
        self._location.identity.refuse_copy()
        cached = machine.cached
        if cached is None or request.min_seqno <= 0 or cached.seqno < request.min_seqno:
            cached = await self._work.run(machine.refresh)
        if is_past(cached, request.past) or request.timeout_s <= 0:
            return cached
        deadline = asyncio.get_running_loop().time() + request.timeout_s
        with self.watch(name) as watch:
            while True:
                state = watch.machine.cached or cached
                left = deadline - asyncio.get_running_loop().time()
                if is_past(state, request.past) or left <= 0 or self.stopping.is_set():
                    return state
                await watch.wait(left)

    @contextlib.contextmanager
    def watch(self, name: str) -> Iterator[Watch]:
        watched = self._watched.get(name)
        if watched is None:
            machine = self._location.machine(name)
            watched = self._watched[name] = _Watched(machine, machine.watch(self._waker(name)))
        watched.users += 1
        if self._poller is None and not self.stopping.is_set():
            self._poller = asyncio.get_running_loop().create_task(self._poll())
        try:
            yield Watch(watched)
        finally:
            watched.users -= 1
            if watched.users == 0:
                watched.stop()
                del self._watched[name]

    def stop(self) -> None:
        """End all waits at once, with the current State."""
        self.stopping.set()
        for watched in self._watched.values():
            watched.moved.set()
        if self._poller is not None:
            self._poller.cancel()

    def _waker(self, name: str) -> Callable[[State], None]:
        loop = asyncio.get_running_loop()

        def moved(_: State) -> None:
            watched = self._watched.get(name)
            if watched is None or watched.woken:
                return
            watched.woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits
                loop.call_soon_threadsafe(self._wake, watched)

        return moved

    @staticmethod
    def _wake(watched: _Watched) -> None:
        watched.woken = False
        watched.moved.set()
        watched.moved = asyncio.Event()  # the current waiters hold the old one

    async def _poll(self) -> None:
        """Read the watched shards in turn while there are any."""
        CALLER.set("")  # it works for all waiters, not for the first one
        pushed = self._location.poll_s > POLL_WITHOUT_PUSH_S
        rate = POLLS_PER_S_WITH_PUSH if pushed else POLLS_PER_S_WITHOUT_PUSH
        while self._watched:
            names = list(self._watched)
            pause = max(1 / rate, self._location.poll_s / len(names))
            for name in names:
                await asyncio.sleep(pause)
                watched = self._watched.get(name)
                if watched is None:
                    continue
                machine = self._location.machine(name)
                if machine is not watched.machine:  # the cache has dropped the watched machine
                    watched.stop()
                    watched.machine, watched.stop = machine, machine.watch(self._waker(name))
                    self._wake(watched)
                with contextlib.suppress(PersistError):  # overloaded: the next round reads it
                    await self._work.run(machine.refresh_quietly)
        self._poller = None


class Watch:
    """A watched shard."""

    def __init__(self, watched: _Watched) -> None:
        self._watched = watched
        self._moved = watched.moved

    @property
    def machine(self) -> Machine:
        """The machine that receives updates. It changes if the cache drops the previous one."""
        return self._watched.machine

    async def wait(self, timeout_s: float) -> bool:
        """Whether the shard advanced within `timeout_s` since the last call (or since it is watched)."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._moved.wait()
        except TimeoutError:
            return False
        self._moved = self._watched.moved
        return True


def is_past(state: State, past: int | None) -> bool:
    """Whether the time `past` is complete."""
    return past is None or not state.upper.less_equal(past)
