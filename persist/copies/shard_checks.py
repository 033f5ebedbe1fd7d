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
from persist.copies.shard_facts import (
    NOT_THERE,
    Fault,
    FaultKind,
    LoggedDiff,
    NamedPart,
    Readable,
    all_parts,
)
from persist.core import invariants, state_diff
from persist.core.attribute import KEY_BYTES, IndexChunk
from persist.core.batch import HollowBatch, Part, Run
from persist.core.blob_keys import belongs_to, is_rollup_key, rollup_seqno, shard_of
from persist.core.errors import Corruption, HistoryLost, PersistError
from persist.core.ids import SeqNo, family_of, shard_id_of
from persist.core.named_holds import by_owner, is_foreign
from persist.core.spill import SpillFile, SpillKind
from persist.core.state import State, auxiliary_blob_keys
from persist.core.state_diff import StateDiff
from persist.core.truncation import begins
from persist.formats.spill_frames import LAYOUTS, decode_run
from persist.formats.state_frames import THIS_BUILD, Build, decode_state
from persist.formats.store_errors import translate, translated, translated_but_missing
from persist.maintenance.clone_refs import LoanLists
from persist.parts import ShardSchema, decode_inline, valid_schemas
from persist.parts.consolidate import sort_groups
from persist.parts.key_encoding import SortedKeys
from persist.parts.part_files import BlobReads, PartFiles
from persist.parts.part_validation import PartCheck, check_presence

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
        if not claim.inputs:
            yield f"the claim {key} of {claim.owner} is for nothing", ""


# Whether the log of a shard leads from its oldest rollup to its State, step by step, and past each other rollup.
#
# Each entry is read by itself, so that one that is damaged is named. Memory: the States of the rollups, and what left
# the State in the live log.


Note = Callable[[FaultKind, str, str], None]  # what is wrong, and the key of the blob


