"""Cloning: a shard under a new name that names the blobs of another one. No row is read or written.

The owner of the blobs lends them first, by one commit; then the clone's log begins with all of its contents, by
another one. Whoever dies between leaves a loan, which the owner's maintenance ends (`persist.commit.lending`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from blob import BlobNotFound
from persist.commit.bundler import keys_in
from persist.commit.lists import LoanLists
from persist.commit.machine import FINALISE_STEPS_MAX
from persist.commit.place import Committer, Place
from persist.commit.store_clock import probed
from persist.core import commands as c
from persist.core.cloning import clone_of, with_entry, without_policy
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
from persist.core.ids import LoanId, ReaderId, check_shard_name, family_of, mint, shard_id_of
from persist.core.keys import is_bundle_key, rollup_key
from persist.core.loans import LENT_KEYS_MAX, by_owner
from persist.core.phases import dropped
from persist.core.record import replace
from persist.core.recorded import NOBODY, Caller
from persist.core.state import State
from persist.formats.store_errors import translated_but_missing

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
