"""The base of all asynchronous handles: each wraps a synchronous handle of `persist`, whose methods it awaits.

A handle is opened when it is awaited, or by its first method call. So both `await client.shard("orders")` and
`await client.shard("orders").insert(rows)` work.

A subclass gets the methods of the wrapped class when it is defined, except those that it defines itself. Their types
are in `__init__.pyi`, which is generated.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from concurrent.futures import Future
from functools import partial, wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from persist.aio.threads import Threads

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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
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
        handle = await self._ready()
        return await self._threads.run(partial(call, handle))

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
