"""Checks of leases and clocks: holders of history, blobs and space, and clocks that are wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from persist.check.findings import DAY_MS, CheckedShard, Diagnosis, age, at, diagnosis, is_or_are, many, size
from persist.commit.clocks_and_ids import OFFSET_MS_MAX
from persist.copies.shard_facts import newest
from persist.core.blob_keys import belongs_to, born_ms, is_rollup_key, shard_of
from persist.core.errors import PersistError, UnknownShard
from persist.core.frontier import Antichain
from persist.core.ids import CriticalReaderId, ReaderId, critical_reader_id_of
from persist.core.readable_times import latest_time
from persist.core.state import CriticalReader, LeasedReader, State
from persist.core.truncations_and_drops import last_written
from persist.regions.remote_holds import PURPOSE as REGION

# Holders of history, blobs and space: since when, and whether they are alive.


DATA_FRAMES = "spark "  # purpose of PySpark reads: the end of a DataFrame is unknown, so that their leases lapse
READERS_SHOWN_MAX = 100  # of a shard, for one kind of finding
HELD_ENTRIES_MANY = 1_000  # log entries that a reader holds, if it holds no part
LAPSES_MANY = 5  # leases of one shard that lapsed within a day
HOLDERS_MANY = 1_000  # readers, or writers


def since_held(shard: CheckedShard) -> Iterator[Diagnosis]:
    """Readers that have long held history that the shard's settings would delete."""
    state = shard.known()
    if state.since.element is None:
        return
    allowed = state.history_hold if state.settings.keeps_history else latest_time(state)
    kept_ms = (state.settings.history_ms or 0) if state.settings.keeps_history else 0
    for name, since, cause, remedy, command in _holders(shard, state):
        time = since.element
        if time is None or not since < allowed or since > state.since:
            continue
        age_ms = shard.age_ms(time)
        if age_ms is None or age_ms < shard.limits.held_ms + kept_ms:
            continue
        yield shard.finding(
            "since-held",
            f"{name} holds all history from time {time} on, which is {age(age_ms)} old; without it history would begin "
            f"at {allowed.element}",
            cause=cause,
            remedy=remedy,
            command=command,
        )


def _cursors(state: State) -> list[tuple[CriticalReaderId, CriticalReader]]:
    """The critical readers, oldest since first."""
    return sorted(state.critical_readers.items(), key=lambda item: (item[1].since.element or 0, item[0]))


def _holders(shard: CheckedShard, state: State) -> Iterator[tuple[str, Antichain, str, str, str]]:
    """The holders with the oldest since, at most READERS_SHOWN_MAX of each kind; what a finding says."""
    leased = [item for item in state.leased_readers.items() if not item[1].point and not item[1].since.is_empty]
    for reader, lease in sorted(leased, key=lambda item: (item[1].since.element or 0, item[0]))[:READERS_SHOWN_MAX]:
        yield _reader_name(reader, lease), lease.since, *_cause_and_advice(shard, reader, lease)
    for cursor, critical in _cursors(state)[:READERS_SHOWN_MAX]:
        cause = (
            f"it was registered {_registered(int(critical.registered))}; a critical reader holds history until it is "
            "moved or expired, whether it is used or not"
        )
        remedy = "resume its reader, or expire it: shard.critical_reader(NAME).expire()"
        yield _cursor_name(state, cursor), critical.since, cause, remedy, f"persist inspect holds {shard.name}"


def _reader_name(reader: ReaderId, lease: LeasedReader) -> str:
    if lease.purpose.startswith(REGION):
        return f"region {lease.purpose.removeprefix(REGION)!r} (reader {reader})"
    return f"reader {lease.purpose!r} ({reader})" if lease.purpose else f"a reader without a purpose ({reader})"


def _cursor_name(state: State, cursor: CriticalReaderId) -> str:
    """A State has only digests of the names of critical readers; consumers of a retention policy are known by name."""
    policy = state.settings.rows
    name = next(
        (consumer for consumer in (policy.consumers if policy else ()) if critical_reader_id_of(consumer) == cursor),
        None,
    )
    purpose = state.critical_readers[cursor].purpose
    label = repr(name) if name is not None else repr(purpose) if purpose else "without a purpose"
    return f"critical reader {label} ({cursor})"


