"""The base of all asynchronous handles: each wraps a synchronous handle of `persist`, whose methods it awaits.

A handle is opened when it is awaited, or by its first method call. So both `await client.shard("orders")` and
`await client.shard("orders").insert(rows)` work.

A subclass gets the methods of the wrapped class when it is defined, except those that it defines itself. Their types
are in `__init__.pyi`, which is generated.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial, wraps
from threading import BoundedSemaphore, Condition, Thread
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from persist.client.arguments import check_int
from persist.core.errors import InvalidUsage, Overloaded

# Properties that need no store call; any other property is a method here.
AT_HAND = frozenset({"schema", "done", "acknowledged", "transport"})
_R = TypeVar("_R")
_T = TypeVar("_T")
_H = TypeVar("_H", bound="AsyncHandle[Any]")
_END = object()
_NOT_OPEN = object()


class AsyncHandle(Generic[_T]):
    """An asynchronous handle, for use on one event loop. Its methods are those of the wrapped handle, awaited."""

    below: ClassVar[type[Any]]  # the wrapped class
    iterators_wait: ClassVar[bool] = False  # whether a step of an iterator may wait for new data
    kinds: ClassVar[dict[str, type[AsyncHandle[Any]]]] = {}  # by the name of the wrapped class

    def __init_subclass__(cls, below: type[Any]) -> None:
        cls.below = below
        AsyncHandle.kinds[below.__name__] = cls
        for name, member in _public_members(below).items():
            if getattr(cls, name, None) is None:
                setattr(cls, name, _async_member(name, member))

    def __init__(self, threads: Threads, opener: Callable[[], Awaitable[_T]], *, is_view: bool = False) -> None:
        self._threads = threads
        self._opener = opener
        self._is_view = is_view  # of another handle, which closes what is wrapped
        self._handle: Any = _NOT_OPEN
        self._opening: asyncio.Future[_T] | None = None
        self._waiting = 0

    def __repr__(self) -> str:
        return f"<async {self.below.__name__}, not open>" if self._handle is _NOT_OPEN else f"<async {self._handle!r}>"

    def __await__(self) -> Generator[Any, None, Self]:
        yield from self._ready().__await__()
        return self

    async def __aenter__(self) -> Self:
        await self._ready()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._is_open:
            await self._end(kind)

    if not TYPE_CHECKING:  # an unknown name is an error of types

        def __getattr__(self, name: str) -> Any:
            """An attribute of the wrapped handle, available once it is open."""
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
            if self._handle is _NOT_OPEN:
                raise AttributeError(f"{self.below.__name__}.{name} is known once it is open: await it first")
            return getattr(self._handle, name)

    @property
    def _is_open(self) -> bool:
        return self._handle is not _NOT_OPEN

    async def _end(self, kind: type[BaseException] | None) -> None:
        """Runs at the end of an `async with` block."""
        close = getattr(self._handle, "close", None)
        if close is not None:
            await self._threads.run(close)

    async def _ready(self) -> _T:
        """The wrapped handle, opened once for all tasks that wait for it. It is closed if all of them are cancelled."""
        if self._handle is _NOT_OPEN:
            opening = self._opening = self._opening or asyncio.ensure_future(self._opener())
            self._waiting += 1
            try:
                self._handle = await asyncio.shield(opening)
            finally:
                self._waiting -= 1
                if not self._waiting and self._opening is opening:
                    self._opening = None  # a later call opens it anew if it did not open
                    if not opening.cancel() and self._handle is _NOT_OPEN and not self._is_view:
                        self._threads.close_result(opening)  # the last task was cancelled before it could take it
        handle: _T = self._handle
        return handle

    async def _ask(self, call: Callable[[Any], Any]) -> Any:
        """Call the wrapped handle on a thread and return the result."""
        return await self._threads.run(partial(call, await self._ready()))

    def _give(self, kind: type[_H], call: Callable[[Any], Any]) -> _H:
        """The handle that the call returns, opened on first use."""

        async def opener() -> Any:
            handle = await self._ready()
            if kind is type(self):  # another view of the same handle: it needs no store call and must not be closed
                return call(handle)
            return await self._threads.open(partial(call, handle))

        return kind(self._threads, opener, is_view=kind is type(self))

    def _iterate(self, call: Callable[[Any], Iterator[Any]]) -> Steps[Any]:
        """The iterator that the call returns; each step is awaited."""

        async def opener() -> Iterator[Any]:
            return call(await self._ready())  # a generator that has not started yet

        return Steps(self._threads, opener, waits=self.iterators_wait)


class Steps(AsyncIterator[_R]):
    """An iterator with awaited steps. If a task is cancelled during a step, the next step returns its item."""

    def __init__(self, threads: Threads, opener: Callable[[], Awaitable[Iterator[_R]]], *, waits: bool = False) -> None:
        self._threads = threads
        self._opener = opener
        self._waits = waits
        self._steps: Iterator[_R] | None = None
        self.step: Future[Any] | None = None  # under way, or its item was not delivered

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _R:
        if self._steps is None:
            self._steps = await self._opener()
        if self.step is None:
            self.step = self._threads.submit(partial(next, self._steps, _END), waits=self._waits)
        try:
            item = await asyncio.shield(asyncio.wrap_future(self.step))
        except Exception:
            self.step = None
            raise
        self.step = None  # not if this task was cancelled: then the item is not delivered yet
        if item is _END:
            raise StopAsyncIteration
        result: _R = item
        return result


def _public_members(below: type[Any]) -> dict[str, Any]:
    """The public methods of a class, and its properties that need a store call, by name."""
    members = {name: inspect.getattr_static(below, name) for name in dir(below) if not name.startswith("_")}
    return {
        name: member
        for name, member in members.items()
        if inspect.isfunction(member) or (isinstance(member, property) and name not in AT_HAND)
    }


def _async_member(name: str, member: Any) -> Any:
    """Make a method or property asynchronous: awaited, an async iterator, or a handle that opens on first use."""
    is_property = isinstance(member, property)
    function = member.fget if is_property else member
    returned = function.__annotations__.get("return")

    @wraps(function)
    def member_here(self: AsyncHandle[Any], /, *args: Any, **options: Any) -> Any:
        def call(handle: Any) -> Any:
            value = getattr(handle, name)
            return value if is_property else value(*args, **options)

        if inspect.isgeneratorfunction(function):
            return self._iterate(call)
        kind = type(self) if returned == "Self" else AsyncHandle.kinds.get(returned)
        return self._ask(call) if kind is None else self._give(kind, call)

    return property(member_here) if is_property and returned in AsyncHandle.kinds else member_here


# The bounded thread pools of an asynchronous client.

THREADS = 32  # calls at once
THREADS_MAX = 1_024
LISTENERS = 256  # waits of listeners at once; further ones take turns
CALLS_MAX = 10_000  # calls under way or waiting for a thread
RETRY_AFTER_S = 0.1


class CallPool:
    """Up to `threads` threads, started on demand. They are daemons: they do not keep the program alive."""

    def __init__(self, threads: int, name: str) -> None:
        self._most, self._name = threads, name
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._moved = Condition()
        self._begun = self._idle = 0
        self._is_closed = False

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """A future of the work. Raises InvalidUsage if the pool is closed."""
        future: Future[_T] = Future()
        with self._moved:
            if self._is_closed:
                raise InvalidUsage("this client was closed; connect anew")
            self._waiting.append((future, work))
            if self._idle < len(self._waiting) and self._begun < self._most:
                self._begun += 1
                Thread(target=self._run, name=f"{self._name}-{self._begun}", daemon=True).start()
            else:
                self._moved.notify()
        return future

    def close(self) -> None:
        """End the threads once they are idle. Work that has not started is cancelled."""
        with self._moved:
            self._is_closed = True
            left, self._waiting = self._waiting, deque()
            self._moved.notify_all()
        for future, _ in left:
            future.cancel()

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            future, work = taken
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del taken, future, work  # an idle thread must not keep objects alive, such as the hold of a snapshot

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._moved:
            self._idle += 1
            while not self._waiting and not self._is_closed:
                self._moved.wait()
            self._idle -= 1
            return self._waiting.popleft() if self._waiting else None


class Threads:
    """Two pools: one for calls and one for waits, so that waiting listeners do not block calls."""

    def __init__(self, threads: int = THREADS) -> None:
        check_int("threads", threads, 1, THREADS_MAX)
        self._calls = CallPool(threads, "persist-aio")
        self._waits = CallPool(LISTENERS, "persist-aio-wait")
        self._free = BoundedSemaphore(CALLS_MAX)

    def submit(self, work: Callable[[], _T], *, waits: bool = False) -> Future[_T]:
        """Start the work on a thread. Raises Overloaded (too many calls wait), InvalidUsage (the client is closed)."""
        if not self._free.acquire(blocking=False):
            raise Overloaded(f"this client has {CALLS_MAX} calls under way; wait for some", retry_after_s=RETRY_AFTER_S)
        try:
            future = (self._waits if waits else self._calls).submit(work)
        except BaseException:
            self._free.release()
            raise
        future.add_done_callback(lambda _: self._free.release())
        return future

    async def run(self, work: Callable[[], _T]) -> _T:
        """What the work returns. If the task is cancelled, the work is not started, or its result is dropped."""
        return await asyncio.wrap_future(self.submit(work))

    async def open(self, work: Callable[[], _T]) -> _T:
        """As `run`, for work that returns a resource: if the task is cancelled, the resource is closed."""
        future = self.submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_close_result)
            raise

    def close_result(self, future: asyncio.Future[Any]) -> None:
        """Close the unused resource of a future that is done, on a thread. Raises nothing."""
        if _has_result(future):
            with suppress(InvalidUsage, Overloaded):
                self.submit(partial(_close_result, future))

    def close(self) -> None:
        """End: results of calls under way are dropped, and waiting calls never start. Raises nothing."""
        self._calls.close()
        self._waits.close()


def _has_result(future: Future[Any] | asyncio.Future[Any]) -> bool:
    return not future.cancelled() and future.exception() is None


def _close_result(future: Future[Any] | asyncio.Future[Any]) -> None:
    close = getattr(future.result(), "close", None) if _has_result(future) else None
    if close is not None:
        with suppress(Exception):  # the caller is gone
            close()
