"""Following a copy of a blob store: the newest version of each shard that is there whole."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from blob import Blob, BlobNotFound
from consensus.interface import ENDED
from persist.commit.system import Clock
from persist.copies.blob_store_scan import BlobStoreScan, Evidence
from persist.copies.shard_facts import needed_blobs
from persist.core.batch import Part
from persist.core.blob_keys import (
    BEATS,
    CATALOGUES,
    JOURNALS,
    belongs_to,
    catalogue_number,
    is_beat_key,
    is_catalogue_key,
    is_journal_key,
    is_rollup_key,
    rollup_seqno,
    shard_of,
)
from persist.core.errors import Corruption, PersistError, Unavailable, UpgradeNeeded
from persist.core.ids import SeqNo, family_of, shard_id_of
from persist.core.state import State
from persist.formats.state_frames import THIS_BUILD, Build, decode_catalogue, decode_diff, decode_journal
from persist.formats.store_errors import translated, translated_but_missing
from persist.parts.read_plan import read_bundle

# Which blobs of a version are there, in a store to which another one is copied: in any order, late, with gaps.


ASKED_ONE_BY_ONE_MAX = 20  # blobs; more are found by listing the keys of the shard
LACKING_TOLD_MAX = 20


class Sizes(Mapping[str, int]):
    """The blobs that are there, by key: those of one shard as they were listed, others as they are asked for."""

    def __init__(self, blob: Blob, prefix: str) -> None:
        self._blob = blob
        self._prefix = prefix
        with translated():
            self._listed = {stat.key: stat.size for stat in blob.list(prefix)}

    def __getitem__(self, key: str) -> int:
        if key in self._listed:
            return self._listed[key]
        if not key.startswith(self._prefix):
            with translated():
                stat = self._blob.stat(key)
            if stat is not None:
                self._listed[key] = stat.size
                return stat.size
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._listed)


class BlobPresence:
    """Which blobs of one shard have been seen. What was there once is not asked for again, nor a bundle read again."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self._known: dict[str, int | None] = {}  # by key, with the size as far as a State tells it
        self._listing: dict[str, tuple[Part, ...]] = {}  # what bundles list

    def lacking(self, state: State) -> list[str]:
        """The first few blobs without which the version is not whole. Raises Unavailable."""
        found = self._unseen(needed_blobs(state))
        parts = list(state.trace.parts())
        found |= self._unseen({part.key: part.blob_size for part in parts if part.key is not None})
        lacking = self._asked(found)
        for part in parts:
            if part.bundle is not None and part.key not in lacking:
                lacking |= self._inside(part)
        return sorted(lacking)[:LACKING_TOLD_MAX]

    def keep(self, state: State) -> None:
        """Forget what this version does not name."""
        bundles = {part.key for part in state.trace.parts() if part.bundle is not None}
        self._listing = {key: listed for key, listed in self._listing.items() if key in bundles}
        named = {part.key for part in state.trace.parts()} | needed_blobs(state).keys()
        named |= {part.key for listed in self._listing.values() for part in listed}
        self._known = {key: size for key, size in self._known.items() if key in named}

    def _unseen(self, named: Mapping[str, int | None]) -> dict[str, int | None]:
        return {key: size for key, size in named.items() if key not in self._known}

    def _asked(self, named: dict[str, int | None]) -> set[str]:
        """Those that are not there, or not with their size."""
        if not named:
            return set()
        there: dict[str, int] = {}
        with translated():
            if len(named) > ASKED_ONE_BY_ONE_MAX:
                for prefix in {shard_of(key) for key in named}:
                    there |= {stat.key: stat.size for stat in self._blob.list(f"{prefix}/")}
            else:
                stats = (self._blob.stat(key) for key in named)
                there = {stat.key: stat.size for stat in stats if stat is not None}
        whole = {key: size for key, size in named.items() if key in there and size in (None, there[key])}
        self._known |= whole
        return named.keys() - whole.keys()

    def _inside(self, bundle: Part) -> set[str]:
        key = bundle.key or ""
        if key not in self._listing:
            try:
                with translated_but_missing():
                    listed = read_bundle(bundle, self._blob)
            except (BlobNotFound, Corruption):
                return {key}
            self._listing[key] = tuple(part for run in listed for part in run.parts)
        inside: dict[str, int | None] = {
            part.key: part.blob_size for part in self._listing[key] if part.key is not None
        }
        return self._asked(self._unseen(inside))


