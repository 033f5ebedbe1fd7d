"""What all asynchronous handles have in common: a handle of `persist` whose methods are awaited.

A handle is opened when it is awaited, or when its first method is. So `await client.shard("orders")` and
`await client.shard("orders").insert(rows)` both do what they look like.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from functools import partial, wraps
from types import TracebackType
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Self, TypeVar

from persist.aio.threads import Threads

# Properties that ask nobody; a property that does is a method here.
AT_HAND = frozenset({"schema", "done", "acknowledged", "transport"})
_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")
_H = TypeVar("_H", bound="AsyncHandle[Any]")
_END = object()
_NOT_OPEN = object()


class AsyncHandle(Generic[_T]):
    """An asynchronous handle; use it on one event loop. Its methods are those of the handle below, awaited."""

    below: ClassVar[type[Any]]  # the class of the handle below

    def __init__(self, threads: Threads, opener: Callable[[], Awaitable[_T]]) -> None:
        self._threads = threads
        self._opener = opener
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

    def __getattr__(self, name: str) -> Any:
        """A public method of the handle below that has no line of its own here, or what is at hand."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        found = inspect.getattr_static(self.below, name, None)
        if inspect.isgeneratorfunction(found):
            return partial(_steps, self, name)
        if inspect.isfunction(found) or (isinstance(found, property) and name not in AT_HAND):
            return partial(_asked, self, name)
        if self._handle is _NOT_OPEN:
            raise AttributeError(f"{self.below.__name__}.{name} is known once it is open: await it first")
        return getattr(self._handle, name)

    @property
    def _is_open(self) -> bool:
        return self._handle is not _NOT_OPEN

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name for name in dir(self.below) if not name.startswith("_"))})

    async def _end(self, kind: type[BaseException] | None) -> None:
        """What the end of an `async with` does."""
        close = getattr(self._handle, "close", None)
        if close is not None:
            await self._threads.run(close)

    async def _ready(self) -> _T:
        """The handle below, opened once for all who wait for it."""
        if self._handle is _NOT_OPEN:
            opening = self._opening or asyncio.ensure_future(self._open())
            self._opening = opening
            self._waiting += 1
            try:
                await asyncio.shield(opening)
            finally:
                self._waiting -= 1
                if self._opening is opening and (opening.done() or not self._waiting):
                    self._opening = None  # whoever asks again opens it anew, if it is not open by then
                    opening.cancel()
        handle: _T = self._handle
        return handle

    async def _open(self) -> _T:
        self._handle = await self._opener()
        found: _T = self._handle
        return found


class Steps(AsyncIterator[_R]):
    """An iterator whose steps are awaited. A step whose task is cancelled is not lost: the next one gives it."""

    def __init__(self, threads: Threads, opener: Callable[[], Awaitable[Iterator[_R]]], *, waits: bool = False) -> None:
        self._threads = threads
        self._opener = opener
        self._waits = waits
        self._steps: Iterator[_R] | None = None
        self._step: asyncio.Future[Any] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _R:
        if self._steps is None:
            self._steps = await self._opener()
        if self._step is None:
            work = partial(next, self._steps, _END)
            self._step = asyncio.ensure_future(self._threads.run(work, waits=self._waits))
        step = self._step
        try:
            found = await asyncio.shield(step)
        except Exception:
            self._step = None
            raise
        self._step = None  # and not where this task was cancelled: then nobody has what came yet
        if found is _END:
            raise StopAsyncIteration
        result: _R = found
        return result


def asks(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], Coroutine[Any, Any, _R]]:
    """The method, awaited."""

    @wraps(method)
    def asked(self: Any, /, *args: _P.args, **options: _P.kwargs) -> Coroutine[Any, Any, _R]:
        return _asked(self, method.__name__, *args, **options)

    return asked


def opens(method: Callable[Concatenate[Any, _P], Any], kind: type[_H]) -> Callable[Concatenate[Any, _P], _H]:
    """The method, which gives a handle that is opened when it is needed."""

    @wraps(method)
    def opened(self: Any, /, *args: _P.args, **options: _P.kwargs) -> _H:
        async def opener() -> Any:
            handle = await self._ready()
            return await self._threads.open(partial(getattr(handle, method.__name__), *args, **options))

        return kind(self._threads, opener)

    return opened


def steps(
    method: Callable[Concatenate[Any, _P], Iterator[_R]], *, waits: bool = False
) -> Callable[Concatenate[Any, _P], Steps[_R]]:
    """The method, which gives an iterator, for `async for`. `waits`: a step may wait for something to come."""

    @wraps(method)
    def stepped(self: Any, /, *args: _P.args, **options: _P.kwargs) -> Steps[_R]:
        return _steps(self, method.__name__, *args, _waits=waits, **options)

    return stepped


async def _asked(self: AsyncHandle[Any], name: str, *args: Any, **options: Any) -> Any:
    handle = await self._ready()
    if isinstance(inspect.getattr_static(self.below, name), property):
        return await self._threads.run(partial(getattr, handle, name))
    found = await self._threads.run(partial(getattr(handle, name), *args, **options))
    return _awaited(self._threads, found)


def _awaited(threads: Threads, found: Any) -> Any:
    """A handle or an iterator, as it is used here; anything else as it is."""
    for kind in AsyncHandle.__subclasses__():
        if isinstance(found, kind.below):
            made = kind(threads, partial(_given, found))
            made._handle = found
            return made
    return Steps(threads, partial(_given, found)) if isinstance(found, Iterator) else found


async def _given(found: Any) -> Any:
    return found


def _steps(self: AsyncHandle[Any], name: str, *args: Any, _waits: bool = False, **options: Any) -> Steps[Any]:
    async def opener() -> Iterator[Any]:
        handle = await self._ready()
        begun: Iterator[Any] = getattr(handle, name)(*args, **options)  # a generator: nothing is done yet
        return begun

    return Steps(self._threads, opener, waits=_waits)
