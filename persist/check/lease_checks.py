"""Checks of leases and clocks: who holds history, blobs or a name, since when, and whose clock is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from persist.check.findings import (
    DAY_MS,
    HELD_ENTRIES_MANY,
    LAPSES_MANY,
    OFFSET_MS_MAX,
    READERS_MANY,
    WRITERS_MANY,
    CheckedShard,
    Diagnosis,
    age,
    at,
    diagnosis,
    many,
    size,
)
from persist.copies.shard_facts import newest
from persist.core.blob_keys import belongs_to, born_ms, is_rollup_key, shard_of
from persist.core.errors import PersistError, UnknownShard
from persist.core.frontier import Antichain
from persist.core.ids import CriticalReaderId, ReaderId, critical_reader_id_of
from persist.core.state import CriticalReader, LeasedReader, State, latest_time
from persist.regions.remote_holds import PURPOSE as REGION

# Who holds: history, blobs that left the shard, a place in it. By name, since when, and whether they still live.


DATA_FRAMES = "spark "  # what reads of PySpark say: nobody knows when a DataFrame is done with, so their leases lapse
READERS_TOLD_MAX = 100  # of a shard, by one kind of finding


@dataclass(frozen=True, slots=True)
class _Holder:
    """Who holds `since`. `lives` says whether somebody still renews it, in words."""

    who: str
    since: Antichain
    began: str
    lives: str
    remedy: str
    command: str


def since_held(seen: CheckedShard) -> Iterator[Diagnosis]:
    """Readers for whom history is kept that the shard's own setting would let go, for long."""
    state = seen.state
    if state is None or state.since.element is None:
        return
    allowed = state.history_hold if state.settings.keeps_history else latest_time(state)
    kept_ms = (state.settings.history_ms or 0) if state.settings.keeps_history else 0
    for holder in _holders(seen, state):
        time = holder.since.element
        if time is None or not holder.since < allowed or holder.since > state.since:
            continue
        old_ms = seen.age_ms(time)
        if old_ms is None or old_ms < seen.limits.held_ms + kept_ms:
            continue
        yield diagnosis(
            "since-held",
            seen.name,
            f"{holder.who} holds all history from time {time} on, which is {age(old_ms)} old; without it history would "
            f"begin at {allowed.element}",
            cause=f"{holder.began}; {holder.lives}",
            remedy=holder.remedy,
            command=holder.command,
        )


def _cursors(state: State) -> list[tuple[CriticalReaderId, CriticalReader]]:
    """The critical readers, those first that hold the most."""
    return sorted(state.critical_readers.items(), key=lambda item: (item[1].since.element or 0, item[0]))


def _holders(seen: CheckedShard, state: State) -> Iterator[_Holder]:
    """Those who hold the most, at most READERS_TOLD_MAX of each kind."""
    leased = [(key, one) for key, one in state.leased_readers.items() if not one.point and not one.since.is_empty]
    for reader, held in sorted(leased, key=lambda item: (item[1].since.element or 0, item[0]))[:READERS_TOLD_MAX]:
        yield _Holder(
            _reader_name(reader, held), held.since, f"it was opened {_opened(seen, reader)}", _lives(seen, held),
            _reader_remedy(seen, held), _reader_command(seen, held),
        )  # fmt: skip
    for cursor, critical in _cursors(state)[:READERS_TOLD_MAX]:
        yield _Holder(
            _cursor_name(state, cursor), critical.since, f"it was registered {_registered(int(critical.registered))}",
            "a critical reader holds until it is moved or given up, whether anybody reads or not",
            "let its reader go on, or give it up: shard.critical_reader(NAME).expire()",
            f"persist inspect holds {seen.name}",
        )  # fmt: skip


def _reader_name(reader: ReaderId, held: LeasedReader) -> str:
    if held.purpose.startswith(REGION):
        return f"region {held.purpose.removeprefix(REGION)!r} (reader {reader})"
    return f"reader {held.purpose!r} ({reader})" if held.purpose else f"a reader without a purpose ({reader})"


def _cursor_name(state: State, cursor: CriticalReaderId) -> str:
    """A State keeps no names of critical readers, only what they are made into; consumers of a policy are named."""
    policy = state.settings.rows
    name = next((one for one in (policy.consumers if policy else ()) if critical_reader_id_of(one) == cursor), None)
    purpose = state.critical_readers[cursor].purpose
    told = repr(name) if name is not None else repr(purpose) if purpose else "without a purpose"
    return f"critical reader {told} ({cursor})"


