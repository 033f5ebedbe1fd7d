"""Transitions of readers: expiring holds, holds that never expire, and how they move the shard's since."""

from __future__ import annotations

from persist.core import commands as c
from persist.core.erasure_progress import erased_from
from persist.core.errors import Expired, InvalidUsage, NotReadable, OpaqueMismatch, Overloaded
from persist.core.frontier import MINIMUM, TIME_MAX, Antichain
from persist.core.ids import CriticalReaderId, ReaderId, SeqNo
from persist.core.persistent_map import with_changes
from persist.core.readable_times import is_kept
from persist.core.record import replace
from persist.core.shard_phases import only_drop
from persist.core.state import ROLLUP_LEAST, CriticalReader, LeasedReader, State
from persist.core.transitions.context import RETRY_LATER_S, Context
from persist.core.transitions.history_control import named, with_since
from persist.core.transitions.lease_expiry import check_lease, heartbeat_ms, is_fresh, without_lapsed_readers

PURPOSE_CHARS_MAX = 256
OPAQUE_CHARS_MAX = 256
READERS_MAX = 10_000  # with leases: all are in the State, which every commit processes
CURSORS_MAX = 1_000  # they never lapse: a client has to give them up


def register(state: State, command: c.RegisterReader, context: Context) -> tuple[State, c.ReaderRegistered]:
    known = state.leased_readers.get(command.reader)
    if known is not None:  # a retry whose first answer was lost
        return state, c.ReaderRegistered(known.since, state.upper, known.seqno)
    state = _with_room(state, command, context)
    since = _point(state, command) if command.point else _since(state, command.since)
    purpose = _bounded("purpose", command.purpose, PURPOSE_CHARS_MAX)
    reader = LeasedReader(since, state.seqno, context.lease_now_ms, command.lease_ms, purpose, command.point)
    return _with_reader(state, command.reader, reader), c.ReaderRegistered(since, state.upper, state.seqno)


def _since(state: State, wanted: Antichain | None) -> Antichain:
    """The time from which on a new reader holds the shard. Raises NotReadable."""
    erased = erased_from(state)
    since = max(state.since, erased) if wanted is None else wanted
    if since < erased:
        raise _not_any_more(state, since, erased)
    if since < state.since:
        alone = since.element is not None and is_kept(state, since.element)
        what = "only that single time is kept: take a snapshot of it" if alone else "its history was forgotten"
        raise NotReadable(
            f"shard {state.name!r} is readable from {state.since} on, not as of {since}: {what}",
            as_of=since.to_json(),
            since=state.since.to_json(),
        )
    return since


def _point(state: State, command: c.RegisterReader) -> Antichain:
    """The single time that a new reader holds. Raises NotReadable, InvalidUsage."""
    time = named(state, command.tag).time if command.tag else (command.since or MINIMUM).element
    if time is None:
        raise InvalidUsage(f"a reader of a single time of shard {state.name!r} needs a time, not []")
    erased = erased_from(state)
    if Antichain(time) < erased and time not in (tag.time for tag in state.tags.values()):
        raise _not_any_more(state, Antichain(time), erased)
    if not is_kept(state, time):
        raise NotReadable(
            f"shard {state.name!r} is readable from {state.since} on, not as of [{time}]: its history was forgotten",
            as_of=[time],
            since=state.since.to_json(),
        )
    return Antichain(time)


def _not_any_more(state: State, since: Antichain, erased: Antichain) -> NotReadable:
    return NotReadable(
        f"shard {state.name!r} is no longer readable as of {since} for new readers, since rows were erased; read as of "
        f"{erased} or later",
        as_of=since.to_json(),
        since=erased.to_json(),
    )


def downgrade_since(state: State, command: c.DowngradeSince, context: Context) -> tuple[State, c.SinceDowngraded]:
    """Recompute since even if this hold is unchanged: other holds may have moved without moving since."""
    following, moved = _moved(state, command, context)
    if command.moves_since:
        following = with_since(following, context, may_close=True)
    return following, c.SinceDowngraded(moved, following.since)


def _moved(state: State, command: c.DowngradeSince, context: Context) -> tuple[State, Antichain]:
    """The State with the reader's hold moved, and the new since of that hold."""
    known = state.leased_readers.get(command.reader)
    if known is None or known.seqno > command.seqno:
        raise Expired(
            f"reader {command.reader} of shard {state.name!r} is gone: its lease lapsed or it was closed; open the "
            "snapshot, listener or load() again"
        )
    since, seqno = known.since, known.seqno
    if command.since is not None:
        since, seqno = max(since, command.since), max(seqno, min(command.seqno, state.seqno))
    _check_reached(state, known.since, since)
    if known.point and since != known.since and not since.is_empty:
        raise InvalidUsage(
            f"reader {command.reader} of shard {state.name!r} holds the single time {known.since}; open another one "
            f"for {since}"
        )
    held = since == known.since and seqno - known.seqno < min(context.policy.rollup_every, ROLLUP_LEAST)
    if held and is_fresh(command.reader, known, context):
        return state, since
    moved = replace(known, since=since, seqno=seqno, heartbeat_ms=heartbeat_ms(known, context))
    return _with_reader(state, command.reader, moved), since


def expire(state: State, command: c.ExpireReader, context: Context) -> tuple[State, c.Done]:
    if command.reader not in state.leased_readers:
        return state, c.Done()
    return replace(state, leased_readers=with_changes(state.leased_readers, {}, (command.reader,))), c.Done()


