"""What a group of commands needs of the blob store before it can be planned.

A piece that cannot be read fails only the commands that need it. The others of their group go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from blob import Blob, BlobUnavailable
from blob.forwarding import ForwardingBlob
from persist.attributes.index import AttributeIndex
from persist.attributes.storage import NodeCache, StaleIndex
from persist.commit.outcome_files import OutcomeFiles
from persist.core import commands as c
from persist.core.attribute import AttributeKey
from persist.core.errors import Corruption, PersistError
from persist.core.ids import IdSource
from persist.core.marks import Mark
from persist.core.outcomes import Outcome
from persist.core.state import State
from persist.core.transitions.context import Indexed, IndexPage


class GroupRead(Struct, frozen=True):
    """What the index of attributes and the files of outcomes hold for a group.

    `unread` has the error of each command for which they could not be read, by its place in the group.
    """

    indexed: Indexed
    remembered: Mapping[str, Outcome]
    unread: Mapping[int, PersistError] = {}


def read_apart(state: State, commands: Sequence[c.Command], blob: Blob, ids: IdSource, cache: NodeCache) -> GroupRead:
    """Read for each command by itself, to find out for which ones it is not possible. Does not raise.

    A store that is away is asked once; from then on only what the cache holds is read.
    """
    patient = _UntilAway(blob)
    attributes, outcomes = AttributeIndex(patient, ids, cache), OutcomeFiles(patient, ids, cache)
    values: dict[AttributeKey, int | None] = {}
    pages: dict[tuple[AttributeKey, AttributeKey | None], IndexPage] = {}
    marks: dict[int, Mark | None] = {}
    shown: dict[int, Mark | None] = {}
    spans: dict[tuple[int, int], tuple[Mark, ...]] = {}
    first_ms: int | None = None
    remembered: dict[str, Outcome] = {}
    unread: dict[int, PersistError] = {}
    for place, command in enumerate(commands):
        try:
            indexed, found = attributes.indexed(state, [command]), outcomes.remembered(state, [command])
        except StaleIndex as error:
            unread[place] = Corruption(f"shard {state.name!r} has lost a blob of its metadata: {error}")
        except PersistError as error:
            unread[place] = error
        else:
            values.update(indexed.values)
            pages.update(indexed.pages)
            marks.update(indexed.marks)
            shown.update(indexed.shown)
            spans.update(indexed.spans)
            first_ms = indexed.first_ms if first_ms is None else first_ms
            remembered.update(found)
    indexed = Indexed(state.attribute_root.flushes, values, pages, marks, shown, spans, first_ms)
    return GroupRead(indexed, remembered, unread)


class _UntilAway(ForwardingBlob):
    """Asks no more once the store was away."""

    _away: BlobUnavailable | None = None

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if self._away is not None:
            raise self._away
        try:
            return super().get_range(key, start, length)
        except BlobUnavailable as error:
            self._away = error
            raise
