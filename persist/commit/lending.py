"""Loans come to their end: a clone gives back what it does not need any more, and what no clone took is ended.

A clone ends a loan at the owner first, and forgets it then; either may be repeated. A loan whose clone never came to
be is ended by the owner's maintenance, once nobody can begin that clone any more: where its name has no log, one is
begun, as that of a shard that was dropped; where it has one, lists as old as this one are refused there from now on.
No clock decides on that. Clocks only say how long to wait before somebody who may still be at work is stopped.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeVar

from blob import BlobNotFound
from persist.commit.bundler import keys_in
from persist.commit.lists import LoanLists
from persist.commit.place import Committer, CommitterOf, Place
from persist.commit.store_clock import StoreClock
from persist.core import commands as c
from persist.core.cloning import fence_of
from persist.core.errors import UnknownShard
from persist.core.ids import LoanId, SeqNo, family_of, shard_id_of
from persist.core.keys import born_ms, is_bundle_key
from persist.core.loans import Loan, is_foreign
from persist.core.state import State
from persist.formats.store_errors import translated, translated_but_missing

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
            refused = machine.apply(c.RefuseStagedBefore(born_ms(loan.list_key) + 1))
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
            borrower.apply(c.RefuseStagedBefore(born + 1))
            found = borrower.refresh()
        return loan_id in found.borrowed or found.swept_before_ms <= born


def _remember(known: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > REMEMBERED_MAX:
        known.popitem(last=False)
