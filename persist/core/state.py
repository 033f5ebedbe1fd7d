"""The State of a shard: all of its metadata; rows are in blobs.

Immutable: a transition makes a new State that shares what did not change, so that two consecutive States can be
compared by identity. Mappings are never mutated after they are put into a State.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from persist.core.attribute import NO_INDEX, AttributeKey, IndexChunk, IndexRoot
from persist.core.audit_log import NOBODY, Caller, CommandEntry, Committed, TokenOutcome
from persist.core.batch import EMPTY_TRACE, Part, Trace, parts_of
from persist.core.clock_index import NEWBORN, UNSEALED, Seal
from persist.core.erasure import Erasure
from persist.core.frontier import EMPTY, MINIMUM, Antichain
from persist.core.ids import CriticalReaderId, LoanId, ReaderId, SeqNo, ShardId, Token, WriterId, shard_id_of
from persist.core.named_holds import Loan, Tag
from persist.core.persistent_map import Entries, watched
from persist.core.record import Record, replace
from persist.core.shard_settings import NO_RETENTION, NO_SETTINGS, KeptCut, Retention, ShardSettings
from persist.core.spill import SpillFile, SpillKind
from persist.core.truncations_and_drops import NOT_TRUNCATED, RowDrop, Truncation, Truncations

SERVICE_TIMES_MAX = 64
ROLLUP_LEAST = 32  # minimum of seqnos between two rollups, unless `Policy.rollup_every` is smaller
BUNDLE_GROWTH = 4  # parts listed by one bundle, of about a MiB, in multiples of `Policy.plain_parts_max`
OVERLAY_ROOM = 5  # an overlay of so many times the flush threshold throttles writers (Overloaded)


class Policy(Record, frozen=True):
    """Limits that transitions obey. Settings, not durable state."""

    inline_part_bytes_max: int = 64 * 1024
    inline_shard_bytes_max: int = 1024 * 1024
    inline_batches: int = 64  # so many of the newest batches with inline rows only are merged into a blob
    batches_max: int = 10_000  # more unmerged batches throttle writers (Overloaded)
    rollup_every: int = 1_024  # seqnos between rollups, at most twice that; opening reads so many state diffs
    overlay_flush_at: int = 2_000  # attributes, outcomes, marks, or half as many commits, in a State: flushed to blobs
    plain_parts_max: int = 1_024  # parts of a batch that the State names itself; beyond that they go to bundles

    @property
    def overlay_turn_at(self) -> int:
        """Overlay entries that are flushed in place of a rollup."""
        return max(1, self.overlay_flush_at // 2)

    @property
    def overlay_max(self) -> int:
        """Overlay entries of one kind; more throttle writers (Overloaded)."""
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
    """A record with a lease, which heartbeats renew."""

    __slots__ = ()
    heartbeat_ms: int
    lease_ms: int

    @property
    def lapses_ms(self) -> int:
        """The last moment of the lease."""
        return self.heartbeat_ms + self.lease_ms

    def lapsed(self, now_ms: int, leases: int = 1) -> bool:
        """Whether `leases` times the lease have passed since the last heartbeat."""
        return self.heartbeat_ms + leases * self.lease_ms < now_ms


class WriterState(Leased, Record, frozen=True):
    """A registered writer, and the outcome of its most recent command, which answers a retry.

    `lower`, `upper` describe the batch that `token` appended.
    """

    heartbeat_ms: int
    lease_ms: int
    token: Token | None = None
    lower: Antichain = MINIMUM
    upper: Antichain = MINIMUM


class LeasedReader(Leased, Record, frozen=True):
    """An expiring hold on `since` and on `seqno`: no blob that the State at `seqno` or later names is deleted.

    With `point` it holds the single time `since`, as a tag does: the shard's since may pass it.
    """

    since: Antichain
    seqno: SeqNo
    heartbeat_ms: int
    lease_ms: int
    purpose: str
    point: bool = False


class CriticalReader(Record, frozen=True):
    """A hold on `since` that never expires; moving it requires `opaque`.

    `registered`, the seqno after which it was taken, distinguishes it from an earlier hold of the same name.
    """

    since: Antichain
    opaque: str
    purpose: str
    registered: SeqNo = SeqNo(0)


class Rollup(Record, frozen=True):
    """The blob of the whole State at one seqno, and its size in bytes."""

    key: str
    size: int


class Claim(Leased, Record, frozen=True):
    """A worker's claim on a maintenance task; another worker may take it over once it has lapsed.

    For a merge: `inputs` are the part ids it reads, `done` the output parts it has written so far and `resume_key`
    the encoded key at which it resumes. The output parts are named by the State, so they are not swept.
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

    `lease_clock_ms` is the clock of leases, which advances by the time that committers have observed; 0: not begun.
    A blob whose key was minted before `swept_before_ms` may have been swept, so a commit may not name it unless it is
    named already.

    `attributes` are the recent values (None: deleted), which override those in the index. `event_count` and
    `byte_count`, the rows and the bytes of parts ever appended, are attributes that the shard maintains. `features`
    names what a build must know to read and to change this State (see `persist.formats.builds`). `outcomes` are the
    recent outcomes of tokens, by id. The outcome of a token minted at or before `forgotten_ms` may be forgotten.
    `service_times` are the intervals of times that the service chose, ascending, at most SERVICE_TIMES_MAX: older ones
    are joined. `incarnation` counts the earlier lives of the name. `long_diffs` are the blobs of state diffs that were
    too long for the log, by seqno, while their log entries exist. `given_up` is the seqno of the last commit that
    retired a critical reader: an older registration may be one that was answered, given up, and delivered late.

    `left` are the staged parts that left the trace (the 16 bytes of their ids, and the seqno at which they left), so
    that none is named again; those minted before `left_before_ms` are forgotten, and refused by their age. `commit_id`
    is that of the commit that made this State; the next state diff names it as its parent.

    `seal` and `marks` map wall clocks to uppers: `seal.last` is the newest mark, `marks` the recent ones before it, by
    instant; older ones are in the attribute index. `history_hold` is the shard's own hold on since, by its `settings`;
    `[]`: none. `tags` are times that stay readable after since has passed them. `truncations` are those that no restore
    has undone: the last one, and those that a readable time precedes. `restored_at` is the time of the last restore.
    `drops` are the row drops that a readable time precedes, ascending. No row before `floor` is visible at any readable
    time. `cuts` are the future truncations of the row policy, by the instant whose upper they are; `retention` is its
    progress. `erasures` are the erasures, by id. `loans` are the lists of its blobs that clones may name, `borrowed`
    the owners of blobs that it may name itself, as a clone. `handed_over` is the epoch of the home that has taken over
    the shard, which is read-only here; 0: none. Parts of an older schema than `schema_floor`, which has stricter
    constraints, are refused. `schema_times` are the first times that were written after a schema was registered, by its
    id; a schema without one applies from the first time on.

    `entries` are the recent commits of the history, by seqno; `info_bytes` is the size of the callers' texts in them.
    `spilled` are the files with older outcomes and entries, by kind, oldest first.
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
        """The last truncation that no restore has undone."""
        return self.truncations[-1] if self.truncations else NOT_TRUNCATED

    @property
    def lease_now_ms(self) -> int:
        """The clock of leases as of this State, in ms."""
        return self.lease_clock_ms or self.walltime_ms

    @property
    def upper(self) -> Antichain:
        return self.trace.upper

    @property
    def schema_id(self) -> int:
        return max(self.schemas)

    @property
    def is_closed(self) -> bool:
        return self.upper.is_empty and self.since.is_empty

    @property
    def merge_since(self) -> Antichain:
        """The time to which merges advance earlier ones: since, or the latest time if the shard is closed to reads."""
        if not self.since.is_empty or self.upper.element is None:
            return self.since
        return Antichain(max(self.upper.element - 1, 0))

    @property
    def seqno_since(self) -> SeqNo:
        """The earliest seqno that a leased reader holds; the current one without readers. Called by every commit."""
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
        return self.spilled.get(kind, ())

    def blob_keys(self) -> Iterator[str]:
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
            yield from (part.key for part in parts_of(erasure.pending.runs) if part.key is not None)
    for loan in state.loans.values():
        yield loan.list_key


def remembering(state: State) -> State:
    """The State as it was decoded, with mappings of readers and writers that cache when the first lease may lapse."""
    return replace(state, writers=watched(state.writers), leased_readers=watched(state.leased_readers))


def blank_state(name: str) -> State:
    """The State from which the first state diff of a shard leads; never committed itself."""
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
    """The State of a new shard, which is committed as v1."""
    hold = MINIMUM if settings.keeps_history else EMPTY
    entry = CommandEntry("create", MINIMUM, MINIMUM, caller=caller if caller != NOBODY else None)
    made = {"seqno": SeqNo(1), "walltime_ms": now_ms, "schemas": {1: schema}}
    made |= {"entries": {SeqNo(1): Committed(now_ms, (entry,))}, "info_bytes": len(caller.info)}
    return replace(blank_state(name), seal=NEWBORN, settings=settings, history_hold=hold, **made)
