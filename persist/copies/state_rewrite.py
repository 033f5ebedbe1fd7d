"""Rewriting of States for another name or location: which fields and blobs are carried over, and their loans."""

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
from persist.core.batch import Listing, Part, trace_of
from persist.core.blob_keys import is_bundle_key, shard_of
from persist.core.bundles import Listed
from persist.core.erasure import Erasure
from persist.core.errors import Corruption
from persist.core.ids import LoanId, SeqNo, ShardId, family_of, shard_id_of
from persist.core.named_holds import Loan, is_foreign
from persist.core.record import replace
from persist.core.state import State, auxiliary_blob_keys
from persist.core.transitions.lifecycle import fence_of
from persist.core.transitions.outcomes_and_audit import retired
from persist.formats.state_frames import encode_listing
from persist.formats.store_errors import translated, translated_but_missing
from persist.maintenance.clones_and_loans import LoanLists
from persist.parts.read_plan import decode_bundle

# The parts of a State that are carried to another location or name, and its blobs.

UNKNOWN = -1  # a size or a checksum that is not in the State


def to_carried(state: State, commit_id: str) -> State:
    """The State with the next seqno that continues this one elsewhere. It names no rollup.

    Leases of readers, writers and claims are dropped: their holders do not know the other location. The last outcome of
    each writer is kept, as are critical readers, tags, history and outcomes.
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
    """The blobs that a State names, including those in bundles: key to size and CRC-32, UNKNOWN if not in the State.

    Raises BlobNotFound or Corruption (a bundle is missing or damaged), Unavailable.
    """
    sums = dict.fromkeys(auxiliary_blob_keys(state), (UNKNOWN, UNKNOWN))
    for named in all_parts(state, blob):
        if named.error is not None:
            raise named.error
        part = named.part
        if part.key is not None:
            sums[part.key] = part.blob_size, part.checksum
    return sums


class Renaming:
    """A State under another name, with blob keys of its own, also in its bundles.

    `read` returns a bundle by its old key. `bundles` are the rewritten bundles, by their new keys. Renaming the same
    State to the same name is deterministic.
    """

    def __init__(self, name: str, version: int, read: Callable[[str], bytes], clone: State | None = None) -> None:
        """`clone`: this State, under its own name and id. Only borrowed blobs get keys of its own."""
        self.name = name
        self.shard_id: ShardId = shard_id_of(name) if clone is None else clone.shard_id
        self.bundles: dict[str, bytes] = {}
        self._version = version
        self._read = read
        self._life = 0 if clone is None else clone.incarnation
        self._only_foreign = clone is not None

    def key(self, key: str) -> str:
        """The new key of this blob."""
        if self._only_foreign and not is_foreign(key, self.shard_id):
            return key
        return f"{self.shard_id}{key.removeprefix(shard_of(key))}"

    def state(self, state: State) -> State:
        """The State under the other name, in its first incarnation; or under its own."""
        return replace(
            state,
            name=self.name,
            shard_id=self.shard_id,
            incarnation=self._life,
            trace=trace_of(replace(batch, runs=self._runs(batch.runs)) for batch in state.trace.batches),
            attribute_chunks={
                number: replace(chunk, key=self.key(chunk.key)) for number, chunk in state.attribute_chunks.items()
            },
            spilled={
                kind: tuple(replace(file, key=self.key(file.key)) for file in files)
                for kind, files in state.spilled.items()
            },
            erasures={name: self._erasure(erasure) for name, erasure in state.erasures.items()},
        )

    def _erasure(self, erasure: Erasure) -> Erasure:
        if erasure.pending is None:
            return erasure
        return replace(erasure, pending=replace(erasure.pending, runs=self._runs(erasure.pending.runs)))

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


# Copies of the blobs of a State to a location, each verified by its checksum. Existing blobs are kept.


Read = Callable[[str, int, int], bytes]  # reads a blob, which must have this size and CRC-32


def copy_blobs(
    location: Location,
    read: Read,
    sums: Sums,
    renaming: Renaming | None,
    pool: Executor,
    on_put: Callable[[int], object] = lambda size: None,
) -> int:
    """Copy missing blobs, and renamed bundles, to the location; returns the number of bytes.

    `read` reads them; `on_put` is called with the bytes of each put.
    """

    def put(key: str, data: bytes) -> int:
        with translated():
            location.blob.put(key, data)
        on_put(len(data))
        return len(data)

    shard = renaming.shard_id if renaming is not None else next(map(shard_of, sums), None)
    with translated():
        existing = {stat.key: stat.size for stat in location.blob.list(f"{shard}/")} if sums else {}
    new_keys = {key: key if renaming is None else renaming.key(key) for key in sums}
    bundles = {} if renaming is None else renaming.bundles
    missing = [key for key, new in new_keys.items() if new not in bundles and existing.get(new) != sums[key][0]]
    sent = sum(pool.map(lambda key: put(new_keys[key], read(key, *sums[key])), missing))
    return sent + sum(put(key, data) for key, data in bundles.items() if key not in existing)


# Loans of recovered shards: each owner lends what its clones name, whatever its own State says.
#
# A clone may be recovered as of another moment than its owner: the commit that lent may be lost, or the one by which
# the clone returned something. Otherwise the owner would delete blobs that the clone names.


def relend(states: Mapping[str, State], versions: Versions, now_ms: int, fenced_at: SeqNo) -> dict[str, State]:
    """These first States, by name, with loans for everything that any of them has borrowed. Writes the lists.

    An owner that is not recovered becomes a dropped shard whose log begins at `fenced_at`: otherwise the next shard of
    its name would claim the lent blobs. Safe to repeat.
    """
    lent, lists = dict(states), LoanLists(versions.blob)
    for state in states.values():
        for loan_id, owner in state.borrowed.items():
            keys = _borrowed(state, owner, versions.blob)
            lender = lent.get(owner)
            if not keys or (lender is not None and _holds(lender, loan_id, keys, lists)):
                continue
            if lender is None:
                schema = state.schemas[state.schema_id]
                lender = replace(fence_of(owner, schema, now_ms, f"{loan_id[1:]}"), seqno=fenced_at)
            key = versions.write_lent(lender.shard_id, tuple(sorted(keys)))
            lent[owner] = replace(lender, loans={**lender.loans, loan_id: Loan(state.name, key, now_ms, len(keys))})
    return lent


def _borrowed(state: State, owner: str, blob: Blob) -> set[str]:
    """The blobs of this owner that the State names, including those in bundles."""
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
