"""Commands on a shard as a whole: schema, region, lapsed leases, and clones with their results."""

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

# Commands that change what a shard's rows are. `commands` has all of their names too.


class EvolveSchema(ManagedCommand, frozen=True):
    """Make `schema` current iff the current id is `expected_id` and the shard can evolve to it. -> SchemaRegistered

    It has other columns than the schema before it, or other constraints, and not both. Where its types have no room for
    every value, or it constrains rows more, `expected_upper` is the upper up to which the contents were found to fit;
    UpperMismatch where somebody wrote since. Rows that were staged before are staged anew then. InvalidUsage where it
    is no schema, does not fit the one before it, or needs an upper.
    """

    expected_id: int
    schema: SchemaRecord
    expected_upper: Antichain | None = None


# Commands by which a shard goes on at another home. `commands` has all of their names.


class HandOver(Command, frozen=True):
    """The last commit of the shard here: it goes on at a home of the location that has this epoch. -> Done

    From then on every change is refused as ReadOnly, but for `TakeBack`. Conflict: it was handed over to another one.
    """

    epoch: Annotated[int, Meta(ge=1)]


class TakeBack(Command, frozen=True):
    """The shard goes on here: nothing came of the home of this epoch. -> Done, also where it was not handed over.

    Conflict: it was handed over to another one.
    """

    epoch: Annotated[int, Meta(ge=1)]


# Commands that end what has lapsed. `commands` has all of their names too.


class LapsedLeases(Record, frozen=True):
    """Leases as they are in some State."""

    leased_readers: Mapping[Annotated[ReaderId, written(ReaderId)], LeasedReader] = {}
    writers: Mapping[Annotated[WriterId, written(WriterId)], WriterState] = {}
    claims: Mapping[str, Claim] = {}


class ForgetLapsed(MaintainCommand, frozen=True):
    """Forget what lapsed: leases, and the right to name what was staged. -> SweptBefore, whose commit always happens.

    Readers, writers and claims go whose leases lapsed. The caller vouches that those in `silent` lapsed too. One of
    them that was renewed since, so that it differs from what is given here, is kept. From now on no blob is named
    whose key was minted before `staged_before_ms`, unless it is named already; never beyond the committer's own clock.
    A commit that was stepped from an earlier State loses its race: so what is that old and is not named now may be
    deleted.
    """

    silent: LapsedLeases = LapsedLeases()
    staged_before_ms: Annotated[int, Meta(ge=0, le=TIME_MS_MAX)] = 0


# Commands of clones, and their results. `commands` has all of their names too.


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
