"""The State of a shard: everything that is known about it, except the rows in blobs.

Frozen: a transition makes a new State that shares what did not change, so that two consecutive States can be
compared by identity. Mappings are never mutated after they are put into a State.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from persist.core.attribute import NO_INDEX, AttributeKey, IndexChunk, IndexRoot
from persist.core.audit_log import NOBODY, Caller, CommandEntry, Committed
from persist.core.batch import EMPTY_TRACE, Part, Trace
from persist.core.clock_index import NEWBORN, UNSEALED, Seal
from persist.core.dedup import TokenOutcome
from persist.core.erasure import Erasure
from persist.core.frontier import EMPTY, MINIMUM, TIME_MAX, Antichain, meet
from persist.core.ids import CriticalReaderId, LoanId, ReaderId, SeqNo, ShardId, Token, WriterId, shard_id_of
from persist.core.named_holds import Loan, Tag
from persist.core.persistent_map import Entries, watched
from persist.core.record import Record, replace
from persist.core.shard_settings import DROP, NO_RETENTION, NO_SETTINGS, KeptCut, Retention, ShardSettings
from persist.core.spill import SpillFile, SpillKind
from persist.core.truncation import NOT_TRUNCATED, RowDrop, Truncation, Truncations

SERVICE_TIMES_MAX = 64
ROLLUP_LEAST = 32  # seqnos from a rollup to the next one, at least, unless `Policy.rollup_every` is fewer
BUNDLE_GROWTH = 4  # times as many parts as a batch may name itself are listed by one bundle, of about a MiB
OVERLAY_ROOM = 5  # times as many entries as make a flush due slow writers down (Overloaded)


class Policy(Record, frozen=True):
    """Limits that transitions obey. Settings, not durable state."""

    inline_part_bytes_max: int = 64 * 1024
    inline_shard_bytes_max: int = 1024 * 1024
    inline_batches: int = 64  # of the newest ones that hold inline rows only, which then are merged into a blob
    batches_max: int = 10_000  # more unmerged batches than this slow writers down (Overloaded)
    rollup_every: int = 1_024  # seqnos between rollups, and now and then twice that: so many state diffs opening reads
    overlay_flush_at: int = 2_000  # attributes, outcomes, marks, or half as many commits, in a State: they go to blobs
    plain_parts_max: int = 1_024  # parts of a batch that the State names itself; beyond that they go to bundles

    @property
    def overlay_turn_at(self) -> int:
        """So many are flushed in the place of a rollup."""
        return max(1, self.overlay_flush_at // 2)

    @property
    def overlay_max(self) -> int:
        """Attributes, outcomes or entries that wait for their blobs; more slow writers down (Overloaded)."""
        return OVERLAY_ROOM * self.overlay_flush_at

    @property
    def bundle_parts_max(self) -> int:
        """Parts that one bundle lists."""
        return max(2, BUNDLE_GROWTH * self.plain_parts_max)


class SchemaRecord(Record, frozen=True):
    """One version of the shard's schema: a serialized Arrow schema and the names of its key columns."""

    arrow: bytes
    key: tuple[str, ...]


class Leased:
    """Something held under a lease, which heartbeats renew."""

    __slots__ = ()
    heartbeat_ms: int
    lease_ms: int

    @property
    def lapses_ms(self) -> int:
        """The last moment of the lease."""
        return self.heartbeat_ms + self.lease_ms

    def lapsed(self, now_ms: int, leases: int = 1) -> bool:
        """Whether so many leases have passed since the last heartbeat."""
        return self.heartbeat_ms + leases * self.lease_ms < now_ms


class WriterState(Leased, Record, frozen=True):
    """A registered writer, and the outcome of its most recent command for when it is asked again.

    `lower`, `upper` describe the batch that `token` appended.
    """

    heartbeat_ms: int
    lease_ms: int
    token: Token | None = None
    lower: Antichain = MINIMUM
    upper: Antichain = MINIMUM


class LeasedReader(Leased, Record, frozen=True):
    """An expiring hold on `since` and on `seqno`: no blob that the State at `seqno` or later names is deleted.

    With `point` it holds the time `since` alone, as a tag does: the shard's since may pass it.
    """

    since: Antichain
    seqno: SeqNo
    heartbeat_ms: int
    lease_ms: int
    purpose: str
    point: bool = False


