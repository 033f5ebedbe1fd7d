"""What a shard did in a stretch of wall-clock time, told by its log, by a listing and by its commit history.

A key tells when its blob was made. So every blob that is there, and every one that the log says has left, counts as put
on its day. Of a blob that was deleted, and whose log entry was collected after it, nothing is left: it is not counted.
So the counts are whole from the first entry of the log on, and at least so many before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from blob import BlobNotFound, BlobStat
from persist.attributes.storage import NodeCache
from persist.commit.entry_files import EntryFiles
from persist.commit.system import SystemIds
from persist.core.errors import Corruption
from persist.core.ids import family_of, shard_id_of
from persist.core.keys import belongs_to, born_ms, is_bundle_key, is_of_maintenance, is_part_key, shard_of
from persist.core.recorded import MAINTENANCE, MERGE, PAGE_MAX, Entry
from persist.core.state import Policy, State
from persist.core.state_diff import StateDiff
from persist.cost.tally import DAY_MS, PUT_KINDS, Tally, kind_of, put_of, tally_of
from persist.inspect.log import Logged
from persist.inspect.looking import Look
from persist.inspect.records import Findings
from persist.inspect.states import Rechecked, Seen

PAGES_MAX = 100_000  # of the commit history of one shard, which are read for one answer
CACHE_BYTES_MAX = 1024 * 1024
POLICY = Policy()  # by which a commit takes rows along, and rollups are made, unless a location says otherwise


@dataclass(frozen=True, slots=True)
class Window:
    """The wall clocks `[from_ms, to_ms)`, in milliseconds since 1970."""

    from_ms: int
    to_ms: int

    def has(self, at_ms: int) -> bool:
        return self.from_ms <= at_ms < self.to_ms


@dataclass(frozen=True, slots=True)
class Did:
    """What a shard did. `days` are by days since 1970. `whole_from_ms` is from when on nothing is left out.

    `merged` are the blobs that merges took the place of, with their sizes (None:
    not known). `puts` are the PUTs of the window: counted, or where something is left out worked out besides.
    """

    days: Mapping[int, Tally]
    whole_from_ms: int
    merged: Mapping[str, int | None]
    puts: int


@dataclass(slots=True)
class _History:
    """What the commit history tells of the window: appends too large for the State, and the versions that it spans."""

    staged: int = 0
    first: int = 0
    last: int = 0

    def saw(self, seqno: int, entry: Entry) -> None:
        self.first, self.last = seqno, self.last or seqno
        self.staged += entry.operation not in MAINTENANCE and entry.size > POLICY.inline_part_bytes_max

    def puts(self, counted: Tally) -> int:
        """PUTs of which at least these were made: one for such an append, for a merge, and for so many versions."""
        rollups = (self.last - self.first + 1) // POLICY.rollup_every if self.last else 0
        merged = counted.of("flushed", "compacted").requests
        return (
            max(counted.of("parts").requests, self.staged)
            + max(merged, counted.merges)
            + max(counted.of("rollups").requests, rollups)
            + counted.of("bundles", "index").requests
        )


@dataclass(slots=True)
class ShardWatcher:
    """Hears what `persist.inspect.usage` reads of one shard."""

    name: str
    window: Window
    sizes: dict[str, int] = field(default_factory=dict)  # of what is there
    named: dict[str, int | None] = field(default_factory=dict)  # what the log names
    gone: Mapping[str, int] = field(default_factory=dict)
    merged: set[str] = field(default_factory=set)
    log_from_ms: int | None = None  # when the log begins; None: it tells all from v1 on
    _walltimes: dict[int, int] = field(default_factory=dict)
    _has_begun: bool = False
    seen: Seen | None = None

    def known(self, seen: Seen) -> None:
        self.seen = seen

    def logged(self, logged: Logged) -> None:
        change = logged.change
        if not self._has_begun and logged.seqno != 1:
            self.log_from_ms = self.window.to_ms if change is None else change.walltime_ms
        self._has_begun = True
        if change is None:
            return
        self.named.update(keys_named(change))
        if change.gone:
            self._walltimes[logged.seqno] = change.walltime_ms
        if is_merge(change):
            self.merged.update(key for key in change.gone if is_part_key(key) or is_bundle_key(key))

    def listed(self, stat: BlobStat) -> None:
        self.sizes[stat.key] = stat.size

    def left(self, gone: Mapping[str, int]) -> None:
        self.gone = gone

    def did(self, look: Look, findings: Findings) -> Did:
        """All of it. Reads the commit history. Raises Unavailable."""
        days: dict[int, Tally] = {}

        def day_of(at_ms: int) -> Tally:
            return days.setdefault(at_ms // DAY_MS, Tally())

        history = _History()
        history_from_ms = self._count_commits(look, day_of, history, findings)
        whole_from_ms = max(self.window.from_ms, self.log_from_ms or 0, history_from_ms)
        for key, size in self.blobs():
            if self.window.has(at_ms := born_ms(key)):
                day_of(at_ms).put(kind_of(key), put_of(size))
        merged: dict[str, int | None] = {}
        for key, seqno in self.gone.items():
            at_ms = self._walltimes.get(seqno, 0)
            if not self.window.has(at_ms):
                continue
            if key in self.merged:
                merged[key] = self._size(key)
            if key not in self.sizes:
                day_of(at_ms).deleted += 1
        counted = tally_of(list(days.values()))
        is_whole = whole_from_ms <= self.window.from_ms
        puts = counted.of(*PUT_KINDS).requests if is_whole else history.puts(counted)
        return Did(dict(sorted(days.items())), whole_from_ms, merged, puts)

    def _count_commits(self, look: Look, day_of: Callable[[int], Tally], history: _History, findings: Findings) -> int:
        """Count the commits of the window by their history; since when that is whole (0: all of the window).

        What cannot be read is noted.
        """
        state = None if self.seen is None else self.seen.state
        at_ms, seqno = self.window.to_ms, 0
        if state is None:
            return at_ms
        try:
            for found, at_ms, entry in _entries(look, state):
                if at_ms < self.window.from_ms:
                    return 0
                if self.window.has(at_ms):
                    history.saw(found, entry)
                    day = day_of(at_ms)
                    day.commits += found != seqno
                    day.merges += entry.operation == MERGE
                    if entry.operation not in MAINTENANCE:
                        day.rows, day.bytes = day.rows + entry.rows, day.bytes + entry.size
                seqno = found
        except (BlobNotFound, Corruption) as error:
            if not Rechecked(look, state).has_moved:
                findings.note(f"the commit history cannot be read: {error}")
        return 0 if seqno == 1 else at_ms

    def blobs(self) -> Iterator[tuple[str, int | None]]:
        """Every blob of this shard, in any of its lives, that is there or that the log tells of."""
        family = family_of(shard_id_of(self.name))
        for key in {**self.sizes, **self.named, **dict.fromkeys(self.gone)}:
            if key.startswith(family) and belongs_to(key, shard_of(key)):
                yield key, self._size(key)

    def _size(self, key: str) -> int | None:
        found = self.sizes.get(key)
        return self.named.get(key) if found is None else found


@dataclass(slots=True)
class RestWatcher:
    """Hears of the blobs that belong to no shard. Their keys do not all tell when they were made: the store does."""

    window: Window
    tally: Tally = field(default_factory=Tally)

    def listed(self, stat: BlobStat) -> None:
        if self.window.has(stat.modified_ms):
            self.tally.put("index", put_of(stat.size))

    def logged(self, logged: Logged) -> None:
        return

    def left(self, gone: Mapping[str, int]) -> None:
        return

    def known(self, seen: Seen) -> None:
        return


def is_merge(change: StateDiff) -> bool:
    """Whether it brings what a merge has written: by its history, or else by the keys of the parts."""
    held = None if change.entries is None else change.entries.set.get(change.seqno)
    if held is not None and any(entry.operation == MERGE for entry in held.entries):
        return True
    if change.trace is None or not change.trace.count:
        return False
    keys = (part.key for batch in change.trace.batches for part in batch.parts())
    return any(key is not None and is_of_maintenance(key) for key in keys)


def keys_named(change: StateDiff) -> Iterator[tuple[str, int | None]]:
    """The blobs that a state diff brings, with their sizes as far as it tells them."""
    parts = [] if change.trace is None else [part for batch in change.trace.batches for part in batch.parts()]
    if change.claims is not None:
        parts += [part for claim in change.claims.set.values() for part in claim.done]
    yield from ((part.key, part.blob_size) for part in parts if part.key is not None)
    if change.rollups is not None:
        yield from ((one.key, one.size or None) for one in change.rollups.set.values())
    if change.attribute_chunks is not None:
        yield from ((chunk.key, None) for chunk in change.attribute_chunks.set.values())
    yield from ((file.key, None) for file in change.outcome_files or ())
    yield from ((entry_file.key, entry_file.size) for entry_file in change.entry_files or ())
    if change.long_diffs is not None:
        yield from ((key, None) for key in change.long_diffs.set.values())
    if change.loans is not None:
        yield from ((loan.list_key, None) for loan in change.loans.set.values())


def _entries(look: Look, state: State) -> Iterator[tuple[int, int, Entry]]:
    """The commit history, newest first: version, wall clock and entry. Raises BlobNotFound, Corruption."""
    files = EntryFiles(look.versions, SystemIds(), NodeCache(CACHE_BYTES_MAX))
    before = None
    for _ in range(PAGES_MAX):
        page = files.page(state, before, PAGE_MAX, maintenance=True)
        yield from ((int(one.place.seqno), one.at_ms, one.entry) for one in page.told)
        before = page.following
        if before is None:
            return
