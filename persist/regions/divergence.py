"""Salvage: updates that an old home has acknowledged and the new home lacks, shard by shard and time by time.

A promotion records in the new home's blob store from which version each shard continued. Later entries in the old
home's log are its divergence. Its updates are written to files, for their owner to examine and insert again. Neither
home is changed, except for the leases of the reader in the old home's log.
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
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.errors import InvalidUsage, NotReadable, PersistError, Unavailable
from persist.core.frontier import MINIMUM, Antichain
from persist.core.shard_view import digest_of
from persist.core.spill import ENTRIES
from persist.core.state import State
from persist.core.transitions.outcomes_and_audit import is_maintenance
from persist.parts import TIME
from persist.regions.failover import KeptVersion, Promotion, promotions_in

HOME_OPERATIONS = frozenset({"hand_over", "take_back"})  # operations that only concern which home it is
NAME_MAX = 200  # characters of a file's name, without its extension


@dataclass(frozen=True, slots=True)
class Diverged:
    """What one shard of the old home has beyond the new one.

    `version` and `upper`: the newest in the old home. `kept`: the version in the new home; None: it has none of this
    incarnation. `commits`: the number of later commits. `why`: why its updates cannot be read. `times` and `updates`
    were written to `file`; None: they were not written.
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
        """Both homes have the same updates before it."""
        return MINIMUM if self.kept is None else self.kept.upper

    @property
    def overlaps(self) -> bool:
        """Whether the old home continued beyond where the new one resumed, so that both used the same times."""
        if self.kept is None or self.dropped or self.kept.resumes.element is None:
            return False
        return self.upper.element is None or self.upper.element > self.kept.resumes.element

    def to_json(self) -> dict[str, Any]:
        """The output of the command."""
        fields: dict[str, Any] = {"shard": self.name, "lower": self.lower.to_json(), "upper": self.upper.to_json()}
        fields |= {"commits": self.commits, "kept": self.kept is not None, "dropped": self.dropped}
        fields |= {"overlaps": self.overlaps, "times": self.times, "updates": self.updates}
        return {**fields, "file": self.file or None, "why": self.why or None}


def find_diverged(old: Location, promotion: Promotion) -> Iterator[Diverged]:
    """Find the shards of the old home that continued beyond the new one. Writes nothing.

    They are compared with the first promotion that the old home does not know, regardless of later ones. `why` is set
    for shards that cannot be read. Raises InvalidUsage (they are homes of two locations), Corruption, Unavailable.
    """
    binding = old.identity.check()
    if binding.location_id != promotion.location_id:
        raise InvalidUsage(f"{old.blob.url} has another location than the home of epoch {promotion.epoch}")
    fork_point = _find_fork_point(old, binding.epoch, promotion)
    for name in old.all_names():
        kept, is_fork = fork_point.of_shard(name), fork_point.own is not None
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
            kept = None  # it was another incarnation
        if kept is None or is_fork or _is_more(state, kept):
            yield Diverged(name, int(state.seqno), state.upper, kept, state.is_closed, commits)


@dataclass(frozen=True, slots=True)
class _ForkPoint:
    """Where the new home's line of promotions left that of the old home: its first promotion that is not in the latter.

    `own`: the promotion by which the old home's line diverged from the new one's; None: it has none since.
    """

    promotion: Promotion
    own: Promotion | None

    def of_shard(self, name: str) -> KeptVersion | None:
        """What both have: after a fork, the version of the line that left first."""
        kept = self.promotion.shards.get(name)
        if kept is None or self.own is None:
            return kept
        own_version = self.own.shards.get(name)
        if own_version is None or own_version.shard_id != kept.shard_id:
            return None
        return replace(kept, version=own_version.version, upper=min(kept.upper, own_version.upper))


def _find_fork_point(old: Location, epoch: int, promotion: Promotion) -> _ForkPoint:
    """Raises InvalidUsage: the home of this promotion is not later than the old home."""
    line = (*promotion.earlier, replace(promotion, earlier=()))
    own_promotions = [noted for noted in promotions_in(old.blob) if noted.epoch <= epoch]
    if fork := [noted for noted in own_promotions if noted not in line]:
        return _ForkPoint(next((promoted for promoted in line if promoted not in own_promotions), promotion), fork[0])
    later = [promoted for promoted in line if promoted.epoch > epoch]
    if not later:
        raise InvalidUsage(
            f"{old.consensus.url} has epoch {epoch}, and the new home epoch {promotion.epoch}: give the old home, and "
            "the blob store of the new one"
        )
    return _ForkPoint(later[0], None)


