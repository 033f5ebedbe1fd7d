"""The attributes of a shard. The listing continues past nodes of their index that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from operator import itemgetter

from persist.attributes.node_codec import Leaf
from persist.attributes.node_store import ChunkReader, StaleIndex
from persist.copies.shard_facts import FaultKind, ShardFacts, newest
from persist.core.attribute import MARKS_FROM, AttributeKey, attribute_key, is_core_key
from persist.core.errors import Corruption, InvalidUsage, Unavailable
from persist.core.state import State
from persist.inspect.documents import Document, JsonRecord
from persist.inspect.readonly_location import ReadOnlyLocation

HEIGHT_MAX = 32  # of a plausible tree


class AttributeRow(JsonRecord, frozen=True):
    """An attribute. `where` is `state` for a recent value, `index` for one in the tree."""

    key: str
    value: int
    where: str


class AttributeTree(JsonRecord, frozen=True):
    """The index of the older attributes: its root node is `root_bytes` at `root_offset`.

    Nothing live is before the offset `lowest`. `entries` counts its attributes and marks, `recent` those in the State.
    `bytes` are those of its chunks.
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


def attributes_document(location: ReadOnlyLocation, name: str, lower: str | None, upper: str | None) -> Document:
    """The attributes with keys in `[lower, upper)` (None: to the ends), ascending. Raises InvalidUsage: no such key."""
    start = attribute_key(bytes(16) if lower is None else lower)
    end = None if upper is None else attribute_key(upper)
    if end is not None and end < start:
        raise InvalidUsage(f"upper is {end} and lower {start}: give the lower key first")
    facts = newest(location, name)
    state = facts.known()
    rows = _attributes(location, facts, start, end)
    return Document("attributes", facts.faults, name, int(state.seqno), _tree_of(state), rows)


def _attributes(
    location: ReadOnlyLocation, facts: ShardFacts, lower: AttributeKey, upper: AttributeKey | None
) -> Iterator[AttributeRow]:
    """Merge recent values with those in the index, which they override. Keys ascend."""
    state = facts.known()
    recent = {k: v for k, v in state.attributes.items() if lower <= k and (upper is None or k < upper)}
    older = ((key, value, "index") for key, value in _indexed(location, facts, lower, upper) if key not in recent)
    newer = ((key, value, "state") for key, value in sorted(recent.items()))
    for key, value, where in merge(newer, older, key=itemgetter(0)):
        if value is not None:
            yield AttributeRow(key, value, where)


def _indexed(
    location: ReadOnlyLocation, facts: ShardFacts, lower: AttributeKey, upper: AttributeKey | None
) -> Iterator[tuple[AttributeKey, int]]:
    end = MARKS_FROM if upper is None else min(upper, MARKS_FROM)
    for leaf in _leaves(location, facts, bytes.fromhex(lower)):
        for raw, value in leaf.entries():
            key = AttributeKey(raw.hex())
            if key >= end:
                return
            if key >= lower and not is_core_key(key):
                yield key, value


def _leaves(location: ReadOnlyLocation, facts: ShardFacts, lower: bytes) -> Iterator[Leaf]:
    """The leaves of the tree in order of keys, except those entirely before `lower`.

    Raises Unavailable: the shard has changed, and nodes were deleted meanwhile.
    """
    state, faults = facts.known(), facts.faults
    reader = ChunkReader(location.blob, state.attribute_chunks, location.nodes)

    def subtree(level: int, offset: int, length: int) -> Iterator[Leaf]:
        problem = ""
        try:
            node = reader.read(offset, length)
            if isinstance(node, Leaf) != (level == 1):
                problem = "it is not at its level"
        except Corruption as error:
            problem = error.message
        except StaleIndex as error:
            if facts.has_moved:
                raise Unavailable("the attribute index has changed meanwhile; try again") from error
            problem = str(error)
        if problem:
            faults.note(FaultKind.INDEX, f"the attribute index node at offset {offset} cannot be read: {problem}")
        elif isinstance(node, Leaf):
            yield node
        else:
            for at in range(node.child_of(lower) if lower else 0, len(node)):
                _, child, _, size = node.child(at)
                yield from subtree(level - 1, child, size)

    root = state.attribute_root
    if root.height > HEIGHT_MAX:
        faults.note(FaultKind.INDEX, f"the attribute index claims a height of {root.height} levels")
    elif root.height:
        yield from subtree(root.height, root.offset, root.length)


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
