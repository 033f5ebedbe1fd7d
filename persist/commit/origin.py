"""Of which request the work under way is a part: its id goes with the work as a context variable does."""

from __future__ import annotations

from contextvars import ContextVar, Token
from types import TracebackType

from persist.core.ids import IdSource


class Request:
    """One request, by whoever asks. It has an id ("": none) once it was given one, or was sent to a server."""

    __slots__ = ("id",)

    def __init__(self, request_id: str = "") -> None:
        self.id = request_id

    def named(self, ids: IdSource) -> str:
        """Its id, which is made now if there is none."""
        if not self.id:
            self.id = ids.uuid7()
        return self.id


_CURRENT: ContextVar[Request | None] = ContextVar("persist_request", default=None)


def request_id() -> str:
    """The id of the request that the work under way is for; "" if there is none."""
    found = _CURRENT.get()
    return "" if found is None else found.id


def begin_request(found: str) -> None:
    """The rest of this task, and what it has done on other threads, is for the request of this id."""
    _CURRENT.set(Request(found))


class Requesting:
    """For the length of a `with`: the request under way, else a new one."""

    __slots__ = ("_token",)

    def __init__(self) -> None:
        self._token: Token[Request | None] | None = None

    def __enter__(self) -> Request:
        found = _CURRENT.get()
        if found is None:
            found = Request()
            self._token = _CURRENT.set(found)
        return found

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._token is not None:
            _CURRENT.reset(self._token)