class CriticalReader(Record, frozen=True):
    """A hold on `since` that never expires; only who knows `opaque` moves it.

    `registered` is the seqno after which it was taken. It tells this hold from an earlier one of the same name.
    """

    since: Antichain
    opaque: str
    purpose: str
    registered: SeqNo = SeqNo(0)


class Rollup(Record, frozen=True):
    """Where the whole State at one seqno lies."""

    key: str
    size: int


class Claim(Leased, Record, frozen=True):
    """A worker's claim on a piece of maintenance; another may take it over once it lapsed.

    For a merge: `inputs` are the part ids it reads, `done` the output parts it has written so far and `resume_key`
    the encoded key from which it goes on. The output parts are part of the State, so nothing sweeps them.
    """

    owner: str
    heartbeat_ms: int
    lease_ms: int
    inputs: tuple[str, ...] = ()
    done: tuple[Part, ...] = ()
    resume_key: bytes = b""
    since: Antichain = MINIMUM


class State(Record, frozen=True):
    """One version of a shard. `walltime_ms` is when it was committed, by the committer's clock, which may be wrong.

    `lease_clock_ms` is the time by which leases are judged: it goes on only by what committers have watched. 0: not
    yet. A blob whose key was minted before `swept_before_ms` is not named any more unless it is named already:
    maintenance may have swept it.

    `attributes` are the recent values (None: deleted), which cover those in the index. `event_count` and `byte_count`,
    the rows and the bytes of parts ever appended, are attributes too, which the shard keeps itself. `features` names
    what a build must know to read this State and to go on from it (see `persist.formats.builds`). `outcomes` are the
    recent outcomes of tokens, by id. Tokens that were minted at `forgotten_ms` or before may have an outcome that is no
    longer known. `service_times` are the intervals of times that the service chose, ascending, of which there are at
    most SERVICE_TIMES_MAX: older ones are joined.
    `incarnation` counts the lives of the name before this one. `long_diffs` are the blobs of state diffs that were too
    long for the log, by seqno, while their log entries live. `given_up` is the seqno of the last commit that retired a
    critical reader: a registration from before it may be one that was answered, given up, and delivered late.

    `left` are the staged parts that left the trace (the 16 bytes of their ids, and the seqno at which they left), so
    that none is named again; those minted before `left_before_ms` are forgotten, and refused by their age. `commit_id`
    is that of the commit that made this State; the next state diff names it as its parent.

    `seal` and `marks` tell which upper belongs to which wall clock: `seal.last` is the newest mark, `marks` the recent
    ones before it, by instant; older ones lie in the index of attributes. `history_hold` is the shard's own hold on
    since, by its `settings`; `[]` where it holds none. `tags` are times that stay readable when since has passed them.
    `truncations` are those that no restore has undone: the last one, and those that some readable time comes before.
    `restored_at` is the time of the last restore.
    `drops` are those by a drop that some readable time comes before, ascending. No row before `floor` is there as of
    any readable time. `cuts` are those by which the policy of rows will truncate, by the instant whose upper they are;
    `retention` tells how far it has come. `erasures` are rows that were to go for good, by id. `loans` say which of
    its blobs clones may name, `borrowed` from which shards it may name blobs itself, as a clone. `handed_over` is the
    epoch of the home at which the shard goes on, and it does not change here any more; 0: it goes on here. Parts that
    name an older schema than `schema_floor` are committed no more: it asks more of rows than those before it.
    `schema_times` are the first times that were written once a schema was registered, by its id; one that is not among
    them counts as there from the first time on.

    `entries` are the recent ones of the commit history, by seqno, in which callers have said `info_bytes`. `spilled`
    are the files with older outcomes and entries, by kind, oldest first.
    """

    name: str
    shard_id: ShardId
    seqno: SeqNo
    walltime_ms: int
    since: Antichain
    trace: Trace
    schemas: Mapping[int, SchemaRecord]
    writers: Mapping[WriterId, WriterState] = {}
    leased_readers: Mapping[ReaderId, LeasedReader] = {}
    critical_readers: Mapping[CriticalReaderId, CriticalReader] = {}
    rollups: Mapping[SeqNo, Rollup] = {}
    claims: Mapping[str, Claim] = {}
    tombstone: bool = False
    attributes: Mapping[AttributeKey, int | None] = {}
    event_count: int = 0
    byte_count: int = 0
    attribute_root: IndexRoot = NO_INDEX
    attribute_chunks: Mapping[int, IndexChunk] = {}
    features: tuple[str, ...] = ()
    left: Mapping[bytes, int] = {}
    left_before_ms: int = 0
    incarnation: int = 0
    commit_id: str = ""
    lease_clock_ms: int = 0
    swept_before_ms: int = 0
    outcomes: Mapping[str, TokenOutcome] = {}
    spilled: Mapping[SpillKind, tuple[SpillFile, ...]] = {}
    forgotten_ms: int = 0
    service_times: tuple[tuple[int, int], ...] = ()
    long_diffs: Mapping[SeqNo, str] = {}
    given_up: SeqNo = SeqNo(0)
    seal: Seal = UNSEALED
    marks: Mapping[int, Antichain] = {}
    settings: ShardSettings = NO_SETTINGS
    history_hold: Antichain = EMPTY
    entries: Mapping[SeqNo, Committed] = {}
    info_bytes: int = 0
    tags: Mapping[str, Tag] = {}
    truncations: Truncations = ()
    restored_at: int = 0
    drops: tuple[RowDrop, ...] = ()
    floor: int = 0
    cuts: Mapping[int, KeptCut] = {}
    retention: Retention = NO_RETENTION
    erasures: Mapping[str, Erasure] = {}
    loans: Mapping[LoanId, Loan] = {}
    borrowed: Mapping[LoanId, str] = {}
    handed_over: int = 0
    schema_floor: int = 0
    schema_times: Mapping[int, int] = {}

    @property
    def truncated(self) -> Truncation:
        """The last truncation that was not undone."""
        return self.truncations[-1] if self.truncations else NOT_TRUNCATED

    @property
    def lease_now_ms(self) -> int:
        """The time by which leases are judged, as of this State."""
        return self.lease_clock_ms or self.walltime_ms

    @property
    def upper(self) -> Antichain:
        return self.trace.upper

    @property
    def schema_id(self) -> int:
        """Id of the current schema."""
        return max(self.schemas)

    @property
    def is_closed(self) -> bool:
        """Nobody can write and nobody can read any more."""
        return self.upper.is_empty and self.since.is_empty

    @property
    def merge_since(self) -> Antichain:
        """The time to which merges bring earlier ones. Where nobody can read any more, all go to the latest time."""
        if not self.since.is_empty or self.upper.element is None:
            return self.since
        return Antichain(max(self.upper.element - 1, 0))

    @property
    def seqno_since(self) -> SeqNo:
        """The earliest seqno that any leased reader holds; the current one without readers. Every commit asks."""
        readers = self.leased_readers
        if not readers:
            return self.seqno
        held = readers.held if isinstance(readers, Entries) else None
        if held is None:
            held = min(reader.seqno for reader in readers.values())
            if isinstance(readers, Entries):
                readers.held = held
        return SeqNo(held)

    def files_of(self, kind: SpillKind) -> tuple[SpillFile, ...]:
        """The files of this kind, oldest first."""
        return self.spilled.get(kind, ())

    def blob_keys(self) -> Iterator[str]:
        """Every blob that this State names."""
        yield from self.trace.blob_keys
        yield from auxiliary_blob_keys(self)


