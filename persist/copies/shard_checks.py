"""Checks of one shard: its State against itself, its attribute index, its loans, and the order of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import pyarrow as pa

from blob import Blob, BlobNotFound
from persist.attributes.node_codec import Leaf
from persist.attributes.node_store import ChunkReader, NodeCache
from persist.commit.clone_refs import LoanLists
from persist.copies.readable import Readable
from persist.core.attribute import KEY_BYTES
from persist.core.batch import HollowBatch, Part, Run
from persist.core.blob_keys import belongs_to, is_rollup_key, rollup_seqno, shard_of
from persist.core.errors import Corruption
from persist.core.ids import family_of, shard_id_of
from persist.core.merge_plan import claim_is_for_merge
from persist.core.named_holds import by_owner, is_foreign
from persist.core.state import State, auxiliary_blob_keys
from persist.core.truncation import begins
from persist.parts import ShardSchema
from persist.parts.consolidate import sort_groups
from persist.parts.key_encoding import SortedKeys
from persist.parts.part_files import BlobReads, Files

# Faults of shards that the checker finds, by kind.


class Kind(StrEnum):
    """What a fault is of. docs/check.md has the table of what each kind finds, and at which depth."""

    LOG = "log"  # an entry cannot be read, is not there, or follows another one than it says
    ROLLUP = "rollup"  # it cannot be read, or holds another State than the log makes
    STEP = "step"  # a commit moved what never moves back, or named a blob that had left
    STATE = "state"  # the State contradicts itself
    LOAN = "loan"  # a blob of another shard, which that one has not lent
    MISSING = "missing"  # a blob is not there
    SIZE = "size"  # a blob has another size
    BUNDLE = "bundle"  # it cannot be read, or lists something else
    PART = "part"  # the bytes or rows of a part are others than the State says
    ORDER = "order"  # the rows of a part are not in order, or lie outside the bounds of their keys
    INDEX = "index"  # the tree of attributes contradicts itself
    BLOB = "blob"  # any other blob cannot be read


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a shard. `key` is that of the blob ("": it is of no blob)."""

    shard: str
    kind: Kind
    what: str
    key: str = ""

    def to_json(self) -> dict[str, str | None]:
        """The fields by name; null for none."""
        return {"shard": self.shard, "kind": str(self.kind), "what": self.what, "key": self.key or None}

    def __str__(self) -> str:
        """One sentence that names the shard, the kind and the blob."""
        of = f", blob {self.key}" if self.key else ""
        return f"shard {self.shard!r} has a fault of the kind {self.kind}{of}: {self.what}"


# Whether a State agrees with itself: its counts, bounds, order, schemas, holds and names of blobs. Pure.
#
# `persist.core.invariants` has what every commit checks before it is made. This has what a commit cannot get wrong by
# itself, and what damaged bytes can all the same.


EXACT_BYTES_MAX = 128  # a bound of at most so many bytes is a key; a longer one may lie beyond the keys of the part

Said = tuple[str, str]  # what is wrong, and the key of the blob; "": it is of no blob


def contradictions(state: State) -> Iterator[Said]:
    """What is wrong within the State, beyond its invariants."""
    yield from _counts(state)
    for batch in state.trace.batches:
        yield from _of_batch(state, batch)
    yield from _holds(state)
    yield from _claims(state)
    for seqno, rollup in state.rollups.items():
        if belongs_to(rollup.key, shard_of(rollup.key)) and is_rollup_key(rollup.key):
            if rollup_seqno(rollup.key) != seqno:
                yield f"the rollup v{seqno} has the key of another version", rollup.key
        else:
            yield f"the rollup v{seqno} has a key that no rollup can have", rollup.key
    for key in dict.fromkeys(auxiliary_blob_keys(state)):
        if is_foreign(key, state.shard_id) and not state.borrowed:
            yield f"the blob {key} belongs to another shard, of which nothing is borrowed", key


def of_runs(runs: Iterable[Run]) -> Iterator[Said]:
    """Whether the parts of each run lie in the order of their keys."""
    for run in runs:
        for one, following in pairwise(run.parts):
            ends = one.key_upper
            if following.key_lower < one.key_lower:
                yield f"part {following.id} stands after part {one.id}, and its keys begin before", following.key or ""
            elif ends is not None and len(ends) <= EXACT_BYTES_MAX and following.key_lower < ends:
                yield f"part {following.id} has keys that part {one.id}, before it, has too", following.key or ""


