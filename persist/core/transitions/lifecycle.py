"""Transitions of a shard as a whole: schema, close, tombstone, next life, handover to another region, and clones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from persist.core import commands as c
from persist.core.attribute import NO_INDEX
from persist.core.audit_log import CLONE, NOBODY, Caller, CommandEntry, Committed, births
from persist.core.batch import Description, HollowBatch, trace_of
from persist.core.blob_keys import belongs_to, is_loan_key, shard_of
from persist.core.errors import Conflict, Expired, InvalidUsage, Overloaded, ReadOnly, SchemaMismatch
from persist.core.frontier import EMPTY, MINIMUM, TIME_MAX
from persist.core.ids import INCARNATION_MAX, LoanId, SeqNo, check_shard_name, family_of, shard_id_of
from persist.core.named_holds import LOANS_MAX, Loan, is_foreign
from persist.core.persistent_map import with_changes
from persist.core.record import replace
from persist.core.shard_settings import NO_RETENTION, ShardSettings
from persist.core.spill import OUTCOMES
from persist.core.state import SchemaRecord, State, initial_state
from persist.core.transitions.context import RETRY_LATER_S, Context
from persist.core.transitions.lease_expiry import without_lapsed_readers
from persist.core.transitions.outcomes_and_audit import of_ended_life, retired
from persist.core.transitions.row_drops import without_pending
from persist.core.transitions.time_checks import check_upper

FINALISE_BATCHES_PER_STEP = 100
HOLDERS_NAMED_MAX = 5


def evolve_schema(state: State, command: c.EvolveSchema, context: Context) -> tuple[State, c.SchemaRegistered]:
    current = state.schema_id
    if state.schemas[current] == command.schema:  # nothing to do, or a retry
        return state, c.SchemaRegistered(current)
    following = with_schema(state, command, context)
    if command.expected_upper is not None:  # what is committed from here on was staged by who knew the schema
        check_upper(state, command.expected_upper)
        following = replace(following, schema_floor=current + 1)
    return following, c.SchemaRegistered(current + 1)


def with_schema(state: State, command: c.EvolveSchema | c.SchemaChange, context: Context) -> State:
    """The State whose current schema is that of the command. Raises SchemaMismatch, and the verdict's error."""
    current = state.schema_id
    if command.expected_id != current:
        raise SchemaMismatch(
            f"shard {state.name!r} has schema {current}, not the expected {command.expected_id}; read it again",
            expected=command.expected_id,
            actual=current,
        )
    context.verdict.check()
    settings = _settings_after(state, context.verdict.settings)
    first = TIME_MAX + 1 if state.upper.element is None else state.upper.element
    return replace(reshaped(state, command), settings=settings, schema_times={**state.schema_times, current + 1: first})


def reshaped(state: State, command: c.EvolveSchema | c.SchemaChange) -> State:
    """The State with the schema of the command, unchecked."""
    return replace(state, schemas={**state.schemas, command.expected_id + 1: command.schema})


def _settings_after(state: State, looked_at: int | None) -> ShardSettings:
    """The settings after a change of the columns. `looked_at`: the version for which the removed names were checked.

    A row policy refers to its column by name. So if names are removed the settings get a new version: a client that
    read the columns before, to set a policy, is refused.
    """
    known = state.settings
    if looked_at is None:
        return known
    if known.version != looked_at:
        raise SchemaMismatch(
            f"the settings of shard {state.name!r} changed while its columns were being changed; nothing was changed: "
            "retry",
            expected=looked_at,
            actual=known.version,
        )
    return replace(known, version=known.version + 1) if known.version else known


def drop(state: State, command: c.Drop, context: Context) -> tuple[State, c.Done]:
    if state.is_closed:
        return state, c.Done()
    state = without_lapsed_readers(state, context.lease_now_ms)
    holders = [r.purpose or str(k) for k, r in state.critical_readers.items() if not r.since.is_empty]
    holders += [r.purpose or str(k) for k, r in state.leased_readers.items() if not r.since.is_empty]
    if holders and not command.force:
        named = ", ".join(sorted(holders)[:HOLDERS_NAMED_MAX])
        raise Conflict(
            f"shard {state.name!r} is held by {len(holders)} readers ({named}); close them, or drop it by force",
            holders=sorted(holders),
        )
    trace = state.trace
    if not state.upper.is_empty:
        trace = trace.push(HollowBatch(Description(state.upper, EMPTY, MINIMUM), (), 0))
    # Pending erasures await a time that never comes; all rows are deleted now. Certificates are kept until the drop.
    return replace(state, trace=trace, since=EMPTY, leased_readers={}, critical_readers={}, erasures={}), c.Done()


