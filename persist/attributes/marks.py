"""Marks in the index of attributes: which upper the shard had by an instant that is no longer in the State.

Later marks come first there, so the newest one at or before an instant is the first entry from that instant's key on.
The uppers of marks never go back, so the first mark beyond a time is found by halving.
"""

from __future__ import annotations

from persist.attributes.tree import NodeReader, entries, last_key
from persist.core.attribute import MARKS_FROM, AttributeKey
from persist.core.marks import Mark, mark_key, mark_of
from persist.core.state import State

OUTLIVED_MAX = 4_096  # marks that one flush takes out


class Marks:
    """The marks in the index of this State; not those that the State itself holds, which are later."""

    def __init__(self, state: State, reader: NodeReader) -> None:
        self._state = state
        self._reader = reader

    def newest_at(self, at_ms: int) -> Mark | None:
        """The newest mark at or before the instant."""
        if at_ms < 0:
            return None  # no mark lies before 1970
        for leaf in entries(self._state.attribute_root, self._reader, bytes.fromhex(mark_key(at_ms))):
            for key, value in leaf:
                return mark_of(AttributeKey(key.hex()), value)
        return None

    def first_ms(self) -> int | None:
        """Where the oldest mark lies: the last entry of all. None: there is none in the index."""
        found = last_key(self._state.attribute_root, self._reader)
        key = AttributeKey("" if found is None else found.hex())
        return mark_of(key, 0).at_ms if key >= MARKS_FROM else None

    def first_beyond(self, time: int) -> Mark | None:
        """The first mark whose upper is beyond the time. None: there is none in the index."""
        state, last = self._state, self._state.seal.last
        if last is None:
            return None
        found = self.newest_at(min([*state.marks, last.at_ms]) - 1)
        if found is None or found.upper.less_equal(time):
            return None
        first_ms = 0  # no mark before this instant is beyond the time
        while first_ms < found.at_ms:
            middle = (first_ms + found.at_ms - 1) // 2
            mark = self.newest_at(middle)
            if mark is not None and not mark.upper.less_equal(time):
                found = mark
            else:
                first_ms = middle + 1
        return found

    def around(self, first: int, last: int, limit: int) -> tuple[Mark, ...]:
        """The marks from the first one beyond `last` on, newest first, down to one that is not beyond `first`.

        At most `limit`. Where none is beyond `last`, from the newest one on.
        """
        state, newest = self._state, self._state.seal.last
        if newest is None:
            return ()
        beyond = self.first_beyond(last)
        from_ms = min([*state.marks, newest.at_ms]) - 1 if beyond is None else beyond.at_ms
        found: list[Mark] = []
        if from_ms < 0:
            return ()  # no mark lies before 1970
        for leaf in entries(state.attribute_root, self._reader, bytes.fromhex(mark_key(from_ms))):
            for key, value in leaf:
                found.append(mark_of(AttributeKey(key.hex()), value))
                if len(found) == limit or found[-1].upper.less_equal(first):
                    return tuple(found)
        return tuple(found)

    def outlived(self) -> list[AttributeKey]:
        """Marks whose answer lies before since, but for the newest of them, by which it is told; some, if many."""
        since, root = self._state.since.element, self._state.attribute_root
        if since is None or not root.height:
            return []
        first = self.first_beyond(since)
        last = self._state.seal.last
        if first is None and (last is None or last.upper.less_equal(since)):
            return []  # what the State holds lies before since too: the next flush finds the same
        before_ms = first.at_ms if first is not None else min([*self._state.marks, last.at_ms if last else 0])
        newest = self.newest_at(before_ms - 1)
        found: list[AttributeKey] = []
        if newest is None or not newest.at_ms:
            return found
        for leaf in entries(root, self._reader, bytes.fromhex(mark_key(newest.at_ms - 1))):
            found += [AttributeKey(key.hex()) for key, _ in leaf[: OUTLIVED_MAX - len(found)]]
            if len(found) == OUTLIVED_MAX:
                break
        return found
