"""Lists of blobs that are lent, as they lie in the blob store, and what they keep from being deleted.

Lists are looked through one after another. So memory is that of one list, and of as many more as are remembered.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice

from blob import Blob, BlobNotFound
from persist.commit.place import Committer
from persist.core.errors import Corruption, Unavailable
from persist.core.loans import compact
from persist.core.state import State
from persist.formats.state_frames import decode_lent
from persist.formats.store_errors import translated_but_missing

IDS_KEPT_MAX = 200_000  # ids of blobs that are remembered, of all lists together
PAGE = 50_000  # blobs that are compared with every list at once


class LoanLists:
    """Reads lists. Thread-safe. A list never changes, so what was read is remembered, up to a bound."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self._lock = threading.Lock()
        self._ids: OrderedDict[str, frozenset[bytes]] = OrderedDict()
        self._count = 0

    def keys(self, list_key: str) -> tuple[str, ...]:
        """The blob keys that the list holds. Raises BlobNotFound, Corruption (it is damaged), Unavailable."""
        with translated_but_missing():
            data = self._blob.get(list_key)
        try:
            return decode_lent(data).keys
        except Corruption as error:
            raise Corruption(f"list {list_key}: {error.message}") from error

    def held(self, machine: Committer, state: State) -> Iterator[frozenset[bytes]]:
        """The ids of blobs that are lent, as `compact` gives them, list after list.

        Raises Corruption: a list is damaged or missing, so nobody may delete anything here. Unavailable: a loan ended
        meanwhile; look again, at a newer State.
        """
        for loan_id, loan in state.loans.items():
            try:
                yield self._of(loan.list_key)
            except BlobNotFound as error:
                now = machine.refresh().loans.get(loan_id)
                if now is not None and now.list_key == loan.list_key:
                    raise Corruption(
                        f"list {loan.list_key} of what shard {state.name!r} has lent to {loan.borrower!r} is missing: "
                        "nothing is deleted"
                    ) from error
                raise Unavailable(f"a loan of shard {state.name!r} has changed meanwhile; look again") from error

    def not_held(self, machine: Committer, state: State, keys: Iterable[str]) -> Iterator[str]:
        """These keys without what is lent, in their order. Raises what `held` does."""
        if not state.loans:
            yield from keys
            return
        rest = iter(keys)
        while page := list(islice(rest, PAGE)):
            left = {compact(key) for key in page}
            for ids in self.held(machine, state):
                left -= ids
            yield from (key for key in page if compact(key) in left)

    def _of(self, list_key: str) -> frozenset[bytes]:
        with self._lock:
            known = self._ids.get(list_key)
            if known is not None:
                self._ids.move_to_end(list_key)
                return known
        found = frozenset(map(compact, self.keys(list_key)))
        with self._lock:
            if list_key not in self._ids and len(found) <= IDS_KEPT_MAX:
                self._ids[list_key] = found
                self._count += len(found)
            while self._count > IDS_KEPT_MAX:
                self._count -= len(self._ids.popitem(last=False)[1])
        return found