def of_part(state: State, batch: HollowBatch, part: Part) -> Iterator[Said]:
    """Whether what the State says of a part can be true together."""
    key = part.key or ""
    if part.schema_id not in state.schemas:
        yield f"part {part.id} names schema {part.schema_id}, which is not registered", key
    if part.key is not None and not belongs_to(part.key, shard_of(part.key)):
        yield f"part {part.id} has a key that no blob can have", key
    elif part.key is not None and is_foreign(part.key, state.shard_id) and not state.borrowed:
        yield f"part {part.id} belongs to another shard, of which nothing is borrowed", key
    if part.key_upper is not None and part.key_upper < part.key_lower:
        yield f"part {part.id} has keys that end before they begin", key
    if part.time_max < part.time_min or part.diff_max < part.diff_min:
        yield f"part {part.id} has a greatest time or diff below the least", key
    lower, upper, since = batch.desc.lower.element, batch.desc.upper.element, batch.desc.since.element
    last = max((bound for bound in (None if upper is None else upper - 1, since) if bound is not None), default=None)
    if lower is not None and begins(part) < lower:
        yield f"part {part.id} has times from {begins(part)}, before its batch {batch.desc}", key
    if upper is not None and last is not None and part.time_max > last:
        yield f"part {part.id} has times up to {part.time_max}, beyond its batch {batch.desc}", key


def _counts(state: State) -> Iterator[Said]:
    for batch in state.trace.batches:
        if batch.rows != (rows := sum(part.rows for part in batch.parts())):
            yield f"batch {batch.desc} says that it has {batch.rows} rows, and its parts have {rows}", ""
    if state.trace.rows != (rows := sum(batch.rows for batch in state.trace.batches)):
        yield f"the shard says that it has {state.trace.rows} rows, and its batches have {rows}", ""


def _of_batch(state: State, batch: HollowBatch) -> Iterator[Said]:
    yield from of_runs(batch.runs)
    for part in batch.parts():
        yield from of_part(state, batch, part)


def _holds(state: State) -> Iterator[Said]:
    """Nobody holds a time that since has passed: since moves to the meet of what is held, and no further."""
    for name, hold in state.critical_readers.items():
        if hold.since < state.since:
            yield f"critical reader {name} holds {hold.since}, which since {state.since} has passed", ""
    for reader_id, reader in state.leased_readers.items():
        if not reader.point and reader.since < state.since:
            yield f"reader {reader_id} holds {reader.since}, which since {state.since} has passed", ""


def _claims(state: State) -> Iterator[Said]:
    """Parts that a claim names may have left, by another's merge; but no worker claims a merge of nothing."""
    for key, claim in state.claims.items():
        if claim_is_for_merge(key) and not claim.inputs:
            yield f"the claim {key} of {claim.owner} is for nothing", ""


# Whether the tree of a shard's attributes is one: keys ascend, and each lies in the node that looking it up leads to.
#
# Each node is compared with its checksum where chunks are read whole; what only a wrong flush could write is found
# here. Memory: one node of each level.


CACHE_BYTES = 1024 * 1024  # a node is read once, so that more is of no use


class TreeCheck:
    """Walks one version of the index. Raises Corruption, StaleIndex (it was collected meanwhile), Unavailable."""

    def __init__(self, state: State, blob: Blob) -> None:
        self._root = state.attribute_root
        self._reader = ChunkReader(blob, state.attribute_chunks, NodeCache(CACHE_BYTES))
        self._count = 0

    def run(self) -> None:
        """The whole tree."""
        root = self._root
        if not root.height:
            return
        self._walk(root.offset, root.length, root.height, None, None)
        if self._count != root.count:
            raise Corruption(f"the index of attributes has {self._count} of them, not {root.count}")

    def _walk(self, offset: int, length: int, height: int, lower: bytes | None, upper: bytes | None) -> None:
        """A node whose keys are to lie in `[lower, upper)`. None: without end."""
        node = self._reader.read(offset, length)
        keys = [node.keys[at : at + KEY_BYTES] for at in range(0, len(node.keys), KEY_BYTES)]
        where = f"the node of the index of attributes at offset {offset}"
        if isinstance(node, Leaf) != (height == 1) or not keys:
            raise Corruption(f"{where} is not at its level, or is empty")
        if any(later <= earlier for earlier, later in pairwise(keys)):
            raise Corruption(f"{where} has a key twice, or keys that do not ascend")
        if (lower is not None and keys[0] < lower) or (upper is not None and keys[-1] >= upper):
            raise Corruption(f"{where} has keys that belong to another node")
        if isinstance(node, Leaf):
            self._count += len(keys)
            return
        for at in range(len(node)):
            key, child, _, size = node.child(at)
            ends = keys[at + 1] if at + 1 < len(keys) else upper
            self._walk(child, size, height - 1, lower if at == 0 else key, ends)


