"""A State and its attribute index over a blob store, without a committer: every flush is applied at once."""

from __future__ import annotations

from collections.abc import Mapping

from blob import Blob
from persist.attributes.attribute_index import AttributeIndex
from persist.attributes.btree import NodeReader, entries
from persist.attributes.node_codec import Shape
from persist.attributes.node_store import NodeCache
from persist.core import commands as c
from persist.core.attribute import AttributeKey, attribute_key
from persist.core.ids import IdSource
from persist.core.invariants import check_state
from persist.core.state import Policy, State
from persist.core.transitions import Context, step
from tests.support.shard import Shard

Values = Mapping[bytes, int | None]


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Indexed:
    """`state` is what was committed last."""

    def __init__(self, blob: Blob, ids: IdSource, *, cache_bytes: int = 1 << 26, shape: Shape | None = None) -> None:
        self.blob = blob
        self.cache = NodeCache(cache_bytes)
        self.index = AttributeIndex(blob, ids, self.cache, shape or Shape())
        self.state: State = Shard().state

    def write(self, values: Values, *, compact: bool = True) -> c.FlushAttributes:
        """Write the values into a new version of the index, which is not committed yet."""
        return self.index.flushed(self.state, sorted(values.items()), compact=compact)

    def commit(self, command: c.FlushAttributes) -> bool:
        state, result = step(self.state, command, Context(0, Policy()))
        check_state(state)
        self.state = state
        assert isinstance(result, c.Flushed)
        return result.applied

    def flush(self, values: Values, *, compact: bool = True) -> None:
        assert self.commit(self.write(values, compact=compact))

    def collect(self) -> None:
        """Delete every blob that the State does not name."""
        named = set(self.state.blob_keys())
        self.blob.delete([stat.key for stat in self.blob.list("") if stat.key not in named])

    def contents(self) -> dict[bytes, int]:
        """Everything in the index, read page by page."""
        found: dict[bytes, int] = {}
        lower: AttributeKey | None = attribute_key(bytes(16))
        while lower is not None:
            page = self.index.page(self.state, lower, None, 100)
            assert list(page.values) == sorted(page.values)
            found.update({bytes.fromhex(key): value for key, value in page.values.items()})
            lower = page.following
        return found

    def get(self, *numbers: int) -> list[int | None]:
        keys = [AttributeKey(key_of(number).hex()) for number in numbers]
        found = self.index.lookup(self.state, keys)
        return [found[key] for key in keys]

    @property
    def span(self) -> int:
        """Bytes from the start of the oldest chunk to the end: what the index takes in the store."""
        return sum(chunk.length for chunk in self.state.attribute_chunks.values())

    def leaves(self, reader: NodeReader) -> list[int]:
        """Entries of each leaf, in order."""
        return [len(leaf) for leaf in entries(self.state.attribute_root, reader, bytes(16))]