class Replay:
    """Replays the log of one shard as it is read. What is wrong is noted.

    `state` is the one that the shard shows. None: it cannot be loaded, so the log alone is looked at.
    """

    def __init__(self, versions: Versions, name: str, state: State | None, note: Note) -> None:
        self._versions = versions
        self._name = name
        self._state = state
        self._note = note
        self._gone: set[str] = set()  # blobs that left the State
        self._made: State | None = None
        self._last: int | None = None  # the entry before
        self._is_over = False  # nothing can be said of the entries that follow
        self._keys: dict[int, str] = {}  # of the rollups that can be read
        self._rollups = {} if state is None else self._read_rollups(state)

    def take(self, logged: LoggedDiff) -> None:
        """Take the next entry. Raises Unavailable: the log was cut meanwhile."""
        if self._is_over or (self._state is not None and logged.seqno > self._state.seqno):
            return  # the shard has moved on meanwhile
        if self._last is None and self._state is not None and logged.seqno not in self._state.rollups:
            what = f"the log begins at v{logged.seqno}, of which the shard names no rollup"
            self._note(FaultKind.ROLLUP, what, "")
        self._is_over = not self._follow(logged)

    def end(self) -> None:
        """All entries were taken."""
        if self._is_over or self._state is None:
            return
        seqno = self._state.seqno
        if self._made is None:
            self._note(FaultKind.ROLLUP, "no rollup can be read from which its log goes on", "")
        elif self._made.seqno < seqno:
            self._note(FaultKind.LOG, f"the log ends at v{self._made.seqno}, before v{seqno}", "")
        elif self._made != self._state:
            differing = _differing(self._made, self._state)
            self._note(FaultKind.LOG, f"the log makes another v{seqno} than the newest rollup: {differing}", "")

    def _follow(self, logged: LoggedDiff) -> bool:
        """Whether something can be said of what comes after this entry."""
        seqno, change = logged.seqno, logged.change
        if self._last is not None and seqno != self._last + 1:
            self._note(FaultKind.LOG, f"the log goes from v{self._last} to v{seqno}: entries are not there", "")
            return False
        self._last = seqno
        if logged.cut is not None:
            raise logged.cut
        if change is None:
            self._note(FaultKind.LOG, logged.wrong, "")
            return False
        try:
            made = None if self._made is None else state_diff.apply(change, self._made)
        except (Corruption, HistoryLost) as error:
            self._note(FaultKind.LOG, f"the log entry v{seqno} cannot be followed: {error.message}", "")
            return False
        self._step(change, made)
        self._gone.update(change.gone)
        held = self._rollups.get(SeqNo(seqno))
        if made is not None and held is not None and made != held:
            what = f"the rollup v{seqno} holds another State than the log: {_differing(made, held)}"
            self._note(FaultKind.ROLLUP, what, self._keys[seqno])
        self._made = held if made is None else made
        return True

    def _step(self, change: StateDiff, made: State | None) -> None:
        """That no frontier moves back, and that no blob comes back which had left.

        One of another shard may: a clone of that name is dropped, and the next one borrows it too.
        """
        added = () if change.trace is None else [key for batch in change.trace.batches for key in batch.blob_keys()]
        for key in added:
            if key in self._gone and not is_foreign(key, shard_id_of(self._name)):
                self._note(FaultKind.STEP, f"the commit v{change.seqno} names a blob that had left the shard", key)
        if made is None or self._made is None:
            return
        try:
            invariants.check_step(self._made, made)
        except Corruption as error:
            self._note(FaultKind.STEP, f"the commit v{change.seqno} breaks a promise: {error.message}", "")

    def _read_rollups(self, state: State) -> dict[SeqNo, State]:
        """The rollups that the State names, as far as they can be read. One that is missing is found by the listing."""
        readable = {}
        for seqno, rollup in sorted(state.rollups.items()):
            try:
                held = self._versions.read_rollup(rollup.key)
            except Corruption as error:
                self._note(FaultKind.ROLLUP, f"the rollup v{seqno} cannot be read: {error.message}", rollup.key)
                continue
            if held is None:
                continue
            if (held.name, held.seqno) != (state.name, seqno):
                what = f"the rollup v{seqno} holds v{held.seqno} of shard {held.name!r}"
                self._note(FaultKind.ROLLUP, what, rollup.key)
                continue
            readable[seqno], self._keys[seqno] = held, rollup.key
        return readable


def _differing(one: State, other: State) -> str:
    names = [name for name in type(one).__struct_fields__ if getattr(one, name) != getattr(other, name)]
    return ", ".join(names)


# Whether a shard and those of whose blobs it names some agree on what was lent.


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
            note(FaultKind.LOAN, f"shard {owner!r}, of which it borrows, cannot be read: {error.message}", "")
            continue
        if lender is None:
            note(FaultKind.LOAN, f"shard {owner!r}, of which it borrows, is not there", "")
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
                note(FaultKind.MISSING, f"the list {loan.list_key} of loan {loan_id} is not there", loan.list_key)
                left.clear()  # nobody can tell what it held
            except Corruption as error:
                note(FaultKind.LOAN, error.message, loan.list_key)
                left.clear()
        for key in sorted(left):
            why = f"shard {owner!r} knows nothing of loan {', '.join(unknown)}" if unknown else "no loan has it"
            note(FaultKind.LOAN, f"the blob {key} belongs to shard {owner!r}, which has not lent it: {why}", key)
    for family, keys in foreign.items():
        for key in sorted(keys) if state.borrowed else ():  # else the State tells it of each part
            note(FaultKind.LOAN, f"the blob {key} belongs to a shard {family} of which nothing is borrowed", key)


# Whether the tree of a shard's attributes is one: keys ascend, and each lies in the node that looking it up leads to.
#
# Each node is compared with its checksum where chunks are read whole; what only a wrong flush could write is found
# here. Memory: one node of each level.


CACHE_BYTES = 1024 * 1024  # a node is read once, so that more is of no use


