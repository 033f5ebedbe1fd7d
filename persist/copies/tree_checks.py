"""Whether the tree of a shard's attributes is one: keys ascend, and each lies in the node that looking it up leads to.

Each node is compared with its checksum where chunks are read whole; what only a wrong flush could write is found here.
Memory: one node of each level.
"""

from __future__ import annotations

from itertools import pairwise

from blob import Blob
from persist.attributes.nodes import Leaf
from persist.attributes.storage import ChunkReader, NodeCache
from persist.core.attribute import KEY_BYTES
from persist.core.errors import Corruption
from persist.core.state import State

CACHE_BYTES = 1024 * 1024  # a node is read once, so that more is of no use


class TreeCheck:
    """Walks one version of the index. Raises Corruption, StaleIndex (it was collected meanwhile), Unavailable."""

    def __init__(self, state: State, blob: Blob) -> None:
        self._root = state.attribute_root
        self._reader = ChunkReader(blob, state.attribute_chunks, NodeCache(CACHE_BYTES))
        self._count = 0

    def run(self) -> None:
        """The whole tree."""
        root = self._root
        if not root.height:
            return
        self._walk(root.offset, root.length, root.height, None, None)
        if self._count != root.count:
            raise Corruption(f"the index of attributes has {self._count} of them, not {root.count}")

    def _walk(self, offset: int, length: int, height: int, lower: bytes | None, upper: bytes | None) -> None:
        """A node whose keys are to lie in `[lower, upper)`. None: without end."""
        node = self._reader.read(offset, length)
        keys = [node.keys[at : at + KEY_BYTES] for at in range(0, len(node.keys), KEY_BYTES)]
        where = f"the node of the index of attributes at offset {offset}"
        if isinstance(node, Leaf) != (height == 1) or not keys:
            raise Corruption(f"{where} is not at its level, or is empty")
        if any(later <= earlier for earlier, later in pairwise(keys)):
            raise Corruption(f"{where} has a key twice, or keys that do not ascend")
        if (lower is not None and keys[0] < lower) or (upper is not None and keys[-1] >= upper):
            raise Corruption(f"{where} has keys that belong to another node")
        if isinstance(node, Leaf):
            self._count += len(keys)
            return
        for at in range(len(node)):
            key, child, _, size = node.child(at)
            ends = keys[at + 1] if at + 1 < len(keys) else upper
            self._walk(child, size, height - 1, lower if at == 0 else key, ends)