def register_critical(
    state: State, command: c.RegisterCriticalReader, context: Context
) -> tuple[State, c.CriticalReaderState | c.HoldGivenUp]:
    known = state.critical_readers.get(command.reader)
    if known is not None:
        return state, _state_of(known, state)
    if command.seen is not None and command.seen < state.given_up:
        return state, c.HoldGivenUp(state.given_up)
    if len(state.critical_readers) >= CURSORS_MAX:
        raise InvalidUsage(
            f"shard {state.name!r} has {len(state.critical_readers)} cursors, which is the maximum; give one up first"
        )
    opaque = _bounded("opaque token", command.opaque, OPAQUE_CHARS_MAX)
    purpose = _bounded("cursor", command.purpose, PURPOSE_CHARS_MAX)
    earliest = max(state.since, erased_from(state))
    since = earliest if command.since is None else max(earliest, command.since)
    _check_movable(state, state.since, since, command.force)
    registered = state.seqno
    reader = CriticalReader(since, opaque, purpose, registered)
    state = _with_critical(state, command.reader, reader)
    if command.since is not None:
        state = with_since(state, context, may_close=True)
    return state, _state_of(reader, state)


def compare_and_downgrade_since(
    state: State, command: c.CompareAndDowngradeSince, context: Context
) -> tuple[State, c.CriticalReaderState]:
    known = state.critical_readers.get(command.reader)
    if known is None:
        raise Expired(
            f"critical reader {command.reader} is not registered with shard {state.name!r}; register it first"
        )
    if command.registered not in (None, known.registered):
        raise Expired(f"this hold of critical reader {command.reader} was given up, and its name has a new one")
    new_opaque = _bounded("opaque token", command.new_opaque, OPAQUE_CHARS_MAX)
    since = max(known.since, command.since)
    if known.opaque == new_opaque and known.opaque != command.expected_opaque and since == known.since:
        return state, _state_of(known, state)  # a retry
    _check_opaque(state, command.reader, known, command.expected_opaque)
    _check_movable(state, known.since, since, command.force)
    moved = replace(known, since=since, opaque=new_opaque)
    state = with_since(_with_critical(state, command.reader, moved), context, may_close=True)
    return state, _state_of(moved, state)


def expire_critical(state: State, command: c.ExpireCriticalReader, context: Context) -> tuple[State, c.Done]:
    known = state.critical_readers.get(command.reader)
    if known is None or command.registered not in (None, known.registered):
        return state, c.Done()
    _check_opaque(state, command.reader, known, command.expected_opaque)
    kept = {k: r for k, r in state.critical_readers.items() if k != command.reader}
    given_up = SeqNo(state.seqno + 1)
    return replace(state, critical_readers=kept, given_up=given_up), c.Done()


def _state_of(reader: CriticalReader, state: State) -> c.CriticalReaderState:
    return c.CriticalReaderState(reader.since, reader.opaque, state.since, reader.registered)


def _with_room(state: State, command: c.RegisterReader, context: Context) -> State:
    """The State, without lapsed readers if there are too many. Raises Overloaded, InvalidUsage."""
    check_lease("reader", command.lease_ms)
    if len(state.leased_readers) >= READERS_MAX:
        state = without_lapsed_readers(state, context.lease_now_ms)
        if len(state.leased_readers) >= READERS_MAX:
            raise Overloaded(
                f"shard {state.name!r} has {len(state.leased_readers)} readers; expire some",
                retry_after_s=RETRY_LATER_S,
            )
    return state


def _with_reader(state: State, reader_id: ReaderId, reader: LeasedReader) -> State:
    return replace(state, leased_readers=with_changes(state.leased_readers, {reader_id: reader}))


def _with_critical(state: State, reader_id: CriticalReaderId, reader: CriticalReader) -> State:
    return replace(state, critical_readers={**state.critical_readers, reader_id: reader})


def _check_opaque(state: State, reader: CriticalReaderId, known: CriticalReader, expected: str) -> None:
    if known.opaque != expected:
        raise OpaqueMismatch(
            f"critical reader {known.purpose or reader!r} of shard {state.name!r} is held by another: tokens differ",
            expected=expected,
            actual=known.opaque,
            since=known.since.to_json(),
        )


def _check_movable(state: State, held: Antichain, since: Antichain, force: bool) -> None:
    """Refuse to move a hold that never expires to a harmful `since`."""
    _check_is_time(since)
    if not force:
        _check_reached(state, held, since)
        if since > held and since.is_empty and not state.upper.is_empty:
            raise InvalidUsage(
                f"since [] closes shard {state.name!r} to reads for ever, whatever its history; give a time, or force"
            )
    if since > held and since.is_empty and state.upper.is_empty:
        raise InvalidUsage(only_drop(state.name))


def _check_is_time(since: Antichain) -> None:
    if since.element is not None and since.element > TIME_MAX:
        raise InvalidUsage(f"since {since} is beyond the last time, {TIME_MAX}")


def _check_reached(state: State, held: Antichain, since: Antichain) -> None:
    """Refuse a since beyond the upper: it is a time of a wrong unit, or a typo, and irreversible."""
    _check_is_time(since)
    if since > held and state.upper < since and not since.is_empty:
        raise InvalidUsage(
            f"since {since} is beyond the upper {state.upper} of shard {state.name!r}: nothing could be read until a "
            "writer reaches it, and since never moves back; give at most the upper"
        )


def _bounded(what: str, text: str, chars_max: int) -> str:
    if len(text) > chars_max:
        raise InvalidUsage(f"the {what} has {len(text)} characters; at most {chars_max} are kept")
    return text
