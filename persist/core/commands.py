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
from typing import Annotated

from persist.core.attribute import AttributeUpdate, GivenKey, IndexChunk, IndexRoot
from persist.core.batch import Part, Run
from persist.core.command import ADMIN as ADMIN
from persist.core.command import INCLUDED as INCLUDED
from persist.core.command import LEASE_MS_MAX as LEASE_MS_MAX
from persist.core.command import MAINTAIN as MAINTAIN
from persist.core.command import MANAGE as MANAGE
from persist.core.command import READ as READ
from persist.core.command import SCOPES as SCOPES
from persist.core.command import TIME_MS_MAX as TIME_MS_MAX
from persist.core.command import WRITE as WRITE
from persist.core.command import Command as Command
from persist.core.command import MaintainCommand as MaintainCommand
from persist.core.command import ManagedCommand as ManagedCommand
from persist.core.command import ReadCommand as ReadCommand
from persist.core.command import WriteCommand as WriteCommand
from persist.core.command import WriterCommand as WriterCommand
from persist.core.command import kinds as kinds
from persist.core.frontier import MINIMUM, Antichain
from persist.core.history_commands import CutsTaken as CutsTaken
from persist.core.history_commands import ForgetHistory as ForgetHistory
from persist.core.history_commands import ForgetOutlived as ForgetOutlived
from persist.core.history_commands import LowerSeal as LowerSeal
from persist.core.history_commands import NoteLooked as NoteLooked
from persist.core.history_commands import NoteRewritten as NoteRewritten
from persist.core.history_commands import ProveErasure as ProveErasure
from persist.core.history_commands import ReadErasures as ReadErasures
from persist.core.history_commands import ReadRetention as ReadRetention
from persist.core.history_commands import RemoveTag as RemoveTag
from persist.core.history_commands import ResolveTime as ResolveTime
from persist.core.history_commands import RetentionIs as RetentionIs
from persist.core.history_commands import SetSettings as SetSettings
from persist.core.history_commands import SetTag as SetTag
from persist.core.history_commands import TakeCuts as TakeCuts
from persist.core.history_commands import TimesShown as TimesShown
from persist.core.ids import CriticalReaderId, PartId, ReaderId, SeqNo, WriterId, written
from persist.core.record import Record
from persist.core.results import Appended as Appended
from persist.core.results import AttributeValues as AttributeValues
from persist.core.results import Bundled as Bundled
from persist.core.results import Claimed as Claimed
from persist.core.results import CriticalReaderState as CriticalReaderState
from persist.core.results import Done as Done
from persist.core.results import ErasuresAre as ErasuresAre
from persist.core.results import Finalised as Finalised
from persist.core.results import Flushed as Flushed
from persist.core.results import HistoryMoved as HistoryMoved
from persist.core.results import HoldGivenUp as HoldGivenUp
from persist.core.results import MarksShown as MarksShown
from persist.core.results import MergeApplied as MergeApplied
from persist.core.results import PartReplaced as PartReplaced
from persist.core.results import ReaderRegistered as ReaderRegistered
from persist.core.results import Result as Result
from persist.core.results import RollupAdded as RollupAdded
from persist.core.results import SchemaRegistered as SchemaRegistered
from persist.core.results import SealLowered as SealLowered
from persist.core.results import SettingsAre as SettingsAre
from persist.core.results import SinceDowngraded as SinceDowngraded
from persist.core.results import SweptBefore as SweptBefore
from persist.core.results import TagRemoved as TagRemoved
from persist.core.results import TagsAre as TagsAre
from persist.core.results import TimeResolved as TimeResolved
from persist.core.results import TimeToCome as TimeToCome
from persist.core.rewrite import DROP_BEFORE as DROP_BEFORE
from persist.core.rewrite import EDITS as EDITS
from persist.core.rewrite import ERASE as ERASE
from persist.core.rewrite import INSERT as INSERT
from persist.core.rewrite import NEVER as NEVER
from persist.core.rewrite import RESTORE as RESTORE
from persist.core.rewrite import TRUNCATE as TRUNCATE
from persist.core.rewrite import Effects as Effects
from persist.core.rewrite import NewErasure as NewErasure
from persist.core.rewrite import PassedCut as PassedCut
from persist.core.rewrite import Rewrite as Rewrite
from persist.core.rewrite import SchemaChange as SchemaChange
from persist.core.rewrite import effects as effects
from persist.core.rewrite import scopes_of as scopes_of
from persist.core.shard_commands import BeginClone as BeginClone
from persist.core.shard_commands import EndLoan as EndLoan
from persist.core.shard_commands import EvolveSchema as EvolveSchema
from persist.core.shard_commands import ForgetLapsed as ForgetLapsed
from persist.core.shard_commands import HandOver as HandOver
from persist.core.shard_commands import LapsedLeases as LapsedLeases
from persist.core.shard_commands import Lend as Lend
from persist.core.shard_commands import LendOn as LendOn
from persist.core.shard_commands import Lent as Lent
from persist.core.shard_commands import Returned as Returned
from persist.core.shard_commands import ShrinkLoan as ShrinkLoan
from persist.core.shard_settings import NO_SETTINGS, ShardSettings
from persist.core.spill import SpillFile, SpillKind
from persist.core.state import SchemaRecord

_Writer = Annotated[WriterId, written(WriterId)]
_Reader = Annotated[ReaderId, written(ReaderId)]
_Critical = Annotated[CriticalReaderId, written(CriticalReaderId)]


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

    `force`: also beyond the shard's upper, so that nothing is readable until a writer reaches it. `registered` names
    the hold that is meant: Expired if it was given up, even if the name has a new one. None: any hold of this name.
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


# --- life cycle


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


# --- maintenance


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
