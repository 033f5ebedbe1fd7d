"""The attributes of a shard. A node of their index that cannot be read hides no other."""

from __future__ import annotations

from collections.abc import Iterator

from persist.attributes.node_codec import Leaf
from persist.attributes.node_store import ChunkReader, StaleIndex
from persist.copies.shard_facts import FaultKind, ShardFacts, newest
from persist.core.attribute import MARKS_FROM, AttributeKey, attribute_key, is_core_key
from persist.core.errors import Corruption, InvalidUsage, Unavailable
from persist.core.state import State
from persist.inspect.documents import Document, JsonRecord
from persist.inspect.readonly_location import ReadOnlyLocation

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


def attributes_document(look: ReadOnlyLocation, name: str, lower: str | None, upper: str | None) -> Document:
    """The attributes with keys in `[lower, upper)` (None: to the ends), ascending. Raises InvalidUsage: no such key."""
    start = attribute_key(bytes(16) if lower is None else lower)
    end = None if upper is None else attribute_key(upper)
    if end is not None and end < start:
        raise InvalidUsage(f"upper is {end} and lower {start}: give the lower key first")
    facts = newest(look, name)
    state = facts.known()
    rows = _attributes(look, facts, start, end)
    return Document("attributes", facts.faults, name, int(state.seqno), _tree_of(state), rows)


def _attributes(
    look: ReadOnlyLocation, facts: ShardFacts, lower: AttributeKey, upper: AttributeKey | None
) -> Iterator[AttributeRow]:
    """The recent ones cover those in the index; both ascend."""
    state = facts.known()
    recent = iter(sorted((k, v) for k, v in state.attributes.items() if lower <= k and (upper is None or k < upper)))
    held = next(recent, None)
    for key, value in _indexed(look, facts, lower, upper):
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
    look: ReadOnlyLocation, facts: ShardFacts, lower: AttributeKey, upper: AttributeKey | None
) -> Iterator[tuple[AttributeKey, int]]:
    end = MARKS_FROM if upper is None else min(upper, MARKS_FROM)
    for leaf in _leaves(look, facts, bytes.fromhex(lower)):
        for raw, value in leaf.entries():
            key = AttributeKey(raw.hex())
            if key >= end:
                return
            if key >= lower and not is_core_key(key):
                yield key, value


def _leaves(look: ReadOnlyLocation, facts: ShardFacts, lower: bytes) -> Iterator[Leaf]:
    """The leaves of the tree in order of keys. Those wholly before `lower` are left out.

    Raises Unavailable: the shard has moved on, and nodes went meanwhile.
    """
    state, faults = facts.known(), facts.faults
    reader = ChunkReader(look.blob, state.attribute_chunks, look.nodes)

    def below(level: int, offset: int, length: int) -> Iterator[Leaf]:
        why = ""
        try:
            node = reader.read(offset, length)
            if isinstance(node, Leaf) != (level == 1):
                why = "it is not at its level"
        except Corruption as error:
            why = error.message
        except StaleIndex as error:
            if facts.has_moved:
                raise Unavailable("the attribute index has moved on meanwhile; look again") from error
            why = str(error)
        if why:
            faults.note(FaultKind.INDEX, f"the node of the attribute index at offset {offset} cannot be read: {why}")
        elif isinstance(node, Leaf):
            yield node
        else:
            for at in range(node.child_of(lower) if lower else 0, len(node)):
                _, child, _, size = node.child(at)
                yield from below(level - 1, child, size)

    root = state.attribute_root
    if root.height > HEIGHT_MAX:
        faults.note(FaultKind.INDEX, f"the attribute index says that it is {root.height} levels high")
    elif root.height:
        yield from below(root.height, root.offset, root.length)


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
