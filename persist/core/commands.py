"""Commands on a shard, one record each, with the result after `->`. `transitions.step` applies them.

Commands that write have a writer and an idempotency token. A retry with the same token is answered as the first try:
for the last token of a registered writer, and for a caller's token, whose writer is `writer_of(token)` and whose
`digest` is of the request (TokenReused, OutcomeForgotten). Their `attributes` change together with the rows or not at
all: AttributeMismatch carries the actual values. Frontiers are `Antichain`s, intervals half-open, durations in
milliseconds.

A command consists of a class here and its line in `transitions`. The class lists the scopes that permit it; its name in
snake case identifies it when it is encoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

# ruff: noqa: F403, F405  # callers find bases, `Rewrite` and results here too
from persist.core.attribute import AttributeUpdate, GivenKey, IndexChunk, IndexRoot
from persist.core.batch import Part, Run
from persist.core.clock_index import MARKS_PAGE_MAX
from persist.core.command import *
from persist.core.erasure import Doomed, Proof
from persist.core.frontier import MINIMUM, Antichain
from persist.core.ids import CriticalReaderId, LoanId, PartId, ReaderId, SeqNo, WriterId, written
from persist.core.named_holds import KEEP_MS_MAX, LENT_KEYS_MAX
from persist.core.record import Meta, Record
from persist.core.results import *
from persist.core.retention_plan import Facts
from persist.core.rewrite import *
from persist.core.shard_settings import MARK_EVERY_MS, NO_SETTINGS, Looked, RowPolicy, Rung, ShardSettings
from persist.core.spill import SpillFile, SpillKind
from persist.core.state import Claim, LeasedReader, SchemaRecord, State, WriterState

_Writer = Annotated[WriterId, written(WriterId)]
_Reader = Annotated[ReaderId, written(ReaderId)]
_Critical = Annotated[CriticalReaderId, written(CriticalReaderId)]
_Loan = Annotated[LoanId, written(LoanId)]
_Count = Annotated[int, Meta(ge=1, le=LENT_KEYS_MAX)]
_Instant = Annotated[int, Meta(ge=0, le=TIME_MS_MAX)]
RUNGS_AT_ONCE = 8
CUTS_TRIED_MAX = 2  # that one run takes


# --- writers


class ExpireWriter(WriteCommand, frozen=True):
    """Retire a writer. -> Done, also if it is gone already."""

    writer: _Writer


class CompareAndAppend(WriterCommand, frozen=True):
    """Append a batch `[expected_upper, new_upper)` iff the shard's upper is `expected_upper`. -> Appended

    All times of the rows are in the interval. Linearises all writers. UpperMismatch carries the actual upper. `cut`:
    unique keys were looked up without rows that a pending truncation before that time removes; UpperMismatch if it was
    withdrawn.
    """

    expected_upper: Antichain
    new_upper: Antichain
    runs: tuple[Run, ...]
    attributes: tuple[AttributeUpdate, ...] = ()
    cut: int = 0


class Append(WriterCommand, frozen=True):
    """Append a batch `[lower, upper)`; times before the shard's upper are ignored. -> Appended

    For replicated writers that write identical definite data. UpperMismatch if `lower` is beyond the shard's upper (a
    gap), or an insert took a time of it. With attributes it is all or nothing: the shard's upper has to be `lower`.
    `cut` as for CompareAndAppend.
    """

    lower: Antichain
    upper: Antichain
    runs: tuple[Run, ...]
    attributes: tuple[AttributeUpdate, ...] = ()
    cut: int = 0


class Insert(WriterCommand, frozen=True):
    """Append rows at the next time, chosen by the service. -> Appended

    Inserts that are committed together share one time and one batch.
    """

    runs: tuple[Run, ...]
    attributes: tuple[AttributeUpdate, ...] = ()


WRITES_ROWS = (CompareAndAppend, Append, Insert, Rewrite)
"""Commands with `runs` whose rows are added to the shard."""


class ForcedCommand(ManagedCommand, frozen=True, kw_only=True):
    """`force` is the last field, so that it may be omitted."""

    force: bool = False


class AdvanceUpper(ForcedCommand, frozen=True):
    """Declare every time before `upper` complete, without data; `[]` closes the shard to writes. -> Appended

    Never moves the upper back; idempotent. `force`: also beyond FAR_TIME, which is usually a mistake.
    """

    upper: Antichain


# --- attributes


class UpdateAttributes(WriterCommand, frozen=True):
    """Change attributes alone, all or nothing. -> Done"""

    attributes: tuple[AttributeUpdate, ...]


class ReadAttributes(ReadCommand, frozen=True):
    """The present values of these attributes. -> AttributeValues; changes nothing."""

    keys: tuple[GivenKey, ...]


class ScanAttributes(ReadCommand, frozen=True):
    """The first attributes that are set with keys in `[lower, upper)` (None: to the end). -> AttributeValues

    At most `limit`, by key ascending; the next page begins at the result's `following`. Core attributes are left out.
    """

    lower: GivenKey
    upper: GivenKey | None = None
    limit: int = 1_000


class FlushAttributes(MaintainCommand, frozen=True):
    """Replace the index at `expected` by the one at `root`, which also has the values `flushed`. -> Flushed

    `chunks` are the new blobs by first offset. Chunks wholly before the root's `lowest` leave the State.
    """

    expected: IndexRoot
    root: IndexRoot
    chunks: Mapping[int, IndexChunk]
    flushed: Mapping[GivenKey, int | None]


class Flush(MaintainCommand, frozen=True):
    """Replace the files `merged`, the newest of this kind, and the recent entries `flushed` by `file`. -> Flushed

    `flushed` are the ids of outcomes, or the seqnos of commits, that leave the State. Applied iff it has all of them.
    """

    kind: SpillKind
    merged: tuple[str, ...]  # keys
    flushed: tuple[str | int, ...]
    file: SpillFile


# --- readers


class RegisterReader(ReadCommand, frozen=True):
    """Take an expiring hold at `since` (None = the shard's since) and at the current seqno. -> ReaderRegistered

    `point`: on that single time, which must be readable; with `tag` it is the time of the tag. It does not hold since
    back, and it stays readable until the hold ends, even if the tag is removed. NotReadable.
    """

    reader: _Reader
    since: Antichain | None
    lease_ms: int
    purpose: str = ""
    point: bool = False
    tag: str = ""


class DowngradeSince(ReadCommand, frozen=True):
    """Move a reader's holds forward to `since` and `seqno`, and the shard's since to the meet. -> SinceDowngraded

    The reader no longer needs any State before `seqno`. At `[]` it holds no time, and the shard's since follows the
    other holds. Without `moves_since` the shard's since is unchanged, so that no other client loses history. `since`
    None, a heartbeat: the holds are unchanged too. The lease is renewed; the State does not change if nothing moves and
    a quarter of the lease has not passed yet.

    The holder relies on the States from `seqno` on. A hold that begins later was taken by a registration that was
    delivered late, after the holder's own had lapsed: Expired.
    """

    reader: _Reader
    since: Antichain | None
    seqno: SeqNo
    moves_since: bool = True


class ExpireReader(ReadCommand, frozen=True):
    """Retire a reader; the shard's since is unchanged. -> Done, also if it is gone already."""

    reader: _Reader


class RegisterCriticalReader(ManagedCommand, frozen=True):
    """Take a hold on since that never expires, or return the present one. -> CriticalReaderState

    A new hold begins at `since`, as if it had been moved there, or is refused. None: at the shard's since.

    `seen`: the last seqno at which, as the caller knows, a hold was given up. If one was given up after that, no hold
    is taken -> HoldGivenUp, with the seqno for a retry. So a request that is delivered late does not take a hold that
    would never be given up. None: a new hold is taken in any case.
    """

    reader: _Critical
    opaque: str
    purpose: str = ""
    since: Antichain | None = None
    force: bool = False
    seen: SeqNo | None = None


class CompareAndDowngradeSince(ManagedCommand, frozen=True):
    """Move a critical reader's hold iff its opaque token is `expected_opaque`. -> CriticalReaderState

    `force`: also beyond the shard's upper, so that nothing is readable until a writer reaches it, and to `[]`, so that
    nothing is readable any more. `registered` names the hold that is meant: Expired if it was given up, even if the
    name has a new one. None: any hold of this name.
    """

    reader: _Critical
    expected_opaque: str
    new_opaque: str
    since: Antichain
    force: bool = False
    registered: SeqNo | None = None


class ExpireCriticalReader(ManagedCommand, frozen=True):
    """Retire a critical reader iff its opaque token matches; since is unchanged. -> Done, also if it is gone.
    `registered` as in CompareAndDowngradeSince: a new hold of the same name is kept.
    """

    reader: _Critical
    expected_opaque: str
    registered: SeqNo | None = None


# --- wall clocks, settings, history and tags


class ResolveTime(ReadCommand, frozen=True):
    """The upper of the shard at the wall clock `at_ms`, which is sealed by this command. -> TimeResolved

    The answer never changes. TimeToCome: the instant is in the future. NotReadable: it is unknown or forgotten.
    Unavailable: the clock of the committer could not be checked.
    """

    at_ms: _Instant


class TimesShown(ReadCommand, frozen=True):
    """The wall clocks from which the times from `first` to `last` are visible. -> MarksShown, page by page

    NotReadable: `first` was forgotten. InvalidUsage: it is not complete. It commits only if a checked clock can date
    rows that were committed without one.
    """

    first: Annotated[int, Meta(ge=0)]
    last: Annotated[int, Meta(ge=0)]
    limit: Annotated[int, Meta(ge=2, le=MARKS_PAGE_MAX)] = MARKS_PAGE_MAX


class LowerSeal(Command, frozen=True):
    """Repair a seal that a wrong clock has moved far ahead: set it back to the checked clock. -> SealLowered

    Marks are kept. Other instants in between lose their answer. Changes nothing if the seal is not far ahead.
    """


class SetSettings(ManageCommand, frozen=True):
    """Change the shard's settings iff their version is the expected one. -> SettingsAre

    `history_ms` None: unlimited; 0: as long as readers need it. `rows` None: all rows are kept. Conflict carries the
    actual version. A retry is safe.
    """

    expected_version: Annotated[int, Meta(ge=0)]
    history_ms: int | None
    mark_every_ms: int = MARK_EVERY_MS
    rows: RowPolicy | None = None


class ForgetOutlived(MaintainCommand, frozen=True):
    """Forget history before `before_ms`, expired tags, and dropped rows. -> HistoryMoved

    History: the shard's own hold moves to the upper at `before_ms`, if that instant is beyond the retention of the
    shard by the clock of this commit; without retention, since follows the latest time as far as readers allow. None:
    it is unchanged. Dropped rows leave the State, by metadata alone, if no readable time precedes their drop: parts
    wholly before a cut are removed, parts across it are clipped. A retry is safe. Unavailable: the clock of the
    committer, which decides what has expired, could not be checked.
    """

    before_ms: _Instant | None = None


class ForgetHistory(Command, frozen=True):
    """Move the shard's own hold to `before`, and since as far as readers allow. -> HistoryMoved. A retry is safe."""

    scopes: ClassVar[tuple[str, ...]] = (MANAGE, MAINTAIN)

    before: Antichain


class SetTag(ManageCommand, frozen=True):
    """Keep `time` readable under the name `tag`, for `keep_ms` from now on (None: until it is removed). -> TagsAre

    The time must be readable: not before since, or kept by a tag already. An existing tag of the same time gets this
    `keep_ms`; Conflict if it is of another time. A retry is safe.
    """

    tag: str
    time: Annotated[int, Meta(ge=0)]
    keep_ms: Annotated[int, Meta(ge=0, le=KEEP_MS_MAX)] | None = None


class RemoveTag(ManageCommand, frozen=True):
    """Remove a tag; its time is forgotten unless something else keeps it. -> TagRemoved, also if there is none"""

    tag: str


# --- row policies


class ReadRetention(ReadCommand, frozen=True):
    """The shard's row policy, and the facts for its plan. -> RetentionIs; changes nothing.

    With `policy` or `cuts_ms`: as they would be with this policy, and after taking the cuts of these instants.
    """

    policy: RowPolicy | None = None
    cuts_ms: Annotated[tuple[_Instant, ...], Meta(max_length=CUTS_TRIED_MAX)] = ()


class TakeCuts(Command, frozen=True):
    """Take the cuts and the tags of the row policy at some instants. -> CutsTaken

    An instant that is unknown or no longer readable is skipped, as is a cut if nothing was written since the one before
    it, and a tag whose name exists. Tags in excess of the ladder are removed. A retry is safe. Unavailable: the clock
    of the committer could not be checked, or an instant is in the future.
    """

    scopes: ClassVar[tuple[str, ...]] = (MANAGE, MAINTAIN)

    at_ms: Annotated[tuple[_Instant, ...], Meta(max_length=CUTS_TRIED_MAX)] = ()
    rungs: Annotated[tuple[Rung, ...], Meta(max_length=RUNGS_AT_ONCE)] = ()


class NoteLooked(Command, frozen=True):
    """Record the progress of the policy by its column. -> Done. A retry is safe.

    Nothing changes if the settings have another version by now, or if the policy has progressed further. `overran`:
    rows that a consumer has not passed were removed.
    """

    scopes: ClassVar[tuple[str, ...]] = (MANAGE, MAINTAIN)

    looked: Looked
    overran: bool = False


class RetentionIs(Result, frozen=True):
    """`checked_ms` is the committer's clock if the blob store agrees with it, else None.

    `rows` is the number of rows at the latest time; None: unknown.
    """

    facts: Facts
    checked_ms: int | None
    rows: int | None


class CutsTaken(Result, frozen=True):
    """The number of new cuts."""

    count: int


# --- erasures


class ReadErasures(MaintainCommand, frozen=True):
    """The shard's erasures, and what each waits for. -> ErasuresAre; changes nothing."""


class NoteRewritten(MaintainCommand, frozen=True):
    """Record that no part of the shard contains the rows of this erasure; `doomed` are blobs that did. -> Done

    Changes nothing if a part may still contain them, or if it was recorded before.
    """

    erasure: str
    doomed: Doomed


class ProveErasure(MaintainCommand, frozen=True):
    """Record the proof that a scan of both stores found nothing left of this erasure. -> Done

    Changes nothing if a rollup from before `rewritten` is still named, or if it was proved before.
    """

    erasure: str
    proof: Proof


# --- schema and life cycle


class EvolveSchema(ManagedCommand, frozen=True):
    """Make `schema` current iff the current id is `expected_id` and the shard can evolve to it. -> SchemaRegistered

    It changes either columns or constraints. If its types cannot hold every value of the present ones, or its
    constraints are stricter, `expected_upper` is the upper up to which the contents were checked; UpperMismatch if rows
    were written since. Rows that were staged before have to be staged again. InvalidUsage if it is invalid, does not
    fit the present schema, or needs an `expected_upper`.
    """

    expected_id: int
    schema: SchemaRecord
    expected_upper: Antichain | None = None


class Drop(Command, frozen=True):
    """Close the shard to writes and reads. -> Done. Conflict while readers hold it, unless `force` retires them."""

    force: bool = False


class Finalise(MaintainCommand, frozen=True):
    """Take a closed shard one bounded step towards its tombstone. -> Finalised

    `store_ms` is the blob store's time, which decides which minted tokens are from the future.
    """

    store_ms: int | None = None


class Recreate(WriteCommand, frozen=True):
    """Begin the next life of a tombstone's name, with this schema, as another shard. -> Done

    It names the `shard` whose tombstone it is, so that a retry does not begin a further life. InvalidUsage if `schema`
    is invalid.
    """

    schema: SchemaRecord
    settings: ShardSettings = NO_SETTINGS


class HandOver(Command, frozen=True):
    """Move the shard from the home of epoch `expected` to that of `epoch`; 0: the home of this log. -> Done

    While it is at another home, every change but this command is refused as ReadOnly. Conflict: it is at another home
    than the two. A retry is safe.
    """

    expected: Annotated[int, Meta(ge=0)]
    epoch: Annotated[int, Meta(ge=0)]


# --- clones


class Lend(Command, frozen=True):
    """The shard `borrower` may name blobs that the State at `seqno` names: those of the list at `list_key`. -> Lent

    Accepted iff no garbage collection that deletes one of them can have begun. A retry is safe.
    """

    loan: _Loan
    borrower: str
    list_key: str
    keys: _Count
    seqno: SeqNo


class LendOn(Command, frozen=True):
    """The shard `borrower` may name blobs that are lent already, as a clone of a clone does. -> Lent

    Accepted iff the loan `through` still has the list at `through_key`. The caller has checked that this list is a part
    of it. Legal in every phase and life of the owner. A retry is safe.
    """

    loan: _Loan
    borrower: str
    list_key: str
    keys: _Count
    through: _Loan
    through_key: str


class ShrinkLoan(MaintainCommand, frozen=True):
    """Reduce a loan to the list at `new_key`, a part of that at `list_key`. -> Lent

    Accepted iff the loan still has the list at `list_key`.
    """

    loan: _Loan
    list_key: str
    new_key: str
    keys: _Count


class EndLoan(MaintainCommand, frozen=True):
    """End a loan: the borrower names none of its blobs any more. -> Done, also if there is no such loan."""

    loan: _Loan


class Returned(MaintainCommand, frozen=True):
    """Let the borrower forget a loan that its owner has ended. -> Done, also if it is unknown.

    InvalidUsage while the State names a blob of that owner and has no other loan from it.
    """

    loan: _Loan


class BeginClone(Command, frozen=True):
    """Begin the next life of the name as a clone, with this State. -> Done

    Expired: one of its loans may have been ended meanwhile.
    """

    state: State
    lists: tuple[str, ...] = ()  # the keys of the lists of its loans


class Lent(Result, frozen=True):
    """Whether the loan exists, with this list."""

    accepted: bool


# --- maintenance


class LapsedLeases(Record, frozen=True):
    """Leases as they were in some State."""

    leased_readers: Mapping[_Reader, LeasedReader] = {}
    writers: Mapping[_Writer, WriterState] = {}
    claims: Mapping[str, Claim] = {}


class ForgetLapsed(MaintainCommand, frozen=True):
    """Remove lapsed leases, and refuse old staged blobs from now on. -> SweptBefore; it always commits.

    It removes readers, writers and claims whose leases have lapsed. The caller guarantees that those in `silent` have
    lapsed too; one that was renewed since, so that it differs from `silent`, is kept. From now on a blob whose key was
    minted before `staged_before_ms` (at most the committer's clock) may not be named unless it is named already. A
    commit that was planned on an earlier State loses its race, so blobs that are that old and not named now may be
    deleted.
    """

    silent: LapsedLeases = LapsedLeases()
    staged_before_ms: _Instant = 0


class AddRollup(MaintainCommand, frozen=True):
    """Name the rollup of the State at `seqno`. -> RollupAdded; not added if a newer one is named."""

    seqno: SeqNo
    key: str
    size: int


class RemoveRollups(MaintainCommand, frozen=True):
    """Forget the rollups, and the blobs of state diffs, before `below`, except the newest rollup. -> Done"""

    below: SeqNo


class HoldClaim(MaintainCommand, frozen=True):
    """Claim a merge of the parts `inputs`, renew one's own claim `key`, or take over a lapsed one. -> Claimed

    `done` is the output so far, with times advanced to `since`, and `resume_key` the key at which the merge resumes.
    Outputs are only added: `done` begins with those that the own claim holds already. Without `done` the claim keeps
    its outputs, and those of an earlier holder if its inputs were the same; otherwise they are discarded. Not granted
    while another's live claim has one of the inputs, if an input is gone, or, with outputs, if the claim was lost.
    """

    key: str
    owner: str
    lease_ms: int
    inputs: tuple[str, ...]
    done: tuple[Part, ...] = ()
    resume_key: bytes = b""
    since: Antichain = MINIMUM


class ReleaseClaim(MaintainCommand, frozen=True):
    """Release a claim. -> Done, also if it is another's."""

    key: str
    owner: str


class MergeSpec(Record, frozen=True):
    """A planned merge of these parts of adjacent batches, advancing times to `since`."""

    inputs: tuple[str, ...]  # part ids
    lower: Antichain
    upper: Antichain
    since: Antichain
    rows: int
    size: int

    @property
    def claim_key(self) -> str:
        return f"merge:{self.lower}"


class MergeResult(MaintainCommand, frozen=True):
    """The result of a merge: `outputs` replace the parts `inputs`, iff all of these are still there. -> MergeApplied

    With a `claim_key`, only if `owner` still holds that claim: the outputs of a lost claim may be deleted already.
    """

    inputs: tuple[str, ...]
    outputs: tuple[Run, ...]
    since: Antichain
    claim_key: str = ""
    owner: str = ""


class BundleParts(MaintainCommand, frozen=True):
    """Replace the parts `inputs` of one batch by the bundles `outputs`, which list them. -> Bundled

    Iff all of these are still there, and none is being merged.
    """

    inputs: tuple[str, ...]
    outputs: tuple[Run, ...]


class ReplacePart(Command, frozen=True):
    """Remove the part with this id, which cannot be read, from the shard. -> PartReplaced

    With a `replacement`, a copy of it under another id and key replaces it, so that no row is lost. Without, its rows
    are lost. InvalidUsage if the shard has no such part. `within` is the bundle that lists it, if any: the contents of
    this bundle, `listed`, replace the bundle first.
    """

    part: Annotated[PartId, written(PartId)]
    replacement: Part | None = None
    within: Annotated[PartId, written(PartId)] | None = None
    listed: tuple[Run, ...] = ()