# Whether a shard and those of whose blobs it names some agree on what was lent.


Note = Callable[[Kind, str, str], None]  # what is wrong, and the key of the blob


def check_borrowed(location: Readable, state: State, named: Iterable[str], note: Note) -> None:
    """Each blob of another shard is in the list of a loan that its owner has, too. Raises Unavailable.

    A loan of which nothing is named any more may be ended on one side already: that is how it ends.
    """
    foreign = by_owner(key for key in named if is_foreign(key, state.shard_id))
    lists = LoanLists(location.blob)
    for owner in dict.fromkeys(state.borrowed.values()):
        left = foreign.pop(family_of(shard_id_of(owner)), set())
        if not left:
            continue
        try:
            lender = location.versions.load(owner)
        except Corruption as error:
            note(Kind.LOAN, f"shard {owner!r}, of which it borrows, cannot be read: {error.message}", "")
            continue
        if lender is None:
            note(Kind.LOAN, f"shard {owner!r}, of which it borrows, is not there", "")
            continue
        unknown = []
        for loan_id, name in state.borrowed.items():
            loan = lender.loans.get(loan_id) if name == owner else None
            if name == owner and (loan is None or loan.borrower != state.name):
                unknown.append(str(loan_id))
            if loan is None or loan.borrower != state.name:
                continue
            try:
                left.difference_update(lists.keys(loan.list_key))
            except BlobNotFound:
                note(Kind.MISSING, f"the list {loan.list_key} of loan {loan_id} is not there", loan.list_key)
                left.clear()  # nobody can tell what it held
            except Corruption as error:
                note(Kind.LOAN, error.message, loan.list_key)
                left.clear()
        for key in sorted(left):
            why = f"shard {owner!r} knows nothing of loan {', '.join(unknown)}" if unknown else "no loan has it"
            note(Kind.LOAN, f"the blob {key} belongs to shard {owner!r}, which has not lent it: {why}", key)
    for family, keys in foreign.items():
        for key in sorted(keys) if state.borrowed else ():  # else the State tells it of each part
            note(Kind.LOAN, f"the blob {key} belongs to a shard {family} of which nothing is borrowed", key)


# Whether the rows of a part lie in the order and within the bounds that every reader relies on.
#
# `persist.parts.part_validation` compares a part with its bytes before a commit believes it; what only a build of ours
# can get wrong is not looked at there. Memory: a row group.


class RowOrder:
    """Looks at parts of these schemas. Not thread-safe: one per thread."""

    def __init__(self, blob: BlobReads, schemas: Mapping[int, ShardSchema]) -> None:
        self._files = Files(blob, schemas)
        self.schemas = schemas

    def check(self, part: Part) -> None:
        """Raises Corruption: rows are not in order, come twice, or lie outside bounds; and what reading does."""
        if part.key is None:
            return  # unsorted, and its bounds are compared with its rows
        schema = self.schemas[part.schema_id]
        file, last = self._files.open(part), None
        for number, group in enumerate(file.groups):
            rows = file.read([number], schema.updates_schema.names)
            if not rows.num_rows:
                continue
            _check_bounds(rows, schema, part, group.key_lower, group.key_upper)
            joined = rows if last is None else pa.concat_tables([last, rows])
            order, firsts = sort_groups(joined, schema)
            if order is not None:
                raise Corruption(f"the rows of part {part.id} are not in order, in row group {number}")
            if not firsts.all():
                raise Corruption(f"part {part.id} has an update twice, in row group {number}")
            last = rows.slice(rows.num_rows - 1)


def _check_bounds(rows: pa.Table, schema: ShardSchema, part: Part, lower: bytes, upper: bytes | None) -> None:
    """The rows are in order, or are found not to be: so the first and the last one tell."""
    keys = SortedKeys(rows, schema.key)
    ends = keys[0], keys[len(keys) - 1]
    if min(ends) < lower or (upper is not None and max(ends) > upper):
        raise Corruption(f"part {part.id} has keys outside the bounds that it tells of them")
