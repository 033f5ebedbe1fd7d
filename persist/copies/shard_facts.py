"""The facts of a shard: its newest State, its live log, its blobs and its parts. Read-only.

Inspections, checks, repairs and the verification of backups share these facts. Damage hides nothing else: if the rollup
that the log names cannot be read, an older one is replayed; if an entry cannot be read, the State before it is the last
one that is certain. Both are faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Protocol

from blob import Blob, BlobNotFound, BlobStat
from consensus import Consensus, Entry
from persist.commit.blob_tasks import keys_in
from persist.commit.clocks_and_ids import Clock
from persist.commit.state_loader import FIRST, LogCut, Versions
from persist.core import state_diff
from persist.core.batch import Description, Part
from persist.core.blob_keys import belongs_to, is_bundle_key, is_rollup_key, rollup_seqno, shard_of
from persist.core.bundles import Listed
from persist.core.errors import Corruption, InvalidUsage, NotReadable, PersistError, UnknownShard, UpgradeNeeded
from persist.core.ids import CriticalReaderId, LoanId, ReaderId, SeqNo, family_of, shard_id_of
from persist.core.record import replace
from persist.core.state import Leased, LeasedReader, State, auxiliary_blob_keys, blank_state
from persist.core.state_diff import StateDiff
from persist.formats.state_frames import Build
from persist.formats.store_errors import translated, translated_but_missing
from persist.maintenance.clones_and_loans import LoanLists
from persist.parts.read_plan import read_bundle

PAGE = 200  # log entries that are read at once
NAMED_MAX = 5  # names in one message
TRIES = 4  # retries for a shard that changes meanwhile
LOG_ENTRIES_READ_MAX = 100_000  # of one log, unless all of it is requested
FAULTS_MAX = 10_000  # that are listed; more are only counted
NOT_THERE = "is missing"


class Readable(Protocol):
    """Both stores of a location, for reading: of an open location, or of one opened for inspection."""

    @property
    def blob(self) -> Blob: ...

    @property
    def consensus(self) -> Consensus: ...

    @property
    def versions(self) -> Versions: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def build(self) -> Build: ...


def first_names(names: Sequence[str]) -> str:
    """The first NAMED_MAX names, for a message."""
    return ", ".join(names[:NAMED_MAX]) + (", …" if len(names) > NAMED_MAX else "")


# Faults: what is wrong with a shard, by kind.


class FaultKind(StrEnum):
    """The kinds of faults. docs/check.md lists what each kind covers, and at which depth it is found."""

    LOG = "log"  # an entry cannot be read, is missing, or does not follow its predecessor
    ROLLUP = "rollup"  # it cannot be read, or its State differs from that of the log
    STEP = "step"  # a commit moved a frontier back, or named a blob that had left
    STATE = "state"  # the State contradicts itself
    LOAN = "loan"  # a blob of another shard that was not lent
    MISSING = "missing"  # a blob is missing
    SIZE = "size"  # a blob has the wrong size
    BUNDLE = "bundle"  # it cannot be read, or its list is wrong
    PART = "part"  # the bytes or rows of a part differ from what the State says
    ORDER = "order"  # the rows of a part are unordered, or outside the bounds of its keys
    INDEX = "index"  # the tree of attributes contradicts itself
    BLOB = "blob"  # any other blob cannot be read


@dataclass(frozen=True, slots=True)
class NamedPart:
    """A part that the State names, and the positions of its batch and run.

    `within` is the bundle that lists it, `listed` the whole list. `failed` is why a bundle cannot be read.
    """

    batch: int
    run: int
    desc: Description
    part: Part
    within: Part | None = None
    listed: Listed = ()
    error: BlobNotFound | Corruption | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a shard (None: of the location). `key` is the key of the blob ("": it is not about a blob).

    `named`: the part whose bytes or rows are wrong.
    """

    shard: str | None
    kind: FaultKind
    what: str
    key: str = ""
    named: NamedPart | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, str | None]:
        return {"shard": self.shard, "kind": str(self.kind), "what": self.what, "key": self.key or None}

    def __str__(self) -> str:
        """One sentence with the shard, the kind and the blob."""
        of = f", blob {self.key}" if self.key else ""
        return f"shard {self.shard!r} has a fault of the kind {self.kind}{of}: {self.what}"


