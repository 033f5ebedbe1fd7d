"""Checks of one shard: its State, its log, its loans, its blobs, and the bytes and rows of its parts."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice, pairwise

import pyarrow as pa

from blob import Blob, BlobError, BlobNotFound
from persist.attributes.node_codec import Leaf, check_nodes
from persist.attributes.node_store import ChunkReader, NodeCache
from persist.commit.state_loader import Versions
from persist.copies.shard_facts import NOT_THERE, Fault, FaultKind, LoggedDiff, NamedPart, Readable, all_parts
from persist.core import invariants, state_diff
from persist.core.attribute import KEY_BYTES
from persist.core.batch import HollowBatch, Part, Run
from persist.core.blob_keys import belongs_to, is_rollup_key, rollup_seqno, shard_of
from persist.core.errors import Corruption, HistoryLost, PersistError
from persist.core.ids import SeqNo, family_of, shard_id_of
from persist.core.named_holds import by_owner, is_foreign
from persist.core.spill import SpillFile, SpillKind
from persist.core.state import State, auxiliary_blob_keys
from persist.core.state_diff import StateDiff
from persist.core.truncations_and_drops import begins
from persist.formats.spill_frames import LAYOUTS, decode_run
from persist.formats.state_frames import THIS_BUILD, Build, decode_state
from persist.formats.store_errors import translate, translated_but_missing
from persist.maintenance.clones_and_loans import LoanLists
from persist.parts import ShardSchema, decode_inline, valid_schemas
from persist.parts.consolidate import sort_groups
from persist.parts.key_encoding import SortedKeys
from persist.parts.part_files import BlobReads, PartFiles
from persist.parts.part_validation import PartCheck, check_presence

# The consistency of a State: its counts, bounds, order, schemas, holds and blob keys. Pure.
#
# `persist.core.invariants` has what every commit checks. This has what a commit cannot violate, but damaged bytes can.

EXACT_BYTES_MAX = 128  # an upper bound of at most this size is a key of the part; a longer one may be beyond its keys

Problem = tuple[str, str]  # a description, and the key of the blob; "": it is not about a blob


def contradictions(state: State) -> Iterator[Problem]:
    """What is inconsistent within the State, beyond its invariants."""
    for batch in state.trace.batches:
        if batch.rows != (rows := sum(part.rows for part in batch.parts())):
            yield f"batch {batch.desc} claims {batch.rows} rows, and its parts have {rows}", ""
    if state.trace.rows != (rows := sum(batch.rows for batch in state.trace.batches)):
        yield f"the shard claims {state.trace.rows} rows, and its batches have {rows}", ""
    for batch in state.trace.batches:
        yield from run_problems(batch.runs)
        for part in batch.parts():
            yield from _part_problems(state, batch, part)
    # No hold is before since: since moves to the meet of all holds, and no further.
    for name, hold in state.critical_readers.items():
        if hold.since < state.since:
            yield f"critical reader {name} holds {hold.since}, which since {state.since} has passed", ""
    for reader_id, reader in state.leased_readers.items():
        if not reader.point and reader.since < state.since:
            yield f"reader {reader_id} holds {reader.since}, which since {state.since} has passed", ""
    # Parts that a claim names may have left by another merge; but no worker claims a merge of nothing.
    for key, claim in state.claims.items():
        if not claim.inputs:
            yield f"the claim {key} of {claim.owner} has no inputs", ""
    for seqno, rollup in state.rollups.items():
        if belongs_to(rollup.key, shard_of(rollup.key)) and is_rollup_key(rollup.key):
            if rollup_seqno(rollup.key) != seqno:
                yield f"the rollup v{seqno} has the key of another version", rollup.key
        else:
            yield f"the rollup v{seqno} has an invalid key", rollup.key
    for key in dict.fromkeys(auxiliary_blob_keys(state)):
        if is_foreign(key, state.shard_id) and not state.borrowed:
            yield f"the blob {key} belongs to another shard, from which nothing is borrowed", key


def run_problems(runs: Iterable[Run]) -> Iterator[Problem]:
    """Whether the parts of each run are in key order."""
    for run in runs:
        for part, following in pairwise(run.parts):
            key_upper = part.key_upper
            if following.key_lower < part.key_lower:
                yield f"part {following.id} is after part {part.id}, but its keys begin before", following.key or ""
            elif key_upper is not None and len(key_upper) <= EXACT_BYTES_MAX and following.key_lower < key_upper:
                yield f"part {following.id} has keys that part {part.id}, before it, has too", following.key or ""


def _part_problems(state: State, batch: HollowBatch, part: Part) -> Iterator[Problem]:
    """Whether the description of a part in the State is consistent."""
    key = part.key or ""
    if part.schema_id not in state.schemas:
        yield f"part {part.id} names schema {part.schema_id}, which is not registered", key
    if part.key is not None and not belongs_to(part.key, shard_of(part.key)):
        yield f"part {part.id} has an invalid key", key
    elif part.key is not None and is_foreign(part.key, state.shard_id) and not state.borrowed:
        yield f"part {part.id} belongs to another shard, from which nothing is borrowed", key
    if part.key_upper is not None and part.key_upper < part.key_lower:
        yield f"part {part.id} has an upper key below its lower key", key
    if part.time_max < part.time_min or part.diff_max < part.diff_min:
        yield f"part {part.id} has a maximum time or diff below the minimum", key
    lower, upper, since = batch.desc.lower.element, batch.desc.upper.element, batch.desc.since.element
    last = max((bound for bound in (None if upper is None else upper - 1, since) if bound is not None), default=None)
    if lower is not None and begins(part) < lower:
        yield f"part {part.id} has times from {begins(part)}, before its batch {batch.desc}", key
    if upper is not None and last is not None and part.time_max > last:
        yield f"part {part.id} has times up to {part.time_max}, beyond its batch {batch.desc}", key


# Replay: whether the log leads from its oldest rollup to the State, and agrees with each rollup on the way.
#
# Each entry is decoded separately, so that a damaged one can be named. Memory: the States of the rollups, and the blobs
# that left the State in the live log.


Note = Callable[[FaultKind, str, str], None]  # a description, and the key of the blob


class Replay:
    """Replays the log of one shard while it is read, and notes faults.

    `state` is the newest State of the shard. None: it cannot be loaded, so only the log is checked.
    """

    def __init__(self, versions: Versions, name: str, state: State | None, note: Note) -> None:
        self._versions = versions
        self._name = name
        self._state = state
        self._note = note
        self._gone: set[str] = set()  # blobs that left the State
        self._replayed: State | None = None
        self._last: int | None = None  # the previous entry
        self._is_over = False  # nothing is known about the following entries
        self._keys: dict[int, str] = {}  # of the readable rollups
        self._rollups = {} if state is None else self._read_rollups(state)

    def take(self, logged: LoggedDiff) -> None:
        """Take the next entry. Raises Unavailable: the log was cut meanwhile."""
        if self._is_over or (self._state is not None and logged.seqno > self._state.seqno):
            return  # the shard has changed meanwhile
        if self._last is None and self._state is not None and logged.seqno not in self._state.rollups:
            message = f"the log begins at v{logged.seqno}, for which the shard names no rollup"
            self._note(FaultKind.ROLLUP, message, "")
        self._is_over = not self._follow(logged)

    def end(self) -> None:
        """Compare the result after all entries were taken."""
        if self._is_over or self._state is None:
            return
        seqno = self._state.seqno
        if self._replayed is None:
            self._note(FaultKind.ROLLUP, "no rollup can be read that its log continues", "")
        elif self._replayed.seqno < seqno:
            self._note(FaultKind.LOG, f"the log ends at v{self._replayed.seqno}, before v{seqno}", "")
        elif self._replayed != self._state:
            differing = _differing(self._replayed, self._state)
            self._note(FaultKind.LOG, f"v{seqno} of the log differs from the newest rollup: {differing}", "")

    def _follow(self, logged: LoggedDiff) -> bool:
        """Replay an entry. False: nothing is known about the entries after it."""
        seqno, change = logged.seqno, logged.change
        if self._last is not None and seqno != self._last + 1:
            self._note(FaultKind.LOG, f"the log jumps from v{self._last} to v{seqno}: entries are missing", "")
            return False
        self._last = seqno
        if logged.cut is not None:
            raise logged.cut
        if change is None:
            self._note(FaultKind.LOG, logged.wrong, "")
            return False
        try:
            replayed = None if self._replayed is None else state_diff.apply(change, self._replayed)
        except (Corruption, HistoryLost) as error:
            self._note(FaultKind.LOG, f"the log entry v{seqno} cannot be applied: {error.message}", "")
            return False
        self._step(change, replayed)
        self._gone.update(change.gone)
        rollup_state = self._rollups.get(SeqNo(seqno))
        if replayed is not None and rollup_state is not None and replayed != rollup_state:
            message = f"the rollup v{seqno} differs from the log: {_differing(replayed, rollup_state)}"
            self._note(FaultKind.ROLLUP, message, self._keys[seqno])
        self._replayed = rollup_state if replayed is None else replayed
        return True

    def _step(self, change: StateDiff, replayed: State | None) -> None:
        """Check that no frontier moved back, and that no blob came back that had left.

        A blob of another shard may come back: a clone of that name is dropped, and the next one borrows it too.
        """
        added = () if change.trace is None else [key for batch in change.trace.batches for key in batch.blob_keys()]
        for key in added:
            if key in self._gone and not is_foreign(key, shard_id_of(self._name)):
                self._note(FaultKind.STEP, f"the commit v{change.seqno} names a blob that had left the shard", key)
        if replayed is None or self._replayed is None:
            return
        try:
            invariants.check_step(self._replayed, replayed)
        except Corruption as error:
            self._note(FaultKind.STEP, f"the commit v{change.seqno} violates an invariant: {error.message}", "")

    def _read_rollups(self, state: State) -> dict[SeqNo, State]:
        """The readable rollups that the State names. Missing ones are found by the listing."""
        readable = {}
        for seqno, rollup in sorted(state.rollups.items()):
            try:
                rollup_state = self._versions.read_rollup(rollup.key)
            except Corruption as error:
                self._note(FaultKind.ROLLUP, f"the rollup v{seqno} cannot be read: {error.message}", rollup.key)
                continue
            if rollup_state is None:
                continue
            if (rollup_state.name, rollup_state.seqno) != (state.name, seqno):
                message = f"the rollup v{seqno} holds v{rollup_state.seqno} of shard {rollup_state.name!r}"
                self._note(FaultKind.ROLLUP, message, rollup.key)
                continue
            readable[seqno], self._keys[seqno] = rollup_state, rollup.key
        return readable


def _differing(first: State, other: State) -> str:
    return ", ".join(name for name in first.__struct_fields__ if getattr(first, name) != getattr(other, name))


# Loans: whether a shard and the owners of blobs that it borrows agree.


def check_borrowed(location: Readable, state: State, named: Iterable[str], note: Note) -> None:
    """Check that each blob of another shard is in the list of a loan that its owner has. Raises Unavailable.

    A loan may exist on one side only if no blob of it is named any more: that is how it ends.
    """
    foreign = by_owner(key for key in named if is_foreign(key, state.shard_id))
    lists = LoanLists(location.blob)
    for owner in dict.fromkeys(state.borrowed.values()):
        unexplained = foreign.pop(family_of(shard_id_of(owner)), set())
        if not unexplained:
            continue
        try:
            lender = location.versions.load(owner)
        except Corruption as error:
            note(FaultKind.LOAN, f"shard {owner!r}, from which it borrows, cannot be read: {error.message}", "")
            continue
        if lender is None:
            note(FaultKind.LOAN, f"shard {owner!r}, from which it borrows, does not exist", "")
            continue
        unknown = []
        for loan_id, name in state.borrowed.items():
            loan = lender.loans.get(loan_id) if name == owner else None
            if name == owner and (loan is None or loan.borrower != state.name):
                unknown.append(str(loan_id))
            if loan is None or loan.borrower != state.name:
                continue
            try:
                unexplained.difference_update(lists.keys(loan.list_key))
            except BlobNotFound:
                note(FaultKind.MISSING, f"the list {loan.list_key} of loan {loan_id} is missing", loan.list_key)
                unexplained.clear()  # its contents are unknown
            except Corruption as error:
                note(FaultKind.LOAN, error.message, loan.list_key)
                unexplained.clear()
        for key in sorted(unexplained):
            reason = f"shard {owner!r} has no loan {', '.join(unknown)}" if unknown else "no loan contains it"
            note(FaultKind.LOAN, f"the blob {key} belongs to shard {owner!r}, which has not lent it: {reason}", key)
    for family, keys in foreign.items():
        for key in sorted(keys) if state.borrowed else ():  # else `contradictions` reports each part
            note(FaultKind.LOAN, f"the blob {key} belongs to a shard {family} from which nothing is borrowed", key)


# The tree of attributes: whether keys ascend, and each is in the node that a lookup leads to.
#
# Checksums of nodes are compared where chunks are read as a whole; this finds what only a wrong flush could write.
# Memory: one node of each level.


CACHE_BYTES = 1024 * 1024  # each node is read once, so that a larger cache does not help


def check_tree(state: State, blob: Blob) -> None:
    """Walk one version of the index. Raises Corruption, StaleIndex (it was collected meanwhile), Unavailable."""
    root, reader = state.attribute_root, ChunkReader(blob, state.attribute_chunks, NodeCache(CACHE_BYTES))

    def count_entries(offset: int, length: int, height: int, lower: bytes | None, upper: bytes | None) -> int:
        """Count the attributes below a node whose keys must be in `[lower, upper)`. None: unbounded."""
        node = reader.read(offset, length)
        keys = [node.keys[at : at + KEY_BYTES] for at in range(0, len(node.keys), KEY_BYTES)]
        where = f"the node of the attribute index at offset {offset}"
        if isinstance(node, Leaf) != (height == 1) or not keys:
            raise Corruption(f"{where} is not at its level, or is empty")
        if any(later <= earlier for earlier, later in pairwise(keys)):
            raise Corruption(f"{where} has duplicate keys, or keys that do not ascend")
        if (lower is not None and keys[0] < lower) or (upper is not None and keys[-1] >= upper):
            raise Corruption(f"{where} has keys that belong to another node")
        if isinstance(node, Leaf):
            return len(keys)
        total = 0
        for at in range(len(node)):
            key, child, _, size = node.child(at)
            child_upper = keys[at + 1] if at + 1 < len(keys) else upper
            total += count_entries(child, size, height - 1, lower if at == 0 else key, child_upper)
        return total

    counted = count_entries(root.offset, root.length, root.height, None, None) if root.height else root.count
    if counted != root.count:
        raise Corruption(f"the attribute index has {counted} entries, not {root.count}")


# The bytes and rows of parts. Each part is checked separately, so that a bad one hides no other.


THREADS = 4
WINDOW = 64  # parts that are checked together
PIECE_BYTES = 8 * 1024 * 1024


def byte_faults(
    state: State,
    blob: Blob,
    build: Build = THIS_BUILD,
    *,
    deep: bool = False,
    takes: Callable[[str], bool] = lambda name: True,
    threads: int = THREADS,
) -> Iterator[Fault]:
    """The faults of the blobs and inline parts that the State names, in order; then of other blobs.

    Every byte is read once and compared with its checksum; `deep`: every row is decoded too, and their order checked.
    `takes` selects parts by their ids, and other blobs by their keys; bundles are always checked. Raises Unavailable.
    Memory: a piece of `PIECE_BYTES` for each of the `threads`, with `deep` a row group.
    """
    schemas = valid_schemas(state.schemas)
    checks = {number: PartCheck(schema) for number, schema in schemas.items()}

    def check_part(named: NamedPart) -> tuple[FaultKind, str] | None:
        part = named.part
        try:
            if named.error is not None:
                raise named.error
            if part.bundle is not None:
                return None
            if part.key is None:
                decode_inline(part, schemas)
                if deep:
                    _check_of(checks, part).inline_rows(part)
                return None
            check_presence(part, blob)
            if not matches_checksum(part, blob):
                raise Corruption(f"part {part.id} does not match its checksum")
            if deep:
                _check_of(checks, part).blob(part, blob, whole=True)
                return _disorder(part, blob, schemas)
        except BlobNotFound:
            return FaultKind.PART, f"the blob of {'part' if part.bundle is None else 'bundle'} {part.id} {NOT_THERE}"
        except BlobError as error:
            raise translate(error) from error
        except PersistError as error:
            return FaultKind.PART, error.message.partition("; write its rows again")[0]
        return None

    parts = (named for named in all_parts(state, blob) if named.error is not None or takes(str(named.part.id)))
    with ExitStack() as stack:
        map_parts: Callable[..., Iterator[tuple[FaultKind, str] | None]] = map
        if threads > 1:
            map_parts = stack.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="persist-examine")).map
        while window := list(islice(parts, WINDOW)):
            for named, problem in zip(window, map_parts(check_part, window), strict=True):
                if problem is not None:
                    yield Fault(state.name, *problem, named.part.key or "", named)
    yield from _auxiliary_faults(state, blob, build, takes)


def _check_of(checks: Mapping[int, PartCheck], part: Part) -> PartCheck:
    if part.schema_id not in checks:
        raise Corruption(f"part {part.id} names schema {part.schema_id}, which is not registered, or does not fit")
    return checks[part.schema_id]


def matches_checksum(part: Part, blob: Blob) -> bool:
    """Read the blob of a part, in pieces of PIECE_BYTES, and compare its checksum. Raises what the store raises."""
    checksum = 0
    for start in range(0, part.size, PIECE_BYTES):
        piece = blob.get_range(part.key or "", start, min(PIECE_BYTES, part.size - start))
        checksum = zlib.crc32(piece, checksum)
    return checksum == part.checksum


def _disorder(part: Part, blob: BlobReads, schemas: Mapping[int, ShardSchema]) -> tuple[FaultKind, str] | None:
    """Whether rows are unordered, duplicate, or outside the bounds that every reader relies on.

    `persist.parts.part_validation` compares a part with its bytes before a commit accepts it; this finds what only a
    bug of persist can cause. Memory: a row group.
    """
    schema = schemas[part.schema_id]
    try:
        file, last = PartFiles(blob, schemas).open(part), None
        for number, group in enumerate(file.groups):
            rows = file.read([number], schema.updates_schema.names)
            if not rows.num_rows:
                continue
            keys = SortedKeys(rows, schema.key)
            bounds = keys[0], keys[len(keys) - 1]  # if rows are unordered, the check below finds that
            if min(bounds) < group.key_lower or (group.key_upper is not None and max(bounds) > group.key_upper):
                return FaultKind.ORDER, f"part {part.id} has keys outside its bounds"
            joined = rows if last is None else pa.concat_tables([last, rows])
            order, firsts = sort_groups(joined, schema)
            if order is not None:
                return FaultKind.ORDER, f"the rows of part {part.id} are not in order, in row group {number}"
            if not firsts.all():
                return FaultKind.ORDER, f"part {part.id} has a duplicate update, in row group {number}"
            last = rows.slice(rows.num_rows - 1)
    except Corruption as error:
        return FaultKind.ORDER, error.message
    return None


# The blobs that a State names besides parts: each is read as a whole, and compared with its checksums.


Check = Callable[[bytes], object]


def _auxiliary_faults(state: State, blob: Blob, build: Build, takes: Callable[[str], bool]) -> Iterator[Fault]:
    """The faults of each blob that `takes` selects. Memory: one such blob."""
    checks: dict[str, Check] = {rollup.key: partial(decode_state, build=build) for rollup in state.rollups.values()}
    sizes: dict[str, int] = {}
    for first, chunk in state.attribute_chunks.items():
        checks[chunk.key], sizes[chunk.key] = partial(check_nodes, first=first), chunk.length
    for spill_kind, files in state.spilled.items():
        for file in files:
            checks[file.key], sizes[file.key] = partial(_check_spill, spill_kind, file), file.size
    for key in filter(takes, dict.fromkeys(auxiliary_blob_keys(state))):
        of_index = FaultKind.INDEX if key.endswith(".nodes") else FaultKind.BLOB
        kind = FaultKind.ROLLUP if is_rollup_key(key) else of_index
        try:
            with translated_but_missing():
                if key not in checks:
                    if blob.stat(key) is None:
                        raise BlobNotFound(key)
                    continue
                data = blob.get(key)
            if len(data) != sizes.get(key, len(data)):
                raise Corruption(f"it has {len(data)} bytes, not {sizes[key]}")
            checks[key](data)
        except BlobNotFound:
            yield Fault(state.name, kind, f"the blob {key} {NOT_THERE}", key)
        except Corruption as error:
            yield Fault(state.name, kind, f"the blob {key} is damaged: {error.message}", key)


def _check_spill(kind: SpillKind, file: SpillFile, data: bytes) -> None:
    for _, value in decode_run(data, LAYOUTS[kind], file.index_at):
        LAYOUTS[kind].value(value)
