"""The index as a B+tree on append-only storage: lookups, and flushing a batch of updates into a new version.

Nodes are immutable: a flush appends a new version of every leaf that it touches and of all their ancestors. The earlier
version stays intact, so a flush that is not committed changes nothing.

Progressive compaction: every flush also rewrites the leaves with the lowest offsets, at least one and one for every
`LEAVES_A_MOVE` leaves that it touched. The oldest nodes therefore become garbage steadily, and the first chunks hold no
live node after a while; no separate compaction is needed. Every index node records the lowest offset of each child's
sub-tree, which leads directly to that leaf. (The lowest node is a leaf: an index node is written after its children.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from persist.attributes.node_codec import Child, Leaf, Node, NodeIndex, Shape, Update
from persist.core.attribute import KEY_BYTES, IndexRoot
from persist.core.errors import Corruption

LEAVES_A_MOVE = 4  # leaves written for their updates, per leaf that is rewritten to free the first chunks
LEAST_KEY = bytes(KEY_BYTES)
_NOWHERE = (1 << 64) - 1  # beyond every offset


class NodeReader(Protocol):
    def read(self, offset: int, length: int) -> Node: ...

    def forget(self, offset: int) -> None:
        """Drop this node from the cache: only readers of the earlier version may need it again."""
        ...


class NodeWriter(Protocol):
    def write(self, node: Node) -> tuple[int, int]:
        """Append a node; its offset and length."""
        ...


# --- looking up


def lookup(root: IndexRoot, reader: NodeReader, keys: Sequence[bytes]) -> dict[bytes, int | None]:
    """The values of `keys` (None: not in the tree). Every node on the path is read once."""
    values: dict[bytes, int | None] = dict.fromkeys(keys)
    if root.height:
        _lookup(reader, root.offset, root.length, root.height, sorted(values), values)
    return values


def _lookup(
    reader: NodeReader, offset: int, length: int, height: int, keys: Sequence[bytes], values: dict[bytes, int | None]
) -> None:
    node = _read(reader, offset, length, height)
    if isinstance(node, Leaf):
        for key in keys:
            values[key] = node.get(key)
        return
    for at, first, last in _route(node, keys):
        _, child, _, size = node.child(at)
        _lookup(reader, child, size, height - 1, keys[first:last], values)


def entries(root: IndexRoot, reader: NodeReader, lower: bytes) -> Iterator[list[tuple[bytes, int]]]:
    """The entries with keys from `lower` on, leaf by leaf."""
    if root.height:
        yield from _entries(reader, root.offset, root.length, root.height, lower)


def _entries(
    reader: NodeReader, offset: int, length: int, height: int, lower: bytes
) -> Iterator[list[tuple[bytes, int]]]:
    node = _read(reader, offset, length, height)
    if isinstance(node, Leaf):
        yield [entry for entry in node.entries() if entry[0] >= lower]
        return
    for at in range(node.child_of(lower), len(node)):
        _, child, _, size = node.child(at)
        yield from _entries(reader, child, size, height - 1, lower)


def last_key(root: IndexRoot, reader: NodeReader) -> bytes | None:
    """The greatest key; None if the tree is empty."""
    if not root.height:
        return None
    height, node = root.height, _read(reader, root.offset, root.length, root.height)
    while isinstance(node, NodeIndex):
        height, (_, offset, _, length) = height - 1, node.child(len(node) - 1)
        node = _read(reader, offset, length, height)
    return node.keys[-KEY_BYTES:] or None


def _read(reader: NodeReader, offset: int, length: int, height: int) -> Node:
    node = reader.read(offset, length)
    if isinstance(node, Leaf) != (height == 1):
        raise Corruption(f"the node of the attribute index at offset {offset} is not at its level")
    return node


def _route(node: NodeIndex, keys: Sequence[bytes]) -> Iterator[tuple[int, int, int]]:
    """The children that may hold the sorted `keys`: position, and the half-open slice of `keys`."""
    first = 0
    while first < len(keys):
        at = node.child_of(keys[first])
        last = bisect_left(keys, node.key(at + 1), first + 1) if at + 1 < len(node) else len(keys)
        yield at, first, last
        first = last


# --- flushing


@dataclass(slots=True)
class _Changing:
    """An index node of the earlier version, and the changes of its children."""

    node: NodeIndex
    key: bytes
    height: int
    replaced: dict[int, list[Child]] = field(default_factory=dict)  # children that are written already
    changing: dict[int, _Changing] = field(default_factory=dict)
    lows: list[int] = field(default_factory=list)  # lowest offset of the nodes that are not rewritten, by child

    @property
    def lowest(self) -> int:
        return min(self.lows)


class TreeFlush:
    """Applies one batch of updates to a version of the tree."""

    def __init__(
        self, root: IndexRoot, reader: NodeReader, writer: NodeWriter, shape: Shape, *, compact: bool = True
    ) -> None:
        self._root = root
        self._reader = reader
        self._writer = writer
        self._shape = shape
        self._compact = compact
        self._grown = 0
        self._leaves = 0

    def run(self, updates: Sequence[Update], crowded: Callable[[int], bool] = lambda lowest: False) -> IndexRoot:
        """Write the tree with `updates` (ascending by key, no key twice) applied; its root, without its `end`.

        `crowded(lowest)` is whether more leaves must be rewritten if all nodes before `lowest` are garbage.
        """
        if not updates:
            return self._root
        if self._root.height < 2:
            leaf = self._take(self._root.offset, self._root.length, 1) if self._root.height else Leaf(b"", b"")
            assert isinstance(leaf, Leaf)
            return self._build_root(self._write_leaf(LEAST_KEY, leaf, updates), 1)
        top = self._open(LEAST_KEY, self._root.offset, self._root.length, self._root.height)
        self._update(top, updates, [key for key, _ in updates])
        if self._compact:
            self._move(top, crowded)
        node = self._finish(top)
        if len(node) == 1:  # the only child becomes the root
            return self._build_root([node.child(0)], top.height - 1)
        return self._build_root(self._write_index(LEAST_KEY, node, grown_last=_only_last(top)), top.height)

    def _take(self, offset: int, length: int, height: int) -> Node:
        """A node of the earlier version that is to be replaced."""
        node = _read(self._reader, offset, length, height)
        self._reader.forget(offset)
        return node

    def _open(self, key: bytes, offset: int, length: int, height: int) -> _Changing:
        node = self._take(offset, length, height)
        assert isinstance(node, NodeIndex)
        return _Changing(node, key, height, lows=node.lows.tolist())

    def _update(self, parent: _Changing, updates: Sequence[Update], keys: Sequence[bytes]) -> None:
        node = parent.node
        for at, first, last in _route(node, keys):
            key, offset, _, length = node.child(at)
            if parent.height > 2:
                child = parent.changing[at] = self._open(key, offset, length, parent.height - 1)
                self._update(child, updates[first:last], keys[first:last])
                parent.lows[at] = child.lowest
                continue
            leaf = self._take(offset, length, 1)
            assert isinstance(leaf, Leaf)
            parent.replaced[at] = self._write_leaf(key, leaf, updates[first:last])
            parent.lows[at] = _NOWHERE

    def _move(self, top: _Changing, crowded: Callable[[int], bool]) -> None:
        """Rewrite the leaves with the lowest offsets."""
        moves = max(1, self._leaves // LEAVES_A_MOVE)
        while (lowest := top.lowest) != _NOWHERE and (moves > 0 or crowded(lowest)):
            self._move_lowest(top, lowest)
            moves -= 1

    def _move_lowest(self, parent: _Changing, lowest: int) -> None:
        at = parent.lows.index(lowest)
        key, offset, _, length = parent.node.child(at)
        if parent.height > 2:
            child = parent.changing.get(at)
            if child is None:
                child = parent.changing[at] = self._open(key, offset, length, parent.height - 1)
            self._move_lowest(child, lowest)
            parent.lows[at] = child.lowest
            return
        parent.replaced[at] = [self._write(key, self._take(offset, length, 1))]
        parent.lows[at] = _NOWHERE

    def _finish(self, changed: _Changing) -> NodeIndex:
        """Write the children; the new node, of any length."""
        for at, child in changed.changing.items():
            node = self._finish(child)
            changed.replaced[at] = self._write_index(child.key, node, grown_last=_only_last(child))
        return changed.node.replaced(changed.replaced)

    def _write_leaf(self, key: bytes, leaf: Leaf, updates: Sequence[Update]) -> list[Child]:
        """Write the updated leaf as one or several leaves, none if it is empty; `key` is its lower bound."""
        appended = not len(leaf) or updates[0][0] > leaf.keys[-KEY_BYTES:]
        changed, grown = leaf.updated(updates)
        self._grown += grown
        leaves = changed.split(_cuts(len(changed), self._shape.leaf_entries_max, appended)) if len(changed) else []
        self._leaves += len(leaves)
        return self._siblings(key, leaves)

    def _write_index(self, key: bytes, node: NodeIndex, grown_last: bool) -> list[Child]:
        nodes = node.split(_cuts(len(node), self._shape.index_entries_max, grown_last)) if len(node) else []
        return self._siblings(key, nodes)

    def _siblings(self, key: bytes, nodes: Sequence[Node]) -> list[Child]:
        """Write the nodes in ascending order; `key` is the lower bound of the first."""
        keys = [min(key, node.first) for node in nodes[:1]]
        keys += [_between(earlier, later) for earlier, later in pairwise(nodes)]
        return [self._write(key, node) for key, node in zip(keys, nodes, strict=True)]

    def _write(self, key: bytes, node: Node) -> Child:
        offset, length = self._writer.write(node)
        return key, offset, int(node.lows.min()) if isinstance(node, NodeIndex) else offset, length

    def _build_root(self, children: list[Child], height: int) -> IndexRoot:
        """The root above `children`, whose height is `height`."""
        while len(children) > 1:
            children = self._write_index(LEAST_KEY, NodeIndex.of(children), grown_last=True)
            height += 1
        flushes, count = self._root.flushes + 1, self._root.count + self._grown
        if not children:
            return IndexRoot(flushes, 0, 0, 0, 0, self._root.end, count)
        [(_, offset, low, length)] = children
        return IndexRoot(flushes, offset, length, height, low, self._root.end, count)


def _between(earlier: Node, later: Node) -> bytes:
    """A key greater than all of the earlier leaf and at most the first of the later one, with most trailing zeros.

    Index nodes store common bytes once. Between index nodes it is the first key of the later one, which has that form.
    """
    last, first = earlier.keys[-KEY_BYTES:], later.first
    if isinstance(earlier, NodeIndex):
        return first
    alike = 0
    while first[alike] == last[alike]:  # terminates, since keys ascend
        alike += 1
    return first[: alike + 1].ljust(KEY_BYTES, b"\0")


def _only_last(changed: _Changing) -> bool:
    """Whether the node grew at its end only: then it is split so that all pieces but the last are full."""
    return all(at == len(changed.node) - 1 for at, children in changed.replaced.items() if len(children) > 1)


def _cuts(entries: int, most: int, appended: bool) -> list[int]:
    """Where to split a node of `entries` into pieces of at most `most`: full ones first if `appended`, else equal."""
    if entries <= most:
        return []
    if appended:
        return list(range(most, entries, most))
    pieces = -(-entries // most)
    return [entries * piece // pieces for piece in range(1, pieces)]