def finalise(state: State, command: c.Finalise, context: Context) -> tuple[State, c.Finalised]:
    if state.tombstone:
        return state, c.Finalised(done=True)
    batches = state.trace.batches
    if len(batches) > 1 or batches[0].runs:
        taken = batches[:FINALISE_BATCHES_PER_STEP]
        emptied = HollowBatch(Description(taken[0].desc.lower, taken[-1].desc.upper, MINIMUM), (), 0)
        # Older builds dropped a shard with its pending erasures, which no State at the upper [] may have.
        state = replace(state, trace=trace_of((emptied, *batches[len(taken) :])), erasures={})
        return state, c.Finalised(done=False)
    store_ms = context.now_ms if command.store_ms is None else command.store_ms
    born = [*births(state.outcomes), *(file.last for file in state.files_of(OUTCOMES))]
    gone = replace(
        state,
        writers={},
        leased_readers={},
        critical_readers={},
        claims={},
        attributes={},
        attribute_root=NO_INDEX,
        attribute_chunks={},
        marks={},
        entries={},
        info_bytes=0,
        tags={},
        truncations=(),
        restored_at=0,
        drops=(),
        floor=0,
        cuts={},
        retention=NO_RETENTION,
        erasures={},
        left={},
        # A minted token that landed in this life must not land in the next one. A token from the future would block
        # all others until its time, so such tokens are remembered individually.
        outcomes=of_ended_life(state, store_ms, context),
        spilled={},
        forgotten_ms=max(state.forgotten_ms, min(max(born, default=0), store_ms)),
        tombstone=True,
    )
    return gone, c.Finalised(done=True)


def recreate(state: State, command: c.Recreate, context: Context) -> tuple[State, c.Done]:
    """The next life begins as the first one did. The log continues, so its rollups stay named until it is truncated."""
    context.verdict.check()
    incarnation = _next_incarnation(state)
    born = initial_state(state.name, command.schema, context.now_ms, command.settings)
    return replace(
        born,
        shard_id=shard_id_of(state.name, incarnation),
        seqno=state.seqno,
        rollups=state.rollups,
        features=state.features,
        incarnation=incarnation,
        forgotten_ms=state.forgotten_ms,
        outcomes=state.outcomes,
        long_diffs=state.long_diffs,
        loans=state.loans,
        borrowed=state.borrowed,
        entries={},
    ), c.Done()


def _next_incarnation(state: State) -> int:
    if state.incarnation == INCARNATION_MAX:
        raise InvalidUsage(f"the name {state.name!r} was used {INCARNATION_MAX + 1} times; take another one")
    return state.incarnation + 1


# A shard is handed over to another home of its location, and taken back if that home does not start.


HOLDS = (c.RegisterReader, c.ExpireReader, c.DowngradeSince)
"""Commands that a handed-over shard answers without a commit, since its history is not forgotten any more.

After it was taken back, a reader that registered meanwhile gets Expired.
"""


def hand_over(state: State, command: c.HandOver, context: Context) -> tuple[State, c.Done]:
    if state.handed_over == command.epoch:  # a retry
        return state, c.Done()
    if state.handed_over != command.expected:
        raise Conflict(f"shard {state.name!r} is at {_home(state.handed_over)}, not at {_home(command.expected)}")
    return replace(state, handed_over=command.epoch), c.Done()


def _home(epoch: int) -> str:
    return f"the home of epoch {epoch}" if epoch else "this home"


def held(state: State, command: Any, held_here: Callable[[], c.Result]) -> c.Result:
    """The answer to a hold at a shard that was handed over. `held_here` returns the ordinary answer."""
    if not isinstance(command, c.DowngradeSince) or command.reader in state.leased_readers:
        return held_here()
    return c.SinceDowngraded(command.since or state.since, state.since)


def check_here(state: State) -> None:
    if state.handed_over:
        raise ReadOnly(
            f"shard {state.name!r} was handed over to the home of epoch {state.handed_over}: write there",
            home=[],
            region="",
        )


