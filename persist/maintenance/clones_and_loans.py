"""Clones: creating one from the blobs of another shard, the lists of lent blobs, and the end of loans."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import islice
from typing import TypeVar

from blob import Blob, BlobNotFound
from persist.commit.blob_tasks import keys_in
from persist.commit.clocks_and_ids import StoreClock, probed
from persist.commit.committer import FINALISE_STEPS_MAX, Committer, CommitterOf
from persist.commit.location import Location
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
from persist.core.ids import LoanId, ReaderId, SeqNo, ShardId, check_shard_name, family_of, mint, shard_id_of
from persist.core.named_holds import LENT_KEYS_MAX, Loan, by_owner, compact, is_foreign
from persist.core.record import replace
from persist.core.shard_phases import dropped
from persist.core.state import State
from persist.core.transitions.lifecycle import clone_of, fence_of, with_entry, without_policy
from persist.formats.state_frames import decode_lent
from persist.formats.store_errors import translated, translated_but_missing

IDS_CACHED_MAX = 200_000  # ids of blobs in all cached lists together
PAGE = 50_000  # blobs that are compared with every list together
_K = TypeVar("_K")
_V = TypeVar("_V")


class LoanLists:
    """Reads lists of lent blobs, which no collector may delete. Thread-safe.

    A list never changes, so it is cached. Lists are read one by one, so memory is that of one list and the cache.
    """

    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self._lock = threading.Lock()
        self._ids: OrderedDict[str, frozenset[bytes]] = OrderedDict()
        self._count = 0

    def keys(self, list_key: str) -> tuple[str, ...]:
        """The blob keys in a list. Raises BlobNotFound, Corruption (it is damaged), Unavailable."""
        with translated_but_missing():
            data = self._blob.get(list_key)
        try:
            return decode_lent(data).keys
        except Corruption as error:
            raise Corruption(f"list {list_key}: {error.message}") from error

    def held(self, machine: Committer, state: State) -> Iterator[frozenset[bytes]]:
        """The ids of lent blobs, in the form of `compact`, list by list.

        Raises Corruption: a list is damaged or missing, so nothing may be deleted. Unavailable: a loan ended meanwhile;
        retry with a newer State.
        """
        for loan_id, loan in state.loans.items():
            try:
                yield self._ids_in(loan.list_key)
            except BlobNotFound as error:
                current = machine.refresh().loans.get(loan_id)
                if current is not None and current.list_key == loan.list_key:
                    raise Corruption(
                        f"list {loan.list_key} of the blobs that shard {state.name!r} has lent to {loan.borrower!r} is "
                        "missing: nothing is deleted"
                    ) from error
                raise Unavailable(f"a loan of shard {state.name!r} has changed meanwhile; try again") from error

    def not_held(self, machine: Committer, state: State, keys: Iterable[str]) -> Iterator[str]:
        """The keys that are not lent, in their order. Raises as `held`."""
        if not state.loans:
            yield from keys
            return
        rest = iter(keys)
        while page := list(islice(rest, PAGE)):
            not_lent = {compact(key) for key in page}
            for ids in self.held(machine, state):
                not_lent -= ids
            yield from (key for key in page if compact(key) in not_lent)

    def _ids_in(self, list_key: str) -> frozenset[bytes]:
        with self._lock:
            cached = self._ids.get(list_key)
            if cached is not None:
                self._ids.move_to_end(list_key)
                return cached
        ids = frozenset(map(compact, self.keys(list_key)))
        with self._lock:
            if list_key not in self._ids and len(ids) <= IDS_CACHED_MAX:
                self._ids[list_key] = ids
                self._count += len(ids)
            while self._count > IDS_CACHED_MAX:
                self._count -= len(self._ids.popitem(last=False)[1])
        return ids


TRIES_MAX = 20  # a try fails if the shard, or an owner of its blobs, changed meanwhile
TRIES_UNHELD = 2  # after so many tries a lease holds garbage collection
HELD_MS = 60_000
BEGINS_MAX = 3  # tries to begin a log while the outcome is unknown

_Lent = dict[LoanId, tuple[str, str]]  # the owner's name, and the key of the list


class Cloning:
    """Creates clones in one location: shards that name the blobs of other shards. No row is read. Thread-safe.

    First the owner of the blobs lends them, by one commit; then the clone's log begins with its State, by another. A
    process that dies in between leaves a loan, which the owner's maintenance ends (`Lending`).
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._lists = LoanLists(location.blob)

    def clone(self, source: str, name: str, keep_policies: bool = False, caller: Caller = NOBODY) -> State:
        """Create the shard `name` with the current contents of `source`; returns its State.

        Raises InvalidUsage, UnknownShard (there is no such source), Conflict (the name is taken, or an erasure of the
        source is not complete; nothing was changed),
        Overloaded (too many clones), Indeterminate (it may have happened: check whether the clone exists).
        """
        if check_shard_name(source) == check_shard_name(name):
            raise InvalidUsage(f"shard {source!r} cannot be a clone of itself; give the clone another name")
        machine = self._location.machine(source)
        self._readable_state(machine)
        tombstone = self._tombstone_of(name)
        for attempt in range(TRIES_MAX):
            with self._hold_collection(machine) if attempt >= TRIES_UNHELD else nullcontext():
                clone = self._try_clone(self._readable_state(machine), name, tombstone, keep_policies, caller)
            if clone is not None:
                return clone
        raise Unavailable(f"shard {source!r} changed {TRIES_MAX} times while its blobs were lent; clone it again")

    def _readable_state(self, machine: Committer) -> State:
        state = machine.refresh()
        if state.is_closed:
            raise UnknownShard(dropped(state.name))
        if state.since.is_empty:
            raise InvalidUsage(f"shard {state.name!r} is closed to reads, so it cannot be cloned")
        if any(erasure.proof is None for erasure in state.erasures.values()):
            raise Conflict(
                f"an erasure of shard {state.name!r} is not complete, and a clone would keep its rows: clone it when "
                f"`persist erase list {state.name}` shows it as erased"
            )
        return state

    def _tombstone_of(self, name: str) -> State | None:
        """The tombstone of a dropped shard of this name; None: unused. Raises Conflict if a shard has the name."""
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
            with suppress(UnknownShard):  # the next incarnation has begun
                machine.apply(finalise)
            state = machine.refresh()
        raise Unavailable(f"shard {name!r} was dropped and is still being deleted; clone again later")

    @contextmanager
    def _hold_collection(self, machine: Committer) -> Iterator[None]:
        """Hold garbage collection of the shard, so that every blob of its State can be lent."""
        reader = mint(ReaderId, self._location.ids)
        machine.apply(c.RegisterReader(reader, None, HELD_MS, "clone"))
        try:
            yield
        finally:
            with suppress(PersistError):  # it lapses
                machine.apply(c.ExpireReader(reader))

    def _try_clone(
        self, state: State, name: str, tombstone: State | None, keep_policies: bool, caller: Caller
    ) -> State | None:
        """The clone of this State; None: the shard, or an owner, has changed."""
        ids, now_ms = self._location.ids, self._location.clock.now_ms()
        clone = clone_of(state if keep_policies else without_policy(state), name, {}, ids.uuid7(), now_ms)
        lent: _Lent = {}
        try:
            keys = self._keys_of(clone)
            if keys is None or not self._lend(state, name, keys, lent):
                self._end_loans(lent)
                return None
            clone = replace(clone, borrowed={loan_id: owner for loan_id, (owner, _) in lent.items()})
            return self._begin(clone, tombstone, tuple(key for _, key in lent.values()), caller)
        except Indeterminate:
            raise  # the clone may exist: its loans end with it, or maintenance ends them
        except PersistError:
            self._end_loans(lent)
            raise

    def _keys_of(self, clone: State) -> set[str] | None:
        """The blobs that the clone will name, with the parts of its bundles. None: a bundle is gone."""
        keys = set(clone.blob_keys())
        for bundle in sorted(filter(is_bundle_key, keys)):
            try:
                keys.update(keys_in(self._location.blob, bundle))
            except BlobNotFound:
                return None
        if len(keys) > LENT_KEYS_MAX:
            raise InvalidUsage(f"a clone can name {LENT_KEYS_MAX} blobs, not {len(keys)}; let maintenance merge first")
        return keys

    def _lend(self, state: State, name: str, keys: set[str], lent: _Lent) -> bool:
        """Have the owners lend these blobs, and add the loans to `lent`. False: an owner has changed."""
        groups = by_owner(keys)
        if family_of(shard_id_of(name)) in groups:
            raise Conflict(f"shard {state.name!r} still uses blobs of an earlier shard {name!r}; take another name")
        own = groups.pop(family_of(state.shard_id), None)
        owners = {family_of(shard_id_of(owner)): owner for owner in state.borrowed.values()}
        for family, group in groups.items():
            if family not in owners:
                raise Corruption(f"shard {state.name!r} names blobs of {family}… without a loan")
            if not self._lend_on(state, owners[family], name, group, lent):
                return False
        if own is None:
            return True
        loan_id, key = self._write_list(state.name, state.shard_id, own, lent)
        lend = c.Lend(loan_id, name, key, len(own), state.seqno, shard=state.shard_id)
        return self._location.machine(state.name).apply(lend) == c.Lent(True)

    def _lend_on(self, state: State, owner: str, name: str, keys: set[str], lent: _Lent) -> bool:
        """Have `owner` lend blobs that it has lent to this shard."""
        machine = self._location.machine(owner)
        owner_state = machine.refresh()
        for old_id, lender in state.borrowed.items():
            if lender != owner or old_id not in owner_state.loans:
                continue
            old_key = owner_state.loans[old_id].list_key
            try:
                if not keys.issubset(self._lists.keys(old_key)):
                    continue
            except BlobNotFound:
                continue
            loan_id, key = self._write_list(owner, owner_state.shard_id, keys, lent)
            if machine.apply(c.LendOn(loan_id, name, key, len(keys), old_id, old_key)) == c.Lent(True):
                return True
        return False

    def _write_list(self, owner: str, shard_id: ShardId, keys: set[str], lent: _Lent) -> tuple[LoanId, str]:
        """Write the list of a new loan and add the loan to `lent`; its id, and the key of the list."""
        loan_id = mint(LoanId, self._location.ids)
        key = self._location.versions.write_lent(shard_id, tuple(sorted(keys)))
        lent[loan_id] = owner, key
        return loan_id, key

    def _end_loans(self, lent: _Lent) -> None:
        """End the loans of a clone that will not be created, as far as possible now; maintenance ends the rest."""
        for loan_id, (owner, _) in lent.items():
            with suppress(PersistError):
                self._location.machine(owner).apply(c.EndLoan(loan_id))

    def _begin(self, clone: State, tombstone: State | None, lists: tuple[str, ...], caller: Caller) -> State:
        """Make the first commit of the clone; its State. Only after Indeterminate it may have happened."""
        if tombstone is not None:
            machine = self._location.machine(clone.name)
            try:
                machine.apply(c.BeginClone(clone, lists, shard=tombstone.shard_id), caller)
            except (UnknownShard, ShardExists) as error:
                raise _taken(clone.name) from error
            return machine.state()
        first, unknown = with_entry(clone, caller), None
        key = rollup_key(first.shard_id, first.seqno, self._location.ids)
        for _ in range(BEGINS_MAX):
            try:
                if self._location.versions.begin(first, key):
                    return first
                raise _taken(clone.name)
            except Indeterminate as error:
                unknown = error
            except Conflict:
                raise
            except PersistError as error:
                if unknown is None:
                    raise
                raise Indeterminate(f"the clone {clone.name!r} may have been created; check if it exists") from error
        assert unknown is not None
        raise unknown


