"""Mappings that share what did not change: a State has tens of thousands of entries, and a commit changes a few.

A change costs time in proportion to what changed, on average; so does comparing two mappings of which one was derived
from the other. A mapping is an immutable dict and a small dict of changes, which are folded into a new dict when they
become many (as in log-structured stores).
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from itertools import repeat
from math import isqrt
from typing import Any, Generic, TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")

_DELETED: Any = object()
_SAME: Any = object()  # as in the dict below
CHANGES_MIN = 32  # plus the square root of the entries: then copying the changes costs as much as folding them


class Entries(Mapping[_K, _V], Generic[_K, _V]):
    """An immutable mapping. `with_changes` makes one from another mapping.

    `due` is for entries that expire: a time before which none does. `held` is for entries that hold a seqno: the least
    one. None: not known. Both are caches that any caller may set.
    """

    __slots__ = ("_base", "_changes", "_length", "due", "held")

    def __init__(
        self, base: Mapping[_K, _V], changes: dict[_K, _V], length: int, due: int | None = None, held: int | None = None
    ) -> None:
        self._base = base
        self._changes = changes
        self._length = length
        self.due = due
        self.held = held

    def __getitem__(self, key: _K) -> _V:
        change = self._changes.get(key, _SAME)
        if change is _SAME:
            return self._base[key]
        if change is _DELETED:
            raise KeyError(key)
        value: _V = change
        return value

    def get(self, key: Any, default: Any = None) -> Any:
        change = self._changes.get(key, _SAME)
        if change is _SAME:
            return self._base.get(key, default)
        return default if change is _DELETED else change

    def __contains__(self, key: Any) -> bool:
        change = self._changes.get(key, _SAME)
        return key in self._base if change is _SAME else change is not _DELETED

    def __iter__(self) -> Iterator[_K]:
        changes = self._changes
        for key in self._base:
            if changes.get(key) is not _DELETED:
                yield key
        for key, value in changes.items():
            if value is not _DELETED and key not in self._base:
                yield key

    def __len__(self) -> int:
        return self._length

    def plain(self) -> dict[_K, _V]:
        """A new dict of the same entries, in their order. Much faster than looking them up one by one."""
        merged = {**self._base, **self._changes}
        if len(merged) == self._length:
            return merged
        return {key: value for key, value in merged.items() if value is not _DELETED}

    def items(self) -> ItemsView[_K, _V]:
        return self.plain().items()

    def values(self) -> ValuesView[_V]:
        return self.plain().values()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return len(self) == len(other) and difference(other, self) == ({}, ())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Entries({dict(self)})"


def with_changes(before: Mapping[_K, _V], changed: Mapping[_K, _V], deleted: Iterable[_K] = ()) -> Entries[_K, _V]:
    """The mapping with these entries set and these keys deleted, some of which may be missing."""
    length, changes, gone = len(before), dict(changed), frozenset(deleted)
    for key in changed:
        length += key not in before
    for key in gone:
        length -= key in before
        changes[key] = _DELETED
    base, due, held = before, None, None
    if isinstance(before, Entries):
        base, due, held = before._base, before.due, _held(before, changed, gone)
        changes = {**before._changes, **changes}
    if len(changes) > CHANGES_MIN + isqrt(len(base)):
        folded = {**base, **changes}
        base, changes = {key: value for key, value in folded.items() if value is not _DELETED}, {}
    if due is not None:
        due = min([due, *(entry.lapses_ms for entry in changed.values())])  # type: ignore[attr-defined]
    return Entries(base, changes, length, due, held)


def _held(before: Entries[Any, Any], changed: Mapping[Any, Any], gone: frozenset[Any]) -> int | None:
    """The least seqno after this change. None: unknown, also if the entry that held it has changed or gone."""
    held = before.held
    if held is None or any(key in before and before[key].seqno == held for key in (*changed, *gone)):
        return None
    least: int = min([held, *(entry.seqno for key, entry in changed.items() if key not in gone)])
    return least


def watched(entries: Mapping[_K, _V]) -> Entries[_K, _V]:
    """The same entries, as a mapping with caches. One that was decoded is a plain dict without caches."""
    return entries if isinstance(entries, Entries) else Entries(entries, {}, len(entries))


def difference(before: Mapping[_K, _V], after: Mapping[_K, _V]) -> tuple[dict[_K, _V], tuple[_K, ...]]:
    """The arguments with which `with_changes` makes `after` from `before`: entries to set, and keys to delete."""
    if isinstance(before, Entries) and isinstance(after, Entries) and before._base is after._base:
        old, new = before._changes, after._changes  # of which one was made from the other, so most are the same object
        pairs = zip(new, map(old.get, new, repeat(_SAME)), new.values(), strict=False)
        keys: Iterable[_K] = [key for key, was, now in pairs if was is not now]
        if not old.keys() <= new.keys():
            keys = [*keys, *(key for key in old if key not in new)]
    elif isinstance(after, Entries) and after._base is before:
        keys = after._changes
    else:
        keys = {**before, **after}
    changed, deleted = {}, []
    for key in keys:
        if key not in after:
            if key in before:
                deleted.append(key)
        elif key not in before or (before[key] is not after[key] and before[key] != after[key]):
            changed[key] = after[key]
    return changed, tuple(deleted)
