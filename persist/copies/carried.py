"""What of a State is carried to another location, or to another name, and which blobs go with it."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from blob import Blob
from persist.commit.examine import all_parts
from persist.core.batch import HollowBatch, Listing, Part
from persist.core.bundles import Listed
from persist.core.erasure import Erasure
from persist.core.ids import SeqNo, ShardId, shard_id_of
from persist.core.keys import shard_of
from persist.core.loans import is_foreign
from persist.core.record import replace
from persist.core.state import State, auxiliary_blob_keys
from persist.core.trace import trace_of
from persist.core.transitions.outcomes import retired
from persist.formats.state_frames import encode_listing
from persist.parts.bundles import listed_in

UNKNOWN = -1  # a size or a checksum that the State does not tell


def carried(state: State, commit_id: str) -> State:
    """The State of the next seqno that takes this one's place where it is brought back. It names no rollup.

    Readers, writers and claims under a lease stay behind: their holders do not know the other place. What the last
    token of each writer came to is remembered. Critical readers, tags, history and the outcomes of tokens are carried.
    """
    while state.writers:
        state = retired(state, state.writers, state.lease_now_ms)
    return replace(
        state,
        seqno=SeqNo(state.seqno + 1),
        commit_id=commit_id,
        leased_readers={},
        claims={},
        rollups={},
        long_diffs={},
        handed_over=0,
    )


def blobs_of(state: State, blob: Blob) -> dict[str, tuple[int, int]]:
    """The blobs that a State names, also by what bundles list: key to size and CRC-32, UNKNOWN where it tells none.

    Raises BlobNotFound or Corruption (a bundle is missing or damaged), Unavailable.
    """
    found = dict.fromkeys(auxiliary_blob_keys(state), (UNKNOWN, UNKNOWN))
    for named in all_parts(state, blob):
        if named.failed is not None:
            raise named.failed
        part = named.part
        if part.key is not None:
            found[part.key] = part.blob_size, part.checksum
    return found


class Renaming:
    """A State under another name, and so with keys of its own: those of its blobs, and those that its bundles list.

    `read` gives the bytes of a bundle by its old key. `bundles` are the new bytes of the bundles, by their new keys.
    The same State under the same name is always renamed alike.
    """

    def __init__(self, name: str, version: int, read: Callable[[str], bytes]) -> None:
        self.name = name
        self.shard_id: ShardId = shard_id_of(name)
        self.bundles: dict[str, bytes] = {}
        self._version = version
        self._read = read
        self._life = 0
        self._only_foreign = False

    @classmethod
    def own(cls, state: State, version: int, read: Callable[[str], bytes]) -> Renaming:
        """A clone under its own name and id, whose borrowed blobs have keys of its own; its own blobs keep theirs."""
        made = cls(state.name, version, read)
        made.shard_id, made._life, made._only_foreign = state.shard_id, state.incarnation, True
        return made

    def key(self, key: str) -> str:
        """The key under which this blob goes on."""
        if self._only_foreign and not is_foreign(key, self.shard_id):
            return key
        return f"{self.shard_id}{key.removeprefix(shard_of(key))}"

    def state(self, state: State) -> State:
        """The State under the other name, in the first life of it; or under its own."""
        return replace(
            state,
            name=self.name,
            shard_id=self.shard_id,
            incarnation=self._life,
            trace=trace_of(self._batch(batch) for batch in state.trace.batches),
            attribute_chunks={
                number: replace(chunk, key=self.key(chunk.key)) for number, chunk in state.attribute_chunks.items()
            },
            outcome_files=tuple(replace(file, key=self.key(file.key)) for file in state.outcome_files),
            erasures={name: self._erasure(one) for name, one in state.erasures.items()},
            entry_files=tuple(replace(file, key=self.key(file.key)) for file in state.entry_files),
        )

    def _erasure(self, erasure: Erasure) -> Erasure:
        if erasure.pending is None:
            return erasure
        return replace(erasure, pending=replace(erasure.pending, runs=self._runs(erasure.pending.runs)))

    def _batch(self, batch: HollowBatch) -> HollowBatch:
        return replace(batch, runs=self._runs(batch.runs))

    def _runs(self, runs: Listed) -> Listed:
        return tuple(replace(run, parts=tuple(map(self._part, run.parts))) for run in runs)

    def _part(self, part: Part) -> Part:
        if part.key is None:
            return part
        key = self.key(part.key)
        if part.bundle is None or key == part.key:
            return replace(part, key=key)
        listed = self._runs(listed_in(self._read(part.key), part.key))
        data = self.bundles[key] = encode_listing(Listing(listed), self._version)
        return replace(part, key=key, checksum=zlib.crc32(data), bundle=replace(part.bundle, size=len(data)))