def check_tree(state: State, blob: Blob) -> None:
    """Walk one version of the index. Raises Corruption, StaleIndex (it was collected meanwhile), Unavailable."""
    root, reader = state.attribute_root, ChunkReader(blob, state.attribute_chunks, NodeCache(CACHE_BYTES))

    def count(offset: int, length: int, height: int, lower: bytes | None, upper: bytes | None) -> int:
        """The attributes below a node whose keys are to lie in `[lower, upper)`. None: without end."""
        node = reader.read(offset, length)
        keys = [node.keys[at : at + KEY_BYTES] for at in range(0, len(node.keys), KEY_BYTES)]
        where = f"the node of the index of attributes at offset {offset}"
        if isinstance(node, Leaf) != (height == 1) or not keys:
            raise Corruption(f"{where} is not at its level, or is empty")
        if any(later <= earlier for earlier, later in pairwise(keys)):
            raise Corruption(f"{where} has a key twice, or keys that do not ascend")
        if (lower is not None and keys[0] < lower) or (upper is not None and keys[-1] >= upper):
            raise Corruption(f"{where} has keys that belong to another node")
        if isinstance(node, Leaf):
            return len(keys)
        below = 0
        for at in range(len(node)):
            key, child, _, size = node.child(at)
            ends = keys[at + 1] if at + 1 < len(keys) else upper
            below += count(child, size, height - 1, lower if at == 0 else key, ends)
        return below

    counted = count(root.offset, root.length, root.height, None, None) if root.height else root.count
    if counted != root.count:
        raise Corruption(f"the index of attributes has {counted} of them, not {root.count}")


# The bytes and rows of parts: each is looked at alone, so that one that is bad hides no other.


THREADS = 4
WINDOW = 64  # parts that are looked at together
PIECE_BYTES = 8 * 1024 * 1024


def everything(name: str) -> bool:
    """Whatever it is called, it is looked at."""
    return True


def byte_faults(
    state: State,
    blob: Blob,
    build: Build = THIS_BUILD,
    *,
    deep: bool = False,
    takes: Callable[[str], bool] = everything,
    threads: int = THREADS,
) -> Iterator[Fault]:
    """What is wrong with the blobs and inline parts that the State names, in their order; then with other blobs.

    Every byte is read once and compared with its checksum; `deep`: every row is decoded too, and their order checked.
    `takes` says by their ids which parts are looked at, and by their keys which other blobs; every bundle is. Raises
    Unavailable: the store does not answer. Memory: a piece of `PIECE_BYTES` for each of the `threads`, with `deep` a
    row group.
    """
    schemas = valid_schemas(state.schemas)
    checks = {number: PartCheck(schema) for number, schema in schemas.items()}

    def look(named: NamedPart) -> tuple[FaultKind, str] | None:
        part = named.part
        try:
            if named.failed is not None:
                raise named.failed
            if part.bundle is not None:
                return None
            if part.key is None:
                decode_inline(part, schemas)
                if deep:
                    _check_of(checks, part).inline_rows(part)
                return None
            check_presence(part, blob)
            _check_bytes(part, blob)
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

    parts = (named for named in all_parts(state, blob) if named.failed is not None or takes(str(named.part.id)))
    with ExitStack() as stack:
        look_at: Callable[..., Iterator[tuple[FaultKind, str] | None]] = map
        if threads > 1:
            look_at = stack.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="persist-examine")).map
        while window := list(islice(parts, WINDOW)):
            for named, wrong in zip(window, look_at(look, window), strict=True):
                if wrong is not None:
                    yield Fault(state.name, *wrong, named.part.key or "", named)
    yield from _auxiliary_faults(state, blob, build, takes)


def _check_of(checks: Mapping[int, PartCheck], part: Part) -> PartCheck:
    if part.schema_id not in checks:
        raise Corruption(f"part {part.id} names schema {part.schema_id}, which is not registered, or does not fit")
    return checks[part.schema_id]


