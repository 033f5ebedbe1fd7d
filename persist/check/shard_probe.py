"""What the check has seen of one shard: its newest State, its live log, a listing of its blobs. Each is read once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from blob import BlobStat
from persist.attributes.attribute_index import Marks
from persist.attributes.node_store import ChunkReader, StaleIndex
from persist.check.findings import LOG_ENTRIES_READ_MAX, Limits
from persist.core.clock_index import Mark
from persist.core.errors import Corruption, UnknownShard
from persist.core.frontier import Antichain
from persist.core.ids import CriticalReaderId, ReaderId, family_of, shard_id_of
from persist.core.state import Leased, LeasedReader, State
from persist.core.state_diff import StateDiff
from persist.formats.store_errors import translated
from persist.inspect.documents import Findings
from persist.inspect.log_listing import first_live, walked
from persist.inspect.readonly_location import Look
from persist.inspect.state_history import newest


@dataclass(frozen=True, slots=True)
class Lapse:
    """A lease that had ended when a commit took it out. `purpose`: what a reader said it is for; "": a writer."""

    kind: str
    purpose: str
    at_ms: int


@dataclass
class LogSeen:
    """What the live log tells. `is_whole`: all of it was read. Wall clocks are those of committers.

    `uppers` are (wall clock, upper) of the commits that brought times, ascending. `gone` are the blobs that left the
    State, and at which version. `settings_ms` is when the shard's settings changed last (0: before the log begins),
    `moved` when a critical reader came or moved last, `began` when a leased one came.
    """

    entries: int = 0
    bytes: int = 0
    first_seqno: int = 0
    first_ms: int = 0
    settings_ms: int = 0
    is_whole: bool = True
    wrong: list[str] = field(default_factory=list)
    uppers: list[tuple[int, int]] = field(default_factory=list)
    gone: dict[str, int] = field(default_factory=dict)
    moved: dict[CriticalReaderId, int] = field(default_factory=dict)
    began: dict[ReaderId, int] = field(default_factory=dict)
    walltimes: dict[int, int] = field(default_factory=dict)  # of the versions that were asked for
    lapses: list[Lapse] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Seen:
    """A shard as the check has seen it. `state` None: none can be made. `listed` are its blobs, by key.

    `wrong` is what was damaged or missing on the way to the State. Ages are counted by `now_ms`.
    """

    look: Look
    name: str
    now_ms: int
    limits: Limits
    head: int
    state: State | None
    wrong: Findings
    log: LogSeen
    listed: dict[str, BlobStat]

    def silent_ms(self, held: Leased) -> int:
        """For how long at least nobody has renewed a lease.

        The lease clock goes on by what committers watch. What has passed since the last commit counts by wall clocks.
        """
        if self.state is None:
            return 0
        idle_ms = max(0, self.now_ms - self.state.walltime_ms)
        return max(0, self.state.lease_now_ms - held.heartbeat_ms) + idle_ms

    def complete_ms(self, time: int) -> int | None:
        """When the shard first was complete beyond a time, by a mark, or else by the log. None: nobody knows."""
        assert self.state is not None
        found = _mark_beyond(self.look, self.state, time)
        if found is not None and found.at_ms:
            return found.at_ms
        if self.log.uppers and (self.log.first_seqno == 1 or self.log.uppers[0][1] <= time):
            return next((at_ms for at_ms, upper in self.log.uppers if upper > time), None)
        return None

    def age_ms(self, time: int) -> int | None:
        """How long ago that was."""
        at_ms = self.complete_ms(time)
        return None if at_ms is None else max(0, self.now_ms - at_ms)

    def upper_by(self, at_ms: int) -> Antichain | None:
        """The upper that the shard had by an instant, at least, as marks and the log tell it. None: nobody knows."""
        assert self.state is not None
        by_log = [Antichain(upper) for known_ms, upper in self.log.uppers if known_ms <= at_ms]
        by_mark = _mark_by(self.look, self.state, at_ms)
        return max([*by_log[-1:], *([] if by_mark is None else [by_mark.upper])], default=None)


def _mark_beyond(look: Look, state: State, time: int) -> Mark | None:
    """The first mark whose upper is beyond the time."""
    last = state.seal.last
    marks = [Mark(at_ms, upper) for at_ms, upper in sorted(state.marks.items())]
    marks += [last] if last is not None else []
    shown = next((mark for mark in marks if not mark.upper.less_equal(time)), None)
    if shown is None or shown is not marks[0]:
        return shown
    return _indexed(look, state, lambda indexed: indexed.first_beyond(time)) or shown


def _mark_by(look: Look, state: State, at_ms: int) -> Mark | None:
    """The newest mark at or before the instant."""
    last = state.seal.last
    if last is not None and last.at_ms <= at_ms:
        return last
    recent = max((known for known in state.marks if known <= at_ms), default=None)
    if recent is not None:
        return Mark(recent, state.marks[recent])
    return _indexed(look, state, lambda marks: marks.newest_at(at_ms))


def _indexed(look: Look, state: State, ask: Callable[[Marks], Mark | None]) -> Mark | None:
    """What the index of attributes tells of marks. One that is damaged, or has moved on, tells nothing."""
    if not state.attribute_root.height:
        return None
    try:
        return ask(Marks(state, ChunkReader(look.blob, state.attribute_chunks, look.nodes)))
    except (Corruption, StaleIndex):
        return None


def seen_of(look: Look, name: str, now_ms: int, limits: Limits) -> Seen | None:
    """Read what there is of a shard. None: there is none of this name any more. Raises Unavailable."""
    try:
        found = newest(look, name)
    except UnknownShard:
        return None
    state = found.state
    wanted = set() if state is None else {int(one.seqno) + 1 for one in state.leased_readers.values()}
    log = _log_seen(look, name, wanted)
    with translated():
        listed = {stat.key: stat for stat in look.blob.list(family_of(shard_id_of(name)))}
    return Seen(look, name, now_ms, limits, found.head, state, found.findings, log, listed)


def _log_seen(look: Look, name: str, wanted: set[int]) -> LogSeen:
    """One walk through the live log. `wanted` are the versions of which the wall clock is asked for."""
    seen = LogSeen()
    leases: dict[str, Leased] = {}
    lease_clock_ms = upper = before = 0
    for logged in walked(look, name):
        if seen.entries >= LOG_ENTRIES_READ_MAX:
            seen.is_whole = False
            break
        seen.entries += 1
        seen.bytes += logged.size
        if before and logged.seqno != before + 1 and first_live(look, name) < logged.seqno:
            seen.wrong.append(f"entries v{before + 1} to v{logged.seqno - 1} are missing")  # not collected meanwhile
        before = logged.seqno
        if logged.change is None:
            seen.wrong.append(logged.wrong or f"the log entry v{logged.seqno} cannot be read")
            continue
        change = logged.change
        if not seen.first_seqno:
            seen.first_seqno, seen.first_ms = logged.seqno, change.walltime_ms
        if logged.seqno in wanted:
            seen.walltimes[logged.seqno] = change.walltime_ms
        lease_clock_ms = change.lease_clock_ms or lease_clock_ms
        _note_leases(seen, change, leases, lease_clock_ms)
        if change.settings is not None:
            seen.settings_ms = change.walltime_ms
        seen.gone.update(dict.fromkeys(change.gone, logged.seqno))
        brought = _upper_of(change)
        if brought > upper:
            upper = brought
            seen.uppers.append((change.walltime_ms, upper))
    return seen


def _upper_of(change: StateDiff) -> int:
    """The last upper that its batches tell; 0: it brought none."""
    if change.trace is None or not change.trace.batches:
        return 0
    return change.trace.batches[-1].desc.upper.element or 0


def _note_leases(seen: LogSeen, change: StateDiff, leases: dict[str, Leased], lease_clock_ms: int) -> None:
    """Who came, moved and lapsed with one commit. A lease of which the log does not tell the length is passed over."""
    if change.critical_readers is not None:
        for cursor in change.critical_readers.set:
            seen.moved[cursor] = change.walltime_ms
    for kind, changed in (("reader", change.leased_readers), ("writer", change.writers)):
        if changed is None:
            continue
        for gone in changed.deleted:
            held = leases.pop(gone, None)
            if held is not None and lease_clock_ms and held.lapsed(lease_clock_ms):
                purpose = held.purpose if isinstance(held, LeasedReader) else ""
                seen.lapses.append(Lapse(kind, purpose, change.walltime_ms))
        for came, lease in changed.set.items():
            leases[came] = lease
            if kind == "reader":
                seen.began.setdefault(ReaderId(came), change.walltime_ms)
