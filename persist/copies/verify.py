"""Whether everything that the shards of a location need is there and sound. Writes nothing, and holds nothing.

The log of each shard is replayed and its rollups are decoded; its State must agree with itself, with the log and with
the shards of which it borrows. The blobs that it names are compared with a listing: a missing one, or one of another
size, is a fault. With `deep` every byte is read, and every row decoded, whose order is checked. A sample is deep for a
share of the parts. A blob that nothing names is counted, and is no fault: a write may be under way.

Shards move on meanwhile, and what they named is collected. So where something is amiss in one that has moved, it is
looked at anew.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from blob import Blob, BlobNotFound
from persist.attributes.node_store import StaleIndex
from persist.commit.blob_tasks import keys_in
from persist.commit.clone_refs import LoanLists
from persist.commit.examine import THREADS, all_parts, faults
from persist.copies.log_replay import Replay
from persist.copies.readable import Readable
from persist.copies.shard_checks import Fault, Kind, RowOrder, TreeCheck, check_borrowed, contradictions, of_runs
from persist.copies.throttled_blob import PacedBlob, check_rate
from persist.core import invariants
from persist.core.blob_keys import belongs_to, is_bundle_key, is_rollup_key, shard_of
from persist.core.errors import Corruption, InvalidUsage
from persist.core.ids import check_shard_name, family_of
from persist.core.named_holds import is_foreign
from persist.core.state import State, auxiliary_blob_keys
from persist.formats.store_errors import translated, translated_but_missing
from persist.parts import sound_schemas

SAMPLES_MAX = 10_000  # into which a location can be cut: 0.01% each
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,4})?)%\Z")
TRIES = 4  # looks at a shard that moves on each time


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found of one shard, as of its version `seqno` (0: it cannot be opened).

    `blobs` of `size` bytes are named. `waiting` blobs left the State, and GC deletes them. `unnamed` blobs of
    `unnamed_size` bytes are named by nothing.
    """

    shard: str
    seqno: int
    faults: tuple[Fault, ...]
    blobs: int = 0
    size: int = 0
    waiting: int = 0
    unnamed: int = 0
    unnamed_size: int = 0

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
class How:
    """How deep to look.

    `deep`: read every byte, decode every row. `sample`: the same for the parts that it takes. `rate`: at most so many
    bytes a second (None: no limit). `alone`: the shards are checked without those of which they borrow, as in a backup.
    `threads`: parts that are read at a time.
    """

    deep: bool = False
    rate: int | None = None
    sample: Sample | None = None
    alone: bool = False
    threads: int = THREADS

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


def verified(location: Readable, names: Iterable[str], how: How, blob: Blob | None = None) -> Iterator[Verified]:
    """What is found of these shards, one after the other; those that are dropped meanwhile are left out.

    Parts are read from `blob` (None: from the location), at the rate that is given. Raises InvalidUsage (the two stores
    do not belong together), Unavailable. Repeating it is safe.
    """
    how.check()
    read = blob or location.blob
    if how.rate is not None:
        read = PacedBlob(read, how.rate, location.clock)
    for name in names:
        found = _Shard(location, read, check_shard_name(name), how).verified()
        if found is not None:
            yield found


