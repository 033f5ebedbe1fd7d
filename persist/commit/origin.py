"""Of which request the work under way is a part: its id goes with the work as a context variable does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from persist.core.ids import IdSource

_REQUEST_ID: ContextVar[str] = ContextVar("persist_request_id", default="")


def request_id() -> str:
    """The id of the request that the work under way is for; "" if there is none."""
    return _REQUEST_ID.get()


def set_request_id(found: str) -> None:
    """The rest of this task, and what it has done on other threads, is for this request."""
    _REQUEST_ID.set(found)


@contextmanager
def requesting(ids: IdSource) -> Iterator[str]:
    """The block is for one request: the one under way, else a new one. Its id."""
    found = _REQUEST_ID.get()
    if found:
        yield found
        return
    token = _REQUEST_ID.set(made := ids.uuid7())
    try:
        yield made
    finally:
        _REQUEST_ID.reset(token)
