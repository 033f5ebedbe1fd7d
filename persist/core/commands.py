"""Commands on a shard: one record each, whose results are those of `results`. `transitions.step` says what they do.

Commands that write carry their writer and an idempotency token. A retry with the same token answers as the first time
did: of a registered writer its last one, or of a token that comes alone, whose writer is `writer_of(token)` and whose
`digest` is of what was asked for (TokenReused, OutcomeForgotten). Their `attributes` change together with the rows or
not at all: AttributeMismatch carries the actual values. Frontiers are `Antichain`s, intervals half-open, durations in
milliseconds.

A class here and its line in `transitions` is all that a command takes. The class says under which scopes a caller
may send it; its name in snake case is what tells it from the others when it is written.
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
from persist.core.shard_commands import TakeBack as TakeBack
from persist.core.shard_settings import NO_SETTINGS, ShardSettings
from persist.core.spill import SpillFile, SpillKind
from persist.core.state import SchemaRecord

_Writer = Annotated[WriterId, written(WriterId)]
_Reader = Annotated[ReaderId, written(ReaderId)]
_Critical = Annotated[CriticalReaderId, written(CriticalReaderId)]


# --- writers


class ExpireWriter(WriteCommand, frozen=True):
    """Retire a writer. -> Done, also when it is gone already."""

    writer: _Writer


class CompareAndAppend(WriterCommand, frozen=True):
    """Append a batch `[expected_upper, new_upper)` iff the shard's upper is `expected_upper`. -> Appended

    All times of the rows lie in the interval. Linearises all writers. UpperMismatch carries the actual upper. `cut`:
    unique keys were looked up as a pending truncation before that time leaves them; UpperMismatch where it was
    withdrawn.
    """

    expected_upper: Antichain
    new_upper: Antichain
    runs: tuple[Run, ...]
    attributes: tuple[AttributeUpdate, ...] = ()
    cut: int = 0


class Append(WriterCommand, frozen=True):
    """Append a batch `[lower, upper)`; what the shard has already is dropped. -> Appended

    For replicated writers that write identical definite data. UpperMismatch when `lower` lies beyond the shard's upper
    (a gap), or an insert took a time of it. With attributes it happens as a whole: the shard's upper has to be `lower`.
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
"""What may bring `runs` whose rows are added to the shard."""


class ForcedCommand(ManagedCommand, frozen=True, kw_only=True):
    """`force` comes after all other fields, so that clients of before, who do not send it, are understood."""

    force: bool = False


class AdvanceUpper(ForcedCommand, frozen=True):
    """Declare every time before `upper` complete, without data; `[]` closes the shard to writes. -> Appended

    Never moves the upper back; idempotent. `force`: also beyond FAR_TIME, where nobody means to come.
    """

    upper: Antichain


# --- attributes


class UpdateAttributes(WriterCommand, frozen=True):
    """Change attributes alone, all or nothing. -> Done"""

    attributes: tuple[AttributeUpdate, ...]


class ReadAttributes(ReadCommand, frozen=True):
    """The values of these attributes as of now. -> AttributeValues; changes nothing."""

    keys: tuple[GivenKey, ...]


class ScanAttributes(ReadCommand, frozen=True):
    """The first attributes that are set with keys in `[lower, upper)` (None: to the end). -> AttributeValues

    At most `limit`, by key ascending; `following` of the answer is where the next page begins. Core attributes are
    left out.
    """

    lower: GivenKey
    upper: GivenKey | None = None
    limit: int = 1_000


class FlushAttributes(MaintainCommand, frozen=True):
    """Replace the index at `expected` by the one at `root`, which covers the values `flushed` too. -> Flushed

    `chunks` are the new blobs by first offset. Chunks wholly before the root's `lowest` leave the State.
    """

    expected: IndexRoot
    root: IndexRoot
    chunks: Mapping[int, IndexChunk]
    flushed: Mapping[GivenKey, int | None]


class Flush(MaintainCommand, frozen=True):
    """Put `file` in the place of the files `merged`, the newest of this kind, and of what is recent. -> Flushed

    `flushed` are the ids of outcomes, or the seqnos of commits, that leave the State. Iff the State holds all of them.
    """

    kind: SpillKind
    merged: tuple[str, ...]  # keys
    flushed: tuple[str | int, ...]
    file: SpillFile


# --- readers


class RegisterReader(ReadCommand, frozen=True):
    """Take an expiring hold at `since` (None = the shard's since) and at the current seqno. -> ReaderRegistered

    `point`: on that time alone, which since has not passed or which something keeps; with `tag` it is the time of the
    tag. Since does not wait for it, and it stays readable until the hold ends, also when the tag goes. NotReadable.
    """

    reader: _Reader
    since: Antichain | None
    lease_ms: int
    purpose: str = ""
    point: bool = False
    tag: str = ""


