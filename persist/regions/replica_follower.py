"""Following a copy of a blob store: the newest complete version of each shard."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import TypeVar

from blob import Blob, BlobNotFound
from consensus.interface import ENDED
from persist.commit.clocks_and_ids import Clock
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
from persist.formats.store_errors import read_or_none, translated, translated_but_missing
from persist.parts.read_plan import read_bundle

# Which blobs of a version exist, in a copy that fills in any order, late, and with gaps.

SINGLE_LOOKUPS_MAX = 20  # blobs; for more of them the keys of the shard are listed
MISSING_SHOWN_MAX = 20


class Sizes(Mapping[str, int]):
    """The blobs that exist, by key: those of one shard are listed at once, others looked up on demand."""

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
    """Which blobs of one shard have been seen. Seen blobs are not looked up again, nor bundles read again."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self._seen: dict[str, int | None] = {}  # by key, with the size if a State has it
        self._listing: dict[str, tuple[Part, ...]] = {}  # the parts in bundles

    def missing(self, state: State) -> list[str]:
        """The first few blobs that the version lacks. Raises Unavailable."""
        parts = list(state.trace.parts())
        missing = self._check({**needed_blobs(state), **_sizes(parts)})
        for part in parts:
            if part.bundle is not None and part.key not in missing:
                missing |= self._missing_inside(part)
        return sorted(missing)[:MISSING_SHOWN_MAX]

    def keep(self, state: State) -> None:
        """Forget blobs that this version does not name."""
        bundles = {part.key for part in state.trace.parts() if part.bundle is not None}
        self._listing = {key: listed for key, listed in self._listing.items() if key in bundles}
        named = {part.key for part in state.trace.parts()} | needed_blobs(state).keys()
        named |= {part.key for listed in self._listing.values() for part in listed}
        self._seen = {key: size for key, size in self._seen.items() if key in named}

    def _check(self, named: dict[str, int | None]) -> set[str]:
        """The blobs that do not exist, or not with their size."""
        named = {key: size for key, size in named.items() if key not in self._seen}
        if not named:
            return set()
        sizes: dict[str, int] = {}
        with translated():
            if len(named) > SINGLE_LOOKUPS_MAX:
                for prefix in {shard_of(key) for key in named}:
                    sizes |= {stat.key: stat.size for stat in self._blob.list(f"{prefix}/")}
            else:
                stats = (self._blob.stat(key) for key in named)
                sizes = {stat.key: stat.size for stat in stats if stat is not None}
        complete = {key: size for key, size in named.items() if key in sizes and size in (None, sizes[key])}
        self._seen |= complete
        return named.keys() - complete.keys()

    def _missing_inside(self, bundle: Part) -> set[str]:
        key = bundle.key or ""
        if key not in self._listing:
            try:
                with translated_but_missing():
                    listed = read_bundle(bundle, self._blob)
            except (BlobNotFound, Corruption):
                return {key}
            self._listing[key] = tuple(part for run in listed for part in run.parts)
        return self._check(_sizes(self._listing[key]))


def _sizes(parts: Iterable[Part]) -> dict[str, int | None]:
    return {part.key: part.blob_size for part in parts if part.key is not None}


# Following: the newest complete version of each shard, as the copy fills.
#
# A region reads publications (`persist.maintenance.journal_writer`) and rollups, which arrive in any order, late,
# and may be deleted before they were seen. A version is *accepted* once it is known to have been in the log at home and
# all blobs that it needs have arrived. From then on the region shows it. Accepted versions never go back. Read-only.

log = logging.getLogger("persist.regions")
T = TypeVar("T")