# Following: the newest version of each shard that a copy of its blob store has whole, as the copy fills.
#
# A region reads publications (`persist.maintenance.publication_writer`) and rollups, which come in any order, late,
# and may be gone before they were seen. A version is *accepted* once it was in the log at home and every blob that it
# needs has come. From then on it is what the region shows. What is accepted never goes back. Nothing is ever written.


log = logging.getLogger("persist.regions")
T = TypeVar("T")

SHARDS_MAX = 20_000  # that are followed at a time; of others only how far they were is kept
WAITING_MAX = 100_000  # published entries of one shard that wait for blobs; beyond that its rollups tell
VERSIONS_TRIED_MAX = 64  # of one shard at a time, the newest first
RECHECKED_AT_ONCE = 2  # shards whose rollups one round looks for, besides those of which journals tell
MINUTE_MS = 60_000
POLL_S = 1.0  # how often new publications are looked for
NAMES_S = 30.0  # how often names are
RETRY_S = 5.0  # so long after rollups were listed they are again, where published entries do not lead on, with no news
RECHECK_S = 60.0  # the same where nothing was heard: publications may have come and gone while nobody looked


@dataclass(eq=False)
class _Shard:
    """A shard that somebody reads here. `state`: the accepted version. `evidence` tells of later ones."""

    name: str
    presence: BlobPresence
    evidence: Evidence
    state: State | None = None
    taken: set[str] = field(default_factory=set)  # journals that were read for it
    listed_s: float | None = None  # when its rollups were last looked for, and while this was known
    listed_for: int = 0
    lacking: tuple[str, ...] = ()
    why: tuple[str, ...] = ()
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class FollowedShard:
    """How far a shard is here. `known`: the newest version that anything tells of. `lacking`: blobs of newer ones.

    `shown_ms`: the wall clock at home up to which all that was published is shown, by the clocks there.
    """

    name: str
    seqno: SeqNo
    upper: list[int]
    known: SeqNo
    lacking: tuple[str, ...]
    why: tuple[str, ...]
    shown_ms: int