def _opened(shard: CheckedShard, reader: ReaderId) -> str:
    """When the reader was opened, by the log, or else by the clock that minted its id."""
    by_log = shard.log.began.get(reader)
    if by_log is not None and shard.log.first_seqno == 1:
        return at(by_log)
    return at(born_ms(reader))


def _registered(seqno: int) -> str:
    return f"after v{seqno}" if seqno else "before registrations were recorded"


def _cause_and_advice(shard: CheckedShard, reader: ReaderId, lease: LeasedReader) -> tuple[str, str, str]:
    """When a reader was opened and whether its program is alive, a remedy, and a command."""
    silent_ms, lease_age = shard.silent_ms(lease), age(lease.lease_ms)
    opened, command = f"it was opened {_opened(shard, reader)}", f"persist inspect holds {shard.name}"
    if silent_ms > lease.lease_ms:
        cause = f"{opened}; it was not renewed for {age(silent_ms)}, its lease is {lease_age}: its program is gone"
        return cause, "start maintenance, which expires leases that are not renewed", "persist maintain gc --once"
    cause = f"{opened}; its program is alive: it renewed its lease of {lease_age} within {age(max(silent_ms, 1000))}"
    if lease.purpose.startswith(REGION):
        return cause, "find out why that region is behind; its holds can be released", command
    return cause, "end that program, or let it continue to read; its lease then ends", command


def gc_held(shard: CheckedShard) -> Iterator[Diagnosis]:
    """Readers of old versions: blobs that left the shard since then, and the log, are retained."""
    state = shard.known()
    readers = sorted(state.leased_readers.items(), key=lambda item: (item[1].seqno, item[0]))
    for reader, lease in readers[:READERS_SHOWN_MAX]:
        began_ms = shard.log.walltimes.get(int(lease.seqno) + 1)
        if began_ms is None or shard.now_ms - began_ms < shard.limits.held_ms:
            continue
        left = [key for key, seqno in shard.log.gone.items() if seqno > lease.seqno and key in shard.listed]
        entries = shard.head - int(lease.seqno)
        if all(map(is_rollup_key, left)) and entries < HELD_ENTRIES_MANY:
            continue  # a listener of an idle shard: only its own renewals are newer
        kept = sum(shard.listed[key].size for key in left)
        cause, remedy, command = _cause_and_advice(shard, reader, lease)
        yield shard.finding(
            "gc-held",
            f"{_reader_name(reader, lease)} has read v{lease.seqno} for {age(shard.now_ms - began_ms)}: it retains "
            f"{many(len(left), 'blob')} of {size(kept)} and {many(entries, 'log entry')}",
            cause=cause,
            remedy=remedy,
            command=command,
        )


def cursor_still(shard: CheckedShard) -> Iterator[Diagnosis]:
    """Critical readers that have not moved for long, though there is more to read."""
    state = shard.known()
    latest = latest_time(state)
    if state.upper.is_empty:  # it is closed to writes
        latest = Antichain(max(last_written(state.trace.parts(), state.drops), 0))
    for cursor, critical in _cursors(state):
        time = critical.since.element
        if time is None or not critical.since < latest:
            continue
        moved_ms, still_ms = shard.log.moved.get(cursor), shard.age_ms(time + 1)
        if moved_ms is not None:
            still_ms = shard.now_ms - moved_ms if still_ms is None else min(still_ms, shard.now_ms - moved_ms)
        if still_ms is None or still_ms < shard.limits.held_ms:
            continue
        behind = (latest.element or 0) - time
        yield shard.finding(
            "cursor-still",
            f"{_cursor_name(state, cursor)} has been at time {time} for {age(still_ms)}, {many(behind, 'time')} behind "
            "the latest",
            cause=f"its reader has stopped; it was registered {_registered(int(critical.registered))}",
            remedy="restart its reader, or expire it: shard.critical_reader(NAME).expire()",
            command=f"persist inspect holds {shard.name}",
        )


def many_holders(shard: CheckedShard) -> Iterator[Diagnosis]:
    """Very many readers or writers: each takes space in every State."""
    state = shard.known()
    for role, count in (("reader", len(state.leased_readers)), ("writer", len(state.writers))):
        if count >= HOLDERS_MANY:
            yield shard.finding(
                f"{role}s-many",
                f"the shard has {count:,} registered {role}s, which makes every State larger",
                cause=f"a program opens {role}s without closing them: each remains until its lease ends",
                remedy=f"keep one {role} open, or close each",
                command=f"persist inspect holds {shard.name}",
            )


