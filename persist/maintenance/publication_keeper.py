"""What maintenance does for publications: publish what others did not, delete what rollups cover, tell the names.

It may be killed at any instant, and any number may work at once: what two of them publish is the same.
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
from persist.maintenance.publication_writer import Publisher, PublishSettings

log = logging.getLogger("persist.publications")

NOTHING = SeqNo(0)
SHARDS_KEPT_MAX = 100_000  # of which it is remembered what is published
SCAN_LIMIT = 1_000  # log entries that are read at once
PUBLISHED_AT_ONCE_MAX = 10_000  # log entries of one shard
REWRITE_BYTES_MAX = 8 * 1024 * 1024  # of journals that one round writes anew
SMALL_JOURNALS_MAX = 64  # older ones that are covered in no part are put together beyond that
UNSETTLED_MAX = 1_000  # shards that one round looks at, for it does not know how far their rollups go
CATALOGUES_KEPT = 2
BEATS_KEPT = 2


@dataclass
class _Known:
    """What is known of one shard. `published`: seqnos beyond `covered`, which the newest sound rollup holds."""

    covered: SeqNo = NOTHING
    checked: str = ""  # the rollup that was read back last
    published: dict[SeqNo, str] = field(default_factory=dict)  # the commit ids
    behind_s: float | None = None  # since when something is known to be missing


@dataclass
class _Journal:
    """A journal that is there: the commits that it tells of."""

    size: int
    seen_s: float
    commits: dict[str, dict[SeqNo, str]]


class Published:
    """What is published of a location. One a process of maintenance. Thread-safe.

    `at_once`: what is missing is published when it is first seen, by a process that does not come back to it.
    """

    def __init__(self, location: Location, settings: PublishSettings | None = None, *, at_once: bool = False) -> None:
        self.settings = settings or PublishSettings()
        self._location = location
        self._at_once = at_once
        self._publisher = Publisher(location.blob, location.identity, location.clock, location.ids, self.settings)
        self._lock = threading.RLock()
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._journals: dict[str, _Journal] = {}
        self._read_s: float | None = None
        self._round_s: float | None = None
        self.bad_journals = 0

    def look(self, name: str, state: State) -> float | None:
        """Publish what nobody else has published of this shard. In how many seconds to look again; None: it is all.

        Raises what the stores raise; repeating it is safe.
        """
        with self._lock:
            self._read_journals()
        try:
            self._look_at_rollup(name, state)
        finally:  # what is wrong with the rollup of one shard keeps nothing of the others
            self.flush()
        with self._lock:
            known = self._of(name)
            if not self._lacks(known, state):
                known.behind_s = None
                return None if self._publisher.is_idle else self.settings.every_s
            now_s = self._location.clock.monotonic()
            known.behind_s = now_s if known.behind_s is None else known.behind_s
            waited_s = now_s - known.behind_s
            if waited_s < self.settings.every_s and not self._at_once:
                return self.settings.every_s - waited_s
            known.behind_s = None
            covered, published = known.covered, dict(known.published)
        self._publish(name, covered, published)
        return self.settings.every_s

    def _of(self, name: str) -> _Known:
        known = self._known.setdefault(name, _Known())
        self._known.move_to_end(name)
        if len(self._known) > SHARDS_KEPT_MAX:
            self._known.popitem(last=False)
            self._journals.clear()  # read anew: what is forgotten is no longer known as published
        return known

    def _lacks(self, known: _Known, state: State) -> bool:
        """Whether a version beyond the rollup is not published. The newest one is compared by its commit."""
        if state.seqno <= known.covered:
            return False
        if known.published.get(state.seqno) != state.commit_id:
            return True
        return any(seqno not in known.published for seqno in range(known.covered + 1, state.seqno))

    def _publish(self, name: str, covered: SeqNo, published: dict[SeqNo, str]) -> None:
        """Queue what is missing, for one journal with what was gathered of other shards since the last."""
        lacking: dict[SeqNo, tuple[str, bytes]] = {}
        following = SeqNo(covered + 1)
        while len(lacking) < PUBLISHED_AT_ONCE_MAX:
            with translated():
                page = self._location.consensus.scan(name, int(following), SCAN_LIMIT)
            if not page:
                break
            for entry in page:
                change = self._location.versions.decode(entry.data)
                if published.get(change.seqno) != change.commit_id:
                    lacking[change.seqno] = (change.commit_id, entry.data)
            following = SeqNo(page[-1].seqno + 1)
        with self._lock:
            dropped, known = self._publisher.dropped, self._of(name)
            for seqno, (commit_id, data) in lacking.items():
                self._publisher.add(name, data)
                if self._publisher.dropped != dropped:  # the queue is full: the rest is read from the log the next time
                    break
                known.published[seqno] = commit_id
        self.flush()

    def flush(self, *, now: bool = False) -> None:
        """Put what was gathered, if the interval is over. Raises what the stores raise."""
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
        """What was thought to be published may not be: it is found out anew."""
        self._known.clear()
        self._journals.clear()
        self._read_s = None

    # --- journals of all processes

    def _read_journals(self, *, now: bool = False) -> None:
        """Read the journals that came since the last time; at most once an interval."""
        now_s = self._location.clock.monotonic()
        if not now and self._read_s is not None and now_s - self._read_s < self.settings.every_s:
            return
        with translated():
            listed = {stat.key: stat for stat in self._location.blob.list(JOURNALS) if is_journal_key(stat.key)}
        for key in self._journals.keys() - listed.keys():
            del self._journals[key]
        for key in sorted(listed.keys() - self._journals.keys()):
            commits = self._commits_in(key)
            if commits is None:
                continue
            age_s = max(0, self._location.clock.now_ms() - listed[key].modified_ms) / 1000
            self._journals[key] = _Journal(listed[key].size, now_s - age_s, commits)
            for name, found in commits.items():
                known = self._of(name)
                known.published.update({seqno: commit for seqno, commit in found.items() if seqno > known.covered})
        self._read_s = now_s

    def _entries_in(self, key: str) -> dict[str, tuple[bytes, ...]] | None:
        """None: it is gone. One that is damaged tells of nothing, and stays."""
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

    def _commits_in(self, key: str) -> dict[str, dict[SeqNo, str]] | None:
        found = self._entries_in(key)
        if found is None:
            return None
        build = self._location.settings.build
        commits: dict[str, dict[SeqNo, str]] = {}
        for name, entries in found.items():
            changes = (decode_diff(entry, build) for entry in entries)
            commits[name] = {change.seqno: change.commit_id for change in changes}
        return commits

    # --- what rollups cover

    def _look_at_rollup(self, name: str, state: State) -> None:
        """Note the newest rollup, once it was read back: what is published of before it may go."""
        newest = max(state.rollups, default=NOTHING)
        with self._lock:
            known = self._of(name)
            if newest <= known.covered or state.rollups[newest].key == known.checked:
                return
            known.checked = state.rollups[newest].key
        held = read_back(self._location.versions, state, newest)
        if held is None:
            return
        # One that names itself counts only where its entry is published: another may have begun the log.
        covered = SeqNo(newest - 1) if newest in held.rollups else newest
        with self._lock:
            known = self._of(name)
            known.covered = max(known.covered, covered)
            known.published = {seqno: commit for seqno, commit in known.published.items() if seqno > known.covered}

    def _is_covered(self, name: str, seqno: SeqNo) -> bool:
        known = self._known.get(name)
        return known is not None and seqno <= known.covered

    # --- now and then

    def round(self, names: dict[str, bool] | None = None) -> bool:
        """Tell that maintenance is at work, and tidy up; at most once a heartbeat. Whether it was time.

        `names`: every shard, and whether it was dropped; for the catalogue.
        """
        with self._lock:
            now_s = self._location.clock.monotonic()
            if self._round_s is not None and now_s - self._round_s < self.settings.beat_s:
                return False
            self._round_s = now_s
            self._location.identity.confirm()
            self._beat()
            if names is not None:
                self._list_names(names)
            self._read_journals()
            unsettled = self._unsettled(now_s)
        for name in unsettled:
            with suppress(UnknownShard, Corruption):  # one that was lost holds up no other
                self._look_at_rollup(name, self._location.machine(name).refresh())
        with self._lock:
            self._tidy(now_s)
        return True

    def is_time(self) -> bool:
        """Whether `round` would do anything."""
        now_s = self._location.clock.monotonic()
        return self._round_s is None or now_s - self._round_s >= self.settings.beat_s

    def _beat(self) -> None:
        blob = self._location.blob
        with translated():
            with suppress(BlobExists):
                blob.put(beat_key(self._location.clock.now_ms()), b"")
            beats = [stat.key for stat in blob.list(BEATS) if is_beat_key(stat.key)]
            if len(beats) > BEATS_KEPT:
                blob.delete(beats[:-BEATS_KEPT])

    def _list_names(self, names: dict[str, bool]) -> None:
        """Write a catalogue if it would be another one than the last."""
        blob = self._location.blob
        shards = {name: "" if dropped else shard_id_of(name) for name, dropped in names.items()}
        with translated():
            keys = [stat.key for stat in blob.list(CATALOGUES) if is_catalogue_key(stat.key)]
            if keys:
                with suppress(Corruption, BlobNotFound):
                    if decode_catalogue(blob.get(keys[-1])) == shards:
                        return
            number = catalogue_number(keys[-1]) + 1 if keys else 1
            with suppress(BlobExists):  # another process of maintenance was quicker
                blob.put(catalogue_key(number), encode_catalogue(shards))
                old = keys[: 1 - CATALOGUES_KEPT]
                if old:
                    blob.delete(old)

    def _unsettled(self, now_s: float) -> list[str]:
        """Shards of which an old journal has entries, and no rollup is known: nobody has looked at them of late."""
        old = (journal for journal in self._journals.values() if now_s - journal.seen_s >= self.settings.keep_s)
        names = {name for journal in old for name in journal.commits}
        return [name for name in sorted(names) if self._of(name).covered == NOTHING][:UNSETTLED_MAX]

    def _tidy(self, now_s: float) -> None:
        """Delete journals that rollups cover, and write those anew that they cover in part."""
        covered: list[str] = []
        partly: list[str] = []
        small: list[str] = []
        for key, journal in sorted(self._journals.items()):
            if now_s - journal.seen_s < self.settings.keep_s or not journal.commits:
                continue
            pairs = [(name, seqno) for name, commits in journal.commits.items() for seqno in commits]
            left = sum(1 for name, seqno in pairs if not self._is_covered(name, seqno))
            (covered if not left else partly if left < len(pairs) else small).append(key)
        self._delete(covered)
        if partly or len(small) > SMALL_JOURNALS_MAX:
            self._rewrite(partly + (small if len(small) > SMALL_JOURNALS_MAX else []))

    def _rewrite(self, keys: list[str]) -> None:
        """Put what is not covered of these journals into one, then delete them."""
        entries: dict[str, dict[bytes, None]] = {}
        taken: list[str] = []
        size = 0
        for key in keys:
            size += self._journals[key].size
            if taken and size > REWRITE_BYTES_MAX:
                break
            held = self._entries_in(key)
            if held == {}:
                continue  # damaged since it was read: it stays, as it may be read another time
            for name, found in (held or {}).items():
                for entry in found:
                    seqno = decode_diff(entry, self._location.settings.build).seqno
                    if not self._is_covered(name, seqno):
                        entries.setdefault(name, {})[entry] = None
            taken.append(key)
        if entries:
            with translated():
                self._publisher.put({name: tuple(found) for name, found in entries.items()})
        self._delete(taken)

    def _delete(self, keys: list[str]) -> None:
        if not keys:
            return
        self._location.identity.confirm()
        with translated():
            self._location.blob.delete(keys)
        for key in keys:
            self._journals.pop(key, None)

    def close(self) -> None:
        """Publish what was gathered, as far as the store takes it."""
        with suppress(PersistError, BlobError):
            self.flush(now=True)
