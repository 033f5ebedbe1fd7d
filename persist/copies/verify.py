"""Verification: whether everything that shards need exists and is sound. Writes nothing, and takes no lease.

The log of each shard is replayed and its rollups are decoded; its State must agree with itself, with the log and with
the shards from which it borrows. The blobs that it names are compared with a listing: a missing one, or one of the
wrong size, is a fault. With `deep` every byte is read, every row is decoded, and their order is checked. A sample is
deep for a share of the parts. A blob that no State names is not a fault: a write may be in progress.

Shards change meanwhile, and blobs that they named are collected. So a shard with faults that has changed is verified
again.
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
    run_problems,
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
from persist.formats.store_errors import translated

SAMPLES_MAX = 10_000  # the finest division of a location: 0.01% each
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,4})?)%\Z")


@dataclass(frozen=True, slots=True)
class VerifiedShard:
    """The faults of one shard."""

    shard: str
    faults: tuple[Fault, ...]

    @property
    def is_sound(self) -> bool:
        return not self.faults


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample `number` of `of` disjoint ones that cover everything. Numbers wrap around, so that any number is valid."""

    number: int
    of: int

    def takes(self, name: str) -> bool:
        """Whether the blob or part with this name is in the sample. Depends only on the name."""
        return zlib.crc32(name.encode()) % self.of == self.number % self.of


def samples_of(text: str) -> int:
    """How many samples of this share, such as `1%`, cover everything. Raises InvalidUsage."""
    match, low = _SHARE.match(text.strip()), 100 / SAMPLES_MAX
    share = float(match.group(1)) if match else 0.0
    if not low <= share <= 100:
        raise InvalidUsage(f"{text!r:.40} is not a sample; give a share from {low:g}% to 100%, such as 1%")
    return round(100 / share)


@dataclass(frozen=True, slots=True)
class Depth:
    """How thoroughly shards are verified.

    `deep`: read every byte, decode every row. `sample`: the same for the parts in it. `rate`: at most so many bytes a
    second (None: unlimited). `alone`: without the shards from which they borrow, as in a backup. `threads`: parts that
    are read concurrently. `quick`: the log is read but not replayed, and States are not compared.
    """

    deep: bool = False
    rate: int | None = None
    sample: Sample | None = None
    alone: bool = False
    threads: int = THREADS
    quick: bool = False

    def check(self) -> None:
        """Raises InvalidUsage if the rate is too low, or options contradict each other."""
        check_rate(self.rate)
        if self.deep and self.sample is not None:
            raise InvalidUsage("deep and a sample exclude each other; give one of them")
        if self.rate is not None and not self.reads_rows:
            raise InvalidUsage("rate requires deep or a sample: otherwise no parts are read")

    @property
    def reads_rows(self) -> bool:
        """Whether parts are read."""
        return self.deep or self.sample is not None

    def takes(self, name: str) -> bool:
        """Whether the part with this id, or the blob with this key, is read."""
        return self.sample is None or self.sample.takes(name)


QUICK = Depth(quick=True)


def verify_shards(
    location: Readable, names: Iterable[str], depth: Depth, blob: Blob | None = None
) -> Iterator[VerifiedShard]:
    """Verify these shards, one after the other; those that are dropped meanwhile are omitted.

    Parts are read from `blob` (None: from the location), at the given rate. Raises InvalidUsage (the two stores do not
    belong together), UpgradeNeeded, Unavailable. Safe to repeat.
    """
    depth.check()
    source = PacedBlob(blob or location.blob, depth.rate, location.clock)
    for name in names:
        checked = check_shard(location, check_shard_name(name), depth, source)
        if checked is None:
            continue
        facts, faults = checked
        if isinstance(facts.error, UpgradeNeeded):
            raise facts.error
        if facts.state is None or not facts.state.is_closed:
            yield VerifiedShard(name, tuple(faults.listed()))


def check_shard(location: Readable, name: str, depth: Depth, blob: Blob) -> tuple[ShardFacts, Faults] | None:
    """Read and check a shard. None: it does not exist. A closed shard has no faults."""
    seen_before: set[tuple[FaultKind, str]] = set()
    for tries_left in range(TRIES, -1, -1):
        faults = Faults(name)
        try:
            facts = newest(location, name)
            if facts.state is not None and facts.state.is_closed:
                return facts, faults
            _check(facts, depth, faults)
            if not faults or not facts.has_moved:
                break
        except UnknownShard:
            return None
        faults_seen = [(fault.kind, fault.key or fault.what) for fault in faults]  # texts may change with the shard
        if not tries_left:  # it changed during every try: only what two tries have met is a fault
            last_faults, faults = faults, Faults(name)
            faults.take(fault for fault, seen in zip(last_faults, faults_seen, strict=True) if seen in seen_before)
        seen_before = set(faults_seen)
    if depth.reads_rows and facts.error is None:
        _read_parts(facts, depth, blob, faults)
    return facts, faults


