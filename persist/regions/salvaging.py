"""Salvage: what an old home has acknowledged and the new one does not have, shard by shard and time by time.

A promotion notes in the new home's blob store from which version each shard went on. In the old home's log lies what
came after that. Its updates are written to files, which their owner may look at and insert anew. Nothing is changed in
either home, but for the leases of the reader, which the old home's log takes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow.compute as pc
import pyarrow.parquet as pq

from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.commit.location import Location
from persist.core.antichain import MINIMUM, Antichain
from persist.core.errors import InvalidUsage, NotReadable
from persist.core.state import State
from persist.core.transitions.recording import is_maintenance
from persist.parts import TIME
from persist.regions.promotion import Kept, Promotion


@dataclass(frozen=True, slots=True)
class Diverged:
    """What one shard of the old home has beyond what the new one has of it.

    `version` and `upper`: the newest of the old home. `kept`: what the new home has; None: nothing. `why`: why its
    updates cannot be told. `times` and `updates` were written to `file`; None: they were not written.
    """

    name: str
    version: int
    upper: Antichain
    kept: Kept | None
    dropped: bool = False
    times: int | None = None
    updates: int | None = None
    file: str = ""
    why: str = ""

    @property
    def lower(self) -> Antichain:
        """Every time before it is the same in both homes."""
        return MINIMUM if self.kept is None else self.kept.upper

    def to_json(self) -> dict[str, Any]:
        """As the command prints it."""
        told: dict[str, Any] = {"shard": self.name, "lower": self.lower.to_json(), "upper": self.upper.to_json()}
        told["commits"] = self.version - (0 if self.kept is None else self.kept.version)
        told |= {"kept": self.kept is not None, "dropped": self.dropped, "times": self.times, "updates": self.updates}
        return {**told, "file": self.file or None, "why": self.why or None}


def diverged(old: Location, promotion: Promotion) -> Iterator[Diverged]:
    """The shards of the old home that have gone on beyond what the new one has. Writes nothing.

    One that has handed a shard over to that new home has nothing of it alone. Raises InvalidUsage (they are homes of
    two locations), Corruption, Unavailable.
    """
    bound = old.identity.check()
    if bound.location_id != promotion.location_id:
        raise InvalidUsage(f"{old.blob.url} is of another location than the home of epoch {promotion.epoch}")
    if bound.epoch >= promotion.epoch:
        raise InvalidUsage(
            f"{old.consensus.url} is of epoch {bound.epoch}, and the new home of epoch {promotion.epoch}: give the old "
            "home, and the blob store of the new one"
        )
    for name in old.all_names():
        state = old.machine(name).refresh()
        kept = promotion.of_shard(name)
        if state.handed_over == promotion.epoch or (kept is not None and state.seqno <= kept.version):
            continue
        if kept is None and state.tombstone:
            continue
        if kept is None or _is_more(state, kept):
            yield Diverged(name, int(state.seqno), state.upper, kept, state.is_closed)


def _is_more(state: State, kept: Kept) -> bool:
    """Whether more came than what maintenance and readers commit."""
    later = [done for seqno, done in state.entries.items() if seqno > kept.version]
    said = any(not is_maintenance(entry) for done in later for entry in done.entries)
    return said or state.upper != kept.upper or any(file.last > kept.version for file in state.entry_files)


def salvage(old: Location, promotion: Promotion, directory: Path) -> Iterator[Diverged]:
    """As `diverged`, and write the updates of each shard to a Parquet file in this directory, which is made.

    A file has the shard's columns, `__time` and `__diff`, ordered by time. Raises InvalidUsage also where the directory
    has files already, or cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise InvalidUsage(f"{directory} has files already: give an empty directory, or a new one")
        client = Client(EmbeddedTransport(old))
        for found in diverged(old, promotion):
            yield found if found.dropped else _written(client.shard(found.name), found, directory)
    except OSError as error:
        raise InvalidUsage(f"{directory} cannot be written: {error.strerror or error}") from error


def _written(shard: Shard, found: Diverged, directory: Path) -> Diverged:
    """The updates of one shard in a file of its own, which is there whole or not at all."""
    if found.lower == found.upper or found.upper == MINIMUM:
        return replace(found, times=0, updates=0)
    element = found.lower.element
    path = directory / f"{quote(found.name, safe='')}.parquet"
    fresh = path.with_suffix(".part")
    times: set[int] = set()
    updates = 0
    try:
        events = shard.listen(element - 1 if element else None, until=found.upper.element, purpose="salvage")
        with closing(events), pq.ParquetWriter(fresh, shard.schema.updates_schema, compression="zstd") as writer:
            for event in events:
                times.update(pc.unique(event.updates.column(TIME)).to_pylist())
                updates += len(event.updates)
                writer.write_table(event.updates)
    except NotReadable as error:
        fresh.unlink(missing_ok=True)
        return replace(found, why=f"its history is forgotten: {error.message}")
    os.replace(fresh, path)
    return replace(found, times=len(times), updates=updates, file=str(path))
