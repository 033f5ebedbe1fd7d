"""Appends with numbers, by which a shard takes each of them once, also from a writer that starts again.

The shard keeps two attributes of a writer: its instance, which counts how often it was opened, and the number of its
last append. Each append is conditional on the first and moves the second, with its rows or not at all. So an append
that is sent again lands once, and what an earlier instance still has under way does not land.
"""

from __future__ import annotations

from persist.client.shard import Shard
from persist.core.attribute import AttributeUpdate, named_key
from persist.core.errors import AttributeMismatch, Indeterminate, Unavailable

OPEN_TRIES_MAX = 100  # each failed try means that another instance has been opened meanwhile


class Numbered:
    """One writer of one shard, by its name. `stage`: its numbers begin anew in each (an epoch of routes)."""

    def __init__(self, shard: Shard, name: str, stage: str = "") -> None:
        self.shard = shard
        self._name = name
        self._number = named_key(f"numbered writer {name}\0{stage}")
        self._instance = named_key(f"numbered writer's instance {name}")
        self.instance = 0

    def take_over(self) -> None:
        """Become the one instance. Raises Unavailable (many open it at once; retry)."""
        for _ in range(OPEN_TRIES_MAX):
            before = self.shard.attributes.get(self._instance)
            if self._moved(before, (before or 0) + 1):
                return
        raise Unavailable(f"writer {self._name!r} of shard {self.shard.name!r} is being opened by many at once; retry")

    def follow(self, instance: int) -> None:
        """Be that instance here as well. Raises AttributeMismatch (a later one was here already)."""
        for _ in range(OPEN_TRIES_MAX):
            before = self.shard.attributes.get(self._instance)
            if before is not None and before > instance:
                raise self._fenced(before)
            if before == instance or self._moved(before, instance):
                self.instance = instance
                return
        raise Unavailable(f"writer {self._name!r} of shard {self.shard.name!r} is being opened by many at once; retry")

    def check(self) -> None:
        """Raises AttributeMismatch (another instance was opened)."""
        found = self.shard.attributes.get(self._instance)
        if found != self.instance:
            raise self._fenced(found)

    def last(self) -> int:
        """The number of the last append that landed; 0 before the first."""
        return self.shard.attributes.get(self._number) or 0

    def conditions(self, number: int) -> tuple[AttributeUpdate, ...]:
        """What an append of this number takes with it."""
        return (
            AttributeUpdate.replace_if_equals(self._instance, self.instance, self.instance),
            AttributeUpdate.replace_if_greater(self._number, number),
        )

    def landed(self, error: AttributeMismatch, number: int) -> bool:
        """Whether the append was refused because it is there already. Raises AttributeMismatch: of another instance."""
        actual = error.details.get("actual", {})
        if self._instance in actual:
            raise self._fenced(actual[self._instance]) from error
        found = actual.get(self._number)
        return found is not None and found >= number

    def _moved(self, before: int | None, after: int) -> bool:
        """Make the instance `after`, if it is `before`."""
        try:
            self.shard.attributes.update(AttributeUpdate.replace_if_equals(self._instance, after, before))
        except AttributeMismatch:
            return False
        except Indeterminate as error:  # what comes late is fenced by the next number, as another instance is
            if error.details.get("refused") != AttributeMismatch.kind:
                raise
            return False
        self.instance = after
        return True

    def _fenced(self, found: int | None) -> AttributeMismatch:
        return AttributeMismatch(
            f"writer {self._name!r} of shard {self.shard.name!r} was opened elsewhere, which ends this instance; open "
            "it anew to go on",
            actual={self._instance: found},
        )
