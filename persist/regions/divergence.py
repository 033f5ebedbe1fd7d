"""Salvage: what an old home has acknowledged and the new one does not have, shard by shard and time by time.

A promotion notes in the new home's blob store from which version each shard went on. In the old home's log lies what
came after that. Its updates are written to files, which their owner may look at and insert anew. Nothing is changed in
either home, but for the leases of the reader, which the old home's log takes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow.compute as pc
import pyarrow.parquet as pq

from blob.private_files import make_directories, replace_file
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.errors import InvalidUsage, NotReadable, PersistError, Unavailable
from persist.core.frontier import MINIMUM, Antichain
from persist.core.shard_view import digest_of
from persist.core.spill import ENTRIES
from persist.core.state import State
from persist.core.transitions.audit_recording import is_maintenance
from persist.parts import TIME
from persist.regions.failover import KeptVersion, Promotion, promotions_in

UNTOLD = frozenset({"hand_over", "take_back"})  # operations of the commit history that tell of nothing but a home
NAME_MAX = 200  # characters of a file's name, without its ending


@dataclass(frozen=True, slots=True)
class Diverged:
    """What one shard of the old home has beyond what the new one has of it.

    `version` and `upper`: the newest of the old home. `kept`: what the new home has; None: nothing, of this life of the
    name. `commits`: so many came after what it has. `why`: why its updates cannot be told. `times` and `updates` were
    written to `file`; None: they were not written.
    """

    name: str
    version: int
    upper: Antichain
    kept: KeptVersion | None
    dropped: bool = False
    commits: int = 0
    times: int | None = None
    updates: int | None = None
    file: str = ""
    why: str = ""

    @property
    def lower(self) -> Antichain:
        """Every time before it is the same in both homes."""
        return MINIMUM if self.kept is None else self.kept.upper

    @property
    def overlaps(self) -> bool:
        """Whether the old home has gone beyond where the new one went on, so one time may mean two things."""
        if self.kept is None or self.dropped or self.kept.resumes.element is None:
            return False
        return self.upper.element is None or self.upper.element > self.kept.resumes.element

    def to_json(self) -> dict[str, Any]:
        """As the command prints it."""
        told: dict[str, Any] = {"shard": self.name, "lower": self.lower.to_json(), "upper": self.upper.to_json()}
        told |= {"commits": self.commits, "kept": self.kept is not None, "dropped": self.dropped}
        told |= {"overlaps": self.overlaps, "times": self.times, "updates": self.updates}
        return {**told, "file": self.file or None, "why": self.why or None}


def diverged(old: Location, promotion: Promotion) -> Iterator[Diverged]:
    """The shards of the old home that have gone on beyond what the new one has. Writes nothing.

    They are compared with the first promotion that the old home does not know, however many came after it. Of what
    cannot be read `why` tells. Raises InvalidUsage (they are homes of two locations), Corruption, Unavailable.
    """
    bound = old.identity.check()
    if bound.location_id != promotion.location_id:
        raise InvalidUsage(f"{old.blob.url} is of another location than the home of epoch {promotion.epoch}")
    left = _left_at(old, bound.epoch, promotion)
    for name in old.all_names():
        kept, is_fork = left.of_shard(name), left.is_fork
        try:
            state = old.machine(name).refresh()
        except Unavailable:
            raise
        except PersistError as error:
            version = 0 if kept is None else kept.version
            upper = MINIMUM if kept is None else kept.upper
            yield Diverged(name, version, upper, kept, why=f"it cannot be read: {error.message}")
            continue
        if kept is not None and not is_fork and state.seqno <= kept.version:
            continue
        if kept is None and state.tombstone:
            continue
        commits = int(state.seqno) - (0 if kept is None else kept.version)
        if kept is not None and kept.shard_id != state.shard_id:
            kept = None  # it was another shard of this name
        if kept is None or is_fork or _is_more(state, kept):
            yield Diverged(name, int(state.seqno), state.upper, kept, state.is_closed, commits)


@dataclass(frozen=True, slots=True)
class _Left:
    """Where the new home's line left that of the old home: the first promotion there that is not of this one.

    `own`: the promotion by which the old home's line went another way than the new one's; None: it went no way since.
    """

    promotion: Promotion
    own: Promotion | None

    @property
    def is_fork(self) -> bool:
        return self.own is not None

    def of_shard(self, name: str) -> KeptVersion | None:
        """What both have: of a fork that which the one has that went its way earlier."""
        kept = self.promotion.of_shard(name)
        if kept is None or self.own is None:
            return kept
        other = self.own.of_shard(name)
        if other is None or other.shard_id != kept.shard_id:
            return None
        return replace(kept, version=other.version, upper=_earlier(kept.upper, other.upper))


def _left_at(old: Location, epoch: int, promotion: Promotion) -> _Left:
    """Raises InvalidUsage: the home of this promotion is no later one than the old home."""
    line = (*promotion.earlier, replace(promotion, earlier=()))
    own = [known for known in promotions_in(old.blob) if known.epoch <= epoch]
    if fork := [known for known in own if known not in line]:
        return _Left(next((found for found in line if found not in own), promotion), fork[0])
    later = [found for found in line if found.epoch > epoch]
    if not later:
        raise InvalidUsage(
            f"{old.consensus.url} is of epoch {epoch}, and the new home of epoch {promotion.epoch}: give the old "
            "home, and the blob store of the new one"
        )
    return _Left(later[0], None)


def _earlier(one: Antichain, other: Antichain) -> Antichain:
    return one if one <= other else other


def _is_more(state: State, kept: KeptVersion) -> bool:
    """Whether more came than what maintenance and readers commit.

    What callers were told is compared as a whole, since a history that is not kept does not tell all of it. The history
    tells the rest: what was forgotten, restored and rewritten.
    """
    if digest_of(state) != kept.acknowledged:
        return True
    later = [done for seqno, done in state.entries.items() if seqno > kept.version]
    said = any(not is_maintenance(entry) and entry.operation not in UNTOLD for done in later for entry in done.entries)
    return said or any(file.last > kept.version for file in state.files_of(ENTRIES))


def salvage(old: Location, promotion: Promotion, directory: Path) -> Iterator[Diverged]:
    """As `diverged`, and write the updates of each shard to a Parquet file in this directory, which is made.

    A file has the shard's columns, `__time` and `__diff`, ordered by time. Raises InvalidUsage also where the directory
    has files already, or cannot be written.
    """
    try:
        make_directories(directory)
        if any(directory.iterdir()):
            raise InvalidUsage(f"{directory} has files already: give an empty directory, or a new one")
        client = Client(_Unheld(old))
        for found in diverged(old, promotion):
            yield found if found.dropped or found.why else _written(client, found, directory)
    except OSError as error:
        raise InvalidUsage(f"{directory} cannot be written: {error.strerror or error}") from error


class _Unheld(EmbeddedTransport):
    """Reads shards that were handed over without a hold in their log, which takes none: nothing changes them."""

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY, by_names: bool = False) -> c.Result:
        state = self.location.machine(name).state()
        if not state.handed_over:
            return super().apply(name, command, caller, by_names)
        if isinstance(command, c.RegisterReader):
            if command.since is not None and not state.since <= command.since:
                raise NotReadable(f"shard {name!r} is readable from {state.since} on, and not as of {command.since}")
            return c.ReaderRegistered(command.since or state.since, state.upper, state.seqno)
        if isinstance(command, c.DowngradeSince):
            return c.SinceDowngraded(command.since or state.since, state.since)
        if isinstance(command, c.ExpireReader):
            return c.Done()
        return super().apply(name, command, caller, by_names)


def _written(client: Client, found: Diverged, directory: Path) -> Diverged:
    """The updates of one shard in a file of its own, which is there whole or not at all."""
    if found.lower == found.upper or found.upper == MINIMUM:
        return replace(found, times=0, updates=0)
    element = found.lower.element
    path = directory / f"{_file_name(found.name)}.parquet"
    fresh = path.with_suffix(".part")
    times: set[int] = set()
    updates = 0
    try:
        shard = client.shard(found.name)
        events = shard.listen(element - 1 if element else None, until=found.upper.element, purpose="salvage")
        with closing(events), pq.ParquetWriter(fresh, shard.schema.updates_schema, compression="zstd") as writer:
            for event in events:
                times.update(pc.unique(event.updates.column(TIME)).to_pylist())
                updates += len(event.updates)
                writer.write_table(event.updates)
    except PersistError as error:  # other shards are told all the same
        fresh.unlink(missing_ok=True)
        what = "its history is forgotten" if isinstance(error, NotReadable) else "it cannot be read"
        return replace(found, why=f"{what}: {error.message}")
    with fresh.open("rb") as whole:
        os.fsync(whole.fileno())
    replace_file(fresh, path)
    return replace(found, times=len(times), updates=updates, file=str(path))


def _file_name(name: str) -> str:
    """That of a shard's file. A name that is too long for a file is cut, and has its digest at the end."""
    whole = quote(name, safe="")
    if len(whole) <= NAME_MAX:
        return whole
    return f"{whole[: NAME_MAX - 32]}~{hashlib.sha256(name.encode()).hexdigest()[:32]}"