def _check(facts: ShardFacts, depth: Depth, faults: Faults) -> None:
    """Find the faults that show without reading parts. The log is read once."""
    if depth.quick:
        facts.read_log(LOG_ENTRIES_READ_MAX)
        if facts.state is not None:
            faults.take(facts.faults)
            for problem in facts.log.wrong:
                faults.note(FaultKind.LOG, problem)
            for key, size in _named_sizes(facts, faults).items():
                facts.check_blob(key, size, faults)
        return
    state = None if facts.error is not None else facts.known()
    replay = Replay(facts.location.versions, facts.name, state, faults.note)
    facts.read_log(None, replay.take)
    replay.end()
    if state is None:
        _note_load_failure(facts, faults)
        return
    try:
        invariants.check_state(state)
    except Corruption as error:
        faults.note(FaultKind.STATE, error.message)
    for problem, key in contradictions(state):
        faults.note(FaultKind.STATE, problem, key)
    sizes = _named_sizes(facts, faults)
    if not depth.alone:
        check_borrowed(facts.location, state, sizes, faults.note)
    for key, size in sizes.items():
        facts.check_blob(key, size, faults)
    facts.lent(faults)


def _note_load_failure(facts: ShardFacts, faults: Faults) -> None:
    """Note why there is no State. The entries of the log were checked; then the rollup that it names is."""
    versions = facts.location.versions
    if not faults:
        with translated():
            head = facts.location.consensus.head(facts.name)
        key = "" if head is None else versions.decode(head.data).rollup_key
        try:
            rollup_state = versions.read_rollup(key) if key else None
            if key and rollup_state is None:
                faults.note(FaultKind.MISSING, f"the blob {key} {NOT_THERE}", key)
            elif rollup_state is not None and rollup_state.name != facts.name:
                what = f"the newest rollup holds v{rollup_state.seqno} of shard {rollup_state.name!r}"
                faults.note(FaultKind.ROLLUP, what, key)
        except Corruption as error:
            faults.note(FaultKind.ROLLUP, f"the newest rollup cannot be read: {error.message}", key)
    if facts.error is not None:
        faults.note(FaultKind.LOG, f"the shard cannot be loaded: {facts.error.message}")


def _named_sizes(facts: ShardFacts, faults: Faults) -> dict[str, int | None]:
    """The blobs that the State names, including those in bundles, with their sizes if known."""
    sizes, bundles = auxiliary_sizes(facts.known()), set()
    for named in facts.parts():
        part = named.part
        if part.key is not None:
            sizes[part.key] = part.blob_size
        if isinstance(named.error, Corruption):
            faults.note(FaultKind.BUNDLE, named.error.message, part.key)
        if named.within is not None and named.within.id not in bundles:
            bundles.add(named.within.id)
            for problem, key in run_problems(named.listed):
                faults.note(FaultKind.BUNDLE, problem, key)
    return sizes


def _read_parts(facts: ShardFacts, depth: Depth, blob: Blob, faults: Faults) -> None:
    """Read every byte, and every row, of the selected parts, and the tree of attributes.

    A part that was collected meanwhile is not a fault: then the parts that replaced it are read.
    """
    location, state, reported, seen = facts.location, facts.known(), {fault.key for fault in faults}, set[str]()

    def takes(name: str) -> bool:
        is_new = name not in seen and depth.takes(name)
        seen.add(name)
        return is_new

    for _ in range(TRIES + 1):
        new_faults = list(byte_faults(state, blob, location.build, deep=True, takes=takes, threads=depth.threads))
        newer = location.versions.load(facts.name) if new_faults else None
        if newer is None or newer.is_closed:
            break
        names = {str(named.part.id) for named in all_parts(newer, location.blob)} | auxiliary_sizes(newer).keys()
        was_collected = False
        for fault in new_faults:
            if (fault.key if fault.named is None else str(fault.named.part.id)) not in names:
                was_collected = True
            elif not fault.key or fault.key not in reported:
                faults.take([fault])
                reported.add(fault.key)
        state = newer
        if not was_collected:
            break
    try:
        if depth.takes(str(state.attribute_root)) and not any(fault.kind is FaultKind.INDEX for fault in faults):
            check_tree(state, blob)
    except Corruption as error:
        faults.note(FaultKind.INDEX, error.message)
    except StaleIndex:
        pass  # it was collected meanwhile