class Faults(list[Fault]):
    """A list of faults without duplicates."""

    def __init__(self, shard: str | None = None) -> None:
        super().__init__()
        self.shard = shard
        self._known: set[Fault] = set()
        self.beyond = 0  # the number of faults beyond FAULTS_MAX

    def note(self, kind: FaultKind, what: str, key: str | None = None) -> None:
        self.take([Fault(self.shard, kind, what, key or "")])

    def take(self, faults: Iterable[Fault]) -> None:
        for fault in faults:
            if fault in self._known:
                continue
            if len(self) >= FAULTS_MAX:
                self.beyond += 1
                continue
            self._known.add(fault)
            self.append(fault)

    def listed(self) -> list[Fault]:
        """All faults; the last one counts those beyond FAULTS_MAX."""
        more = [Fault(self.shard, FaultKind.BLOB, f"and {self.beyond} more")] if self.beyond else []
        return [*self, *more]


# The log, entry by entry, past those that cannot be read.


@dataclass(frozen=True, slots=True)
class LoggedDiff:
    """A live entry of a log. `change` is None if it cannot be read: `wrong` says why.

    `cut`: it was truncated from the log meanwhile.
    """

    seqno: int
    size: int
    change: StateDiff | None
    wrong: str = ""
    cut: LogCut | None = None


def head_of(location: Readable, name: str) -> int:
    """The newest seqno. Raises UnknownShard, Unavailable, Corruption (the store itself is damaged)."""
    with translated():
        head = location.consensus.head(name)
    if head is None:
        raise UnknownShard(f"there is no shard {name!r} here; `persist shards` lists them")
    return head.seqno


def first_live(location: Readable, name: str) -> SeqNo:
    """The first seqno in the log now."""
    with translated():
        entries = location.consensus.scan(name, 1, 1)
    return SeqNo(entries[0].seqno if entries else 0)


def entries_of(consensus: Consensus, name: str, first: int = 1, last: int | None = None) -> Iterator[Entry]:
    """The live entries of `[first, last]`, ascending. Raises Unavailable."""
    while last is None or first <= last:
        with translated():
            page = consensus.scan(name, first, PAGE if last is None else min(PAGE, last - first + 1))
        for entry in page:
            if last is not None and entry.seqno > last:
                return
            yield entry
        if not page:
            return
        first = page[-1].seqno + 1


def walk_log(location: Readable, name: str, first: int = 1, last: int | None = None) -> Iterator[LoggedDiff]:
    """The state diffs of these entries; long ones are read from their blobs."""
    for entry in entries_of(location.consensus, name, first, last):
        seqno, size = entry.seqno, len(entry.data)
        try:
            change = location.versions.whole(name, location.versions.decode(entry.data))
        except (Corruption, UpgradeNeeded) as error:
            yield LoggedDiff(seqno, size, None, f"the log entry v{seqno} cannot be read: {error.message}")
        except LogCut as error:
            yield LoggedDiff(seqno, size, None, error.message, error)
        else:
            is_wrong = change.seqno != seqno
            wrong = f"the log entry v{seqno} holds the state diff v{change.seqno}" if is_wrong else ""
            yield LoggedDiff(seqno, size, None if is_wrong else change, wrong)


@dataclass(frozen=True, slots=True)
class Lapse:
    """A lease that had lapsed when a commit removed it. `purpose`: of a reader; "": a writer."""

    kind: str
    purpose: str
    at_ms: int