@dataclass
class _Shard:
    _location: Readable
    _blob: Blob  # by which parts are read
    _name: str
    _how: How
    _found: list[Fault] = field(default_factory=list)

    def verified(self) -> Verified | None:
        """None: the shard is not there, or was dropped."""
        before: set[tuple[Kind, str]] = set()
        for left in range(TRIES, -1, -1):
            self._found.clear()
            try:
                state = self._location.versions.load(self._name)
            except Corruption as error:
                self._unloadable(error)
                return Verified(self._name, 0, self._faults())
            if state is None or state.is_closed:
                return None
            found = self._looked_at(state)
            if not self._found or not self._has_moved(state):
                break
            if not left:  # it never stood still for so long: what only one look has met is no fault
                self._found = [fault for fault in self._found if _about(fault) in before]
            before = {_about(fault) for fault in self._found}
        assert state is not None
        if self._how.reads_rows:
            self._read(state)
        return replace(found, faults=self._faults())

    def _faults(self) -> tuple[Fault, ...]:
        return tuple(dict.fromkeys(self._found))

    def _note(self, kind: Kind, what: str, key: str = "") -> None:
        self._found.append(Fault(self._name, kind, what, key))

    def _unloadable(self, error: Corruption) -> None:
        """Why there is no State: the entries of the log, and the rollup with which it begins, are looked at alone."""
        Replay(self._location.versions, self._name, self._note).run(None)
        if not self._found:
            with translated():
                head = self._location.consensus.head(self._name)
            key = "" if head is None else self._location.versions.decode(head.data).rollup_key
            try:
                held = self._location.versions.read_rollup(key) if key else None
                if key and held is None:
                    self._note(Kind.MISSING, f"the blob {key} is not there", key)
                elif held is not None and held.name != self._name:
                    self._note(Kind.ROLLUP, f"the newest rollup holds v{held.seqno} of shard {held.name!r}", key)
            except Corruption as failed:
                self._note(Kind.ROLLUP, f"the newest rollup cannot be read: {failed.message}", key)
        self._note(Kind.LOG, f"the shard cannot be loaded: {error.message}")

    def _has_moved(self, state: State) -> bool:
        """Whether a collection may have taken what seems to be missing."""
        try:
            now = self._location.versions.load(self._name)
        except Corruption:
            return True  # it is looked at anew
        return now is None or now.seqno > state.seqno

    def _looked_at(self, state: State) -> Verified:
        """What is found of it without reading parts. The faults are noted."""
        self._check(state)
        gone = Replay(self._location.versions, self._name, self._note).run(state)
        named = self._named(state)
        if not self._how.alone:
            check_borrowed(self._location, state, named, self._note)
        with translated():
            listed = {stat.key: stat.size for stat in self._location.blob.list(family_of(state.shard_id))}
            for key in named:
                if is_foreign(key, state.shard_id) and (stat := self._location.blob.stat(key)) is not None:
                    listed[key] = stat.size
        self._compare(named, listed)
        waiting_lists = self._lent(state)
        left = {key: size for key, size in listed.items() if key not in named and belongs_to(key, shard_of(key))}
        waiting = left.keys() & (self._with_lists(gone) | waiting_lists)
        unnamed = left.keys() - waiting
        return Verified(
            self._name,
            int(state.seqno),
            (),
            blobs=len(named),
            size=sum(listed.get(key, 0) for key in named),
            waiting=len(waiting),
            unnamed=len(unnamed),
            unnamed_size=sum(left[key] for key in unnamed),
        )

    def _check(self, state: State) -> None:
        """That the State is whole in itself: its batches tile, its counts and bounds agree."""
        try:
            invariants.check_state(state)
        except Corruption as error:
            self._note(Kind.STATE, error.message)
        for what, key in contradictions(state):
            self._note(Kind.STATE, what, key)

    def _named(self, state: State) -> dict[str, int | None]:
        """The blobs that the State names, also by what bundles list, with their sizes as far as these are known."""
        found = auxiliary_sizes(state)
        bundles = set()
        for named in all_parts(state, self._location.blob):
            part = named.part
            if part.key is not None:
                found[part.key] = part.blob_size
            if isinstance(named.failed, Corruption):
                self._note(Kind.BUNDLE, named.failed.message, part.key or "")
            if named.within is not None and named.within.id not in bundles:
                bundles.add(named.within.id)
                for what, key in of_runs(named.listed):
                    self._note(Kind.BUNDLE, what, key)
        return found

    def _compare(self, named: dict[str, int | None], listed: dict[str, int]) -> None:
        for key, size in named.items():
            if key not in listed:
                self._note(Kind.MISSING, f"the blob {key} is not there", key)
            elif size not in (None, listed[key]):
                self._note(Kind.SIZE, f"the blob {key} has {listed[key]} bytes, not {size}", key)

    def _lent(self, state: State) -> set[str]:
        """What other shards may name of its blobs, which are all to be there."""
        found: set[str] = set()
        lists = LoanLists(self._location.blob)
        for loan in state.loans.values():
            try:
                keys = lists.keys(loan.list_key)
            except BlobNotFound:
                continue  # the listing tells
            except Corruption as error:
                self._note(Kind.LOAN, error.message, loan.list_key)
                continue
            found.update(keys)
            if len(keys) != loan.keys:
                what = f"the list {loan.list_key} has {len(keys)} blobs, and its loan says {loan.keys}"
                self._note(Kind.LOAN, what, loan.list_key)
        return found

    def _read(self, state: State) -> None:
        """Every byte of what is taken, and every row."""
        bad = self._bytes(state)
        for _ in range(TRIES + 1):
            before = len(self._found)
            try:
                if self._how.takes(str(state.attribute_root)) and not any(f.kind is Kind.INDEX for f in self._found):
                    TreeCheck(state, self._blob).run()
            except Corruption as error:
                self._note(Kind.INDEX, error.message)
            except StaleIndex:
                pass  # as below
            try:
                self._check_order(state, bad)
                return
            except BlobNotFound:  # it was collected meanwhile; what is missing in truth is known to be bad
                del self._found[before:]
            now = self._location.versions.load(self._name)
            if now is None or now.is_closed:
                return
            state = now

    def _check_order(self, state: State, bad: Collection[str]) -> None:
        """The order of the rows of each part that is taken and not `bad`. Raises BlobNotFound, Unavailable."""
        order = RowOrder(self._blob, sound_schemas(state.schemas))
        for part in (named.part for named in all_parts(state, self._blob)):
            name = str(part.id)
            if part.bundle is not None or name in bad or not self._how.takes(name):
                continue
            if part.schema_id not in order.schemas:
                continue  # reported as a fault of the State
            try:
                with translated_but_missing():
                    order.check(part)
            except Corruption as error:
                self._note(Kind.ORDER, error.message, part.key or "")

    def _bytes(self, state: State) -> set[str]:
        """The ids of the parts that cannot be read, or are not what the State says.

        What was collected meanwhile is no fault: then what has come into its place is read.
        """
        build, known = self._location.build, {fault.key for fault in self._found}
        bad, read = set(), set()

        def takes(name: str) -> bool:
            is_new = name not in read and self._how.takes(name)
            read.add(name)
            return is_new

        for _ in range(TRIES + 1):
            found = list(faults(state, self._blob, build, deep=True, takes=takes, threads=self._how.threads))
            now = self._location.versions.load(self._name) if found else None
            if now is None or now.is_closed:
                break
            parts = {str(named.part.id) for named in all_parts(now, self._location.blob)}
            others, is_gone = auxiliary_sizes(now).keys(), False
            for fault in found:
                key = fault.key if fault.part is None else fault.part.key or ""
                if (fault.key not in others) if fault.part is None else (str(fault.part.id) not in parts):
                    is_gone = True
                elif not key or key not in known:
                    self._note(_kind_of(key) if fault.part is None else Kind.PART, fault.what, key)
                    known.add(key)
            bad |= {str(fault.part.id) for fault in found if fault.part is not None}
            state = now
            if not is_gone:
                break
        return bad

    def _with_lists(self, gone: set[str]) -> set[str]:
        """These blobs, and what the bundles among them list."""
        found = set(gone)
        for bundle in filter(is_bundle_key, gone):
            try:
                with translated_but_missing():
                    found.update(keys_in(self._location.blob, bundle))
            except (BlobNotFound, Corruption):
                continue
        return found


def auxiliary_sizes(state: State) -> dict[str, int | None]:
    """The blobs that are no parts, with their sizes as far as the State tells them."""
    found: dict[str, int | None] = dict.fromkeys(auxiliary_blob_keys(state))
    found.update({rollup.key: rollup.size or None for rollup in state.rollups.values()})
    found.update({chunk.key: chunk.length for chunk in state.attribute_chunks.values()})
    found.update({outcomes.key: outcomes.size for outcomes in state.outcome_files})
    found.update({entries.key: entries.size for entries in state.entry_files})
    return found


def _about(fault: Fault) -> tuple[Kind, str]:
    """What a fault is about. That of a blob may be told in other words as the shard moves."""
    return fault.kind, fault.key or fault.what


def _kind_of(key: str) -> Kind:
    """The kind of a fault of a blob that is no part."""
    if is_rollup_key(key):
        return Kind.ROLLUP
    return Kind.INDEX if key.endswith(".nodes") else Kind.BLOB