def _check_bytes(part: Part, blob: Blob) -> None:
    checksum = 0
    for start in range(0, part.size, PIECE_BYTES):
        piece = blob.get_range(part.key or "", start, min(PIECE_BYTES, part.size - start))
        checksum = zlib.crc32(piece, checksum)
    if checksum != part.checksum:
        raise Corruption(f"part {part.id} does not match its checksum")


def _disorder(part: Part, blob: BlobReads, schemas: Mapping[int, ShardSchema]) -> tuple[FaultKind, str] | None:
    """Whether rows are not in order, come twice, or lie outside the bounds that every reader relies on.

    `persist.parts.part_validation` compares a part with its bytes before a commit believes it; this is what only a
    build of ours can get wrong. Memory: a row group.
    """
    schema = schemas[part.schema_id]
    try:
        file, last = PartFiles(blob, schemas).open(part), None
        for number, group in enumerate(file.groups):
            rows = file.read([number], schema.updates_schema.names)
            if not rows.num_rows:
                continue
            keys = SortedKeys(rows, schema.key)
            ends = keys[0], keys[len(keys) - 1]  # of rows that are in order, or are found not to be
            if min(ends) < group.key_lower or (group.key_upper is not None and max(ends) > group.key_upper):
                return FaultKind.ORDER, f"part {part.id} has keys outside the bounds that it tells of them"
            joined = rows if last is None else pa.concat_tables([last, rows])
            order, firsts = sort_groups(joined, schema)
            if order is not None:
                return FaultKind.ORDER, f"the rows of part {part.id} are not in order, in row group {number}"
            if not firsts.all():
                return FaultKind.ORDER, f"part {part.id} has an update twice, in row group {number}"
            last = rows.slice(rows.num_rows - 1)
    except Corruption as error:
        return FaultKind.ORDER, error.message
    return None


# The blobs that a State names besides parts: each is read whole, and compared with its checksums.


Check = Callable[[bytes], object]


def _auxiliary_faults(state: State, blob: Blob, build: Build, takes: Callable[[str], bool]) -> Iterator[Fault]:
    """Of each blob that `takes` names and that is missing or damaged. Memory: one such blob."""
    checks = dict(_checks(state, build))
    for key in filter(takes, dict.fromkeys(auxiliary_blob_keys(state))):
        check = checks.get(key)
        try:
            if check is not None:
                with translated_but_missing():
                    data = blob.get(key)
                check(data)
                continue
            with translated():
                there = blob.stat(key) is not None
        except BlobNotFound:
            there = False
        except Corruption as error:
            yield Fault(state.name, _kind_of(key), f"the blob {key} is damaged: {error.message}", key)
            continue
        if not there:
            yield Fault(state.name, _kind_of(key), f"the blob {key} {NOT_THERE}", key)


def _kind_of(key: str) -> FaultKind:
    if is_rollup_key(key):
        return FaultKind.ROLLUP
    return FaultKind.INDEX if key.endswith(".nodes") else FaultKind.BLOB


def _checks(state: State, build: Build) -> Iterator[tuple[str, Check]]:
    for first, chunk in state.attribute_chunks.items():
        yield chunk.key, partial(_check_chunk, chunk, first)
    for kind, files in state.spilled.items():
        for file in files:
            yield file.key, partial(_check_spill, kind, file)
    for rollup in state.rollups.values():
        yield rollup.key, partial(decode_state, build=build)


def _check_chunk(chunk: IndexChunk, first: int, data: bytes) -> None:
    _check_size(data, chunk.length)
    check_nodes(data, first)


def _check_spill(kind: SpillKind, file: SpillFile, data: bytes) -> None:
    _check_size(data, file.size)
    for _, value in decode_run(data, LAYOUTS[kind], file.index_at):
        LAYOUTS[kind].value(value)


def _check_size(data: bytes, size: int) -> None:
    if len(data) != size:
        raise Corruption(f"it has {len(data)} bytes, not {size}")