def _taken(name: str) -> Conflict:
    return Conflict(f"there is a shard {name!r} already; give the clone another name, or drop that shard first")


log = logging.getLogger("persist.loans")

SHRINK_PART = 2  # a list is shrunk if at most 1 / SHRINK_PART of it is needed
OLD_LOANS_MAX = 100  # old loans whose clones one run checks
REMEMBERED_MAX = 100_000  # loans with a clone, and clones that were checked


class Lending:
    """Ends loans of shards of a location. Any number may run at the same time; each step may be repeated.

    A clone that no longer needs a loan ends it at the owner first and then forgets it. A loan whose clone was not
    created is ended by the owner's maintenance once the clone can no longer begin: if its name has no log, one is begun
    as that of a dropped shard; if it has a log, that log rejects lists as old as this one from then on. So no clock
    decides. Clocks only determine how long to wait before a process that may still be running is fenced.
    """

    def __init__(self, location: Location, committer_of: CommitterOf, lists: LoanLists, untaken_ms: int) -> None:
        self._location = location
        self._committer_of = committer_of
        self._lists = lists
        self._untaken_ms = untaken_ms
        self._clock = StoreClock(location.blob, location.clock, location.ids)
        self._taken: OrderedDict[LoanId, None] = OrderedDict()
        self._checked: OrderedDict[str, tuple[SeqNo, int]] = OrderedDict()  # the last result of `_needed`, by clone

    def run(self, machine: Committer) -> None:
        """Return loans that the shard does not need, and end its own loans without a clone. Raises as the stores."""
        state = machine.refresh()
        if state.borrowed:
            self._return_unneeded(machine, state)
        if state.loans:
            self._end_untaken(machine, state)

    # --- the borrower's side

    def _return_unneeded(self, machine: Committer, state: State) -> None:
        first, needed = self._needed(machine.name, state)
        if self._checked.get(machine.name) == (first, len(needed)):
            return
        for loan_id, owner in state.borrowed.items():
            family = family_of(shard_id_of(owner))
            of_owner = {key for key in needed if key.startswith(family)}
            newest = max(other for other, name in state.borrowed.items() if name == owner)
            if of_owner and not self._shrink_or_end(owner, loan_id, newest, of_owner):
                continue
            try:
                self._committer_of(owner).apply(c.EndLoan(loan_id))
            except UnknownShard:
                log.warning("the owner of a loan has no log", extra={"shard": machine.name, "owner": owner})
            machine.apply(c.Returned(loan_id))
            log.info("loan returned", extra={"shard": machine.name, "owner": owner})
        _remember(self._checked, machine.name, (first, len(needed)))

    def _needed(self, name: str, state: State) -> tuple[SeqNo, set[str]]:
        """The first seqno of the log, and the blobs of other shards that a version from there on names.

        No such version names the blobs that the first entry removes. The State is read before the log, so blobs that
        leave it meanwhile are included.
        """
        needed = {key for key in state.blob_keys() if is_foreign(key, state.shard_id)}
        oldest = self._location.versions.diffs(name, SeqNo(1), 1)
        first = oldest[0].seqno if oldest else SeqNo(0)
        for change in self._location.versions.whole_diffs(name, first):
            needed.update(key for key in change.gone if is_foreign(key, state.shard_id))
        return first, needed

    def _shrink_or_end(self, owner: str, loan_id: LoanId, newest: LoanId, needed: set[str]) -> bool:
        """Whether the loan can end. If at most half of it is needed, the list is shrunk.

        It can also end if the `newest` loan of that owner contains everything that is needed.
        """
        machine = self._committer_of(owner)
        state = machine.refresh()
        loan = state.loans.get(loan_id)
        if loan is None:
            return False
        try:
            other = state.loans.get(newest)
            if newest != loan_id and other is not None and needed.issubset(self._lists.keys(other.list_key)):
                return True  # the loan is of an earlier incarnation of the clone
            if len(needed) * SHRINK_PART > loan.keys:
                return False
            parts = {key for bundle in filter(is_bundle_key, needed) for key in keys_in(self._location.blob, bundle)}
            kept = tuple(key for key in self._lists.keys(loan.list_key) if key in needed or key in parts)
        except BlobNotFound:
            return False  # another collector was faster
        if not kept or len(kept) * SHRINK_PART > loan.keys:
            return not kept
        new_key = self._location.versions.write_lent(state.shard_id, kept)
        result = machine.apply(c.ShrinkLoan(loan_id, loan.list_key, new_key, len(kept)))
        if result == c.Lent(False):  # not committed: another collector was faster
            with translated():
                self._location.blob.delete([new_key])
        return False

    # --- the owner's side

    def _end_untaken(self, machine: Committer, state: State) -> None:
        unknown = [(loan_id, loan) for loan_id, loan in state.loans.items() if loan_id not in self._taken]
        if not unknown:
            return
        before_ms = min(self._clock.now_ms(), self._location.clock.now_ms()) - self._untaken_ms
        old = [(loan_id, loan) for loan_id, loan in unknown if max(loan.begun_ms, born_ms(loan.list_key)) < before_ms]
        for loan_id, loan in old[:OLD_LOANS_MAX]:
            if self._may_be_taken(state, loan_id, loan):
                continue
            # The lender may not know its outcome and retry: from now on the list is too old for that.
            swept = machine.apply(c.ForgetLapsed(staged_before_ms=born_ms(loan.list_key) + 1))
            assert isinstance(swept, c.SweptBefore)
            if swept.before_ms > born_ms(loan.list_key):  # else the clock of this machine is behind: retry later
                machine.apply(c.EndLoan(loan_id))
                log.info("loan without a clone ended", extra={"shard": machine.name, "borrower": loan.borrower})

    def _may_be_taken(self, state: State, loan_id: LoanId, loan: Loan) -> bool:
        """Whether the clone exists or can still be created; otherwise it is fenced."""
        borrower, list_ms = self._committer_of(loan.borrower), born_ms(loan.list_key)
        try:
            clone = borrower.refresh()
        except UnknownShard:
            clock, ids = self._location.clock, self._location.ids
            fence = fence_of(loan.borrower, state.schemas[state.schema_id], clock.now_ms(), ids.uuid7())
            return not self._location.versions.begin(fence)
        if loan_id in clone.borrowed:
            _remember(self._taken, loan_id, None)
            return True
        if clone.swept_before_ms <= list_ms:
            borrower.apply(c.ForgetLapsed(staged_before_ms=list_ms + 1))
            clone = borrower.refresh()
        return loan_id in clone.borrowed or clone.swept_before_ms <= list_ms


def _remember(cache: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > REMEMBERED_MAX:
        cache.popitem(last=False)
