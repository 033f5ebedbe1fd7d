"""The index of a shard's attributes, as the committer uses it: what it reads before a step, and flushes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import islice

from blob import Blob
from persist.attributes.marks import Marks
from persist.attributes.nodes import DEFAULT_SHAPE, Shape, Update
from persist.attributes.storage import ChunkReader, ChunkWriter, NodeCache
from persist.attributes.tree import Flush, entries, lookup
from persist.core import commands as c
from persist.core.attribute import MARKS_FROM, AttributeKey, IndexChunk, is_core_key, key_after
from persist.core.ids import IdSource
from persist.core.keys import chunk_key
from persist.core.marks import mark_key, mark_value
from persist.core.record import replace
from persist.core.state import State
from persist.core.transitions.context import NOTHING_INDEXED, Indexed, IndexPage

SCAN_LEAVES_MAX = 64  # leaves that one scan reads


class AttributeIndex:
    """Reads and writes the index of one shard. Thread-safe."""

    def __init__(self, blob: Blob, ids: IdSource, cache: NodeCache, shape: Shape = DEFAULT_SHAPE) -> None:
        self._blob = blob
        self._ids = ids
        self._cache = cache
        self._shape = shape
        self._latest = ChunkReader(blob, {}, cache)

    def indexed(self, state: State, commands: Iterable[c.Command]) -> Indexed:
        """What the commands need of the index to be applied to `state`, or to one that follows within the same commit.

        Raises StaleIndex when the State is so old that its index is gone, and the errors of the store.
        """
        if not state.attribute_root.height:
            return NOTHING_INDEXED
        keys: set[AttributeKey] = set()
        instants: set[int] = set()
        times: set[int] = set()
        spans: dict[tuple[int, int], int] = {}
        pages: dict[tuple[AttributeKey, AttributeKey | None], int] = {}
        for command in commands:
            if isinstance(command, c.ReadAttributes):
                keys.update(command.keys)
            elif isinstance(command, c.ScanAttributes):
                pages[command.lower, command.upper] = max(command.limit, pages.get((command.lower, command.upper), 0))
            elif isinstance(command, (c.CompareAndAppend, c.Append, c.Insert, c.UpdateAttributes)):
                keys.update(update.key for update in command.attributes if update.needs_value)
            elif isinstance(command, (c.ResolveTime, c.TakeCut)):
                instants.add(command.at_ms)
            elif isinstance(command, c.ReadRetention):
                instants.update(command.cuts_ms)
            elif isinstance(command, c.SetRungs):
                instants.update(rung.at_ms for rung in command.rungs)
            elif isinstance(command, c.AgeHistory):
                instants.add(command.before_ms)
            elif isinstance(command, c.TimeShown):
                times.add(command.time)
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
            {time: marks.first_beyond(time) for time in times},
            {span: marks.around(*span, limit) for span, limit in spans.items()},
            marks.first_ms() if None in newest.values() else None,
        )

    def lookup(self, state: State, keys: Iterable[AttributeKey]) -> dict[AttributeKey, int | None]:
        """The values of these keys in the index alone."""
        wanted = {bytes.fromhex(key): key for key in keys}
        found = lookup(state.attribute_root, self._reader(state.attribute_chunks), list(wanted))
        return {key: found[raw] for raw, key in wanted.items()}

    def page(self, state: State, lower: AttributeKey, upper: AttributeKey | None, limit: int) -> IndexPage:
        """The first entries of the index alone with keys in `[lower, upper)`: `limit` and what the State may cover."""
        end = bytes.fromhex(MARKS_FROM if upper is None else min(upper, MARKS_FROM))
        covered = sum(1 for key in state.attributes if lower <= key and (upper is None or key < upper))
        found: list[tuple[bytes, int]] = []
        leaves = entries(state.attribute_root, self._reader(state.attribute_chunks), bytes.fromhex(lower))
        for leaf in islice(leaves, SCAN_LEAVES_MAX):
            within = [entry for entry in leaf if entry[0] < end]
            found.extend(within)
            if len(within) < len(leaf):
                return _page(found, None)
            if len(found) > limit + covered:
                break
        else:
            if next(leaves, None) is None:
                return _page(found, None)
        return _page(found, key_after(AttributeKey(found[-1][0].hex())))

    def flush(self, state: State, *, compact: bool = True) -> c.FlushAttributes:
        """Write the State's recent values and marks into a new version of its index; the command that makes it the

        State's. Marks that nobody can read by any more leave it. `compact=False` leaves the oldest nodes where they
        are, which only a benchmark wants.
        """
        values: dict[AttributeKey, int | None] = dict(state.attributes)
        values |= {mark_key(at_ms): mark_value(upper) for at_ms, upper in state.marks.items()}
        values |= dict.fromkeys(Marks(state, self._reader(state.attribute_chunks)).outlived(), None)
        updates: list[Update] = [(bytes.fromhex(key), values[key]) for key in sorted(values)]
        return self.flushed(state, updates, compact=compact)

    def flushed(self, state: State, updates: list[Update], *, compact: bool = True) -> c.FlushAttributes:
        """As `flush`, for any updates: ascending by key, no key twice."""
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

        following = Flush(root, reader, writer, shape, compact=compact).run(updates, crowded)
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


def _page(found: list[tuple[bytes, int]], following: AttributeKey | None) -> IndexPage:
    return IndexPage({AttributeKey(key.hex()): value for key, value in found}, following)