class Follower:
    """Thread-safe. `look` reads what is new; `state` gives the accepted version of a shard.

    `on_moved(name)` is called after a newer version of it was accepted, from any thread.
    """

    def __init__(self, blob: Blob, clock: Clock, poll_s: float = POLL_S, build: Build = THIS_BUILD) -> None:
        self.poll_s = poll_s
        self.blob = blob
        self._clock = clock
        self._build = build
        self._looking = threading.Lock()
        self._lock = threading.Lock()  # guards what follows; no store is called under it
        self._shards: OrderedDict[str, _Shard] = OrderedDict()
        self._journals: dict[str, Mapping[str, tuple[bytes, ...]]] = {}
        self._floors: dict[str, SeqNo] = {}
        self._names: dict[str, bool] = {}  # whether it was dropped
        self._looked_s: float | None = None
        self._named_s: float | None = None
        self.published_ms = 0  # up to this wall clock something was published, by the clocks at home; 0: nothing was
        self.bad_blobs = 0  # that could not be read
        self.failed: PersistError | None = None  # why the last look failed
        self.on_moved: Callable[[str], object] = lambda name: None

    # --- what is accepted

    def state(self, name: str) -> State | None:
        """The accepted version of a shard; None: nothing here tells of it.

        Looks for news where that is due. Raises Unavailable: something tells of the shard, and no version is whole yet,
        or the store does not answer and nothing was accepted before.
        """
        try:
            self.look()
        except PersistError as error:
            log.warning("the region goes on with what it has: %s", error)
        shard = self._followed(name)
        if shard.state is None:
            with shard.lock:
                if shard.state is None:
                    self._advance(shard)
        if shard.state is not None:
            return shard.state
        if shard.evidence.changes or name in self._names or name in self._floors or shard.lacking:
            lacks = f": {shard.lacking[0]} is lacking" if shard.lacking else ""
            raise Unavailable(f"no version of shard {name!r} has come whole yet{lacks}; wait, and retry")
        with self._lock:
            self._shards.pop(name, None)
        return None

    def names(self, prefix: str = "", after: str = "", limit: int = 1000, with_dropped: bool = False) -> list[str]:
        """Names of shards that were published, ascending, beyond `after`. Raises Unavailable."""
        self.look()
        with self._lock:
            names = dict(self._names)
            names |= {s.name: s.state.is_closed for s in self._shards.values() if s.state is not None}
        found = (name for name, dropped in names.items() if with_dropped or not dropped)
        return sorted(name for name in found if name.startswith(prefix) and name > after)[:limit]

    def followed(self, name: str) -> FollowedShard | None:
        """How far a shard is; None where nobody reads it here."""
        with self._lock:
            shard = self._shards.get(name)
        state = None if shard is None else shard.state
        if shard is None or state is None:
            return None
        known = max(shard.evidence.known, state.seqno)
        shown_ms = max(state.walltime_ms, self.published_ms) if known == state.seqno else state.walltime_ms
        return FollowedShard(name, state.seqno, state.upper.to_json(), known, shard.lacking, shard.why, shown_ms)

    def followed_names(self) -> list[str]:
        """The shards that somebody reads here."""
        with self._lock:
            return list(self._shards)

    # --- what is new

    def look(self, *, now: bool = False) -> None:
        """Read what was published since the last time, if that is due (`now`: in any case). Raises Unavailable."""
        if not self._looking.acquire(blocking=now):
            return  # another thread looks just now
        try:
            now_s = self._clock.monotonic()
            if not now and self._looked_s is not None and now_s - self._looked_s < self.poll_s:
                return
            self._looked_s = now_s
            self._read_news(now_s, now)
            self.failed = None
        except PersistError as error:
            self.failed = error
            raise
        finally:
            self._looking.release()

    def _read_news(self, now_s: float, names_too: bool) -> None:
        told = self._read_journals()
        if names_too or self._named_s is None or now_s - self._named_s >= NAMES_S:
            self._read_names()
            self._named_s = now_s
        failed: PersistError | None = None
        for shard in self._due(now_s, told):
            try:
                with shard.lock:
                    self._advance(shard)
            except PersistError as error:  # what is wrong with one shard keeps nothing of the others
                failed = failed or error
        if failed is not None:
            raise failed

    def _read_journals(self) -> set[str]:
        """Read the journals that have come; the shards of which they tell."""
        with translated():
            listed = {stat.key for stat in self.blob.list(JOURNALS)}
        beats = [int(key.removeprefix(BEATS)) * MINUTE_MS for key in listed if is_beat_key(key)]
        self.published_ms = max([self.published_ms, *beats])
        journals = {key for key in listed if is_journal_key(key)}
        with self._lock:
            for key in self._journals.keys() - journals:
                del self._journals[key]
        names: set[str] = set()
        for key in sorted(journals - self._journals.keys()):
            found = self._decoded(key, lambda data: decode_journal(data, self._build))
            if found is None:
                continue
            entries = {told.name: told.entries for told in found.shards}
            with self._lock:
                self._journals[key] = entries
                self.published_ms = max(self.published_ms, found.at_ms)
                for name, own in entries.items():
                    self._names.setdefault(name, bool(own) and own[-1].startswith(ENDED))
            names |= entries.keys()
        return names

    def _read_names(self) -> None:
        with translated():
            keys = [stat.key for stat in self.blob.list(CATALOGUES) if is_catalogue_key(stat.key)]
        for key in sorted(keys, key=catalogue_number, reverse=True):
            found = self._decoded(key, decode_catalogue)
            if found is not None:
                with self._lock:
                    self._names |= {name: not shard_id for name, shard_id in found.items()}
                return

    def _decoded(self, key: str, decode: Callable[[bytes], T]) -> T | None:
        """None: it is gone, or damaged, and may come sound yet."""
        try:
            with translated_but_missing():
                return decode(self.blob.get(key))
        except BlobNotFound:
            return None
        except (Corruption, UpgradeNeeded) as error:
            self.bad_blobs += 1
            log.warning("%s cannot be read: %s", key, error)
            return None

    def _due(self, now_s: float, told: Collection[str]) -> list[_Shard]:
        """The shards in use of which journals have told, or that wait for blobs; a few that may have missed news."""
        due = now_s - RECHECK_S
        with self._lock:
            shards = list(self._shards.values())
        heard = [shard for shard in shards if shard.name in told or shard.evidence.changes]
        others = [shard for shard in shards if shard not in heard and shard.listed_s is not None]
        doubtful = sorted((s for s in others if (s.listed_s or 0.0) <= due), key=lambda s: s.listed_s or 0.0)
        return [*heard, *doubtful[:RECHECKED_AT_ONCE]]

    def _followed(self, name: str) -> _Shard:
        with self._lock:
            shard = self._shards.get(name)
            if shard is None:
                shard = self._shards[name] = _Shard(name, BlobPresence(self.blob), Evidence(name))
                if len(self._shards) > SHARDS_MAX:
                    self._shards.popitem(last=False)
            self._shards.move_to_end(name)
            return shard

    # --- one shard, under its lock

    def _advance(self, shard: _Shard) -> None:
        """Accept the newest version that is whole, if it is newer. Raises Unavailable."""
        before = shard.state
        self._take(shard)
        if before is not None and shard.evidence.changes:
            below = shard.evidence.forked_at()
            why: list[str] = []
            chain = BlobStoreScan(self.blob, self._build, sizes={}).chain(before, shard.evidence, why)
            versions = deque((s for s in chain if below is None or s.seqno < below), maxlen=VERSIONS_TRIED_MAX)
            self._accept_newest(shard, versions)
            shard.why = tuple(why)
        if self._is_to_be_listed(shard):
            self._jump(shard)
        after = shard.state
        if after is not None and after is not before:
            self._accepted(shard, after)

    def _take(self, shard: _Shard) -> None:
        """The entries of journals that were not read for this shard yet."""
        with self._lock:
            fresh = {key: told.get(shard.name, ()) for key, told in self._journals.items() if key not in shard.taken}
            shard.taken = set(self._journals)
        seen = shard.state.seqno if shard.state is not None else 0
        for key, entries in fresh.items():
            for entry in entries:
                try:
                    change = decode_diff(entry, self._build)
                except (Corruption, UpgradeNeeded) as error:
                    self.bad_blobs += 1
                    log.warning("an entry of shard %r in %s cannot be read: %s", shard.name, key, error)
                    continue
                if change.seqno > seen:
                    shard.evidence.add(change)
        if len(shard.evidence.changes) > WAITING_MAX:
            shard.evidence.changes.clear()
            shard.listed_s = None

    def _accept_newest(self, shard: _Shard, versions: deque[State]) -> None:
        """Of these versions, ascending, the newest one that is whole and beyond what was shown is shown from now on."""
        lacking: list[str] = []
        for state in reversed(versions):
            if not self._is_beyond(shard, state):
                break
            missing = shard.presence.lacking(state)
            if not missing:
                shard.state = state
                break
            lacking = lacking or missing
        shard.lacking = tuple(lacking)

    def _is_beyond(self, shard: _Shard, state: State) -> bool:
        before = shard.state
        if before is None:
            return state.seqno >= self._floors.get(shard.name, 0)
        return state.seqno > before.seqno and (state.shard_id != before.shard_id or before.upper <= state.upper)

    def _is_to_be_listed(self, shard: _Shard) -> bool:
        """Whether rollups may lead on: at first, where published entries do not, and now and then."""
        if shard.listed_s is None:
            return True
        waited_s = self._clock.monotonic() - shard.listed_s
        if shard.state is None:
            return waited_s >= self.poll_s
        if shard.evidence.known > shard.state.seqno:
            return shard.evidence.known > shard.listed_for or waited_s >= RETRY_S
        return waited_s >= RECHECK_S

    def _jump(self, shard: _Shard) -> None:
        """Go on from the rollups that are there: the entries that led to them may never come."""
        family = family_of(shard_id_of(shard.name))
        sizes = Sizes(self.blob, family)
        shard.listed_s, shard.listed_for = self._clock.monotonic(), shard.evidence.known
        seen = shard.state.seqno if shard.state is not None else 0
        found = {key: rollup_seqno(key) for key in sizes if is_rollup_key(key) and belongs_to(key, shard_of(key))}
        shard.evidence.rollups = {key: seqno for key, seqno in found.items() if seqno > seen}
        if shard.state is not None and not shard.evidence.rollups:
            return
        newest = BlobStoreScan(self.blob, self._build, sizes=sizes).newest(family, shard.evidence)
        if newest.state is not None and self._is_beyond(shard, newest.state):
            shard.state = newest.state
        shard.lacking, shard.why = newest.missing, newest.why

    def _accepted(self, shard: _Shard, state: State) -> None:
        changes = shard.evidence.changes
        shard.evidence = Evidence(shard.name, changes={seqno: c for seqno, c in changes.items() if seqno > state.seqno})
        shard.presence.keep(state)
        with self._lock:
            self._floors[shard.name] = state.seqno
        self.on_moved(shard.name)