SHARDS_MAX = 20_000  # that are followed at a time; for others only their last seqno is kept
WAITING_MAX = 100_000  # published entries of one shard that wait for blobs; beyond that its rollups are used
VERSIONS_TRIED_MAX = 64  # of one shard at a time, newest first
RECHECKED_AT_ONCE = 2  # shards without news whose rollups one round lists
MINUTE_MS = 60_000
POLL_S = 1.0  # interval of polling for publications
NAMES_S = 30.0  # interval of polling for names
RETRY_S = 5.0  # interval of listing rollups, if published entries have a gap and there is no news
RECHECK_S = 60.0  # interval of listing rollups without news: publications may have been missed


@dataclass(eq=False)
class _Shard:
    """A shard that is read here. `state`: the accepted version. `evidence`: of later versions."""

    name: str
    presence: BlobPresence
    evidence: Evidence
    state: State | None = None
    taken: set[str] = field(default_factory=set)  # journals that were read for it
    listed_s: float | None = None  # when its rollups were last listed
    listed_for: int = 0  # the newest seqno known at that time
    lacking: tuple[str, ...] = ()
    why: tuple[str, ...] = ()
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class FollowedShard:
    """The progress of a shard here. `known`: the newest seqno mentioned. `lacking`: blobs of newer versions.

    `shown_ms`: the wall clock up to which everything published at home is shown, by the clocks there.
    """

    name: str
    seqno: SeqNo
    upper: list[int]
    known: SeqNo
    lacking: tuple[str, ...]
    why: tuple[str, ...]
    shown_ms: int


