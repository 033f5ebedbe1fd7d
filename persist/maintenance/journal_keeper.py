"""Maintenance of publications: publishes missing log entries, deletes covered journals, writes catalogues.

It may be killed at any instant, and any number may run at the same time, because their publications are equivalent.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field

from blob import BlobError, BlobExists, BlobNotFound
from persist.commit.location import Location
from persist.commit.state_loader import read_back
from persist.core.blob_keys import (
    BEATS,
    CATALOGUES,
    JOURNALS,
    beat_key,
    catalogue_key,
    catalogue_number,
    is_beat_key,
    is_catalogue_key,
    is_journal_key,
)
from persist.core.errors import Corruption, PersistError, UnknownShard
from persist.core.ids import SeqNo, shard_id_of
from persist.core.state import State
from persist.formats.state_frames import decode_catalogue, decode_diff, decode_journal, encode_catalogue
from persist.formats.store_errors import translated, translated_but_missing
from persist.maintenance.journal_writer import Publisher, PublishSettings

log = logging.getLogger("persist.publications")

NOTHING = SeqNo(0)
SHARDS_MAX = 100_000  # shards whose publications are remembered
SCAN_LIMIT = 1_000  # log entries per read
PUBLISHED_AT_ONCE_MAX = 10_000  # log entries of one shard
REWRITE_BYTES_MAX = 8 * 1024 * 1024  # of journals that one round rewrites
SMALL_JOURNALS_MAX = 64  # beyond it old journals that rollups do not cover are combined
UNSETTLED_MAX = 1_000  # shards with unknown rollups that one round reads
CATALOGUES_KEPT = 2
BEATS_KEPT = 2
BEAT_S = 60.0  # the interval of maintenance heartbeats
KEEP_S = 300.0  # how long a journal is kept, even if rollups cover all of its entries


@dataclass
class _Progress:
    """The publications of one shard. `published`: seqnos beyond `covered`, that of the newest verified rollup."""

    covered: SeqNo = NOTHING
    checked: str = ""  # the rollup that was last verified
    published: dict[SeqNo, str] = field(default_factory=dict)  # the commit ids
    behind_s: float | None = None  # since when entries are known to be missing


@dataclass
class _Journal:
    """The commits in a journal."""

    size: int
    written_s: float  # monotonic
    commits: dict[str, dict[SeqNo, str]]


class Published:
    """The publications of a location. Use one per maintenance process. Thread-safe.

    `at_once`: publish missing entries as soon as they are noticed, in a process that visits each shard once.
    """

    def __init__(self, location: Location, settings: PublishSettings | None = None, *, at_once: bool = False) -> None:
        self.settings = settings or PublishSettings()
        self._location = location
        self._at_once = at_once
        self._publisher = Publisher(location.blob, location.identity, location.clock, location.ids, self.settings)
        self._lock = threading.RLock()
        self._progress: OrderedDict[str, _Progress] = OrderedDict()
        self._journals: dict[str, _Journal] = {}
        self._read_s: float | None = None
        self._round_s: float | None = None
        self.bad_journals = 0

    def visit(self, name: str, state: State) -> float | None:
        """Publish the missing entries of this shard. Returns the seconds until the next visit; None: all is published.

        Raises the errors of the stores; a retry is safe.
        """
        with self._lock:
            self._read_journals()
        try:
            self._check_rollup(name, state)
        finally:  # an error of one shard does not delay the others
            self.flush()
        with self._lock:
            progress = self._of(name)
            if not self._is_behind(progress, state):
                progress.behind_s = None
                return None if self._publisher.is_idle else self.settings.every_s
            now_s = self._location.clock.monotonic()
            progress.behind_s = now_s if progress.behind_s is None else progress.behind_s
            waited_s = now_s - progress.behind_s
            if waited_s < self.settings.every_s and not self._at_once:
                return self.settings.every_s - waited_s
            progress.behind_s = None
            covered, published = progress.covered, dict(progress.published)
        self._publish(name, covered, published)
        return self.settings.every_s

    def _of(self, name: str) -> _Progress:
        progress = self._progress.setdefault(name, _Progress())
        self._progress.move_to_end(name)
        if len(self._progress) > SHARDS_MAX:
            self._progress.popitem(last=False)
            self._journals.clear()  # reread, because the dropped shard is no longer known as published
        return progress

    def _is_behind(self, progress: _Progress, state: State) -> bool:
        """Whether a version beyond the rollup is not published. The newest version is compared by its commit."""
        if state.seqno <= progress.covered:
            return False
        if progress.published.get(state.seqno) != state.commit_id:
            return True
        return any(seqno not in progress.published for seqno in range(progress.covered + 1, state.seqno))

    def _publish(self, name: str, covered: SeqNo, published: dict[SeqNo, str]) -> None:
        """Queue the missing entries for a journal, together with those of other shards."""
        missing: dict[SeqNo, tuple[str, bytes]] = {}
        following = SeqNo(covered + 1)
        while len(missing) < PUBLISHED_AT_ONCE_MAX:
            with translated():
                page = self._location.consensus.scan(name, int(following), SCAN_LIMIT)
            if not page:
                break
            for entry in page:
                change = self._location.versions.decode(entry.data)
                if published.get(change.seqno) != change.commit_id:
                    missing[change.seqno] = (change.commit_id, entry.data)
            following = SeqNo(page[-1].seqno + 1)
        with self._lock:
            dropped, progress = self._publisher.dropped, self._of(name)
            for seqno, (commit_id, data) in missing.items():
                self._publisher.add(name, data)
                if self._publisher.dropped != dropped:  # the queue is full: the next visit reads the rest
                    break
                progress.published[seqno] = commit_id
        self.flush()

    def flush(self, *, now: bool = False) -> None:
        """Write the queued entries if the interval is over. Raises the errors of the stores."""
        with self._lock:
            before = self._publisher.dropped
            try:
                with translated():
                    self._publisher.publish(now=now)
            except PersistError:
                self._forget_published()
                raise
            if self._publisher.dropped != before:
                self._forget_published()

    def _forget_published(self) -> None:
        """Discard the progress, because entries assumed published may be lost."""
        self._progress.clear()
        self._journals.clear()
        self._read_s = None

    # --- journals of all processes

    def _read_journals(self) -> None:
        """Read new journals, at most once an interval."""
        now_s = self._location.clock.monotonic()
        if self._read_s is not None and now_s - self._read_s < self.settings.every_s:
            return
        with translated():
            stats = {stat.key: stat for stat in self._location.blob.list(JOURNALS) if is_journal_key(stat.key)}
        for key in self._journals.keys() - stats.keys():
            del self._journals[key]
        build = self._location.settings.build
        for key in sorted(stats.keys() - self._journals.keys()):
            entries = self._entries_in(key)
            if entries is None:
                continue
            commits: dict[str, dict[SeqNo, str]] = {}
            for name, of_shard in entries.items():
                changes = [decode_diff(entry, build) for entry in of_shard]
                commits[name] = {change.seqno: change.commit_id for change in changes}
            age_s = max(0, self._location.clock.now_ms() - stats[key].modified_ms) / 1000
            self._journals[key] = _Journal(stats[key].size, now_s - age_s, commits)
            for name, ids in commits.items():
                progress = self._of(name)
                progress.published.update({seqno: commit for seqno, commit in ids.items() if seqno > progress.covered})
        self._read_s = now_s

    def _entries_in(self, key: str) -> dict[str, tuple[bytes, ...]] | None:
        """The entries of a journal by shard. None: it was deleted. A damaged journal is kept and has no entries."""
        try:
            with translated_but_missing():
                journal = decode_journal(self._location.blob.get(key), self._location.settings.build)
        except BlobNotFound:
            return None
        except Corruption as error:
            self.bad_journals += 1
            log.error("damaged journal", extra={"blob": key, "why": error.message})
            return {}
        return {shard.name: shard.entries for shard in journal.shards}

    # --- entries that rollups cover

    def _check_rollup(self, name: str, state: State) -> None:
        """Read the newest rollup back; the publications that a verified rollup covers may be deleted."""
        newest = max(state.rollups, default=NOTHING)
        with self._lock:
            progress = self._of(name)
            if newest <= progress.covered or state.rollups[newest].key == progress.checked:
                return
            progress.checked = state.rollups[newest].key
        rollup = read_back(self._location.versions, state, newest)
        if rollup is None:
            return
        # A rollup that names itself begins a log, and another one may have begun it: its entry must be published, too.
        covered = SeqNo(newest - 1) if newest in rollup.rollups else newest
        with self._lock:
            progress = self._of(name)
            progress.covered = max(progress.covered, covered)
            published = progress.published
            progress.published = {seqno: published[seqno] for seqno in published if seqno > progress.covered}

    def _is_covered(self, name: str, seqno: SeqNo) -> bool:
        progress = self._progress.get(name)
        return progress is not None and seqno <= progress.covered

    # --- periodic rounds

    def round(self, names: dict[str, bool] | None = None) -> bool:
        """Write a heartbeat and a catalogue, and delete covered journals; at most once a heartbeat. Whether it was due.

        `names`: every shard and whether it was dropped, for the catalogue.
        """
        with self._lock:
            if not self.is_time():
                return False
            self._round_s = now_s = self._location.clock.monotonic()
            self._location.identity.confirm()
            self._write_beat()
            if names is not None:
                self._write_catalogue(names)
            self._read_journals()
            # Shards that have entries in an old journal and no known rollup, because they were not visited recently.
            old = [each for each in self._journals.values() if now_s - each.written_s >= KEEP_S]
            names_in_old = sorted({name for journal in old for name in journal.commits})
            unsettled = [name for name in names_in_old if self._of(name).covered == NOTHING][:UNSETTLED_MAX]
        for name in unsettled:
            with suppress(UnknownShard, Corruption):  # a lost shard does not delay the others
                self._check_rollup(name, self._location.machine(name).refresh())
        with self._lock:
            self._clean_up(now_s)
        return True

    def is_time(self) -> bool:
        """Whether `round` would do anything."""
        now_s = self._location.clock.monotonic()
        return self._round_s is None or now_s - self._round_s >= BEAT_S

    def _write_beat(self) -> None:
        blob = self._location.blob
        with translated():
            with suppress(BlobExists):
                blob.put(beat_key(self._location.clock.now_ms()), b"")
            beats = [stat.key for stat in blob.list(BEATS) if is_beat_key(stat.key)]
            if old := beats[:-BEATS_KEPT]:
                blob.delete(old)

    def _write_catalogue(self, names: dict[str, bool]) -> None:
        """Write a catalogue if it differs from the last one."""
        blob = self._location.blob
        shards = {name: "" if dropped else shard_id_of(name) for name, dropped in names.items()}
        with translated():
            keys = [stat.key for stat in blob.list(CATALOGUES) if is_catalogue_key(stat.key)]
            if keys:
                with suppress(Corruption, BlobNotFound):
                    if decode_catalogue(blob.get(keys[-1])) == shards:
                        return
            number = catalogue_number(keys[-1]) + 1 if keys else 1
            with suppress(BlobExists):  # another maintenance process was faster
                blob.put(catalogue_key(number), encode_catalogue(shards))
                if old := keys[: 1 - CATALOGUES_KEPT]:
                    blob.delete(old)

    def _clean_up(self, now_s: float) -> None:
        """Delete journals that rollups cover, and rewrite those that they cover in part."""
        covered: list[str] = []
        partly: list[str] = []
        uncovered: list[str] = []
        for key, journal in sorted(self._journals.items()):
            if now_s - journal.written_s < KEEP_S or not journal.commits:
                continue
            pairs = [(name, seqno) for name, commits in journal.commits.items() for seqno in commits]
            remaining = sum(1 for name, seqno in pairs if not self._is_covered(name, seqno))
            (covered if not remaining else partly if remaining < len(pairs) else uncovered).append(key)
        self._delete(covered)
        self._rewrite(partly + (uncovered if len(uncovered) > SMALL_JOURNALS_MAX else []))

    def _rewrite(self, keys: list[str]) -> None:
        """Combine the uncovered entries of these journals into one journal, then delete them."""
        entries: dict[str, dict[bytes, None]] = {}
        rewritten: list[str] = []
        size = 0
        for key in keys:
            size += self._journals[key].size
            if rewritten and size > REWRITE_BYTES_MAX:
                break
            journal = self._entries_in(key)
            if journal == {}:
                continue  # damaged since the last read: kept, because a later read may succeed
            for name, of_shard in (journal or {}).items():
                for entry in of_shard:
                    seqno = decode_diff(entry, self._location.settings.build).seqno
                    if not self._is_covered(name, seqno):
                        entries.setdefault(name, {})[entry] = None
            rewritten.append(key)
        if entries:
            with translated():
                self._publisher.put({name: tuple(of_shard) for name, of_shard in entries.items()})
        self._delete(rewritten)

    def _delete(self, keys: list[str]) -> None:
        if not keys:
            return
        self._location.identity.confirm()
        with translated():
            self._location.blob.delete(keys)
        for key in keys:
            self._journals.pop(key, None)

    def close(self) -> None:
        """Publish the queued entries, ignoring errors of the stores."""
        with suppress(PersistError, BlobError):
            self.flush(now=True)