def _is_more(state: State, kept: KeptVersion) -> bool:
    """Whether there are later commits than those of maintenance and readers.

    What callers were acknowledged is compared as a whole, since the history may not be complete. The history shows the
    rest: what was forgotten, restored and rewritten.
    """
    if digest_of(state) != kept.acknowledged:
        return True
    later = [record for seqno, record in state.entries.items() if seqno > kept.version]
    has_other_entry = any(
        not is_maintenance(entry) and entry.operation not in HOME_OPERATIONS
        for record in later
        for entry in record.entries
    )
    return has_other_entry or any(file.last > kept.version for file in state.files_of(ENTRIES))


def salvage(old: Location, promotion: Promotion, directory: Path) -> Iterator[Diverged]:
    """As `find_diverged`, and write the updates of each shard to a Parquet file in this directory, which is created.

    A file has the shard's columns, `__time` and `__diff`, ordered by time. Also raises InvalidUsage: the directory has
    files, or cannot be written.
    """
    try:
        make_directories(directory)
        if any(directory.iterdir()):
            raise InvalidUsage(f"{directory} is not empty: give an empty directory, or a new one")
        client = Client(_UnheldTransport(old))
        for shard in find_diverged(old, promotion):
            yield shard if shard.dropped or shard.why else _write_updates(client, shard, directory)
    except OSError as error:
        raise InvalidUsage(f"{directory} cannot be written: {error.strerror or error}") from error


class _UnheldTransport(EmbeddedTransport):
    """Reads shards that were handed over, without a lease: their logs accept none, and nothing changes them."""

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY, by_names: bool = False) -> c.Result:
        state = self.location.machine(name).state()
        if not state.handed_over:
            return super().apply(name, command, caller, by_names)
        if isinstance(command, c.RegisterReader):
            if command.since is not None and not state.since <= command.since:
                raise NotReadable(f"shard {name!r} is readable from {state.since} on, but not as of {command.since}")
            return c.ReaderRegistered(command.since or state.since, state.upper, state.seqno)
        if isinstance(command, c.DowngradeSince):
            return c.SinceDowngraded(command.since or state.since, state.since)
        if isinstance(command, c.ExpireReader):
            return c.Done()
        return super().apply(name, command, caller, by_names)


def _write_updates(client: Client, diverged_shard: Diverged, directory: Path) -> Diverged:
    """Write the updates of one shard to a file of its own, atomically."""
    if diverged_shard.lower == diverged_shard.upper or diverged_shard.upper == MINIMUM:
        return replace(diverged_shard, times=0, updates=0)
    element = diverged_shard.lower.element
    path = directory / f"{_file_name(diverged_shard.name)}.parquet"
    partial = path.with_suffix(".part")
    times: set[int] = set()
    updates = 0
    try:
        shard = client.shard(diverged_shard.name)
        events = shard.listen(element - 1 if element else None, until=diverged_shard.upper.element, purpose="salvage")
        with closing(events), pq.ParquetWriter(partial, shard.schema.updates_schema, compression="zstd") as writer:
            for event in events:
                times.update(pc.unique(event.updates.column(TIME)).to_pylist())
                updates += len(event.updates)
                writer.write_table(event.updates)
    except PersistError as error:  # the other shards are still written
        partial.unlink(missing_ok=True)
        what = "its history is forgotten" if isinstance(error, NotReadable) else "it cannot be read"
        return replace(diverged_shard, why=f"{what}: {error.message}")
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    replace_file(partial, path)
    return replace(diverged_shard, times=len(times), updates=updates, file=str(path))


def _file_name(name: str) -> str:
    """The file name of a shard. Long names are cut, and end in a digest."""
    quoted = quote(name, safe="")
    if len(quoted) <= NAME_MAX:
        return quoted
    return f"{quoted[: NAME_MAX - 32]}~{hashlib.sha256(name.encode()).hexdigest()[:32]}"
