"""Reading and changing the attributes of a shard, as its users do it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from persist.core import commands as c
from persist.core.attribute import AttributeKey, AttributeUpdate, attribute_key
from persist.core.ids import Token

READ_KEYS_MAX = 1_000  # keys a command
SCAN_PAGE = 1_000  # attributes a command

Updates = AttributeUpdate | Iterable[AttributeUpdate]


class UpdateAttributes(Protocol):
    """Changes attributes under a token: `Shard` gives the one of a writer of its own."""

    def __call__(self, updates: Updates, *, token: Token | None = None) -> None: ...


class Attributes:
    """The attributes of one shard. Thread-safe.

    Keys are UUIDs, 16 bytes or 32 hex digits. Every read is of the current State: it sees all updates that were
    acknowledged before it.
    """

    def __init__(self, send: Callable[[c.Command], c.Result], update: UpdateAttributes) -> None:
        self._send = send
        self._update = update

    def get(self, key: object) -> int | None:
        """The attribute's value; None when it is unset."""
        return self.get_many([key])[attribute_key(key)]

    def get_many(self, keys: Iterable[object]) -> dict[AttributeKey, int | None]:
        """The values by key; those of the same thousand keys are of the same State."""
        wanted = [attribute_key(key) for key in keys]
        found: dict[AttributeKey, int | None] = {}
        for first in range(0, len(wanted), READ_KEYS_MAX):
            found.update(self._values(c.ReadAttributes(tuple(wanted[first : first + READ_KEYS_MAX]))).values)
        return found

    def scan(self, lower: object = None, upper: object = None) -> Iterator[tuple[AttributeKey, int]]:
        """What is set with keys in `[lower, upper)` (None: to the ends), ascending, fetched page by page.

        Each page is of the State when it is fetched. What the shard keeps itself is left out.
        """
        start = attribute_key(bytes(16) if lower is None else lower)
        end = None if upper is None else attribute_key(upper)
        while True:
            page = self._values(c.ScanAttributes(start, end, SCAN_PAGE))
            for key, value in page.values.items():
                assert value is not None
                yield key, value
            if page.following is None:
                return
            start = page.following

    def update(self, updates: Updates, *, token: Token | None = None) -> None:
        """Change attributes, all or nothing. AttributeMismatch: a condition failed; `details["actual"]` has the values.

        Unavailable and Overloaded: it did not happen. Indeterminate: it may have; call again with the same `token`.
        """
        self._update(updates, token=token)

    def _values(self, command: c.Command) -> c.AttributeValues:
        result = self._send(command)
        assert isinstance(result, c.AttributeValues)
        return result