@dataclass
class LogFacts:
    """What the live log says. `is_whole`: all of it was read. Wall clocks are those of committers.

    `uppers` are (wall clock, upper) of the commits that advanced the upper, ascending. `gone`: the blobs that left the
    State, and at which version. `settings_ms`: when the settings last changed (0: before the log begins). `moved`: when
    a critical reader was registered or last moved. `began`: when a leased reader was registered. `walltimes`: of the
    first versions that the leased readers of `state`, the newest one, do not hold.
    """

    state: State | None
    entries: int = 0
    bytes: int = 0
    first_seqno: int = 0
    first_ms: int = 0
    settings_ms: int = 0
    is_whole: bool = True
    wrong: list[str] = field(default_factory=list)
    uppers: list[tuple[int, int]] = field(default_factory=list)
    gone: dict[str, int] = field(default_factory=dict)
    moved: dict[CriticalReaderId, int] = field(default_factory=dict)
    began: dict[ReaderId, int] = field(default_factory=dict)
    walltimes: dict[int, int] = field(default_factory=dict)
    lapses: list[Lapse] = field(default_factory=list)

    def __post_init__(self) -> None:
        readers = {} if self.state is None else self.state.leased_readers
        self._seqnos_after_readers = {int(reader.seqno) + 1 for reader in readers.values()}
        self._leases: dict[str, Leased] = {}
        self._lease_clock_ms = 0

    def take(self, seqno: int, change: StateDiff) -> None:
        """Add an entry. They are added in order."""
        if not self.first_seqno:
            self.first_seqno, self.first_ms = seqno, change.walltime_ms
        if seqno in self._seqnos_after_readers:
            self.walltimes[seqno] = change.walltime_ms
        self._lease_clock_ms = change.lease_clock_ms or self._lease_clock_ms
        self._take_leases(change)
        if change.settings is not None:
            self.settings_ms = change.walltime_ms
        self.gone.update(dict.fromkeys(change.gone, seqno))
        upper = change.trace.batches[-1].desc.upper.element if change.trace and change.trace.batches else None
        if upper is not None and upper > (self.uppers[-1][1] if self.uppers else 0):
            self.uppers.append((change.walltime_ms, upper))

    def _take_leases(self, change: StateDiff) -> None:
        """Record readers and writers that came, moved and lapsed. Leases from before the log begins are ignored."""
        if change.critical_readers is not None:
            self.moved.update(dict.fromkeys(change.critical_readers.set, change.walltime_ms))
        for kind, changed in (("reader", change.leased_readers), ("writer", change.writers)):
            if changed is None:
                continue
            for holder in changed.deleted:
                lease = self._leases.pop(holder, None)
                if lease is not None and self._lease_clock_ms and lease.lapsed(self._lease_clock_ms):
                    purpose = lease.purpose if isinstance(lease, LeasedReader) else ""
                    self.lapses.append(Lapse(kind, purpose, change.walltime_ms))
            for holder, lease in changed.set.items():
                self._leases[holder] = lease
                if kind == "reader":
                    self.began.setdefault(ReaderId(holder), change.walltime_ms)


# The parts and other blobs that a State names.


def all_parts(state: State, blob: Blob) -> Iterator[NamedPart]:
    """The parts that the State names, each bundle before its parts. Each bundle is read once.

    The parts of a bundle that cannot be read are omitted. Raises Unavailable.
    """
    for number, batch in enumerate(state.trace.batches):
        for run_number, run in enumerate(batch.runs):
            for part in run.parts:
                if part.bundle is None:
                    yield NamedPart(number, run_number, batch.desc, part)
                    continue
                try:
                    with translated_but_missing():
                        listed = read_bundle(part, blob)
                except (BlobNotFound, Corruption) as error:
                    yield NamedPart(number, run_number, batch.desc, part, error=error)
                    continue
                yield NamedPart(number, run_number, batch.desc, part)
                for listed_part in (inner for listed_run in listed for inner in listed_run.parts):
                    yield NamedPart(number, run_number, batch.desc, listed_part, part, listed)


def auxiliary_sizes(state: State) -> dict[str, int | None]:
    """The blobs that are not parts, with their sizes as far as the State has them."""
    sizes: dict[str, int | None] = dict.fromkeys(auxiliary_blob_keys(state))
    sizes.update({rollup.key: rollup.size or None for rollup in state.rollups.values()})
    sizes.update(needed_blobs(state))
    return sizes


def needed_blobs(state: State) -> dict[str, int]:
    """The blobs that a State needs besides parts, with their sizes: attribute index, outcomes, commit history."""
    sizes = {chunk.key: chunk.length for chunk in state.attribute_chunks.values()}
    return sizes | {file.key: file.size for files in state.spilled.values() for file in files}


# A shard.


