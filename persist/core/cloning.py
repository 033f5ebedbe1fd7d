"""The first State of a clone: what it takes from the shard that it is made of. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from persist.core.antichain import EMPTY, MINIMUM
from persist.core.batch import Description, HollowBatch
from persist.core.ids import LoanId, SeqNo, shard_id_of
from persist.core.outcomes import births
from persist.core.record import replace
from persist.core.recorded import CLONE, NOBODY, Caller, Committed, Entry
from persist.core.state import SchemaRecord, State, initial_state
from persist.core.trace import trace_of
from persist.core.transitions.dropping import without_pending
from persist.core.transitions.outcomes import retired

FIRST = SeqNo(1)


def clone_of(state: State, name: str, loans: Mapping[LoanId, str], commit_id: str, now_ms: int) -> State:
    """The State v1 of the clone `name`: rows, schemas, attributes, tags and what is readable are those of `state`.

    Readers, writers, claims, the commit history, erasures and outcomes of tokens stay behind. Of tokens that were
    minted before it nobody knows whether they were committed to what it was made of. `loans` are the names of owners.
    """
    state = without_feed(state)
    while state.writers:
        state = retired(state, state.writers, state.lease_now_ms)
    born = [*births(state.outcomes), *(file.born_last for file in state.outcome_files)]
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
        outcome_files=(),
        forgotten_ms=max([state.forgotten_ms, *(min(at_ms, now_ms) for at_ms in born)]),
        erasures={},
        entries={},
        entry_files=(),
        info_bytes=0,
        loans={},
        borrowed=dict(loans),
    )


def without_feed(state: State) -> State:
    """The State of a shard that has no writer yet: until one appends to it, the service owns its times.

    A truncation that waits for the writer of the source stays behind.
    """
    if not state.retention.appended:
        return state
    return replace(without_pending(state), retention=replace(state.retention, appended=False))


def without_policy(state: State) -> State:
    """The State without its policy of rows, which would take at once what somebody wants to have back."""
    settings = state.settings
    if settings.rows is None:
        return state
    return replace(state, settings=replace(settings, rows=None, version=settings.version + 1), cuts={})


def fence_of(name: str, schema: SchemaRecord, now_ms: int, commit_id: str) -> State:
    """The State of a name that nobody has used, as that of a shard that was dropped: its next life may begin."""
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
    """The State v1 with its entry in the commit history, where no commit of the ordinary path writes it."""
    entry = Entry(CLONE, MINIMUM, state.upper, caller=None if caller == NOBODY else caller)
    return replace(state, entries={state.seqno: Committed(state.walltime_ms, (entry,))}, info_bytes=len(caller.info))
