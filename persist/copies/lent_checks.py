"""Whether a shard and those of whose blobs it names some agree on what was lent."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from blob import BlobNotFound
from persist.commit.lists import LoanLists
from persist.copies.found import Kind
from persist.copies.readable import Readable
from persist.core.errors import Corruption
from persist.core.ids import family_of, shard_id_of
from persist.core.loans import by_owner, is_foreign
from persist.core.state import State

Note = Callable[[Kind, str, str], None]  # what is wrong, and the key of the blob


def check_borrowed(location: Readable, state: State, named: Iterable[str], note: Note) -> None:
    """Each blob of another shard is in the list of a loan that its owner has, too. Raises Unavailable.

    A loan of which nothing is named any more may be ended on one side already: that is how it ends.
    """
    foreign = by_owner(key for key in named if is_foreign(key, state.shard_id))
    lists = LoanLists(location.blob)
    for owner in dict.fromkeys(state.borrowed.values()):
        left = foreign.pop(family_of(shard_id_of(owner)), set())
        if not left:
            continue
        try:
            lender = location.versions.load(owner)
        except Corruption as error:
            note(Kind.LOAN, f"shard {owner!r}, of which it borrows, cannot be read: {error.message}", "")
            continue
        if lender is None:
            note(Kind.LOAN, f"shard {owner!r}, of which it borrows, is not there", "")
            continue
        unknown = []
        for loan_id, name in state.borrowed.items():
            loan = lender.loans.get(loan_id) if name == owner else None
            if name == owner and (loan is None or loan.borrower != state.name):
                unknown.append(str(loan_id))
            if loan is None or loan.borrower != state.name:
                continue
            try:
                left.difference_update(lists.keys(loan.list_key))
            except BlobNotFound:
                note(Kind.MISSING, f"the list {loan.list_key} of loan {loan_id} is not there", loan.list_key)
                left.clear()  # nobody can tell what it held
            except Corruption as error:
                note(Kind.LOAN, error.message, loan.list_key)
                left.clear()
        for key in sorted(left):
            why = f"shard {owner!r} knows nothing of loan {', '.join(unknown)}" if unknown else "no loan has it"
            note(Kind.LOAN, f"the blob {key} belongs to shard {owner!r}, which has not lent it: {why}", key)
    for family, keys in foreign.items():
        for key in sorted(keys) if state.borrowed else ():  # else the State tells it of each part
            note(Kind.LOAN, f"the blob {key} belongs to a shard {family} of which nothing is borrowed", key)
