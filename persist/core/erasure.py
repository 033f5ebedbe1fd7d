"""The record of an erasure in a State: rows that have to disappear from both stores. Pure.

It contains a digest of the request, never the request itself.
"""

from __future__ import annotations

from persist.core.batch import Run
from persist.core.ids import SeqNo
from persist.core.record import Record

ERASURES_MAX = 100  # of a shard; beyond that the oldest completed one is forgotten
DEADLINE_MS_MAX = 3_650 * 24 * 3600 * 1000  # ten years
REASON_CHARS_MAX = 256
QUESTION_BYTES = 32  # SHA-256


class Doomed(Record, frozen=True):
    """Blobs to delete. `digest` is the SHA-256 of their keys, ascending, each followed by a line feed."""

    blobs: int = 0
    size: int = 0
    digest: bytes = b""


class Proof(Record, frozen=True):
    """The result of a scan of both stores at `at_ms` that found nothing left.

    The log begins at `horizon`, which has a rollup. The scan read `entries` log entries, and `blobs` blobs of `size`
    bytes. `left` says what the consensus store may retain of deleted entries, and how that is removed.
    """

    at_ms: int
    horizon: SeqNo
    entries: int
    blobs: int
    size: int
    left: str = ""


class ErasureRequest(Record, frozen=True):
    """The retractions of an erasure at the next time of a shard that is fed by `append`.

    `runs` were computed from the latest complete time. `tags`: tags of earlier times are removed too.
    """

    runs: tuple[Run, ...] = ()
    tags: bool = False


class Erasure(Record, frozen=True):
    """One erasure. Its rows were retracted at the time `at`; it completes once no earlier time is readable.

    `question` is the digest of the request. From the State `rewritten` on, at `rewritten_ms`, no part contains the rows
    (0: not yet); `doomed` are the blobs that contained them until then. `proof`: nothing is left. `pending`: nothing is
    retracted yet; the commit that completes `at`, the next time, will do so.
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
        """Its progress: pending, retracted, rewritten or erased."""
        if self.pending is not None:
            return "pending"
        if self.proof is not None:
            return "erased"
        return "rewritten" if self.rewritten else "retracted"


class Wait(Record, frozen=True):
    """What an erasure waits for: a reader, a tag, a merge, or history, by its name.

    `time` is the time that it holds (None: none), `until_ms` when it expires (None: never, or unknown).
    """

    kind: str
    name: str
    time: int | None = None
    until_ms: int | None = None


class Scanned(Record, frozen=True):
    """What a scan of both stores found of one shard, at `at_ms`.

    `rewritten`: the oldest loadable State contains no row that was gone by the requested time. The log begins at
    `horizon`. `older` are blobs of States before that one, `unnamed` those that no State names and that may be as old:
    the first of each, and their numbers. `waiting_count` of the older ones are not removed by garbage collection: no
    State names them, so they wait for the sweep, or they are journals.
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
    unnamed_ms: int | None = None  # when the oldest of the unnamed and waiting ones was minted
    waiting_count: int = 0

    @property
    def is_clean(self) -> bool:
        return self.rewritten and not self.older_count and not self.unnamed_count

    @property
    def doomed(self) -> Doomed:
        return Doomed(self.older_count, self.older_size, self.older_digest)