# Transitions of loans, at the owner and at the borrower, and the first State of a clone.


def lend(state: State, command: c.Lend, context: Context) -> tuple[State, c.Lent]:
    """A garbage collector whose State lacks this loan deletes no blob that a State from its horizon on names.

    Its horizon is a rollup that no reader held back, in an earlier State than this. The latest horizon only advances.
    """
    if (known := _known(state, command)) is not None:
        return state, known
    if command.seqno > state.seqno:
        raise InvalidUsage(f"shard {state.name!r} is at v{state.seqno}: it cannot lend what v{command.seqno} names")
    if command.seqno < lends_from(state):
        return state, c.Lent(False)
    return _lent(state, command, context), c.Lent(True)


def lends_from(state: State) -> SeqNo:
    """The first seqno all of whose blobs certainly exist: the latest horizon that a garbage collector can have."""
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
    """As `recreate`, with the contents of another shard. A loan that no clone took is ended only after lists of its age
    are refused here.
    """
    born, incarnation = command.state, _next_incarnation(state)
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
    """Raise InvalidUsage if a clone names blobs of its own name, or of an owner without a loan."""
    owners = {family_of(shard_id_of(owner)) for owner in state.borrowed.values()}
    for key in state.blob_keys():
        if not is_foreign(key, state.shard_id) or family_of(shard_of(key)) not in owners:
            raise InvalidUsage(f"the clone {state.name!r} has no loan for {key}")


def _known(state: State, command: c.Lend | c.LendOn) -> c.Lent | None:
    """The answer to a retry; None: the loan is new."""
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


FIRST = SeqNo(1)


def clone_of(state: State, name: str, loans: Mapping[LoanId, str], commit_id: str, now_ms: int) -> State:
    """The State v1 of the clone `name`, with the rows, schemas, attributes, tags and readable times of `state`.

    Readers, writers, claims, the commit history, erasures and outcomes of tokens are not copied. Tokens that were
    minted before are refused, since they may have been committed to the source. `loans` are the names of owners.
    """
    state = without_feed(state)
    while state.writers:
        state = retired(state, state.writers, state.lease_now_ms)
    born = [*births(state.outcomes), *(file.last for file in state.files_of(OUTCOMES))]
    return replace(
        state,
        name=name,
        shard_id=shard_id_of(name),
        seqno=FIRST,
        walltime_ms=max(now_ms, state.walltime_ms),
        commit_id=commit_id,
        incarnation=0,
        leased_readers={},
        critical_readers={},
        given_up=SeqNo(0),
        rollups={},
        long_diffs={},
        claims={},
        left={},
        left_before_ms=0,
        swept_before_ms=0,
        outcomes={},
        spilled={},
        forgotten_ms=max([state.forgotten_ms, *(min(at_ms, now_ms) for at_ms in born)]),
        erasures={},
        entries={},
        info_bytes=0,
        loans={},
        borrowed=dict(loans),
    )


def without_feed(state: State) -> State:
    """The State of a shard that is not fed by `append` yet: until it is, the service chooses its times.

    A truncation that waits for the writer of the source is not copied.
    """
    if not state.retention.appended:
        return state
    state = without_pending(state)
    return replace(state, retention=replace(state.retention, appended=False))


def without_policy(state: State) -> State:
    """The State without its row policy, which would remove restored rows at once."""
    settings = state.settings
    if settings.rows is None:
        return state
    return replace(state, settings=replace(settings, rows=None, version=settings.version + 1), cuts={})


def fence_of(name: str, schema: SchemaRecord, now_ms: int, commit_id: str) -> State:
    """The State of an unused name, as that of a dropped shard, so that its next life may begin."""
    ended = HollowBatch(Description(MINIMUM, EMPTY, MINIMUM), (), 0)
    return replace(
        initial_state(name, schema, now_ms),
        commit_id=commit_id,
        trace=trace_of((ended,)),
        since=EMPTY,
        tombstone=True,
        entries={},
        info_bytes=0,
    )


def with_entry(state: State, caller: Caller) -> State:
    """The State v1 with its entry in the commit history, for a log that begins without an ordinary commit."""
    entry = CommandEntry(CLONE, MINIMUM, state.upper, caller=None if caller == NOBODY else caller)
    return replace(state, entries={state.seqno: Committed(state.walltime_ms, (entry,))}, info_bytes=len(caller.info))