def _opened(seen: CheckedShard, reader: ReaderId) -> str:
    """When it came, by the log, or else by the clock of who made its id."""
    by_log = seen.log.began.get(reader)
    if by_log is not None and seen.log.first_seqno == 1:
        return at(by_log)
    return at(born_ms(reader))


def _registered(seqno: int) -> str:
    return f"after v{seqno}" if seqno else "before that was noted"


def _lives(seen: CheckedShard, held: LeasedReader) -> str:
    silent_ms = seen.silent_ms(held)
    if silent_ms > held.lease_ms:
        return f"nobody has renewed it for {age(silent_ms)}, and its lease is {age(held.lease_ms)}: its program is gone"
    return f"its program lives: it has renewed its lease of {age(held.lease_ms)} within {age(max(silent_ms, 1000))}"


def _is_gone(seen: CheckedShard, held: LeasedReader) -> bool:
    return seen.silent_ms(held) > held.lease_ms


def _reader_remedy(seen: CheckedShard, held: LeasedReader) -> str:
    if _is_gone(seen, held):
        return "start maintenance, which ends leases that nobody renews"
    if held.purpose.startswith(REGION):
        return "look why that region is behind; what it holds can be let go"
    return "end that program, or have it read on; then its lease ends by itself"


def _reader_command(seen: CheckedShard, held: LeasedReader) -> str:
    return "persist maintain gc --once" if _is_gone(seen, held) else f"persist inspect holds {seen.name}"


def gc_held(seen: CheckedShard) -> Iterator[Diagnosis]:
    """Readers of old versions: blobs that left the shard since then stay, and so does the log."""
    state = seen.state
    if state is None:
        return
    found = sorted(state.leased_readers.items(), key=lambda item: (item[1].seqno, item[0]))
    for reader, held in found[:READERS_TOLD_MAX]:
        began_ms = seen.log.walltimes.get(int(held.seqno) + 1)
        if began_ms is None or seen.now_ms - began_ms < seen.limits.held_ms:
            continue
        left = [key for key, seqno in seen.log.gone.items() if seqno > held.seqno and key in seen.listed]
        entries = seen.head - int(held.seqno)
        if all(map(is_rollup_key, left)) and entries < HELD_ENTRIES_MANY:
            continue  # a listener of a shard at rest: its own renewals are all that came since
        kept = sum(seen.listed[key].size for key in left)
        yield diagnosis(
            "gc-held",
            seen.name,
            f"{_reader_name(reader, held)} has read v{held.seqno} for {age(seen.now_ms - began_ms)}: it keeps "
            f"{many(len(left), 'blob')} of {size(kept)} and {many(entries, 'log entry')}",
            cause=f"it was opened {_opened(seen, reader)}; {_lives(seen, held)}",
            remedy=_reader_remedy(seen, held),
            command=_reader_command(seen, held),
        )


def cursor_still(seen: CheckedShard) -> Iterator[Diagnosis]:
    """Critical readers that have not moved for long, though there is more to read."""
    state = seen.state
    if state is None:
        return
    latest = latest_time(state)
    for cursor, critical in _cursors(state):
        time = critical.since.element
        if time is None or not critical.since < latest:
            continue
        moved_ms, old_ms = seen.log.moved.get(cursor), seen.age_ms(time + 1)
        if moved_ms is not None:
            old_ms = seen.now_ms - moved_ms if old_ms is None else min(old_ms, seen.now_ms - moved_ms)
        if old_ms is None or old_ms < seen.limits.held_ms:
            continue
        behind = (latest.element or 0) - time
        yield diagnosis(
            "cursor-still",
            seen.name,
            f"{_cursor_name(state, cursor)} has stood at time {time} for {age(old_ms)}, {many(behind, 'time')} behind "
            "the latest",
            cause=f"who reads by it has stopped; it was registered {_registered(int(critical.registered))}",
            remedy="start its reader again, or give it up: shard.critical_reader(NAME).expire()",
            command=f"persist inspect holds {seen.name}",
        )


def many_holders(seen: CheckedShard) -> Iterator[Diagnosis]:
    """Very many readers, or writers: each costs every State room."""
    if seen.state is None:
        return
    for found, what, held, most in (
        ("readers-many", "reader", seen.state.leased_readers, READERS_MANY),
        ("writers-many", "writer", seen.state.writers, WRITERS_MANY),
    ):
        if len(held) >= most:
            yield diagnosis(
                found,
                seen.name,
                f"the shard has {len(held):,} registered {what}s, and every commit carries what they do",
                cause=f"a program opens {what}s, and does not close them: each stays until its lease ends",
                remedy=f"keep one {what} open, or close each",
                command=f"persist inspect holds {seen.name}",
            )


