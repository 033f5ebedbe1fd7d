"""The naive truth of a shard's attributes: what each was when, and whether an update could have happened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

from persist.core.attribute import AttributeUpdate
from tests.simulation.oracle_errors import expect

Values = dict[str, int]
ORDERS_MAX = 5_040  # orders of the commands of one commit that are tried


@dataclass
class AttributeTruth:
    """`values` are those now. `past` has, by key, the events at which it changed and what it may have been there."""

    values: Values = field(default_factory=dict)
    past: dict[str, list[tuple[int, frozenset[int | None]]]] = field(default_factory=dict)

    def land(self, commands: Sequence[Sequence[AttributeUpdate]], held: Mapping[str, int | None], tick: int) -> None:
        """These commands landed in one commit, in some order; `held` is what the State has of their keys after it."""
        keys = {str(update.key) for command in commands for update in command}
        possible: dict[str, set[int | None]] = {key: set() for key in keys}
        after: Values | None = None
        for _, order in zip(range(ORDERS_MAX), permutations(commands), strict=False):
            trail = _trail(self.values, order)
            if trail is None or any(key in held and held[key] != trail[-1].get(key) for key in keys):
                continue
            after = trail[-1]
            for values in trail:
                for key in keys:
                    possible[key].add(values.get(key))
        expect(after is not None, "attribute", f"{commands} cannot have led from {self._of(keys)} to {dict(held)}")
        assert after is not None
        for key in keys:
            self.past.setdefault(key, [(0, frozenset({None}))]).append((tick, frozenset(possible[key])))
            self.past[key].append((tick, frozenset({after.get(key)})))
        self.values = after

    def was(self, key: str, value: int | None, invoked: int, returned: int) -> bool:
        """Whether the attribute may have had the value at some moment of `[invoked, returned]`."""
        past = self.past.get(key, [(0, frozenset({None}))])
        current = [values for tick, values in past if tick <= invoked][-1:]
        meanwhile = [values for tick, values in past if invoked < tick <= returned]
        return any(value in values for values in current + meanwhile)

    def check(self, found: Iterable[tuple[str, int | None]], invoked: int, returned: int) -> None:
        """Each of these was the attribute's value at some moment of `[invoked, returned]`."""
        for key, value in found:
            possible = self.was(str(key), value, invoked, returned)
            expect(possible, "attribute", f"{key} was not {value} meanwhile: {self.past.get(str(key), [])[-4:]}")

    def _of(self, keys: Iterable[str]) -> dict[str, int | None]:
        return {key: self.values.get(key) for key in sorted(keys)}


def _trail(values: Values, commands: Iterable[Sequence[AttributeUpdate]]) -> list[Values] | None:
    """The values after each command; None when one cannot have happened."""
    trail = []
    for command in commands:
        values = dict(values)
        for update in command:
            if not _apply(values, update):
                return None
        trail.append(values)
    return trail


def _apply(values: Values, update: AttributeUpdate) -> bool:
    key, now = str(update.key), values.get(str(update.key))
    if update.verb == "delete":
        values.pop(key, None)
        return True
    if update.verb == "accumulate":
        values[key] = (now or 0) + update.value
        return True
    if update.verb == "replace_if_equals" and now != update.expected:
        return False
    if update.verb == "replace_if_greater" and now is not None and now >= update.value:
        return False
    values[key] = update.value
    return True


__all__ = ["AttributeTruth"]
