"""Which blobs of a version are there, in a store to which another one is copied: in any order, late, with gaps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from blob import Blob, BlobNotFound
from persist.core.batch import Part
from persist.core.errors import Corruption
from persist.core.keys import shard_of
from persist.core.state import State
from persist.formats.store_errors import translated, translated_but_missing
from persist.parts.bundles import read_bundle

ASKED_ONE_BY_ONE_MAX = 20  # blobs; more are found by listing the keys of the shard
LACKING_TOLD_MAX = 20


class Sizes(Mapping[str, int]):
    """The blobs that are there, by key: those of one shard as they were listed, others as they are asked for."""

    def __init__(self, blob: Blob, prefix: str) -> None:
        self._blob = blob
        self._prefix = prefix
        with translated():
            self._listed = {stat.key: stat.size for stat in blob.list(prefix)}

    def __getitem__(self, key: str) -> int:
        if key in self._listed:
            return self._listed[key]
        if not key.startswith(self._prefix):
            with translated():
                stat = self._blob.stat(key)
            if stat is not None:
                self._listed[key] = stat.size
                return stat.size
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._listed)


class Presence:
    """Which blobs of one shard have been seen. What was there once is not asked for again, nor a bundle read again."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self._known: dict[str, int | None] = {}  # by key, with the size as far as a State tells it
        self._listing: dict[str, tuple[Part, ...]] = {}  # what bundles list

    def lacking(self, state: State) -> list[str]:
        """The first few blobs without which the version is not whole. Raises Unavailable."""
        found = self._unseen(dict(_outside(state)))
        parts = list(state.trace.parts())
        found |= self._unseen({part.key: part.blob_size for part in parts if part.key is not None})
        lacking = self._asked(found)
        for part in parts:
            if part.bundle is not None and part.key not in lacking:
                lacking |= self._inside(part)
        return sorted(lacking)[:LACKING_TOLD_MAX]

    def keep(self, state: State) -> None:
        """Forget what this version does not name."""
        bundles = {part.key for part in state.trace.parts() if part.bundle is not None}
        self._listing = {key: listed for key, listed in self._listing.items() if key in bundles}
        named = {part.key for part in state.trace.parts()} | {key for key, _ in _outside(state)}
        named |= {part.key for listed in self._listing.values() for part in listed}
        self._known = {key: size for key, size in self._known.items() if key in named}

    def _unseen(self, named: dict[str, int | None]) -> dict[str, int | None]:
        return {key: size for key, size in named.items() if key not in self._known}

    def _asked(self, named: dict[str, int | None]) -> set[str]:
        """Those that are not there, or not with their size."""
        if not named:
            return set()
        there: dict[str, int] = {}
        with translated():
            if len(named) > ASKED_ONE_BY_ONE_MAX:
                for prefix in {shard_of(key) for key in named}:
                    there |= {stat.key: stat.size for stat in self._blob.list(f"{prefix}/")}
            else:
                stats = (self._blob.stat(key) for key in named)
                there = {stat.key: stat.size for stat in stats if stat is not None}
        whole = {key: size for key, size in named.items() if key in there and size in (None, there[key])}
        self._known |= whole
        return named.keys() - whole.keys()

    def _inside(self, bundle: Part) -> set[str]:
        key = bundle.key or ""
        if key not in self._listing:
            try:
                with translated_but_missing():
                    listed = read_bundle(bundle, self._blob)
            except (BlobNotFound, Corruption):
                return {key}
            self._listing[key] = tuple(part for run in listed for part in run.parts)
        inside: dict[str, int | None] = {
            part.key: part.blob_size for part in self._listing[key] if part.key is not None
        }
        return self._asked(self._unseen(inside))


def _outside(state: State) -> Iterator[tuple[str, int | None]]:
    """What a version needs besides parts: its attribute index, outcomes of tokens, the commit history."""
    for chunk in state.attribute_chunks.values():
        yield chunk.key, chunk.length
    for outcomes in state.outcome_files:
        yield outcomes.key, outcomes.size
    for entries in state.entry_files:
        yield entries.key, entries.size
