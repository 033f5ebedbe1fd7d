"""Nodes in blobs: reading them through a bounded cache, and writing them into chunks."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from blob import Blob, BlobNotFound
from persist.attributes.node_codec import Node, decode
from persist.core.attribute import IndexChunk
from persist.core.errors import Corruption
from persist.formats.store_errors import translated, translated_but_missing

CACHE_BYTES_MAX = 64 * 1024 * 1024

_Place = tuple[str, int]  # key of the chunk, offset of the node


class StaleIndex(Exception):
    """A chunk of this version of the index was deleted: a newer version exists."""


class NodeCache:
    """An LRU cache of nodes, or other pieces of blobs, of all shards. Thread-safe.

    Each entry has a `size` in bytes; at most `bytes_max` are held.
    """

    def __init__(self, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.bytes_held = 0
        self.hits = 0
        self.reads = 0  # cache misses
        self._lock = threading.Lock()
        self._nodes: OrderedDict[_Place, Any] = OrderedDict()

    def get(self, place: _Place) -> Any:
        with self._lock:
            node = self._nodes.get(place)
            if node is None:
                self.reads += 1
            else:
                self.hits += 1
                self._nodes.move_to_end(place)
            return node

    def put(self, place: _Place, node: Any) -> None:
        with self._lock:
            before = self._nodes.pop(place, None)
            self.bytes_held += node.size - (before.size if before is not None else 0)
            self._nodes[place] = node
            while self.bytes_held > self.bytes_max and self._nodes:
                _, oldest = self._nodes.popitem(last=False)
                self.bytes_held -= oldest.size

    def clear(self) -> None:
        with self._lock:
            self._nodes.clear()
            self.bytes_held = 0

    def discard(self, place: _Place) -> None:
        with self._lock:
            node = self._nodes.pop(place, None)
            if node is not None:
                self.bytes_held -= node.size


class ChunkReader:
    """Reads the nodes of one version of one shard's index. Thread-safe.

    Raises StaleIndex if a chunk was deleted, Unavailable if the store does not answer, Corruption.
    """

    def __init__(self, blob: Blob, chunks: Mapping[int, IndexChunk], cache: NodeCache) -> None:
        self.chunks = chunks
        self.firsts = sorted(chunks)
        self._blob = blob
        self._cache = cache

    def read(self, offset: int, length: int) -> Node:
        first, chunk = self._chunk(offset, length)
        place = (chunk.key, offset)
        node: Node | None = self._cache.get(place)
        if node is None:
            try:
                with translated_but_missing():
                    data = self._blob.get_range(chunk.key, offset - first, length)
            except BlobNotFound as error:
                raise StaleIndex(str(error)) from error
            node = decode(data, offset)
            self._cache.put(place, node)
        return node

    def forget(self, offset: int) -> None:
        self._cache.discard((self._chunk(offset, 0)[1].key, offset))

    def _chunk(self, offset: int, length: int) -> tuple[int, IndexChunk]:
        at = bisect_right(self.firsts, offset) - 1
        first = self.firsts[at] if at >= 0 else -1
        chunk = self.chunks.get(first)
        if chunk is None or offset + length > first + chunk.length:
            raise Corruption(f"the attribute index has a node at offset {offset}, outside its chunks")
        return first, chunk


class ChunkWriter:
    """Appends nodes from the offset `start` on. Chunks that are not committed are orphans."""

    def __init__(
        self, blob: Blob, new_key: Callable[[], str], cache: NodeCache, start: int, chunk_bytes_target: int
    ) -> None:
        self.chunks: dict[int, IndexChunk] = {}  # written so far
        self._blob = blob
        self._new_key = new_key
        self._cache = cache
        self._first = start
        self._key = ""
        self._nodes: list[bytes] = []
        self._chunk_bytes_target = chunk_bytes_target
        self.end = start

    def write(self, node: Node) -> tuple[int, int]:
        if not self._nodes:
            self._key = self._new_key()
        offset = self.end
        data = node.encode(offset)
        self._nodes.append(data)
        self.end += len(data)
        self._cache.put((self._key, offset), node)
        if self.end - self._first >= self._chunk_bytes_target:
            self.close()
        return offset, len(data)

    def close(self) -> None:
        """Write the last chunk."""
        if not self._nodes:
            return
        with translated():
            self._blob.put(self._key, b"".join(self._nodes))
        self.chunks[self._first] = IndexChunk(self._key, self.end - self._first)
        self._first, self._nodes = self.end, []
