"""Commands on a shard and their results: one frozen class each. `transitions.step` says what they do.

Commands that write carry their writer and an idempotency token; a retry with the same token answers as the
first time did. Their `attributes` change together with the rows or not at all: AttributeMismatch carries the actual
values when a condition fails. Frontiers are `Antichain`s, intervals half-open, durations in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from persist.core.antichain import MINIMUM, Antichain
from persist.core.attribute import AttributeKey, AttributeUpdate, IndexChunk, IndexRoot
from persist.core.batch import Part, Run
from persist.core.ids import CriticalReaderId, ReaderId, SeqNo, Token, WriterId
from persist.core.state import SchemaRecord

# --- writers


@dataclass(frozen=True, slots=True)
class RegisterWriter:
    """Register a writer, or extend its lease if it is registered. -> WriterRegistered"""

    writer: WriterId
    lease_ms: int


@dataclass(frozen=True, slots=True)
class HeartbeatWriter:
    """Extend a writer's lease. -> Done. Expired when it is gone."""

    writer: WriterId


@dataclass(frozen=True, slots=True)
class ExpireWriter:
    """Retire a writer. -> Done, also when it is gone already."""

    writer: WriterId


@dataclass(frozen=True, slots=True)
class CompareAndAppend:
    """Append a batch `[expected_upper, new_upper)` iff the shard's upper is `expected_upper`. -> Appended

    All times of the rows lie in the interval. Linearises all writers. UpperMismatch carries the actual upper.
    """

    writer: WriterId
    token: Token
    expected_upper: Antichain
    new_upper: Antichain
    runs: tuple[Run, ...]
    attributes: tuple[AttributeUpdate, ...] = ()


@dataclass(frozen=True, slots=True)
class Append:
    """Append a batch `[lower, upper)`; what the shard has already is dropped. -> Appended

    For replicated writers that write identical definite data. UpperMismatch when `lower` lies beyond the
    shard's upper (there would be a gap). With attributes it
    happens as a whole: UpperMismatch unless the shard's upper is `lower`.
    """

    writer: WriterId
    token: Token
    lower: Antichain
    upper: Antichain
    runs: tuple[Run, ...]
    attributes: tuple[AttributeUpdate, ...] = ()


@dataclass(frozen=True, slots=True)
class Insert:
    """Append rows at the next time, chosen by the service. -> Appended

    Inserts that are committed together share one time and one batch.
    """

    writer: WriterId
    token: Token
    runs: tuple[Run, ...]
    attributes: tuple[AttributeUpdate, ...] = ()


@dataclass(frozen=True, slots=True)
class AdvanceUpper:
    """Declare every time before `upper` complete, without data; `[]` closes the shard to writes. -> Appended

    Never moves the upper back; idempotent.
    """

    upper: Antichain


# --- attributes


@dataclass(frozen=True, slots=True)
class UpdateAttributes:
    """Change attributes alone, all or nothing. -> Done. AttributeMismatch carries the actual values."""

    writer: WriterId
    token: Token
    attributes: tuple[AttributeUpdate, ...]


@dataclass(frozen=True, slots=True)
class ReadAttributes:
    """The values of these attributes as of now. -> AttributeValues; changes nothing."""

    keys: tuple[AttributeKey, ...]


@dataclass(frozen=True, slots=True)
class ScanAttributes:
    """The first attributes that are set with keys in `[lower, upper)` (None: to the end). -> AttributeValues

    At most `limit`, by key ascending; `following` of the answer is where the next page begins. Core attributes are
    left out.
    """

    lower: AttributeKey
    upper: AttributeKey | None = None
    limit: int = 1_000


@dataclass(frozen=True, slots=True)
class FlushAttributes:
    """Replace the index at `expected` by the one at `root`, which covers the values `flushed` too. -> Flushed

    `chunks` are the new blobs by first offset. Chunks wholly before the root's `lowest` leave the State.
    """

    expected: IndexRoot
    root: IndexRoot
    chunks: Mapping[int, IndexChunk]
    flushed: Mapping[AttributeKey, int | None]


# --- readers


@dataclass(frozen=True, slots=True)
class RegisterReader:
    """Take an expiring hold at `since` (None = the shard's since) and at the current seqno. -> ReaderRegistered"""

    reader: ReaderId
    since: Antichain | None
    lease_ms: int
    purpose: str = ""


@dataclass(frozen=True, slots=True)
class HeartbeatReader:
    """Extend a reader's lease; no State change when a quarter of the lease has not passed yet. -> Done"""

    reader: ReaderId


@dataclass(frozen=True, slots=True)
class DowngradeSince:
    """Move a reader's holds forward to `since` and `seqno`, and the shard's since to the meet. -> SinceDowngraded

    The reader vouches that it needs no State before `seqno` any more. Extends the lease.
    """

    reader: ReaderId
    since: Antichain
    seqno: SeqNo


@dataclass(frozen=True, slots=True)
class ExpireReader:
    """Retire a reader; the shard's since stays. -> Done, also when it is gone already."""

    reader: ReaderId


@dataclass(frozen=True, slots=True)
class RegisterCriticalReader:
    """Take a hold on since that never expires, or find it again. -> CriticalReaderState"""

    reader: CriticalReaderId
    opaque: str
    purpose: str = ""


@dataclass(frozen=True, slots=True)
class CompareAndDowngradeSince:
    """Move a critical reader's hold iff its opaque token is `expected_opaque`. -> CriticalReaderState"""

    reader: CriticalReaderId
    expected_opaque: str
    new_opaque: str
    since: Antichain


@dataclass(frozen=True, slots=True)
class ExpireCriticalReader:
    """Retire a critical reader iff its opaque token matches; the shard's since stays. -> Done"""

    reader: CriticalReaderId
    expected_opaque: str


