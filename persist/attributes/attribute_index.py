"""The index of a shard's attributes as the committer uses it, and the clock marks stored in it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice

from blob import Blob
from persist.attributes.btree import NodeReader, TreeFlush, entries, last_key, lookup
from persist.attributes.node_codec import DEFAULT_SHAPE, Shape, Update
from persist.attributes.node_store import ChunkReader, ChunkWriter, NodeCache
from persist.core import commands as c
from persist.core.attribute import MARKS_FROM, AttributeKey, IndexChunk, is_core_key, key_after
from persist.core.blob_keys import chunk_key
from persist.core.clock_index import Mark, mark_key, mark_of, mark_value
from persist.core.ids import IdSource
from persist.core.record import replace
from persist.core.state import State
from persist.core.transitions.context import NOTHING_INDEXED, Indexed, IndexPage

OUTLIVED_MAX = 4_096  # marks that one flush removes
SCAN_LEAVES_MAX = 64  # leaves that one scan reads


class Marks:
    """The clock marks in the index of this State; the State itself holds the later ones.

    A mark records the upper that the shard had by an instant. In key order later marks come first, so the newest mark
    at or before an instant is the first entry from that instant's key on. The uppers of marks never decrease, so the
    first mark beyond a time is found by binary search.
    """

    def __init__(self, state: State, reader: NodeReader) -> None:
        self._state = state
        self._reader = reader

    def newest_at(self, at_ms: int) -> Mark | None:
        """The newest mark at or before the instant."""
        return next(self._down_from(at_ms), None)

    def first_ms(self) -> int | None:
        """The instant of the oldest mark in the index; None if there is none."""
        last = last_key(self._state.attribute_root, self._reader)
        key = AttributeKey("" if last is None else last.hex())
        return mark_of(key, 0).at_ms if key >= MARKS_FROM else None

    def first_beyond(self, time: int) -> Mark | None:
        """The first mark in the index whose upper is beyond the time, if any."""
        if self._state.seal.last is None:
            return None
        earliest = self.newest_at(self._last_ms())
        if earliest is None or earliest.upper.less_equal(time):
            return None
        first_ms = 0  # no mark before this instant is beyond the time
        while first_ms < earliest.at_ms:
            middle = (first_ms + earliest.at_ms - 1) // 2
            mark = self.newest_at(middle)
            if mark is not None and not mark.upper.less_equal(time):
                earliest = mark
            else:
                first_ms = middle + 1
        return earliest

    def around(self, first: int, last: int, limit: int) -> tuple[Mark, ...]:
        """At most `limit` marks, newest first: from the first one beyond `last` to one that is not beyond `first`.

        If no mark is beyond `last`, from the newest one on.
        """
        if self._state.seal.last is None:
            return ()
        beyond = self.first_beyond(last)
        marks: list[Mark] = []
        for mark in self._down_from(self._last_ms() if beyond is None else beyond.at_ms):
            marks.append(mark)
            if len(marks) == limit or mark.upper.less_equal(first):
                break
        return tuple(marks)

    def outlived(self) -> list[AttributeKey]:
        """At most `OUTLIVED_MAX` marks whose times are all before since, without the newest such mark.

        That one still resolves the instants up to the next mark.
        """
        since, last = self._state.since.element, self._state.seal.last
        if since is None or not self._state.attribute_root.height:
            return []
        first = self.first_beyond(since)
        if first is None and (last is None or last.upper.less_equal(since)):
            return []  # the marks in the State are before since, too: the next flush finds the same ones
        newest = self.newest_at(self._last_ms() if first is None else first.at_ms - 1)
        if newest is None or not newest.at_ms:
            return []
        older = islice(self._down_from(newest.at_ms - 1), OUTLIVED_MAX)
        return [mark_key(mark.at_ms) for mark in older]

    def _last_ms(self) -> int:
        """The instant before the first mark that the State holds."""
        last = self._state.seal.last
        return min([*self._state.marks, last.at_ms if last else 0]) - 1

    def _down_from(self, at_ms: int) -> Iterator[Mark]:
        """The marks at or before the instant, newest first."""
        if at_ms < 0:
            return  # marks begin in 1970
        for leaf in entries(self._state.attribute_root, self._reader, bytes.fromhex(mark_key(at_ms))):
            for key, value in leaf:
                yield mark_of(AttributeKey(key.hex()), value)


class AttributeIndex:
    """Reads and writes the index of one shard. Thread-safe."""

    def __init__(self, blob: Blob, ids: IdSource, cache: NodeCache, shape: Shape = DEFAULT_SHAPE) -> None:
        self._blob = blob
        self._ids = ids
        self._cache = cache
        self._shape = shape
        self._latest = ChunkReader(blob, {}, cache)

    def indexed(self, state: State, commands: Iterable[c.Command]) -> Indexed:
        """The index entries that the commands need, for `state` or a State that follows it within the same commit.

        Raises StaleIndex if the State is so old that its index was deleted, and the errors of the store.
        """
        if not state.attribute_root.height:
            return NOTHING_INDEXED
        keys: set[AttributeKey] = set()
        instants: set[int] = set()
        spans: dict[tuple[int, int], int] = {}
        pages: dict[tuple[AttributeKey, AttributeKey | None], int] = {}
        for command in commands:
            if isinstance(command, c.ReadAttributes):
                keys.update(command.keys)
            elif isinstance(command, c.ScanAttributes):
                pages[command.lower, command.upper] = max(command.limit, pages.get((command.lower, command.upper), 0))
            elif isinstance(command, (c.CompareAndAppend, c.Append, c.Insert, c.Rewrite, c.UpdateAttributes)):
                keys.update(update.key for update in command.attributes if update.needs_value)
            elif isinstance(command, c.ResolveTime):
                instants.add(command.at_ms)
            elif isinstance(command, c.TakeCuts):
                instants.update([*command.at_ms, *(rung.at_ms for rung in command.rungs)])
            elif isinstance(command, c.ReadRetention):
                instants.update(command.cuts_ms)
            elif isinstance(command, c.ForgetOutlived) and command.before_ms is not None:
                instants.add(command.before_ms)
            elif isinstance(command, c.TimesShown):
                spans[command.first, command.last] = max(command.limit, spans.get((command.first, command.last), 0))
        keys = {key for key in keys if key not in state.attributes and not is_core_key(key)}
        marks = Marks(state, self._reader(state.attribute_chunks))
        newest = {at_ms: marks.newest_at(at_ms) for at_ms in instants}
        return Indexed(
            state.attribute_root.flushes,
            self.lookup(state, keys) if keys else {},
            {span: self.page(state, *span, limit) for span, limit in pages.items()},
            newest,
            {span: marks.around(*span, limit) for span, limit in spans.items()},
            marks.first_ms() if None in newest.values() else None,
        )

    def lookup(self, state: State, keys: Iterable[AttributeKey]) -> dict[AttributeKey, int | None]:
        """The values of these keys in the index, ignoring those in the State."""
        wanted = {bytes.fromhex(key): key for key in keys}
        values = lookup(state.attribute_root, self._reader(state.attribute_chunks), list(wanted))
        return {key: values[raw] for raw, key in wanted.items()}

    def page(self, state: State, lower: AttributeKey, upper: AttributeKey | None, limit: int) -> IndexPage:
        """The first index entries with keys in `[lower, upper)`: `limit`, plus as many as the State may override."""
        end = bytes.fromhex(MARKS_FROM if upper is None else min(upper, MARKS_FROM))
        covered = sum(1 for key in state.attributes if lower <= key and (upper is None or key < upper))
        page: list[tuple[bytes, int]] = []
        leaves = entries(state.attribute_root, self._reader(state.attribute_chunks), bytes.fromhex(lower))
        for leaf in islice(leaves, SCAN_LEAVES_MAX):
            within = [entry for entry in leaf if entry[0] < end]
            page.extend(within)
            if len(within) < len(leaf):
                return _page(page, None)
            if len(page) > limit + covered:
                break
        else:
            if next(leaves, None) is None:
                return _page(page, None)
        return _page(page, key_after(AttributeKey(page[-1][0].hex())))

    def flush(self, state: State) -> c.FlushAttributes:
        """Write the State's recent values and marks into a new version of its index; the command that installs it.

        Marks that no read can use any more are removed.
        """
        values: dict[AttributeKey, int | None] = dict(state.attributes)
        values |= {mark_key(at_ms): mark_value(upper) for at_ms, upper in state.marks.items()}
        values |= dict.fromkeys(Marks(state, self._reader(state.attribute_chunks)).outlived(), None)
        updates: list[Update] = [(bytes.fromhex(key), values[key]) for key in sorted(values)]
        return self.flushed(state, updates)

    def flushed(self, state: State, updates: list[Update], *, compact: bool = True) -> c.FlushAttributes:
        """As `flush`, for any updates: ascending by key, no key twice. Tests do not `compact`: rewrite old leaves."""
        root, shape = state.attribute_root, self._shape
        reader = self._reader(state.attribute_chunks)
        new_key = partial(chunk_key, state.shard_id, self._ids)
        writer = ChunkWriter(self._blob, new_key, self._cache, root.end, shape.chunk_bytes_target)
        moves = shape.crowded_moves_max

        def crowded(lowest: int) -> bool:
            nonlocal moves
            live = len(reader.firsts) - bisect_right(reader.firsts, lowest) + 1
            moves -= 1
            return moves >= 0 and live + len(writer.chunks) >= shape.chunks_max

        following = TreeFlush(root, reader, writer, shape, compact=compact).run(updates, crowded)
        writer.close()
        lowest = following.lowest if following.height else writer.end
        following = replace(following, lowest=lowest, end=writer.end)
        values = {AttributeKey(key.hex()): value for key, value in updates}
        return c.FlushAttributes(root, following, writer.chunks, values)

    def _reader(self, chunks: Mapping[int, IndexChunk]) -> ChunkReader:
        latest = self._latest
        if latest.chunks is not chunks:
            latest = self._latest = ChunkReader(self._blob, chunks, self._cache)
        return latest


def _page(entries: list[tuple[bytes, int]], following: AttributeKey | None) -> IndexPage:
    return IndexPage({AttributeKey(key.hex()): value for key, value in entries}, following)