class DowngradeSince(ReadCommand, frozen=True):
    """Move a reader's holds forward to `since` and `seqno`, and the shard's since to the meet. -> SinceDowngraded

    The reader vouches that it needs no State before `seqno` any more. At `[]` it holds no time any more, and the
    shard's since goes by the other readers. Without `moves_since` the shard's since stays: nobody else loses history
    by it. `since` None, a heartbeat: the holds stay too. The lease is extended; no State change where nothing moves
    and a quarter of it has not passed yet.

    The holder counts on the States from `seqno` on. A hold that begins later was taken by a registration that a server
    delivered late, after the holder's own had lapsed. It is answered as one that is gone.
    """

    reader: _Reader
    since: Antichain | None
    seqno: SeqNo
    moves_since: bool = True


class ExpireReader(ReadCommand, frozen=True):
    """Retire a reader; the shard's since stays. -> Done, also when it is gone already."""

    reader: _Reader


class RegisterCriticalReader(ManagedCommand, frozen=True):
    """Take a hold on since that never expires, or find it again as it is. -> CriticalReaderState

    A new hold begins at `since`, as if it had been moved there, or is refused. None: at the shard's since.

    `seen`: what the caller knows of. Where a hold was given up after that, nothing is taken. -> HoldGivenUp, which
    says what to name when asking again. So a request that comes late takes no hold that nobody would ever give up.
    None: a new hold is taken in any case.
    """

    reader: _Critical
    opaque: str
    purpose: str = ""
    since: Antichain | None = None
    force: bool = False
    seen: SeqNo | None = None


class CompareAndDowngradeSince(ManagedCommand, frozen=True):
    """Move a critical reader's hold iff its opaque token is `expected_opaque`. -> CriticalReaderState

    `force`: also beyond the shard's upper. Nothing can be read then before somebody writes that far. `registered`
    names the hold that is meant: Expired where it was given up, also if the name has a new one. None: whichever.
    """

    reader: _Critical
    expected_opaque: str
    new_opaque: str
    since: Antichain
    force: bool = False
    registered: SeqNo | None = None


class ExpireCriticalReader(ManagedCommand, frozen=True):
    """Retire a critical reader iff its opaque token matches; the shard's since stays. -> Done, also when it is gone.

    `registered` as in CompareAndDowngradeSince: a new hold of the same name stays.
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

    `store_ms` is the blob store's time, by which it is judged which minted tokens are from the future.
    """

    store_ms: int | None = None


class Recreate(WriteCommand, frozen=True):
    """Begin the next life of a tombstone's name, with this schema, as another shard. -> Done

    It names the `shard` whose tombstone it is, so that a retry does not end in a second life. InvalidUsage where
    `schema` is none.
    """

    schema: SchemaRecord
    settings: ShardSettings = NO_SETTINGS


# --- maintenance


class AddRollup(MaintainCommand, frozen=True):
    """Name the rollup of the State at `seqno`. -> RollupAdded; not added when a newer one is known."""

    seqno: SeqNo
    key: str
    size: int


class RemoveRollups(MaintainCommand, frozen=True):
    """Forget the rollups, and the blobs of state diffs, before `below`; the newest rollup always stays. -> Done"""

    below: SeqNo


class HoldClaim(MaintainCommand, frozen=True):
    """Claim a merge of the parts `inputs`, renew one's own claim `key`, or take over a lapsed one. -> Claimed

    `done` is the output so far, with times advanced to `since`, and `resume_key` where the merge goes on. Outputs are
    only ever added: `done` begins with what one's own claim holds already. With none, the claim holds what it held, and
    what an earlier holder wrote is handed on, if it was of the same inputs; otherwise it is let go. Not granted while
    another's live claim holds one of the inputs, when one of them is gone, and with outputs when the claim was lost.
    """

    key: str
    owner: str
    lease_ms: int
    inputs: tuple[str, ...]
    done: tuple[Part, ...] = ()
    resume_key: bytes = b""
    since: Antichain = MINIMUM


class ReleaseClaim(MaintainCommand, frozen=True):
    """Give a claim up. -> Done, also when it is another's."""

    key: str
    owner: str


class MergeSpec(Record, frozen=True):
    """What a planner asks for: merge these parts of adjacent batches, advancing times to `since`."""

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
    """A merge's outcome: `outputs` replace the parts `inputs`, iff all of these are still there. -> MergeApplied

    With a `claim_key` also iff `owner` still holds that claim: the outputs of one who lost it may be deleted already.
    """

    inputs: tuple[str, ...]
    outputs: tuple[Run, ...]
    since: Antichain
    claim_key: str = ""
    owner: str = ""


class BundleParts(MaintainCommand, frozen=True):
    """Bundles `outputs` take the place of the parts `inputs` of one batch, which they list. -> Bundled

    Iff all of these are still there, and no merge is at work on one.
    """

    inputs: tuple[str, ...]
    outputs: tuple[Run, ...]


class ReplacePart(Command, frozen=True):
    """Take the part with this id, which cannot be read, out of the shard. -> PartReplaced

    With a `replacement`, a copy of it under another id and key takes its place: then the shard reads as it did before.
    Without, its rows are lost. InvalidUsage when the shard has no such part. `within` is the bundle that lists it, if
    one does: everything that this bundle lists, `listed`, takes its place first.
    """

    part: Annotated[PartId, written(PartId)]
    replacement: Part | None = None
    within: Annotated[PartId, written(PartId)] | None = None
    listed: tuple[Run, ...] = ()
