"""Reading and changing the attributes of a shard, as its users do it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from persist.core import commands as c
from persist.core.attribute import AttributeKey, AttributeUpdate, attribute_key
from persist.core.errors import InvalidUsage
from persist.core.ids import Token

READ_KEYS_MAX = 1_000  # keys a command
SCAN_PAGE = 1_000  # attributes a command

AttributeUpdates = AttributeUpdate | Iterable[AttributeUpdate]
K = TypeVar("K")


class AttributeWriter(Protocol):
    """Changes attributes under a token: `Shard` gives the one of a writer of its own."""

    def __call__(self, updates: AttributeUpdates, *, token: Token | None = None) -> None: ...


class Attributes:
    """The attributes of one shard. Thread-safe.

    Keys are UUIDs, 16 bytes or 32 hex digits. Every read is of the current State: it sees all updates that were
    acknowledged before it.
    """

    def __init__(self, shard: str, send: Callable[[c.Command], c.Result], update: AttributeWriter) -> None:
        self._shard = shard
        self._send = send
        self._update = update

    def __repr__(self) -> str:
        return f"Attributes({self._shard!r})"

    def get(self, key: object) -> int | None:
        """The attribute's value; None when it is unset. Raises InvalidUsage: `key` is none."""
        return self.get_many([attribute_key(key)]).popitem()[1]

    def get_many(self, keys: Iterable[K]) -> dict[K, int | None]:
        """The values by `keys` as they were given; those of the same thousand keys are of the same State.

        Raises InvalidUsage (one of them is no key).
        """
        try:
            wanted = {key: attribute_key(key) for key in keys}
        except TypeError as error:
            raise InvalidUsage(f"keys come as a list of UUIDs, bytes or hex digits: {error}") from None
        distinct = tuple(dict.fromkeys(wanted.values()))
        found: dict[AttributeKey, int | None] = {}
        for first in range(0, len(distinct), READ_KEYS_MAX):
            found.update(self._values(c.ReadAttributes(distinct[first : first + READ_KEYS_MAX])).values)
        return {given: found[key] for given, key in wanted.items()}

    def scan(self, lower: object = None, upper: object = None) -> Iterator[tuple[AttributeKey, int]]:
        """What is set with keys in `[lower, upper)` (None: to the ends), ascending, fetched page by page.

        Each page is of the State when it is fetched. What the shard keeps itself is left out. Raises InvalidUsage (a
        bound is no key).
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

    def update(self, updates: AttributeUpdates, *, token: Token | None = None) -> None:
        """Change attributes as `updates` say, all or nothing.

        Raises: AttributeMismatch (a condition does not hold; `details["actual"]` has the values), Unavailable and
            Overloaded (it did not happen), Indeterminate (it may have: call again with this call's `token`).
        """
        self._update(updates, token=token)

    def _values(self, command: c.Command) -> c.AttributeValues:
        result = self._send(command)
        assert isinstance(result, c.AttributeValues)
        return result