def lease_lapses(seen: CheckedShard) -> Iterator[Diagnosis]:
    """Leases that ended because nobody renewed them, within a day, as far as the live log tells."""
    lapses = [
        one for one in seen.log.lapses if seen.now_ms - one.at_ms < DAY_MS and not one.purpose.startswith(DATA_FRAMES)
    ]
    if len(lapses) < LAPSES_MANY:
        return
    names = [f"reader {one.purpose!r}" if one.kind == "reader" else "a writer" for one in lapses]
    often = max(sorted(set(names)), key=names.count)
    yield diagnosis(
        "lease-lapses",
        seen.name,
        f"{len(lapses)} leases have lapsed since {at(lapses[0].at_ms)}, {names.count(often)} of them of {often}",
        cause="their programs were killed, suspended, or cut off; or they open readers and writers and leave them",
        remedy="close what is opened, give longer leases (lease_ms), or look why those programs end",
        command=f"persist inspect holds {seen.name}",
    )


def loan_stuck(seen: CheckedShard) -> Iterator[Diagnosis]:
    """Blobs that are lent to a clone that does not have them, or is no more."""
    state = seen.state
    if state is None:
        return
    for loan_id, loan in sorted(state.loans.items()):
        old_ms = seen.now_ms - loan.begun_ms
        if old_ms < seen.limits.behind_ms or _has_borrowed(seen, loan.borrower, loan_id):
            continue
        lent_to = seen.look.shown_name(loan.borrower)
        yield diagnosis(
            "loan-stuck",
            seen.name,
            f"{many(loan.keys, 'blob')} {'is' if loan.keys == 1 else 'are'} lent to {lent_to!r} since "
            f"{at(loan.begun_ms)}, and that shard needs none of them",
            cause="the clone was never made, was dropped, or was merged, and maintenance has not ended the loan",
            remedy="start maintenance, which ends it",
            command="persist maintain gc --once",
        )


def _has_borrowed(seen: CheckedShard, borrower: str, loan_id: object) -> bool:
    try:
        state = newest(seen.look, borrower).state
    except UnknownShard:
        return False
    except PersistError:
        return True  # nobody knows
    return state is None or (loan_id in state.borrowed and not state.is_closed)


# Clocks: of who commits, of the blob store, and of this machine. Nothing is probed: what lies there already tells.


REMEDY = "set the clocks by NTP on all machines that write, and on that of the blob store"


@dataclass(frozen=True, slots=True)
class ClocksSeen:
    """What one shard tells of clocks: by how much its last commit lies in the future, by how much a blob was made after
    the store says that it was written, and by how much the store's time of a blob lies in the future. At least 0.
    """

    shard: str
    commit_ms: int
    maker_ms: int
    store_ms: int


def clocks_of(seen: CheckedShard, now_ms: int) -> ClocksSeen:
    """Of a shard that was read before `now_ms`: what is later than that lies in the future."""
    commit_ms = 0 if seen.state is None else seen.state.walltime_ms - now_ms
    maker_ms = store_ms = 0
    for key, stat in seen.listed.items():
        store_ms = max(store_ms, stat.modified_ms - now_ms)
        if belongs_to(key, shard_of(key)):
            maker_ms = max(maker_ms, born_ms(key) - stat.modified_ms)
    return ClocksSeen(seen.name, max(0, commit_ms), maker_ms, store_ms)


def clock_off(found: Iterable[ClocksSeen]) -> Iterator[Diagnosis]:
    """One finding for each pair of clocks that do not agree, by the shard that shows it most.

    A maker's clock that is behind the store's cannot be told from a copy that was made later.
    """
    known = [one for one in found if max(one.commit_ms, one.maker_ms, one.store_ms) > OFFSET_MS_MAX]
    for ahead, name in (
        ("maker_ms", "a writer's clock is {} ahead of the blob store's"),
        ("store_ms", "the blob store's clock is {} ahead of this machine's"),
        ("commit_ms", "a commit is {} in the future, by this machine's clock"),
    ):
        worst = max(known, key=lambda one: (getattr(one, ahead), one.shard), default=None)
        if worst is None or getattr(worst, ahead) <= OFFSET_MS_MAX:
            continue
        yield diagnosis(
            "clock-off",
            worst.shard,
            name.format(age(getattr(worst, ahead))),
            cause="clocks of machines differ; while they do no instants are settled, and nothing goes by age",
            remedy=f"{REMEDY}; what a clock far ahead has settled is taken back by --repair-clock",
            command=f"persist history {worst.shard}",
        )