@dataclass
class ShardFacts:
    """A shard as it was read. `head` is the newest seqno of its log, `state` the newest State (None: it has none).

    `faults` were met while the State was loaded. `error`: why the shard cannot be loaded.
    """

    location: Readable
    name: str
    head: int
    state: State | None
    faults: Faults
    error: Corruption | UpgradeNeeded | None = None

    def __post_init__(self) -> None:
        self._seqno = self.head  # the newest version that was read
        self._keys: frozenset[str] | None = None  # the blobs that it names; None: those of `state`

    def known(self) -> State:
        """The State. Raises Corruption if it cannot be loaded."""
        if self.state is None:
            reasons = "; ".join(dict.fromkeys(fault.what for fault in self.faults))
            raise Corruption(f"no State of shard {self.name!r} can be loaded: {reasons}")
        return self.state

    @cached_property
    def listed(self) -> dict[str, BlobStat]:
        """The blobs in the store of this shard, in all incarnations, by key."""
        with translated():
            return {stat.key: stat for stat in self.location.blob.list(family_of(shard_id_of(self.name)))}

    def stat(self, key: str) -> BlobStat | None:
        """Look up a blob that the shard names: in the listing, or in the store if it is newer or another shard's."""
        if key in self.listed:
            return self.listed[key]
        with translated():
            return self.location.blob.stat(key)

    def check_blob(self, key: str, size: int | None, faults: Faults) -> bool:
        """Whether a blob exists with this size (None: with any); if not it is noted."""
        stat = self.stat(key)
        if stat is None:
            faults.note(FaultKind.MISSING, f"the blob {key} {NOT_THERE}", key)
        elif size not in (None, stat.size):
            faults.note(FaultKind.SIZE, f"the blob {key} has {stat.size} bytes, not {size}", key)
        return stat is not None and size in (None, stat.size)

    def parts(self) -> Iterator[NamedPart]:
        """As `all_parts`."""
        return all_parts(self.known(), self.location.blob)

    @cached_property
    def log(self) -> LogFacts:
        """The facts of the live log, of at most `LOG_ENTRIES_READ_MAX` entries."""
        return self.read_log(LOG_ENTRIES_READ_MAX)

    def read_log(self, limit: int | None = None, *followers: Callable[[LoggedDiff], object]) -> LogFacts:
        """Read the live log once, and set `log`. `followers` get each entry. `limit` None: all of it."""
        self.log, before = LogFacts(self.state), 0
        facts = self.log
        for logged in walk_log(self.location, self.name):
            if facts.entries == limit:
                facts.is_whole = False
                break
            facts.entries += 1
            facts.bytes += logged.size
            for follow in followers:
                follow(logged)
            is_gap = before and logged.seqno != before + 1
            if is_gap and first_live(self.location, self.name) < logged.seqno:  # else it was collected meanwhile
                facts.wrong.append(f"entries v{before + 1} to v{logged.seqno - 1} are missing")
            before = logged.seqno
            if logged.change is None:
                facts.wrong.append(logged.wrong)
            else:
                facts.take(logged.seqno, logged.change)
        return facts

    def keys_left(self, faults: Faults) -> dict[str, int]:
        """The blobs that left the State, and at which version, by the log, including those in bundles.

        Bundles that are missing or damaged are noted.
        """
        versions = dict(self.log.gone)
        for bundle in filter(is_bundle_key, self.log.gone):
            try:
                with translated_but_missing():
                    listed = keys_in(self.location.blob, bundle)
            except (BlobNotFound, PersistError) as error:
                faults.note(FaultKind.BUNDLE, str(error), bundle)
                continue
            for key in listed:
                versions.setdefault(key, versions[bundle])
        return versions

    def lent(self, faults: Faults) -> dict[LoanId, tuple[str, ...]]:
        """The blobs that it has lent, by loan. A list that is unreadable or has the wrong length is a fault.

        A loan that has ended meanwhile is omitted.
        """
        lists, keys_by_loan = LoanLists(self.location.blob), dict[LoanId, tuple[str, ...]]()
        for loan_id, loan in sorted(self.known().loans.items()):
            keys_by_loan[loan_id] = ()
            try:
                keys_by_loan[loan_id] = keys = lists.keys(loan.list_key)
                if len(keys) != loan.keys:
                    what = f"list {loan.list_key} has {len(keys)} blobs, not {loan.keys}"
                    faults.note(FaultKind.LOAN, what, loan.list_key)
            except BlobNotFound:
                if self.is_named(loan.list_key):
                    faults.note(FaultKind.MISSING, f"the blob {loan.list_key} {NOT_THERE}", loan.list_key)
                else:
                    del keys_by_loan[loan_id]
            except (Corruption, UpgradeNeeded) as error:
                faults.note(FaultKind.LOAN, error.message, loan.list_key)
        return keys_by_loan

    # Whether a blob that does not exist is a fault: while a shard changes, blobs that it named are collected. Keys are
    # never reused, so a blob that the newest State does not name was deleted correctly.

    @property
    def has_moved(self) -> bool:
        """Whether the shard has a later version than the first one that was read."""
        return self._keys is not None or head_of(self.location, self.name) > self._seqno

    def is_named(self, key: str) -> bool:
        """Whether the newest State still names this blob, which `state` named. Raises what `newest` raises."""
        if head_of(self.location, self.name) > self._seqno:
            later = newest(self.location, self.name)
            if later.state is None:
                return True
            self._keys, self._seqno = frozenset(later.state.blob_keys()), int(later.state.seqno)
        return self._keys is None or key in self._keys


