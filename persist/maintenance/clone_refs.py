"""Clones: making one from another shard's blobs, the lists of lent blobs, and the end of loans."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TypeVar

from blob import Blob, BlobNotFound
from persist.commit.blob_tasks import keys_in
from persist.commit.machine import FINALISE_STEPS_MAX, Committer, CommitterOf, Place
from persist.commit.system import StoreClock, probed
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.blob_keys import born_ms, is_bundle_key, rollup_key
from persist.core.errors import (
    Conflict,
    Corruption,
    Indeterminate,
    InvalidUsage,
    PersistError,
    ShardExists,
    Unavailable,
    UnknownShard,
)
from persist.core.ids import LoanId, ReaderId, SeqNo, check_shard_name, family_of, mint, shard_id_of
from persist.core.named_holds import LENT_KEYS_MAX, Loan, by_owner, compact, is_foreign
from persist.core.phases import dropped
from persist.core.record import replace
from persist.core.state import State
from persist.core.transitions.lifecycle import clone_of, fence_of, with_entry, without_policy
from persist.formats.state_frames import decode_lent
from persist.formats.store_errors import translated, translated_but_missing

# Lists of blobs that are lent, as they lie in the blob store, and what they keep from being deleted.
#
# Lists are looked through one after another. So memory is that of one list, and of as many more as are remembered.


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


# Cloning: a shard under a new name that names the blobs of another one. No row is read or written.
#
# The owner of the blobs lends them first, by one commit; then the clone's log begins with all of its contents, by
# another one. Whoever dies between leaves a loan, which the owner's maintenance ends (`Lending`).


TRIES_MAX = 20  # each failed one means that the shard, or the owner of its blobs, moved on meanwhile
TRIES_UNHELD = 2  # after so many its collections are held up
HELD_MS = 60_000
BEGINS_MAX = 3  # tries to begin a log whose outcome is not known

_Lent = dict[LoanId, tuple[str, str]]  # the owner's name, and the key of the list


class Cloning:
    """Makes clones in one location. Thread-safe."""

    def __init__(self, location: Place) -> None:
        self._location = location
        self._lists = LoanLists(location.blob)

    def clone(self, source: str, name: str, keep_policies: bool = False, caller: Caller = NOBODY) -> State:
        """Make the shard `name` with the contents of `source` as of now; its State.

        Raises InvalidUsage, UnknownShard (there is no such source), Conflict (the name is taken; nothing was changed),
        Overloaded (too many clones), Indeterminate (it may have happened: look whether the clone is there).
        """
        if check_shard_name(source) == check_shard_name(name):
            raise InvalidUsage(f"shard {source!r} cannot be a clone of itself; give the clone another name")
        machine = self._location.machine(source)
        self._readable(machine)
        ended = self._ended(name)
        for attempt in range(TRIES_MAX):
            with self._held(machine, attempt >= TRIES_UNHELD):
                made = self._tried(self._readable(machine), name, ended, keep_policies, caller)
            if made is not None:
                return made
        raise Unavailable(f"shard {source!r} moved on {TRIES_MAX} times while its blobs were lent; clone it again")

    def _readable(self, machine: Committer) -> State:
        state = machine.refresh()
        if state.is_closed:
            raise UnknownShard(dropped(state.name))
        if state.since.is_empty:
            raise InvalidUsage(f"shard {state.name!r} is closed to reads: there is nothing that a clone could show")
        return state

    def _ended(self, name: str) -> State | None:
        """The tombstone that has this name; None: it was never used. Raises Conflict where a shard has it."""
        machine = self._location.machine(name)
        try:
            state = machine.refresh()
        except UnknownShard:
            return None
        finalise = c.Finalise(shard=state.shard_id, store_ms=probed(self._location.blob, self._location.ids))
        for _ in range(FINALISE_STEPS_MAX):
            if not state.is_closed:
                raise _taken(name)
            if state.tombstone:
                return state
            with suppress(UnknownShard):  # another life has begun
                machine.apply(finalise)
            state = machine.refresh()
        raise Unavailable(f"shard {name!r} was dropped, and takes long to be cleared; clone again")

    @contextmanager
    def _held(self, machine: Committer, is_held: bool) -> Iterator[None]:
        """Hold collections of the shard up, so that what its State names can be lent in any case."""
        if not is_held:
            yield
            return
        reader = mint(ReaderId, self._location.ids)
        machine.apply(c.RegisterReader(reader, None, HELD_MS, "clone"))
        try:
            yield
        finally:
            with suppress(PersistError):  # it lapses
                machine.apply(c.ExpireReader(reader))

    def _tried(self, state: State, name: str, ended: State | None, keep_policies: bool, caller: Caller) -> State | None:
        """The clone of this State; None: the shard, or an owner, has moved on."""
        ids, now_ms = self._location.ids, self._location.clock.now_ms()
        kept = state if keep_policies else without_policy(state)
        born = clone_of(kept, name, {}, ids.uuid7(), now_ms)
        lent: _Lent = {}
        try:
            keys = self._keys(born)
            if keys is None or not self._lend(state, name, keys, lent):
                self._take_back(lent)
                return None
            born = replace(born, borrowed={loan_id: owner for loan_id, (owner, _) in lent.items()})
            return self._begun(born, ended, tuple(key for _, key in lent.values()), caller)
        except Indeterminate:
            raise  # it may be there: its loans stay, and end with it, or are ended
        except PersistError:
            self._take_back(lent)
            raise

    def _keys(self, born: State) -> set[str] | None:
        """The blobs that the clone will name, and what the bundles among them list. None: one of these is gone."""
        keys = set(born.blob_keys())
        for bundle in sorted(filter(is_bundle_key, keys)):
            try:
                with translated_but_missing():
                    keys.update(keys_in(self._location.blob, bundle))
            except BlobNotFound:
                return None
        if len(keys) > LENT_KEYS_MAX:
            raise InvalidUsage(f"a clone can name {LENT_KEYS_MAX} blobs, not {len(keys)}; let maintenance merge first")
        return keys

    def _lend(self, state: State, name: str, keys: set[str], lent: _Lent) -> bool:
        """Have the owners lend these blobs; what was lent is put into `lent`. False: somebody has moved on."""
        groups = by_owner(keys)
        if family_of(shard_id_of(name)) in groups:
            raise Conflict(f"shard {state.name!r} still uses blobs of an earlier shard {name!r}; take another name")
        own = groups.pop(family_of(state.shard_id), None)
        owners = {family_of(shard_id_of(owner)): owner for owner in state.borrowed.values()}
        for family, group in groups.items():
            if family not in owners:
                raise Corruption(f"shard {state.name!r} names blobs of {family}…, of which it has no loan")
            if not self._lent_on(state, owners[family], name, group, lent):
                return False
        return own is None or self._lent(state, name, own, lent)

    def _lent(self, state: State, name: str, keys: set[str], lent: _Lent) -> bool:
        loan_id = mint(LoanId, self._location.ids)
        key = self._location.versions.write_lent(state.shard_id, tuple(sorted(keys)))
        lent[loan_id] = state.name, key
        lend = c.Lend(loan_id, name, key, len(keys), state.seqno, shard=state.shard_id)
        return self._location.machine(state.name).apply(lend) == c.Lent(True)

    def _lent_on(self, state: State, owner: str, name: str, keys: set[str], lent: _Lent) -> bool:
        machine = self._location.machine(owner)
        known = machine.refresh()
        through = [loan_id for loan_id, of in state.borrowed.items() if of == owner and loan_id in known.loans]
        for old in through:
            old_key = known.loans[old].list_key
            try:
                if not keys.issubset(self._lists.keys(old_key)):
                    continue
            except BlobNotFound:
                continue
            loan_id = mint(LoanId, self._location.ids)
            key = self._location.versions.write_lent(known.shard_id, tuple(sorted(keys)))
            lent[loan_id] = owner, key
            if machine.apply(c.LendOn(loan_id, name, key, len(keys), old, old_key)) == c.Lent(True):
                return True
        return False

    def _take_back(self, lent: _Lent) -> None:
        """End loans of a clone that will not be. What cannot be ended now, maintenance ends; lists go with loans."""
        for loan_id, (owner, _) in lent.items():
            with suppress(PersistError):
                self._location.machine(owner).apply(c.EndLoan(loan_id))

    def _begun(self, born: State, ended: State | None, lists: tuple[str, ...], caller: Caller) -> State:
        """The first commit of the clone; its State. Indeterminate: it may have happened; after other errors not."""
        if ended is not None:
            machine = self._location.machine(born.name)
            try:
                machine.apply(c.BeginClone(born, lists, shard=ended.shard_id), caller)
            except (UnknownShard, ShardExists) as error:
                raise _taken(born.name) from error
            return machine.state()
        first, unknown = with_entry(born, caller), None
        key = rollup_key(first.shard_id, first.seqno, self._location.ids)
        for _ in range(BEGINS_MAX):
            try:
                if self._location.versions.begin(first, key):
                    return first
                raise _taken(born.name)
            except Indeterminate as error:
                unknown = error
            except Conflict:
                raise
            except PersistError as error:
                if unknown is None:
                    raise
                raise Indeterminate(f"the clone {born.name!r} may have been made; look whether it is there") from error
        assert unknown is not None
        raise unknown


def _taken(name: str) -> Conflict:
    return Conflict(f"there is a shard {name!r} already; give the clone another name, or drop that one first")


# Loans come to their end: a clone gives back what it does not need any more, and what no clone took is ended.
#
# A clone ends a loan at the owner first, and forgets it then; either may be repeated. A loan whose clone never came to
# be is ended by the owner's maintenance, once nobody can begin that clone any more: where its name has no log, one is
# begun, as that of a shard that was dropped; where it has one, lists as old as this one are refused there from now on.
# No clock decides on that. Clocks only say how long to wait before somebody who may still be at work is stopped.


log = logging.getLogger("persist.loans")

SCAN_LIMIT = 1_000
SHRINK_PART = 2  # a list shrinks once at most this part of it is needed
LOOKED_MAX = 100  # old loans whose clones one run looks for
REMEMBERED_MAX = 100_000  # loans that were taken, and clones that were looked through
_K = TypeVar("_K")
_V = TypeVar("_V")


class Lending:
    """Looks after the loans of shards of a location. Any number may work at once; each step may be repeated."""

    def __init__(self, location: Place, committer_of: CommitterOf, lists: LoanLists, untaken_ms: int) -> None:
        self._location = location
        self._committer_of = committer_of
        self._lists = lists
        self._untaken_ms = untaken_ms
        self._clock = StoreClock(location.blob, location.clock, location.ids)
        self._taken: OrderedDict[LoanId, None] = OrderedDict()
        self._looked: OrderedDict[str, tuple[SeqNo, int]] = OrderedDict()

    def run(self, machine: Committer) -> None:
        """Give back what the shard does not need, and end its own loans that nobody took. Raises what stores raise."""
        state = machine.refresh()
        if state.borrowed:
            self._give_back(machine, state)
        if state.loans:
            self._end_untaken(machine, state)

    # --- the borrower's side

    def _give_back(self, machine: Committer, state: State) -> None:
        first, needed = self._needed(machine.name, state)
        if self._looked.get(machine.name) == (first, len(needed)):
            return
        for loan_id, owner in state.borrowed.items():
            family = family_of(shard_id_of(owner))
            of_owner = {key for key in needed if key.startswith(family)}
            newest = max(other for other, name in state.borrowed.items() if name == owner)
            if of_owner and not self._shrunk(owner, loan_id, newest, of_owner):
                continue
            try:
                self._committer_of(owner).apply(c.EndLoan(loan_id))
            except UnknownShard:
                log.warning("the owner of a loan has no log", extra={"shard": machine.name, "owner": owner})
            machine.apply(c.Returned(loan_id))
            log.info("loan returned", extra={"shard": machine.name, "owner": owner})
        _remember(self._looked, machine.name, (first, len(needed)))

    def _needed(self, name: str, state: State) -> tuple[SeqNo, set[str]]:
        """Where the log begins, and the blobs of other shards that a version from there on names.

        What the first entry says is gone is in no such version. The State comes first: what leaves it later is there.
        """
        needed = {key for key in state.blob_keys() if is_foreign(key, state.shard_id)}
        first, following = SeqNo(0), SeqNo(1)
        while page := self._location.versions.diffs(name, following, SCAN_LIMIT):
            first = first or page[0].seqno
            for change in page:
                if change.seqno > first:
                    gone = self._location.versions.whole(name, change).gone
                    needed.update(key for key in gone if is_foreign(key, state.shard_id))
            following = SeqNo(page[-1].seqno + 1)
        return first, needed

    def _shrunk(self, owner: str, loan_id: LoanId, newest: LoanId, needed: set[str]) -> bool:
        """Whether nothing of this loan is needed. Where at most half of it is, the owner is told of that.

        Nothing is needed of it either where the `newest` loan of that owner has all that is.
        """
        machine = self._committer_of(owner)
        state = machine.refresh()
        loan = state.loans.get(loan_id)
        if loan is None:
            return False
        try:
            other = state.loans.get(newest)
            if newest != loan_id and other is not None and needed.issubset(self._lists.keys(other.list_key)):
                return True  # it is of an earlier life of the name
            if len(needed) * SHRINK_PART > loan.keys:
                return False
            needed = needed | self._listed(filter(is_bundle_key, sorted(needed)))
            kept = tuple(key for key in self._lists.keys(loan.list_key) if key in needed)
        except BlobNotFound:
            return False  # another collector was faster
        if not kept or len(kept) * SHRINK_PART > loan.keys:
            return not kept
        new_key = self._location.versions.write_lent(state.shard_id, kept)
        result = machine.apply(c.ShrinkLoan(loan_id, loan.list_key, new_key, len(kept)))
        if result == c.Lent(False):  # never named: another collector was faster
            with translated():
                self._location.blob.delete([new_key])
        return False

    def _listed(self, bundles: Iterable[str]) -> set[str]:
        found: set[str] = set()
        for bundle in bundles:
            with translated_but_missing():
                found.update(keys_in(self._location.blob, bundle))
        return found

    # --- the owner's side

    def _end_untaken(self, machine: Committer, state: State) -> None:
        old: list[tuple[LoanId, Loan]] = []
        waiting = [(loan_id, loan) for loan_id, loan in state.loans.items() if loan_id not in self._taken]
        if waiting:
            before_ms = min(self._clock.now_ms(), self._location.clock.now_ms()) - self._untaken_ms
            old = [one for one in waiting if max(one[1].begun_ms, born_ms(one[1].list_key)) < before_ms]
        for loan_id, loan in old[:LOOKED_MAX]:
            if self._may_be_taken(state, loan_id, loan):
                continue
            # Whoever lent and does not know that may lend again: the list is too old for that from now on.
            refused = machine.apply(c.ForgetLapsed(staged_before_ms=born_ms(loan.list_key) + 1))
            assert isinstance(refused, c.SweptBefore)
            if refused.before_ms > born_ms(loan.list_key):  # else this machine's clock is behind: later
                machine.apply(c.EndLoan(loan_id))
                log.info("loan that nobody took", extra={"shard": machine.name, "borrower": loan.borrower})

    def _may_be_taken(self, state: State, loan_id: LoanId, loan: Loan) -> bool:
        """Whether the clone is there, or may still come to be. False: it is not, and never will be."""
        borrower, born = self._committer_of(loan.borrower), born_ms(loan.list_key)
        try:
            found = borrower.refresh()
        except UnknownShard:
            clock, ids = self._location.clock, self._location.ids
            fence = fence_of(loan.borrower, state.schemas[state.schema_id], clock.now_ms(), ids.uuid7())
            return not self._location.versions.begin(fence)
        if loan_id in found.borrowed:
            _remember(self._taken, loan_id, None)
            return True
        if found.swept_before_ms <= born:
            borrower.apply(c.ForgetLapsed(staged_before_ms=born + 1))
            found = borrower.refresh()
        return loan_id in found.borrowed or found.swept_before_ms <= born


def _remember(known: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > REMEMBERED_MAX:
        known.popitem(last=False)