def auxiliary_blob_keys(state: State) -> Iterator[str]:
    """The blobs that a State names outside its trace: rollups, outputs of merges, attribute index, rows to erase."""
    for rollup in state.rollups.values():
        yield rollup.key
    for claim in state.claims.values():
        for part in claim.done:
            if part.key is not None:
                yield part.key
    for chunk in state.attribute_chunks.values():
        yield chunk.key
    for file in chain.from_iterable(state.spilled.values()):
        yield file.key
    yield from state.long_diffs.values()
    for erasure in state.erasures.values():
        if erasure.pending is not None:
            yield from (part.key for run in erasure.pending.runs for part in run.parts if part.key is not None)
    for loan in state.loans.values():
        yield loan.list_key


def remembering(state: State) -> State:
    """The State as it was read from bytes, with readers and writers that remember what was worked out of all of them.

    Every commit asks when the first of their leases may lapse.
    """
    return replace(state, writers=watched(state.writers), leased_readers=watched(state.leased_readers))


def held_since(state: State, *more: Antichain) -> Antichain:
    """The meet of what all readers, the shard's own history and `more` hold; since as it is, where nothing does.

    A leased hold beyond the latest complete time counts as that time. Its reader waits for times to come, or mistook
    the unit: the others still read what there is. A lease at `[]` holds nothing, as one that has lapsed: it cannot
    close the shard to reads. Critical readers can, whatever history says.
    """
    leased = (r.since for r in state.leased_readers.values() if not r.since.is_empty and not r.point)
    holds = [_reached(since, state.upper) for since in leased]
    holds += [r.since for r in state.critical_readers.values()]
    if holds and meet(holds).is_empty:
        return EMPTY
    holds += [hold for hold in (state.history_hold, *more) if not hold.is_empty]
    return meet(holds) if holds else state.since


