"""Builds that are broken on purpose: the proof that the checkers can fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

MUTATIONS: dict[str, Callable[[], AbstractContextManager[None]]] = {}


@contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """The build with that mutation, or the sound one."""
    with MUTATIONS[name]() if name else nullcontext():
        yield
