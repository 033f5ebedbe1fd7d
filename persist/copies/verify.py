"""Whether everything that the shards of a location need is there and sound. Writes nothing, and holds nothing.

The log of each shard is replayed and its rollups are decoded; its State must agree with itself, with the log and with
the shards of which it borrows. The blobs that it names are compared with a listing: a missing one, or one of another
size, is a fault. With `deep` every byte is read, and every row decoded, whose order is checked. A sample is deep for a
share of the parts. A blob that nothing names is no fault: a write may be under way.

Shards move on meanwhile, and what they named is collected. So where something is amiss in one that has moved, it is
looked at anew.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from blob import Blob
from persist.attributes.node_store import StaleIndex
from persist.copies.shard_checks import (
    THREADS,
    Replay,
    byte_faults,
    check_borrowed,
    check_tree,
    contradictions,
    of_runs,
)
from persist.copies.shard_facts import (
    LOG_ENTRIES_READ_MAX,
    NOT_THERE,
    TRIES,
    Fault,
    FaultKind,
    Faults,
    Readable,
    ShardFacts,
    all_parts,
    auxiliary_sizes,
    newest,
)
from persist.copies.throttled_blob import PacedBlob, check_rate
from persist.core import invariants
from persist.core.errors import Corruption, InvalidUsage, UnknownShard, UpgradeNeeded
from persist.core.ids import check_shard_name
from persist.core.state import State
from persist.formats.store_errors import translated

SAMPLES_MAX = 10_000  # into which a location can be cut: 0.01% each
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,4})?)%\Z")


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found of one shard."""

    shard: str
    faults: tuple[Fault, ...]

    @property
    def is_sound(self) -> bool:
        return not self.faults


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample `number` of `of` that together are everything. Numbers wrap around, so that any number is valid."""

    number: int
    of: int

    def takes(self, name: str) -> bool:
        """Whether the blob or part of this name is in the sample. It depends on the name alone."""
        return zlib.crc32(name.encode()) % self.of == self.number % self.of


def samples_of(text: str) -> int:
    """How many samples of this share, such as `1%`, are everything. Raises InvalidUsage."""
    match = _SHARE.match(text.strip())
    share = float(match.group(1)) if match else 0.0
    if not 100 / SAMPLES_MAX <= share <= 100:
        low = 100 / SAMPLES_MAX
        raise InvalidUsage(f"a sample of {text!r:.40} is none; give a share from {low:g}% to 100%, such as 1%")
    return round(100 / share)


@dataclass(frozen=True, slots=True)
class Depth:
    """How deep to look.

    `deep`: read every byte, decode every row. `sample`: the same for the parts that it takes. `rate`: at most so many
    bytes a second (None: no limit). `alone`: the shards are checked without those of which they borrow, as in a backup.
    `threads`: parts that are read at a time. `quick`: the log is read and not replayed, and States are not compared.
    """

    deep: bool = False
    rate: int | None = None
    sample: Sample | None = None
    alone: bool = False
    threads: int = THREADS
    quick: bool = False

    def check(self) -> None:
        """Raises InvalidUsage where a number makes no sense, or two depths are given."""
        check_rate(self.rate)
        if self.deep and self.sample is not None:
            raise InvalidUsage("deep and a sample are two depths; give one of them")
        if self.rate is not None and not self.reads_rows:
            raise InvalidUsage("rate is for deep and for samples: without them no bytes of parts are read")

    @property
    def reads_rows(self) -> bool:
        """Whether any part is read."""
        return self.deep or self.sample is not None

    def takes(self, name: str) -> bool:
        """Whether what has this id or key is read."""
        return self.sample is None or self.sample.takes(name)


QUICK = Depth(quick=True)


def verified(location: Readable, names: Iterable[str], how: Depth, blob: Blob | None = None) -> Iterator[Verified]:
    """What is found of these shards, one after the other; those that are dropped meanwhile are left out.

    Parts are read from `blob` (None: from the location), at the rate that is given. Raises InvalidUsage (the two stores
    do not belong together), UpgradeNeeded, Unavailable. Repeating it is safe.
    """
    how.check()
    read = PacedBlob(blob or location.blob, how.rate, location.clock)
    for name in names:
        checked = check_shard(location, check_shard_name(name), how, read)
        if checked is None:
            continue
        facts, faults = checked
        if isinstance(facts.error, UpgradeNeeded):
            raise facts.error
        if facts.state is None or not facts.state.is_closed:
            yield Verified(name, tuple(faults.listed()))


def check_shard(location: Readable, name: str, how: Depth, blob: Blob) -> tuple[ShardFacts, Faults] | None:
    """A shard as it was read, and what is wrong with it. None: it is not there. One that is closed is not checked."""
    before: set[tuple[FaultKind, str]] = set()
    for left in range(TRIES, -1, -1):
        faults = Faults(name)
        try:
            facts = newest(location, name)
            if facts.state is not None and facts.state.is_closed:
                return facts, faults
            _check(facts, how, faults)
            if not faults or not facts.has_moved:
                break
        except UnknownShard:
            return None
        about = [(fault.kind, fault.key or fault.what) for fault in faults]  # words may differ as the shard moves
        if not left:  # it never stood still for so long: what only one look has met is no fault
            met, faults = faults, Faults(name)
            faults.take(fault for fault, one in zip(met, about, strict=True) if one in before)
        before = set(about)
    if how.reads_rows and facts.error is None:
        _read(facts, how, blob, faults)
    return facts, faults


def _check(facts: ShardFacts, how: Depth, faults: Faults) -> None:
    """What is wrong as far as it shows without reading parts. The log is read once."""
    if how.quick:
        facts.read_log(LOG_ENTRIES_READ_MAX)
        if facts.state is not None:
            faults.take(facts.faults)
            for what in facts.log.wrong:
                faults.note(FaultKind.LOG, what)
            _compare(facts, _named(facts, faults), faults)
        return
    state = None if facts.error is not None else facts.known()
    replay = Replay(facts.location.versions, facts.name, state, faults.note)
    facts.read_log(None, replay.take)
    replay.end()
    if state is None:
        _unloadable(facts, faults)
        return
    _check_state(state, faults)
    named = _named(facts, faults)
    if not how.alone:
        check_borrowed(facts.location, state, named, faults.note)
    _compare(facts, named, faults)
    facts.lent(faults)


def _unloadable(facts: ShardFacts, faults: Faults) -> None:
    """Why there is no State. The entries of the log were looked at; then the rollup with which it begins is."""
    versions = facts.location.versions
    if not faults:
        with translated():
            head = facts.location.consensus.head(facts.name)
        key = "" if head is None else versions.decode(head.data).rollup_key
        try:
            held = versions.read_rollup(key) if key else None
            if key and held is None:
                faults.note(FaultKind.MISSING, f"the blob {key} {NOT_THERE}", key)
            elif held is not None and held.name != facts.name:
                faults.note(FaultKind.ROLLUP, f"the newest rollup holds v{held.seqno} of shard {held.name!r}", key)
        except Corruption as error:
            faults.note(FaultKind.ROLLUP, f"the newest rollup cannot be read: {error.message}", key)
    if facts.error is not None:
        faults.note(FaultKind.LOG, f"the shard cannot be loaded: {facts.error.message}")


def _check_state(state: State, faults: Faults) -> None:
    """That the State is whole in itself: its batches tile, its counts and bounds agree."""
    try:
        invariants.check_state(state)
    except Corruption as error:
        faults.note(FaultKind.STATE, error.message)
    for what, key in contradictions(state):
        faults.note(FaultKind.STATE, what, key)


def _named(facts: ShardFacts, faults: Faults) -> dict[str, int | None]:
    """The blobs that the State names, also by what bundles list, with their sizes as far as these are known."""
    sizes = auxiliary_sizes(facts.known())
    bundles = set()
    for named in facts.parts():
        part = named.part
        if part.key is not None:
            sizes[part.key] = part.blob_size
        if isinstance(named.failed, Corruption):
            faults.note(FaultKind.BUNDLE, named.failed.message, part.key)
        if named.within is not None and named.within.id not in bundles:
            bundles.add(named.within.id)
            for what, key in of_runs(named.listed):
                faults.note(FaultKind.BUNDLE, what, key)
    return sizes


def _compare(facts: ShardFacts, named: dict[str, int | None], faults: Faults) -> None:
    """Whether each blob that is named is there, with its size."""
    for key, size in named.items():
        stat = facts.stat(key)
        if stat is None:
            faults.note(FaultKind.MISSING, f"the blob {key} {NOT_THERE}", key)
        elif size not in (None, stat.size):
            faults.note(FaultKind.SIZE, f"the blob {key} has {stat.size} bytes, not {size}", key)


def _read(facts: ShardFacts, how: Depth, blob: Blob, faults: Faults) -> None:
    """Read every byte, and every row, of the parts that are taken, and the tree of attributes.

    What was collected meanwhile is no fault: then what has come into its place is read.
    """
    location, state, known, read = facts.location, facts.known(), {fault.key for fault in faults}, set[str]()

    def takes(name: str) -> bool:
        is_new = name not in read and how.takes(name)
        read.add(name)
        return is_new

    for _ in range(TRIES + 1):
        wrong = list(byte_faults(state, blob, location.build, deep=True, takes=takes, threads=how.threads))
        now = location.versions.load(facts.name) if wrong else None
        if now is None or now.is_closed:
            break
        named = {str(one.part.id) for one in all_parts(now, location.blob)} | auxiliary_sizes(now).keys()
        is_gone = False
        for fault in wrong:
            if (fault.key if fault.named is None else str(fault.named.part.id)) not in named:
                is_gone = True
            elif not fault.key or fault.key not in known:
                faults.take([fault])
                known.add(fault.key)
        state = now
        if not is_gone:
            break
    try:
        if how.takes(str(state.attribute_root)) and not any(fault.kind is FaultKind.INDEX for fault in faults):
            check_tree(state, blob)
    except Corruption as error:
        faults.note(FaultKind.INDEX, error.message)
    except StaleIndex:
        pass  # it was collected meanwhile