def kept_below(state: State, since: Antichain) -> tuple[int, ...]:
    """The times before `since` that a merge of this State keeps apart, ascending. There may be more than 1,000.

    They are the times of tags and before cuts (also those by which a policy drops), those of readers that hold one time
    alone, the last times before the cuts of drops, and those at which truncations wrote retractions, with the times
    before these. None is ever added before the shard's since. So a merge may ask a later State than the one in which
    since was found. In a shard that is closed to reads only drops count: what they dropped has still to leave.
    """
    if since.element is None:
        return ()
    found = {drop.cut - 1 for drop in state.drops}
    if not state.since.is_empty:
        found |= _points(state) | cut_times(state)
        found.update(time for one in told_apart(state) if one.wrote for time in (one.at - 1, one.at))
    return tuple(sorted(time for time in found if time < since.element))


def told_apart(state: State) -> Truncations:
    """The truncations that a readable time comes before. By those a later one tells which rows have gone already."""
    if not state.truncations:  # every view asks, and what is readable depends on all readers
        return ()
    earliest = earliest_readable(state)
    return tuple(one for one in state.truncations if earliest < Antichain(one.at))


def named_times(state: State) -> set[int]:
    """The times that tags keep, and those before cuts.

    A policy that drops reads nothing as of its cuts. There they are told apart, and nobody can read as of them by that
    alone: else the cuts that are still to come would keep all that was dropped.
    """
    policy = state.settings.rows
    tagged = {tag.time for tag in state.tags.values()}
    return tagged if policy is not None and policy.mode == DROP else tagged | cut_times(state)


def cut_times(state: State) -> set[int]:
    """The times before the cuts of the policy of rows, which merges keep apart."""
    return {cut.upper - 1 for cut in state.cuts.values()}


def is_kept(state: State, time: int) -> bool:
    """Whether a read as of this time is exact, as far as history goes: since lies at or before it, or it is kept."""
    return state.since.less_equal(time) or (not state.since.is_empty and time in _points(state))


def earliest_readable(state: State) -> Antichain:
    """The first time as of which anybody may still read; `[]` where nobody can read any more."""
    if state.since.is_empty:
        return EMPTY
    return meet([state.since, *map(Antichain, _points(state))])


def _points(state: State) -> set[int]:
    """The single times that tags, cuts and readers keep."""
    found = named_times(state)
    found.update(r.since.element for r in state.leased_readers.values() if r.point and r.since.element is not None)
    return found


def latest_time(state: State) -> Antichain:
    """The latest complete time; [0] where there is none."""
    upper = state.upper.element
    return Antichain(TIME_MAX if upper is None else max(upper - 1, 0))


def _reached(hold: Antichain, upper: Antichain) -> Antichain:
    if hold.element is None or upper.element is None:
        return hold
    return Antichain(min(hold.element, max(upper.element - 1, 0)))


def blank_state(name: str) -> State:
    """What the first State of a shard is a change of; never committed itself."""
    return State(
        name=name,
        shard_id=shard_id_of(name),
        seqno=SeqNo(0),
        walltime_ms=0,
        since=MINIMUM,
        trace=EMPTY_TRACE,
        schemas={},
    )


def initial_state(
    name: str, schema: SchemaRecord, now_ms: int, settings: ShardSettings = NO_SETTINGS, caller: Caller = NOBODY
) -> State:
    """The State of a shard that was just created; its seqno is v1 once committed."""
    hold = MINIMUM if settings.keeps_history else EMPTY
    entry = CommandEntry("create", MINIMUM, MINIMUM, caller=caller if caller != NOBODY else None)
    made = {"seqno": SeqNo(1), "walltime_ms": now_ms, "schemas": {1: schema}}
    made |= {"entries": {SeqNo(1): Committed(now_ms, (entry,))}, "info_bytes": len(caller.info)}
    return replace(blank_state(name), seal=NEWBORN, settings=settings, history_hold=hold, **made)
