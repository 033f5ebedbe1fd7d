"""Commands on a shard as a whole: schema, home region, lapsed leases, and clones with their results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from persist.core.command import TIME_MS_MAX, Command, MaintainCommand, ManagedCommand
from persist.core.frontier import Antichain
from persist.core.ids import LoanId, ReaderId, SeqNo, WriterId, written
from persist.core.named_holds import LENT_KEYS_MAX
from persist.core.record import Meta, Record
from persist.core.results import Result
from persist.core.state import Claim, LeasedReader, SchemaRecord, State, WriterState

# Commands that change the schema. `commands` exports all names of this module.


class EvolveSchema(ManagedCommand, frozen=True):
    """Make `schema` current iff the current id is `expected_id` and the shard can evolve to it. -> SchemaRegistered

    It changes either columns or constraints. If its types cannot hold every value of the present ones, or its
    constraints are stricter, `expected_upper` is the upper up to which the contents were checked; UpperMismatch if rows
    were written since. Rows that were staged before have to be staged again. InvalidUsage if it is invalid, does not
    fit the present schema, or needs an `expected_upper`.
    """

    expected_id: int
    schema: SchemaRecord
    expected_upper: Antichain | None = None


# Commands that move a shard to another home.


class HandOver(Command, frozen=True):
    """Move the shard from the home of epoch `expected` to that of `epoch`; 0: the home of this log. -> Done

    While it is at another home, every change but this command is refused as ReadOnly. Conflict: it is at another home
    than the two. A retry is safe.
    """

    expected: Annotated[int, Meta(ge=0)]
    epoch: Annotated[int, Meta(ge=0)]


# Commands that end lapsed leases.


class LapsedLeases(Record, frozen=True):
    """Leases as they were in some State."""

    leased_readers: Mapping[Annotated[ReaderId, written(ReaderId)], LeasedReader] = {}
    writers: Mapping[Annotated[WriterId, written(WriterId)], WriterState] = {}
    claims: Mapping[str, Claim] = {}


class ForgetLapsed(MaintainCommand, frozen=True):
    """Remove lapsed leases, and refuse old staged blobs from now on. -> SweptBefore; it always commits.

    It removes readers, writers and claims whose leases have lapsed. The caller guarantees that those in `silent` have
    lapsed too; one that was renewed since, so that it differs from `silent`, is kept. From now on a blob whose key was
    minted before `staged_before_ms` (at most the committer's clock) may not be named unless it is named already. A
    commit that was planned on an earlier State loses its race, so blobs that are that old and not named now may be
    deleted.
    """

    silent: LapsedLeases = LapsedLeases()
    staged_before_ms: Annotated[int, Meta(ge=0, le=TIME_MS_MAX)] = 0


# Commands of clones, and their results.


_Id = Annotated[LoanId, written(LoanId)]
_Count = Annotated[int, Meta(ge=1, le=LENT_KEYS_MAX)]


class Lend(Command, frozen=True):
    """The shard `borrower` may name blobs that the State at `seqno` names: those of the list at `list_key`. -> Lent

    Accepted iff no garbage collection that deletes one of them can have begun. A retry is safe.
    """

    loan: _Id
    borrower: str
    list_key: str
    keys: _Count
    seqno: SeqNo


class LendOn(Command, frozen=True):
    """The shard `borrower` may name blobs that are lent already, as a clone of a clone does. -> Lent

    Accepted iff the loan `through` still has the list at `through_key`. The caller has checked that this list is a part
    of it. Legal in every phase and life of the owner. A retry is safe.
    """

    loan: _Id
    borrower: str
    list_key: str
    keys: _Count
    through: _Id
    through_key: str


class ShrinkLoan(MaintainCommand, frozen=True):
    """Reduce a loan to the list at `new_key`, a part of that at `list_key`. -> Lent

    Accepted iff the loan still has the list at `list_key`.
    """

    loan: _Id
    list_key: str
    new_key: str
    keys: _Count


class EndLoan(MaintainCommand, frozen=True):
    """End a loan: the borrower names none of its blobs any more. -> Done, also if there is no such loan."""

    loan: _Id


class Returned(MaintainCommand, frozen=True):
    """Let the borrower forget a loan that its owner has ended. -> Done, also if it is unknown.

    InvalidUsage while the State names a blob of that owner and has no other loan from it.
    """

    loan: _Id


class BeginClone(Command, frozen=True):
    """Begin the next life of the name as a clone, with this State. -> Done

    Expired: one of its loans may have been ended meanwhile.
    """

    state: State
    lists: tuple[str, ...] = ()  # the keys of the lists of its loans


class Lent(Result, frozen=True):
    """Whether the loan exists, with this list."""

    accepted: bool