def newest(location: Readable, name: str) -> ShardFacts:
    """Load the newest possible State. Raises UnknownShard, Unavailable, Corruption (the store itself is damaged)."""
    head, faults = head_of(location, name), Faults(name)
    load_error: Corruption | UpgradeNeeded | None = None
    for tries_left in range(TRIES, -1, -1):
        try:
            state = location.versions.load(name)
            if state is not None:
                return ShardFacts(location, name, max(head, int(state.seqno)), state, faults)
        except (Corruption, UpgradeNeeded) as error:
            new_head = head_of(location, name)
            if new_head == head or not tries_left:
                key, load_error = error.details.get("blob"), error  # of a rollup: the blob is damaged, not the log
                what = f"the rollup cannot be read: {error.message}" if key else error.message
                faults.note(FaultKind.ROLLUP if key else FaultKind.LOG, what, key)
                break
            head = new_head
    state = _load_version(location, name, head, faults)
    if state is not None and state.seqno < head:
        what = f"v{state.seqno} is shown: no later State can be loaded, and the log ends at v{head}"
        faults.note(FaultKind.LOG, what)
    return ShardFacts(location, name, head, state, faults, load_error)


def at_version(location: Readable, name: str, seqno: int) -> ShardFacts:
    """The State of a version. Raises NotReadable: it left the log; InvalidUsage: it does not exist yet."""
    head = head_of(location, name)
    if not 0 < seqno < 2**63:
        raise InvalidUsage(f"version {seqno} is out of range: versions are in [1, {2**63 - 1}]")
    if seqno > head:
        raise InvalidUsage(f"shard {name!r} has no v{seqno} yet: its log ends at v{head}")
    faults = Faults(name)
    state = _load_version(location, name, seqno, faults)
    if state is None or state.seqno != seqno:
        first = first_live(location, name)
        if faults:
            return ShardFacts(location, name, head, None, faults)
        raise NotReadable(f"v{seqno} of shard {name!r} was deleted from its log, which begins at v{first}")
    return ShardFacts(location, name, head, state, faults)


def _load_version(location: Readable, name: str, target: int, faults: Faults) -> State | None:
    """The State of a version, or the last one before it that can be loaded."""
    latest: State | None = None
    for base in _bases(location, name, target, faults):
        state = _replay(location, base, target, faults)
        if state is not None and state.seqno == target:
            return state
        if state is not None and (latest is None or state.seqno > latest.seqno):
            latest = state
    return latest


def _bases(location: Readable, name: str, target: int, faults: Faults) -> Iterator[State]:
    """States of rollups at or before a version, newest first; finally the first State, if the log has its entry."""
    family = family_of(shard_id_of(name))
    with translated():
        listed = [stat.key for stat in location.blob.list(family) if belongs_to(stat.key, shard_of(stat.key))]
    keys = sorted((rollup_seqno(key), key) for key in listed if is_rollup_key(key))
    for seqno, key in reversed(keys):
        if seqno > target:
            continue
        try:
            state = location.versions.read_rollup(key)
        except (Corruption, UpgradeNeeded) as error:
            faults.note(FaultKind.ROLLUP, f"rollup v{seqno} cannot be read: {error.message}", key)
            continue
        if state is None or state.name != name:
            continue
        if state.seqno != seqno:
            faults.note(FaultKind.ROLLUP, f"rollup v{seqno} holds the State v{state.seqno}", key)
            continue
        yield state
    first_entry = next(walk_log(location, name, 1, 1), None)
    if first_entry is not None and first_entry.change is not None and first_entry.change.schemas is not None:
        yield state_diff.apply(first_entry.change, blank_state(name))


def _replay(location: Readable, base: State, target: int, faults: Faults) -> State | None:
    """Replay the log on a State up to a version, or as far as possible. None: the log does not continue this State.

    That is the case for a rollup of a commit that lost its race.
    """
    state, is_known = base, base.seqno == FIRST and not base.rollups
    for logged in walk_log(location, base.name, int(base.seqno), target):
        change = logged.change
        if change is None:
            faults.note(FaultKind.LOG, logged.wrong)
            return state if is_known else None
        if change.seqno == base.seqno:
            if base.commit_id and change.commit_id != base.commit_id:
                return None
            state, is_known = replace(state, commit_id=change.commit_id), True
            continue
        if change.seqno != state.seqno + 1:
            return None  # the log begins later
        try:
            state = state_diff.apply(change, state)
        except PersistError as error:
            faults.note(FaultKind.LOG, error.message)
            return state if is_known else None
        is_known = True
    return state if is_known else None
