"""The public handle to read and change the attributes of a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from persist.core import commands as c
from persist.core.attribute import AttributeKey, AttributeUpdate, attribute_key
from persist.core.errors import InvalidUsage

READ_KEYS_MAX = 1_000  # keys per command
SCAN_PAGE = 1_000  # attributes per command

AttributeUpdates = AttributeUpdate | Iterable[AttributeUpdate]
K = TypeVar("K")


class AttributeWriter(Protocol):
    """Changes attributes under an idempotency token."""

    def __call__(self, updates: AttributeUpdates, *, token: str | None = None) -> None: ...


class Attributes:
    """The attributes of one shard. Thread-safe.

    Keys are UUIDs, 16 bytes or 32 hex digits. Every read is linearizable: it sees all updates acknowledged before it.
    """

    def __init__(self, shard: str, send: Callable[[c.Command], c.Result], update: AttributeWriter) -> None:
        self._shard = shard
        self._send = send
        self._update = update

    def __repr__(self) -> str:
        return f"Attributes({self._shard!r})"

    def get(self, key: object) -> int | None:
        """The attribute's value; None when it is unset. Raises InvalidUsage if `key` is not a key."""
        return self.get_many([attribute_key(key)]).popitem()[1]

    def get_many(self, keys: Iterable[K]) -> dict[K, int | None]:
        """The values by `keys`, in the form that the caller passed. Each thousand keys are read from one State.

        Raises InvalidUsage if one of them is not a key.
        """
        try:
            wanted = {key: attribute_key(key) for key in keys}
        except TypeError as error:
            raise InvalidUsage(f"keys are a list of UUIDs, bytes or hex digits: {error}") from None
        distinct = tuple(dict.fromkeys(wanted.values()))
        values: dict[AttributeKey, int | None] = {}
        for first in range(0, len(distinct), READ_KEYS_MAX):
            values.update(self._values(c.ReadAttributes(distinct[first : first + READ_KEYS_MAX])).values)
        return {original: values[key] for original, key in wanted.items()}

    def scan(self, lower: object = None, upper: object = None) -> Iterator[tuple[AttributeKey, int]]:
        """The attributes with keys in `[lower, upper)` (None: unbounded), ascending, fetched page by page.

        Each page reads the State at the time it is fetched. Internal attributes are left out. Raises InvalidUsage if a
        bound is not a key.
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

    def update(self, updates: AttributeUpdates, *, token: str | None = None) -> None:
        """Change attributes as `updates` say, all or nothing.

        Raises: AttributeMismatch (a condition does not hold; `details["actual"]` has the values), Unavailable and
            Overloaded (it did not happen), Indeterminate (it may have: call again with this call's `token`).
        """
        self._update(updates, token=token)

    def _values(self, command: c.Command) -> c.AttributeValues:
        result = self._send(command)
        assert isinstance(result, c.AttributeValues)
        return result