# --- schema and life cycle


@dataclass(frozen=True, slots=True)
class EvolveSchema:
    """Make `schema` current iff the current id is `expected_id`; the caller checked the fit. -> SchemaRegistered"""

    expected_id: int
    schema: SchemaRecord


@dataclass(frozen=True, slots=True)
class Drop:
    """Close the shard to writes and reads. -> Done. Conflict while readers hold it, unless `force` retires them."""

    force: bool = False


@dataclass(frozen=True, slots=True)
class Finalise:
    """Take a closed shard one bounded step towards its tombstone. -> Finalised"""


# --- maintenance


@dataclass(frozen=True, slots=True)
class AddRollup:
    """Name the rollup of the State at `seqno`. -> RollupAdded; not added when a newer one is known."""

    seqno: SeqNo
    key: str
    size: int


@dataclass(frozen=True, slots=True)
class RemoveRollups:
    """Forget the rollups before `below`; the newest always stays. -> Done"""

    below: SeqNo


@dataclass(frozen=True, slots=True)
class TakeClaim:
    """Claim the maintenance called `key`, renew one's own claim, or take over a lapsed one. -> Claimed

    For a merge, `inputs` are the parts that it reads. What an earlier holder wrote is handed on when its inputs were
    the same; otherwise it is let go. Not granted while another's live claim holds one of the inputs.
    """

    key: str
    owner: str
    lease_ms: int
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SaveMergeProgress:
    """Keep the output of a merge so far with the claim `key`. -> Claimed. Not granted when the claim was lost.

    Outputs are only ever added: `done` begins with what the claim holds already.
    """

    key: str
    owner: str
    inputs: tuple[str, ...]
    done: tuple[Part, ...]
    resume_key: bytes
    since: Antichain


@dataclass(frozen=True, slots=True)
class ReleaseClaim:
    """Give a claim up. -> Done, also when it is another's."""

    key: str
    owner: str


@dataclass(frozen=True, slots=True)
class ForgetLapsed:
    """Forget readers, writers and claims whose leases lapsed, in a commit that happens even if none did. -> Done

    After it, a commit that was stepped from an earlier State loses its race.
    """


@dataclass(frozen=True, slots=True)
class MergeSpec:
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


@dataclass(frozen=True, slots=True)
class MergeResult:
    """A merge's outcome: `outputs` replace the parts `inputs`, iff all of these are still there. -> MergeApplied

    With a `claim_key` also iff `owner` still holds that claim: the outputs of one who lost it may be deleted already.
    """

    inputs: tuple[str, ...]
    outputs: tuple[Run, ...]
    since: Antichain
    claim_key: str = ""
    owner: str = ""


Command = (
    RegisterWriter
    | HeartbeatWriter
    | ExpireWriter
    | CompareAndAppend
    | Append
    | Insert
    | AdvanceUpper
    | UpdateAttributes
    | ReadAttributes
    | ScanAttributes
    | FlushAttributes
    | RegisterReader
    | HeartbeatReader
    | DowngradeSince
    | ExpireReader
    | RegisterCriticalReader
    | CompareAndDowngradeSince
    | ExpireCriticalReader
    | EvolveSchema
    | Drop
    | Finalise
    | AddRollup
    | RemoveRollups
    | TakeClaim
    | SaveMergeProgress
    | ReleaseClaim
    | MergeResult
    | ForgetLapsed
)

# --- results


@dataclass(frozen=True, slots=True)
class Done:
    pass


@dataclass(frozen=True, slots=True)
class WriterRegistered:
    upper: Antichain
    schema_id: int


@dataclass(frozen=True, slots=True)
class Appended:
    """The batch covers `[lower, upper)`; an insert's rows have the time `lower`."""

    lower: Antichain
    upper: Antichain


@dataclass(frozen=True, slots=True)
class AttributeValues:
    """Values by key; None: unset. `following`: a scan goes on there (None: there is no more)."""

    values: Mapping[AttributeKey, int | None]
    following: AttributeKey | None = None


@dataclass(frozen=True, slots=True)
class Flushed:
    """`applied` (now or by an earlier try), or refused because another flush came first."""

    applied: bool


@dataclass(frozen=True, slots=True)
class ReaderRegistered:
    """The reader may read as of any time in `[since, upper)`; it holds every blob from `seqno` on."""

    since: Antichain
    upper: Antichain
    seqno: SeqNo


@dataclass(frozen=True, slots=True)
class SinceDowngraded:
    reader_since: Antichain
    shard_since: Antichain


@dataclass(frozen=True, slots=True)
class CriticalReaderState:
    since: Antichain
    opaque: str
    shard_since: Antichain


@dataclass(frozen=True, slots=True)
class SchemaRegistered:
    schema_id: int


@dataclass(frozen=True, slots=True)
class RollupAdded:
    added: bool


@dataclass(frozen=True, slots=True)
class Finalised:
    """`done` once the shard is a tombstone."""

    done: bool


@dataclass(frozen=True, slots=True)
class Claimed:
    """Whether the caller holds the claim, and how far an earlier holder came with the same inputs."""

    granted: bool
    owner: str
    inputs: tuple[str, ...] = ()
    done: tuple[Part, ...] = ()
    resume_key: bytes = b""
    since: Antichain = MINIMUM


@dataclass(frozen=True, slots=True)
class MergeApplied:
    """`applied` (now, or by an earlier try whose answer was lost), or refused because an input is gone."""

    applied: bool


Result = (
    Done
    | WriterRegistered
    | Appended
    | AttributeValues
    | Flushed
    | ReaderRegistered
    | SinceDowngraded
    | CriticalReaderState
    | SchemaRegistered
    | RollupAdded
    | Finalised
    | Claimed
    | MergeApplied
)
