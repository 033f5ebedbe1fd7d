"""States under another name or location: what is carried, its blobs, and loans between recovered shards."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Executor

from blob import Blob, BlobNotFound
from persist.commit.blob_tasks import keys_in
from persist.commit.location import Location
from persist.commit.state_loader import Versions
from persist.copies.backup_store import Sums
from persist.copies.shard_facts import all_parts
from persist.core.batch import HollowBatch, Listing, Part, trace_of
from persist.core.blob_keys import is_bundle_key, shard_of
from persist.core.erasure import Erasure
from persist.core.errors import Corruption
from persist.core.ids import LoanId, SeqNo, ShardId, family_of, shard_id_of
from persist.core.manifests import Listed
from persist.core.named_holds import Loan, is_foreign
from persist.core.record import replace
from persist.core.state import State, auxiliary_blob_keys
from persist.core.transitions.audit_recording import retired
from persist.core.transitions.lifecycle import fence_of
from persist.formats.state_frames import encode_listing
from persist.formats.store_errors import translated, translated_but_missing
from persist.maintenance.clone_refs import LoanLists
from persist.parts.read_plan import decode_bundle

# What of a State is carried to another location, or to another name, and which blobs go with it.


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
            spilled={
                kind: tuple(replace(file, key=self.key(file.key)) for file in files)
                for kind, files in state.spilled.items()
            },
            erasures={name: self._erasure(one) for name, one in state.erasures.items()},
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
        listed = self._runs(decode_bundle(self._read(part.key), part.key))
        data = self.bundles[key] = encode_listing(Listing(listed), self._version)
        return replace(part, key=key, checksum=zlib.crc32(data), bundle=replace(part.bundle, size=len(data)))


# The blobs of a State are brought to a location, each read with a check of its checksum. What is there stays.


Read = Callable[[str, int, int], bytes]  # a blob by its key, which must have this size and CRC-32


def copy_blobs(
    location: Location,
    read: Read,
    sums: Sums,
    renaming: Renaming | None,
    pool: Executor,
    told: Callable[[int], object] = lambda size: None,
) -> int:
    """Bring the blobs that are not there yet to the location, and the bundles as they are renamed; how many bytes.

    `read` gives them; `told` hears how many bytes each put has written.
    """

    def put(key: str, data: bytes) -> int:
        with translated():
            location.blob.put(key, data)
        told(len(data))
        return len(data)

    shard = renaming.shard_id if renaming is not None else next(map(shard_of, sums), None)
    with translated():
        there = {stat.key: stat.size for stat in location.blob.list(f"{shard}/")} if sums else {}
    goes = {key: key if renaming is None else renaming.key(key) for key in sums}
    bundles = {} if renaming is None else renaming.bundles
    lacking = [k for k, key in goes.items() if key not in bundles and there.get(key) != sums[k][0]]
    sent = sum(pool.map(lambda key: put(goes[key], read(key, *sums[key])), lacking))
    return sent + sum(put(key, data) for key, data in bundles.items() if key not in there)


# Loans of shards that are recovered: each owner lends what its clones name, whatever it knew of that.
#
# A clone may come back as of another moment than its owner: the commit that lent may be lost, or the one by which the
# clone gave something back. Then the owner would delete what the clone names.


def relent(states: Mapping[str, State], versions: Versions, now_ms: int, fenced_at: SeqNo) -> dict[str, State]:
    """These first States, by their names, with loans for all that any of them has borrowed. Writes lists.

    An owner that does not come back at all is there as a shard that was dropped, whose log begins at `fenced_at`: else
    the next shard of its name would take what it has lent for its own. Repeating it is safe.
    """
    lent, lists = dict(states), LoanLists(versions.blob)
    for state in states.values():
        for loan_id, owner in state.borrowed.items():
            keys = _borrowed(state, owner, versions.blob)
            found = lent.get(owner)
            if not keys or (found is not None and _holds(found, loan_id, keys, lists)):
                continue
            if found is None:
                schema = state.schemas[state.schema_id]
                found = replace(fence_of(owner, schema, now_ms, f"{loan_id[1:]}"), seqno=fenced_at)
            key = versions.write_lent(found.shard_id, tuple(sorted(keys)))
            lent[owner] = replace(found, loans={**found.loans, loan_id: Loan(state.name, key, now_ms, len(keys))})
    return lent


def _borrowed(state: State, owner: str, blob: Blob) -> set[str]:
    """The blobs of this owner that the State names, also by what bundles list."""
    family = family_of(shard_id_of(owner))
    keys = {key for key in state.blob_keys() if is_foreign(key, state.shard_id) and key.startswith(family)}
    for bundle in sorted(filter(is_bundle_key, keys)):
        with translated_but_missing():
            keys.update(keys_in(blob, bundle))
    return keys


def _holds(owner: State, loan_id: LoanId, keys: set[str], lists: LoanLists) -> bool:
    loan = owner.loans.get(loan_id)
    try:
        return loan is not None and keys.issubset(lists.keys(loan.list_key))
    except (BlobNotFound, Corruption):
        return False