def lease_lapses(shard: CheckedShard) -> Iterator[Diagnosis]:
    """Leases that lapsed within a day, as far as the live log goes back."""
    lapses = [
        lapse
        for lapse in shard.log.lapses
        if shard.now_ms - lapse.at_ms < DAY_MS and not lapse.purpose.startswith(DATA_FRAMES)
    ]
    if len(lapses) < LAPSES_MANY:
        return
    names = [f"reader {lapse.purpose!r}" if lapse.kind == "reader" else "a writer" for lapse in lapses]
    often = max(sorted(set(names)), key=names.count)
    yield shard.finding(
        "lease-lapses",
        f"{len(lapses)} leases have lapsed since {at(lapses[0].at_ms)}, {names.count(often)} of them of {often}",
        cause="their programs were killed, suspended or disconnected; or they leave readers and writers open",
        remedy="close them, use longer leases (lease_ms), or find out why those programs end",
        command=f"persist inspect holds {shard.name}",
    )


def loan_stuck(shard: CheckedShard) -> Iterator[Diagnosis]:
    """Blobs that are lent to a clone that does not have them, or no longer exists."""
    state = shard.known()
    for loan_id, loan in sorted(state.loans.items()):
        if shard.now_ms - loan.begun_ms < shard.limits.behind_ms or _has_borrowed(shard, loan.borrower, loan_id):
            continue
        lent_to = shard.location.shown_name(loan.borrower)
        yield shard.finding(
            "loan-stuck",
            f"{many(loan.keys, 'blob')} {is_or_are(loan.keys)} lent to {lent_to!r} since {at(loan.begun_ms)}, and that "
            "shard needs none of them",
            cause="the clone was never created, was dropped, or was merged, and maintenance has not ended the loan",
            remedy="start maintenance, which ends the loan",
            command="persist maintain gc --once",
        )


def _has_borrowed(shard: CheckedShard, borrower: str, loan_id: object) -> bool:
    try:
        state = newest(shard.location, borrower).state
    except UnknownShard:
        return False
    except PersistError:
        return True  # unknown
    return state is None or (loan_id in state.borrowed and not state.is_closed)


# Clocks of writers, of the blob store, and of this machine, as far as existing data shows. Nothing is probed.


CLOCKS = (
    "a writer's clock is {} ahead of the blob store's",
    "the blob store's clock is {} ahead of this machine's",
    "a commit is {} in the future, by this machine's clock",
)


def clocks_of(shard: CheckedShard, now_ms: int) -> tuple[int, int, int]:
    """What a shard that was read before `now_ms` shows of each of CLOCKS, in ms.

    That is how much later a blob was created than the store says it was written, how far the store's time of a blob is
    ahead, and how far the last commit is in the future.
    """
    commit_ms = 0 if shard.state is None else shard.state.walltime_ms - now_ms
    maker_ms = store_ms = 0
    for key, stat in shard.listed.items():
        store_ms = max(store_ms, stat.modified_ms - now_ms)
        if belongs_to(key, shard_of(key)):
            maker_ms = max(maker_ms, born_ms(key) - stat.modified_ms)
    return maker_ms, store_ms, commit_ms


def clock_off(clocks: Mapping[str, tuple[int, int, int]]) -> Iterator[Diagnosis]:
    """One finding for each pair of clocks that differ, about the shard with the largest difference.

    A writer's clock that is behind the store's is indistinguishable from a copy that was made later.
    """
    for number, text in enumerate(CLOCKS):
        off_ms, worst = max(((of_shard[number], name) for name, of_shard in clocks.items()), default=(0, ""))
        if off_ms > OFFSET_MS_MAX:
            yield diagnosis(
                "clock-off",
                text.format(age(off_ms)),
                cause="clocks of machines differ; until they agree no instants are settled, and nothing expires by age",
                remedy="set the clocks by NTP on all machines that write, and on that of the blob store; "
                "--repair-clock undoes what a clock that was far ahead has settled",
                command=f"persist history {worst}",
                shard=worst,
            )
