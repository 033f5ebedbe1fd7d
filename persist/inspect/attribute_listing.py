"""The attributes of a shard. A node of their index that cannot be read hides no other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from persist.attributes.node_codec import Index, Leaf, Node
from persist.attributes.node_store import ChunkReader, StaleIndex
from persist.core.attribute import MARKS_FROM, AttributeKey, attribute_key, is_core_key
from persist.core.errors import Corruption, InvalidUsage, Unavailable
from persist.core.state import State
from persist.inspect.documents import Document, Findings, JsonRecord
from persist.inspect.readonly_location import Look
from persist.inspect.state_history import Rechecked, newest

HEIGHT_MAX = 32  # of a tree that makes sense


class AttributeRow(JsonRecord, frozen=True):
    """An attribute. `where` is `state` for a recent value, `index` for one that lies in the tree."""

    key: str
    value: int
    where: str


class AttributeTree(JsonRecord, frozen=True):
    """The index that holds the older attributes: its root node is `root_bytes` at `root_offset`.

    Nothing live is before the offset `lowest`. `entries` counts the attributes and marks in it, `recent` those that are
    still in the State. `bytes` are those of its chunks.
    """

    flushes: int
    height: int
    entries: int
    recent: int
    root_offset: int
    root_bytes: int
    lowest: int
    end: int
    chunks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Visit:
    """A node that is reached. `node` None: it cannot be read."""

    level: int
    offset: int
    length: int
    node: Node | None


def attributes_document(look: Look, name: str, lower: str | None, upper: str | None) -> Document:
    """The attributes with keys in `[lower, upper)` (None: to the ends), ascending. Raises InvalidUsage: no such key."""
    start = attribute_key(bytes(16) if lower is None else lower)
    end = None if upper is None else attribute_key(upper)
    if end is not None and end < start:
        raise InvalidUsage(f"upper is {end} and lower {start}: give the lower key first")
    seen = newest(look, name)
    state = seen.known()
    rows = _attributes(look, state, start, end, seen.findings)
    return Document("attributes", seen.findings, name, int(state.seqno), _tree_of(state), rows)


def _attributes(
    look: Look, state: State, lower: AttributeKey, upper: AttributeKey | None, findings: Findings
) -> Iterator[AttributeRow]:
    """The recent ones cover those in the index; both ascend."""
    recent = iter(sorted((k, v) for k, v in state.attributes.items() if lower <= k and (upper is None or k < upper)))
    held = next(recent, None)
    for key, value in _indexed(look, state, lower, upper, findings):
        while held is not None and held[0] < key:
            if held[1] is not None:
                yield AttributeRow(held[0], held[1], "state")
            held = next(recent, None)
        if held is None or held[0] != key:
            yield AttributeRow(key, value, "index")
    while held is not None:
        if held[1] is not None:
            yield AttributeRow(held[0], held[1], "state")
        held = next(recent, None)


def _indexed(
    look: Look, state: State, lower: AttributeKey, upper: AttributeKey | None, findings: Findings
) -> Iterator[tuple[AttributeKey, int]]:
    end = MARKS_FROM if upper is None else min(upper, MARKS_FROM)
    for visit in visits(look, state, findings, bytes.fromhex(lower)):
        if isinstance(visit.node, Leaf):
            for raw, value in visit.node.entries():
                key = AttributeKey(raw.hex())
                if key >= end:
                    return
                if key >= lower and not is_core_key(key):
                    yield key, value


def visits(look: Look, state: State, findings: Findings, lower: bytes = b"") -> Iterator[Visit]:
    """The nodes of the tree, each before its children, in order of keys. Those wholly before `lower` are left out."""
    root = state.attribute_root
    if not root.height:
        return
    if root.height > HEIGHT_MAX:
        findings.note(f"the attribute index says that it is {root.height} levels high")
        return
    yield from _Walk(look, state, lower, findings).below(root.height, root.offset, root.length)


class _Walk:
    """From a node down. Raises Unavailable where the shard has moved on, and nodes went meanwhile."""

    def __init__(self, look: Look, state: State, lower: bytes, findings: Findings) -> None:
        self._reader = ChunkReader(look.blob, state.attribute_chunks, look.nodes)
        self._again = Rechecked(look, state)
        self._lower = lower
        self._findings = findings

    def below(self, level: int, offset: int, length: int) -> Iterator[Visit]:
        node: Node | None = None
        try:
            node = self._reader.read(offset, length)
            if isinstance(node, Leaf) != (level == 1):
                node = None
                raise Corruption("it is not at its level")
        except Corruption as error:
            self._note(offset, error.message)
        except StaleIndex as error:
            if self._again.has_moved:
                raise Unavailable("the attribute index has moved on meanwhile; look again") from error
            self._note(offset, str(error))
        yield Visit(level, offset, length, node)
        if isinstance(node, Index):
            for at in range(node.child_of(self._lower) if self._lower else 0, len(node)):
                _, child, _, size = node.child(at)
                yield from self.below(level - 1, child, size)

    def _note(self, offset: int, why: str) -> None:
        self._findings.note(f"the node of the attribute index at offset {offset} cannot be read: {why}")


def _tree_of(state: State) -> AttributeTree:
    root, chunks = state.attribute_root, state.attribute_chunks
    return AttributeTree(
        flushes=root.flushes,
        height=root.height,
        entries=root.count,
        recent=len(state.attributes) + len(state.marks),
        root_offset=root.offset,
        root_bytes=root.length,
        lowest=root.lowest,
        end=root.end,
        chunks=len(chunks),
        bytes=sum(chunk.length for chunk in chunks.values()),
    )
