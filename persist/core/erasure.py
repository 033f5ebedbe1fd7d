"""What a State keeps of an erasure: rows that are to be in no byte of either store any more. Pure.

It never keeps what was asked for, only a digest of it.
"""

from __future__ import annotations

from persist.core.batch import Run
from persist.core.ids import SeqNo
from persist.core.record import Record

ERASURES_MAX = 100  # of a shard; beyond that the oldest one that has ended is forgotten
DEADLINE_MS_MAX = 3_650 * 24 * 3600 * 1000  # ten years
REASON_CHARS_MAX = 256
QUESTION_BYTES = 32  # SHA-256


class Doomed(Record, frozen=True):
    """Blobs that have to go. `digest` is the SHA-256 of their keys, ascending, each followed by a line feed."""

    blobs: int = 0
    size: int = 0
    digest: bytes = b""


class Proof(Record, frozen=True):
    """That nothing was left, as a scan of both stores found at `at_ms`.

    The log begins at `horizon`, where a rollup lies. `entries` log entries, and `blobs` blobs of `size` bytes, were
    looked at. `left` is what the consensus store itself may keep of what it has deleted, and how that is removed.
    """

    at_ms: int
    horizon: SeqNo
    entries: int
    blobs: int
    size: int
    left: str = ""


class ErasureRequest(Record, frozen=True):
    """What an erasure does at the next time, in a shard that is fed by `append`: retract the rows of `runs`.

    They were worked out from the latest complete time. `tags`: the tags of earlier times go too.
    """

    runs: tuple[Run, ...] = ()
    tags: bool = False


class Erasure(Record, frozen=True):
    """One erasure. At the time `at` its rows were retracted; no readable time before that may be left.

    `question` is the digest of what was asked for. From the State `rewritten` on no part shows the rows (0: not yet),
    which was so at `rewritten_ms`; `doomed` are the blobs that showed them until then. `proof`: nothing is left.
    `pending`: nothing was retracted yet. It is with the commit that completes `at`, which is the next time.
    """

    at: int
    question: bytes
    requested_ms: int
    deadline_ms: int | None = None
    reason: str = ""
    rewritten: SeqNo = SeqNo(0)
    rewritten_ms: int = 0
    doomed: Doomed = Doomed()
    proof: Proof | None = None
    pending: ErasureRequest | None = None

    @property
    def phase(self) -> str:
        """How far it is: pending, retracted, rewritten or erased. Who waits for whom is another question."""
        if self.pending is not None:
            return "pending"
        if self.proof is not None:
            return "erased"
        return "rewritten" if self.rewritten else "retracted"


class Wait(Record, frozen=True):
    """What an erasure waits for: a reader, a tag, a merge, or history, by its name.

    `time` is the time that it holds (None: it holds no time), `until_ms` when it ends by itself (None: it does not, or
    that is not known).
    """

    kind: str
    name: str
    time: int | None = None
    until_ms: int | None = None


class Scanned(Record, frozen=True):
    """What a scan of both stores found of one shard, at `at_ms`.

    `rewritten`: the oldest State that can be loaded shows no row that was gone by the time that was asked for. The log
    begins at `horizon`. `older` are blobs of States before that one, `unnamed` those that nothing names and that may be
    as old: the first of each, and how many there are. Of the older ones no collection takes `waiting_count`: nothing
    names these, so they wait for the sweep, or they are journals.
    """

    at_ms: int
    horizon: SeqNo
    entries: int
    blobs: int
    size: int
    rewritten: bool
    older: tuple[str, ...] = ()
    older_count: int = 0
    older_size: int = 0
    older_digest: bytes = b""
    unnamed: tuple[str, ...] = ()
    unnamed_count: int = 0
    unnamed_ms: int | None = None  # when the oldest of these, and of those that wait, was minted
    waiting_count: int = 0

    @property
    def is_clean(self) -> bool:
        return self.rewritten and not self.older_count and not self.unnamed_count

    @property
    def doomed(self) -> Doomed:
        return Doomed(self.older_count, self.older_size, self.older_digest)
