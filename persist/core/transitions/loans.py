"""Transitions of loans, at the owner and at the borrower, and the first State of a clone."""

from __future__ import annotations

from persist.core import commands as c
from persist.core.entries import with_changes
from persist.core.errors import Expired, InvalidUsage, Overloaded
from persist.core.ids import INCARNATION_MAX, LoanId, SeqNo, check_shard_name, family_of, shard_id_of
from persist.core.keys import belongs_to, is_loan_key, shard_of
from persist.core.loans import LOANS_MAX, Loan, is_foreign
from persist.core.record import replace
from persist.core.state import State
from persist.core.transitions.context import RETRY_LATER_S, Context


def lend(state: State, command: c.Lend, context: Context) -> tuple[State, c.Lent]:
    """A collector whose State has not this loan deletes nothing that a State from its horizon on names.

    Its horizon is a rollup that no reader forbade, in an earlier State than this. The latest of these only moves on.
    """
    if (known := _known(state, command)) is not None:
        return state, known
    if command.seqno > state.seqno:
        raise InvalidUsage(f"shard {state.name!r} is at v{state.seqno}: it cannot lend what v{command.seqno} names")
    if command.seqno < lends_from(state):
        return state, c.Lent(False)
    return _lent(state, command, context), c.Lent(True)


def lends_from(state: State) -> SeqNo:
    """The first seqno of which all blobs are there for sure: the latest horizon that a collector can have."""
    held = state.seqno_since
    return max((seqno for seqno in state.rollups if seqno <= held), default=SeqNo(0))


def lend_on(state: State, command: c.LendOn, context: Context) -> tuple[State, c.Lent]:
    if (known := _known(state, command)) is not None:
        return state, known
    through = state.loans.get(command.through)
    if through is None or through.list_key != command.through_key:
        return state, c.Lent(False)
    return _lent(state, command, context), c.Lent(True)


def shrink(state: State, command: c.ShrinkLoan, context: Context) -> tuple[State, c.Lent]:
    loan = state.loans.get(command.loan)
    if loan is None or loan.list_key == command.new_key:
        return state, c.Lent(loan is not None)
    if loan.list_key != command.list_key or command.keys > loan.keys or context.may_be_swept(state, command.new_key):
        return state, c.Lent(False)
    _check_list(state, command.new_key)
    shrunk = replace(loan, list_key=command.new_key, keys=command.keys)
    return replace(state, loans=with_changes(state.loans, {command.loan: shrunk})), c.Lent(True)


def end(state: State, command: c.EndLoan, context: Context) -> tuple[State, c.Done]:
    if command.loan not in state.loans:
        return state, c.Done()
    return replace(state, loans=with_changes(state.loans, {}, (command.loan,))), c.Done()


def returned(state: State, command: c.Returned, context: Context) -> tuple[State, c.Done]:
    owner = state.borrowed.get(command.loan)
    if owner is None:
        return state, c.Done()
    others = [loan for loan, name in state.borrowed.items() if name == owner and loan != command.loan]
    family = family_of(shard_id_of(owner))
    if not others and any(key.startswith(family) for key in state.blob_keys()):
        raise InvalidUsage(
            f"shard {state.name!r} still names blobs of shard {owner!r}: the loan {command.loan} cannot be given back"
        )
    return replace(state, borrowed=with_changes(state.borrowed, {}, (command.loan,))), c.Done()


def begin_clone(state: State, command: c.BeginClone, context: Context) -> tuple[State, c.Done]:
    """As `lifecycle.recreate`, with the contents of another shard. Whoever ends a loan that nobody took has made sure

    before that lists as old as that one are refused here.
    """
    born, incarnation = command.state, state.incarnation + 1
    if incarnation > INCARNATION_MAX:
        raise InvalidUsage(f"the name {state.name!r} was used {incarnation} times; take another one")
    if any(context.may_be_swept(state, key) for key in command.lists):
        raise Expired(f"the clone {state.name!r} was begun so long ago that its loans were ended; clone again")
    check_own(born)
    return replace(
        born,
        name=state.name,
        shard_id=shard_id_of(state.name, incarnation),
        seqno=state.seqno,
        walltime_ms=state.walltime_ms,
        commit_id=state.commit_id,
        rollups=state.rollups,
        features=tuple(sorted({*state.features, *born.features})),
        incarnation=incarnation,
        forgotten_ms=max(state.forgotten_ms, born.forgotten_ms),
        outcomes={**born.outcomes, **state.outcomes},
        long_diffs=state.long_diffs,
        lease_clock_ms=state.lease_clock_ms,
        swept_before_ms=state.swept_before_ms,
        entries={},
        info_bytes=0,
        loans=state.loans,
        borrowed={**state.borrowed, **born.borrowed},
    ), c.Done()


def check_own(state: State) -> None:
    """Raises InvalidUsage where a clone names blobs of its own name, or of an owner of whom it has no loan."""
    owners = {family_of(shard_id_of(owner)) for owner in state.borrowed.values()}
    for key in state.blob_keys():
        if not is_foreign(key, state.shard_id) or family_of(shard_of(key)) not in owners:
            raise InvalidUsage(f"the clone {state.name!r} has no loan for {key}")


def _known(state: State, command: c.Lend | c.LendOn) -> c.Lent | None:
    """What a command is answered that landed before."""
    known = state.loans.get(command.loan)
    return None if known is None else c.Lent(known.list_key == command.list_key)


def _lent(state: State, command: c.Lend | c.LendOn, context: Context) -> State:
    check_shard_name(command.borrower)
    if not is_foreign(shard_id_of(command.borrower), state.shard_id):
        raise InvalidUsage(f"shard {state.name!r} cannot lend to itself")
    _check_list(state, command.list_key)
    if context.may_be_swept(state, command.list_key):
        raise Expired(f"the list {command.list_key} is so old that it may have been swept; clone again")
    if len(state.loans) >= LOANS_MAX:
        raise Overloaded(
            f"shard {state.name!r} has {LOANS_MAX} clones that still use its blobs; drop some, or wait until they are "
            "merged",
            retry_after_s=RETRY_LATER_S,
        )
    loan = Loan(command.borrower, command.list_key, context.now_ms, command.keys)
    return replace(state, loans=with_changes(state.loans, {LoanId(command.loan): loan}))


def _check_list(state: State, key: str) -> None:
    if not belongs_to(key, shard_of(key)) or not is_loan_key(key) or is_foreign(key, state.shard_id):
        raise InvalidUsage(f"{key!r:.200} is not the key of a list of shard {state.name!r}")
