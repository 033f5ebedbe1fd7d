"""Whether everything that the shards of a location need is there and sound. Writes nothing, and holds nothing.

Of each shard the log is read and replayed, its rollups are decoded, and the blobs that it names are compared with a
listing: one that is not there, or has another size, is a fault. With `deep` every byte is read and every row decoded.
What nobody names is counted, and is no fault: a write may be under way.

Shards move on meanwhile, and what they named is collected. So where something is amiss in one that has moved, it is
looked at anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from blob import Blob, BlobNotFound
from persist.commit.bundler import keys_in
from persist.commit.examine import all_parts, faults
from persist.commit.lists import LoanLists
from persist.commit.location import Location
from persist.copies.pace import PacedBlob, check_rate
from persist.core import invariants, state_diff
from persist.core.errors import Corruption, HistoryLost, InvalidUsage
from persist.core.ids import SeqNo, check_shard_name, family_of
from persist.core.keys import belongs_to, is_bundle_key, shard_of
from persist.core.loans import is_foreign
from persist.core.state import State, auxiliary_blob_keys
from persist.formats.store_errors import translated, translated_but_missing

SCAN_LIMIT = 1_000  # log entries that are read at once
TRIES = 4  # looks at a shard that moves on each time


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a shard. `key` is that of the blob ("": it is of no blob)."""

    shard: str
    what: str
    key: str = ""

    def to_json(self) -> dict[str, Any]:
        """The same for JSON."""
        return {"shard": self.shard, "what": self.what, "key": self.key or None}


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found of one shard, as of its version `seqno` (0: it cannot be opened).

    `blobs` of `size` bytes are named. `waiting` blobs left the State, and GC deletes them. `unnamed` blobs of
    `unnamed_size` bytes are named by nothing.
    """

    shard: str
    seqno: int
    faults: tuple[Fault, ...]
    blobs: int = 0
    size: int = 0
    waiting: int = 0
    unnamed: int = 0
    unnamed_size: int = 0

    @property
    def is_sound(self) -> bool:
        return not self.faults


@dataclass(frozen=True, slots=True)
class How:
    """`deep`: read every byte, decode every row. `rate`: at most so many bytes a second (None: as fast as it goes)."""

    deep: bool = False
    rate: int | None = None

    def check(self) -> None:
        """Raises InvalidUsage where a number makes no sense."""
        check_rate(self.rate)
        if self.rate is not None and not self.deep:
            raise InvalidUsage("rate is for deep: without it no bytes of parts are read")


def verified(location: Location, names: Iterable[str], how: How) -> Iterator[Verified]:
    """What is found of these shards, one after the other; those that are dropped meanwhile are left out.

    Raises InvalidUsage (the two stores do not belong together), Unavailable. Repeating it is safe.
    """
    how.check()
    blob = location.blob if how.rate is None else PacedBlob(location.blob, how.rate, location.clock)
    for name in names:
        found = _Shard(location, blob, check_shard_name(name)).verified(how.deep)
        if found is not None:
            yield found


class _Shard:
    def __init__(self, location: Location, blob: Blob, name: str) -> None:
        self._location = location
        self._versions = location.versions
        self._blob = blob
        self._name = name
        self._found: list[Fault] = []

    def verified(self, deep: bool) -> Verified | None:
        """None: the shard is not there, or was dropped."""
        for left in range(TRIES, -1, -1):
            self._found.clear()
            try:
                state = self._versions.load(self._name)
                if state is None or state.is_closed:
                    return None
                found = self._looked_at(state)
            except Corruption as error:
                return Verified(self._name, 0, (Fault(self._name, error.message),))
            if not self._found or not left or not self._has_moved(state):
                break
        if deep:
            assert state is not None
            self._read(state)
        return replace(found, faults=tuple(dict.fromkeys(self._found)))

    def _has_moved(self, state: State) -> bool:
        """Whether a collection may have taken what seems to be missing."""
        now = self._versions.load(self._name)
        return now is None or now.seqno > state.seqno

    def _looked_at(self, state: State) -> Verified:
        """What is found of it without reading parts. The faults are noted."""
        self._check(state)
        gone = self._replayed(state)
        named = self._named(state)
        with translated():
            listed = {stat.key: stat.size for stat in self._location.blob.list(family_of(state.shard_id))}
            for key in named:
                if is_foreign(key, state.shard_id) and (stat := self._location.blob.stat(key)) is not None:
                    listed[key] = stat.size
        self._compare(named, listed)
        waiting_lists = self._lent(state)
        left = {key: size for key, size in listed.items() if key not in named and belongs_to(key, shard_of(key))}
        waiting = left.keys() & (self._with_lists(gone) | waiting_lists)
        unnamed = left.keys() - waiting
        return Verified(
            self._name,
            int(state.seqno),
            (),
            blobs=len(named),
            size=sum(listed.get(key, 0) for key in named),
            waiting=len(waiting),
            unnamed=len(unnamed),
            unnamed_size=sum(left[key] for key in unnamed),
        )

    def _note(self, what: str, key: str = "") -> None:
        self._found.append(Fault(self._name, what, key))

    def _check(self, state: State) -> None:
        """That the State is whole in itself: its batches tile, its counts agree."""
        try:
            invariants.check_state(state)
        except Corruption as error:
            self._note(error.message)

    def _replayed(self, state: State) -> set[str]:
        """That each State can be made again from the oldest rollup on. What left the State in the live log."""
        gone: set[str] = set()
        rollups = {seqno: self._rolled_up(seqno, rollup.key) for seqno, rollup in sorted(state.rollups.items())}
        following = SeqNo(1)
        made: State | None = None
        while page := self._versions.diffs(self._name, following, SCAN_LIMIT):
            for short in page:
                try:
                    change = self._versions.whole(self._name, short)
                    if made is not None:
                        made = state_diff.apply(change, made)
                except (Corruption, HistoryLost) as error:
                    self._note(error.message)
                    return gone
                gone.update(change.gone)
                held = rollups.get(change.seqno)
                if made is not None and held is not None and made.commit_id != held.commit_id:
                    self._note(
                        f"rollup v{change.seqno} holds another State than the log", state.rollups[made.seqno].key
                    )
                made = held if made is None else made
            following = SeqNo(page[-1].seqno + 1)
        if made is None:
            self._note("no rollup can be read from which its log goes on")
        return gone

    def _rolled_up(self, seqno: SeqNo, key: str) -> State | None:
        try:
            found = self._versions.read_rollup(key)
        except Corruption as error:
            self._note(error.message, key)
            return None
        if found is not None and found.seqno != seqno:  # one that is missing is found by the listing
            self._note(f"rollup v{seqno} holds the State v{found.seqno}", key)
            return None
        return found

    def _named(self, state: State) -> dict[str, int | None]:
        """The blobs that the State names, also by what bundles list, with their sizes as far as these are known."""
        found: dict[str, int | None] = dict.fromkeys(auxiliary_blob_keys(state))
        for named in all_parts(state, self._location.blob):
            part = named.part
            if part.key is not None:
                found[part.key] = part.blob_size
            if isinstance(named.failed, Corruption):
                self._note(named.failed.message, part.key or "")
        return found

    def _compare(self, named: dict[str, int | None], listed: dict[str, int]) -> None:
        for key, size in named.items():
            if key not in listed:
                self._note(f"the blob {key} is not there", key)
            elif size not in (None, listed[key]):
                self._note(f"the blob {key} has {listed[key]} bytes, not {size}", key)

    def _lent(self, state: State) -> set[str]:
        """What other shards may name of its blobs, which are all to be there."""
        found: set[str] = set()
        lists = LoanLists(self._location.blob)
        for loan in state.loans.values():
            try:
                found.update(lists.keys(loan.list_key))
            except BlobNotFound:
                continue  # the listing tells
            except Corruption as error:
                self._note(error.message, loan.list_key)
        return found

    def _read(self, state: State) -> None:
        """Every byte of what the State names, and every row."""
        bad = list(faults(state, self._blob, self._location.settings.build, deep=True))
        if not bad:
            return
        now = self._versions.load(self._name)
        still = set() if now is None else {named.part.id for named in all_parts(now, self._location.blob)}
        known = {fault.key for fault in self._found}
        for fault in bad:
            if fault.key not in known and (fault.part is None or fault.part.id in still):
                self._note(fault.what, fault.key)

    def _with_lists(self, gone: set[str]) -> set[str]:
        """These blobs, and what the bundles among them list."""
        found = set(gone)
        for bundle in filter(is_bundle_key, gone):
            try:
                with translated_but_missing():
                    found.update(keys_in(self._location.blob, bundle))
            except (BlobNotFound, Corruption):
                continue
        return found