class Follower:
    """Follows a copy. Thread-safe. `poll` reads news; `state` returns the accepted version of a shard.

    `on_moved(name)` is called after a newer version was accepted, from any thread.
    """

    def __init__(self, blob: Blob, clock: Clock, poll_s: float = POLL_S, build: Build = THIS_BUILD) -> None:
        self.poll_s = poll_s
        self.blob = blob
        self._clock = clock
        self._build = build
        self._polling = threading.Lock()
        self._lock = threading.Lock()  # guards the following fields; not held during I/O
        self._shards: OrderedDict[str, _Shard] = OrderedDict()
        self._journals: dict[str, Mapping[str, tuple[bytes, ...]]] = {}
        self._floors: dict[str, SeqNo] = {}
        self._names: dict[str, bool] = {}  # whether it was dropped
        self._polled_s: float | None = None
        self._named_s: float | None = None
        self.published_ms = 0  # the wall clock of the last publication, by the clocks at home; 0: there was none
        self.bad_blobs = 0  # that could not be read
        self.failed: PersistError | None = None  # the error of the last poll
        self.on_moved: Callable[[str], object] = lambda name: None

    # --- accepted versions

    def state(self, name: str) -> State | None:
        """The accepted version of a shard; None: it is unknown here.

        Polls if that is due. Raises Unavailable: the shard is known, but no version is complete yet, or the store does
        not answer and nothing was accepted before.
        """
        try:
            self.poll()
        except PersistError as error:
            log.warning("the region continues with what it has: %s", error)
        shard = self._followed(name)
        if shard.state is None:
            with shard.lock:
                if shard.state is None:
                    self._advance(shard)
        if shard.state is not None:
            return shard.state
        if shard.evidence.changes or name in self._names or name in self._floors or shard.lacking:
            lacks = f": {shard.lacking[0]} is missing" if shard.lacking else ""
            raise Unavailable(f"no version of shard {name!r} has arrived completely yet{lacks}; wait, and retry")
        with self._lock:
            self._shards.pop(name, None)
        return None

    def names(self, prefix: str = "", after: str = "", limit: int = 1000, with_dropped: bool = False) -> list[str]:
        """Published names of shards, ascending, after `after`. Raises Unavailable."""
        self.poll()
        with self._lock:
            names = dict(self._names)
            names |= {s.name: s.state.is_closed for s in self._shards.values() if s.state is not None}
        matching = (name for name, dropped in names.items() if with_dropped or not dropped)
        return sorted(name for name in matching if name.startswith(prefix) and name > after)[:limit]

    def followed(self, name: str) -> FollowedShard | None:
        """The progress of a shard; None if it is not read here."""
        with self._lock:
            shard = self._shards.get(name)
        state = None if shard is None else shard.state
        if shard is None or state is None:
            return None
        known = max(shard.evidence.known, state.seqno)
        shown_ms = max(state.walltime_ms, self.published_ms) if known == state.seqno else state.walltime_ms
        return FollowedShard(name, state.seqno, state.upper.to_json(), known, shard.lacking, shard.why, shown_ms)

    def followed_names(self) -> list[str]:
        with self._lock:
            return list(self._shards)

    # --- news

    def poll(self, *, now: bool = False) -> None:
        """Read news if that is due (`now`: in any case). Raises Unavailable."""
        if not self._polling.acquire(blocking=now):
            return  # another thread is polling
        try:
            now_s = self._clock.monotonic()
            if not now and self._polled_s is not None and now_s - self._polled_s < self.poll_s:
                return
            self._polled_s = now_s
            self._read_news(now_s, now)
            self.failed = None
        except PersistError as error:
            self.failed = error
            raise
        finally:
            self._polling.release()

    def _read_news(self, now_s: float, names_too: bool) -> None:
        names = self._read_journals()
        if names_too or self._named_s is None or now_s - self._named_s >= NAMES_S:
            self._read_names()
            self._named_s = now_s
        failed: PersistError | None = None
        for shard in self._due(now_s, names):
            try:
                with shard.lock:
                    self._advance(shard)
            except PersistError as error:  # an error of one shard does not affect the others
                failed = failed or error
        if failed is not None:
            raise failed

    def _read_journals(self) -> set[str]:
        """Read new journals; returns the shards with news."""
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
            decoded = self._decoded(key, lambda data: decode_journal(data, self._build))
            if decoded is None:
                continue
            entries = {names.name: names.entries for names in decoded.shards}
            with self._lock:
                self._journals[key] = entries
                self.published_ms = max(self.published_ms, decoded.at_ms)
                for name, entries_of_shard in entries.items():
                    self._names.setdefault(name, bool(entries_of_shard) and entries_of_shard[-1].startswith(ENDED))
            names |= entries.keys()
        return names

    def _read_names(self) -> None:
        with translated():
            keys = [stat.key for stat in self.blob.list(CATALOGUES) if is_catalogue_key(stat.key)]
        for key in sorted(keys, key=catalogue_number, reverse=True):
            decoded = self._decoded(key, decode_catalogue)
            if decoded is not None:
                with self._lock:
                    self._names |= {name: not shard_id for name, shard_id in decoded.items()}
                return

    def _decoded(self, key: str, decode: Callable[[bytes], T]) -> T | None:
        """None: it is missing, or damaged and may still arrive intact."""
        data = read_or_none(self.blob, key)
        try:
            return None if data is None else decode(data)
        except (Corruption, UpgradeNeeded) as error:
            self.bad_blobs += 1
            log.warning("%s cannot be read: %s", key, error)
            return None

    def _due(self, now_s: float, names: Collection[str]) -> list[_Shard]:
        """The shards with news, those that wait for blobs, and a few that may have missed news."""
        recheck_before = now_s - RECHECK_S
        with self._lock:
            shards = list(self._shards.values())
        with_news, stale = [], []
        for shard in shards:
            if shard.name in names or shard.evidence.changes:
                with_news.append(shard)
            elif shard.listed_s is not None and shard.listed_s <= recheck_before:
                stale.append((shard.listed_s, shard.name, shard))
        return [*with_news, *(shard for _, _, shard in nsmallest(RECHECKED_AT_ONCE, stale))]

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
        """Accept the newest complete version, if it is newer. Raises Unavailable."""
        shown = shard.state
        self._take(shard)
        if shown is not None and shard.evidence.changes:
            limit = shard.evidence.forked_at()
            problems: list[str] = []
            chain = BlobStoreScan(self.blob, self._build, sizes={}).chain(shown, shard.evidence, problems)
            versions = deque((s for s in chain if limit is None or s.seqno < limit), maxlen=VERSIONS_TRIED_MAX)
            self._accept_newest(shard, versions)
            shard.why = tuple(problems)
        if self._is_to_be_listed(shard):
            self._jump(shard)
        accepted = shard.state
        if accepted is not None and accepted is not shown:
            self._finish_acceptance(shard, accepted)

    def _take(self, shard: _Shard) -> None:
        """Take the journal entries that were not read for this shard yet."""
        with self._lock:
            new_entries = {
                key: by_shard.get(shard.name, ()) for key, by_shard in self._journals.items() if key not in shard.taken
            }
            shard.taken = set(self._journals)
        shown_seqno = shard.state.seqno if shard.state is not None else 0
        for key, entries in new_entries.items():
            for entry in entries:
                try:
                    change = decode_diff(entry, self._build)
                except (Corruption, UpgradeNeeded) as error:
                    self.bad_blobs += 1
                    log.warning("an entry of shard %r in %s cannot be read: %s", shard.name, key, error)
                    continue
                if change.seqno > shown_seqno:
                    shard.evidence.add(change)
        if len(shard.evidence.changes) > WAITING_MAX:
            shard.evidence.changes.clear()
            shard.listed_s = None

    def _accept_newest(self, shard: _Shard, versions: deque[State]) -> None:
        """Accept the newest of these versions, ascending, that is complete and newer than the shown one."""
        lacking: list[str] = []
        for state in reversed(versions):
            if not self._is_beyond(shard, state):
                break
            missing = shard.presence.missing(state)
            if not missing:
                shard.state = state
                break
            lacking = lacking or missing
        shard.lacking = tuple(lacking)

    def _is_beyond(self, shard: _Shard, state: State) -> bool:
        shown = shard.state
        if shown is None:
            return state.seqno >= self._floors.get(shard.name, 0)
        return state.seqno > shown.seqno and (state.shard_id != shown.shard_id or shown.upper <= state.upper)

    def _is_to_be_listed(self, shard: _Shard) -> bool:
        """Whether to list rollups: at first, if published entries have a gap, and from time to time."""
        if shard.listed_s is None:
            return True
        waited_s = self._clock.monotonic() - shard.listed_s
        if shard.state is None:
            return waited_s >= self.poll_s
        if shard.evidence.known > shard.state.seqno:
            return shard.evidence.known > shard.listed_for or waited_s >= RETRY_S
        return waited_s >= RECHECK_S

    def _jump(self, shard: _Shard) -> None:
        """Continue from rollups: the entries that led to them may never arrive."""
        family = family_of(shard_id_of(shard.name))
        sizes = Sizes(self.blob, family)
        shard.listed_s, shard.listed_for = self._clock.monotonic(), shard.evidence.known
        shown_seqno = shard.state.seqno if shard.state is not None else 0
        seqno_by_key = {
            key: rollup_seqno(key) for key in sizes if is_rollup_key(key) and belongs_to(key, shard_of(key))
        }
        shard.evidence.rollups = {key: seqno for key, seqno in seqno_by_key.items() if seqno > shown_seqno}
        if shard.state is not None and not shard.evidence.rollups:
            return
        newest = BlobStoreScan(self.blob, self._build, sizes=sizes).newest(family, shard.evidence)
        if newest.state is not None and self._is_beyond(shard, newest.state):
            shard.state = newest.state
        shard.lacking, shard.why = newest.missing, newest.why

    def _finish_acceptance(self, shard: _Shard, state: State) -> None:
        changes = shard.evidence.changes
        shard.evidence = Evidence(shard.name, changes={seqno: c for seqno, c in changes.items() if seqno > state.seqno})
        shard.presence.keep(state)
        with self._lock:
            self._floors[shard.name] = state.seqno
        self.on_moved(shard.name)
