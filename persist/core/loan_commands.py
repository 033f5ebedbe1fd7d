"""Commands of clones, and their results. `commands` has all of their names too."""

from __future__ import annotations

from typing import Annotated

from persist.core.command import Command, MaintainCommand
from persist.core.ids import LoanId, SeqNo, written
from persist.core.loans import LENT_KEYS_MAX
from persist.core.record import Meta
from persist.core.results import Result
from persist.core.state import State

_Id = Annotated[LoanId, written(LoanId)]
_Count = Annotated[int, Meta(ge=1, le=LENT_KEYS_MAX)]


class Lend(Command, frozen=True):
    """The shard `borrower` may name blobs that the State at `seqno` names: those of the list at `list_key`. -> Lent

    Accepted iff no collection can have begun that deletes one of them. Repeating it is safe.
    """

    loan: _Id
    borrower: str
    list_key: str
    keys: _Count
    seqno: SeqNo


class LendOn(Command, frozen=True):
    """The shard `borrower` may name blobs that are lent already, as a clone of a clone does. -> Lent

    Accepted iff the loan `through` has the list at `through_key` still, of which this one is a part: whoever asks has
    compared them. Legal in every phase and life of the owner. Repeating it is safe.
    """

    loan: _Id
    borrower: str
    list_key: str
    keys: _Count
    through: _Id
    through_key: str


class ShrinkLoan(MaintainCommand, frozen=True):
    """The borrower needs only the blobs of the list at `new_key`, a part of that at `list_key`. -> Lent

    Accepted iff the loan has that list still.
    """

    loan: _Id
    list_key: str
    new_key: str
    keys: _Count


class EndLoan(MaintainCommand, frozen=True):
    """The borrower names no blob of the loan, and will name none. -> Done, also where there is no such loan."""

    loan: _Id


class Returned(MaintainCommand, frozen=True):
    """The owner has ended this loan; the borrower forgets it. -> Done, also where it knows of none.

    InvalidUsage while the State names a blob of that owner, and has no other loan of it.
    """

    loan: _Id


class BeginClone(Command, frozen=True):
    """The next life of the name begins as a clone: with this State, whose loans stand. -> Done

    Expired: a loan may have been ended meanwhile.
    """

    state: State
    lists: tuple[str, ...] = ()  # the keys of the lists of its loans


class Lent(Result, frozen=True):
    """Whether the loan stands, with this list."""

    accepted: bool
