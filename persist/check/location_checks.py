"""The location as a whole: its stores, marker, format, disks and maintenance; backups, tokens and servers beside it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from blob import BlobMisconfigured, open_blob
from blob.errors import without_secrets
from blob.private_files import is_open
from persist.check.findings import (
    FAILURES_MANY,
    FAILURES_PERCENT_MAX,
    HOUR_MS,
    RACES_MANY,
    RACES_PERCENT_MAX,
    CheckThresholds,
    Diagnosis,
    age,
    at,
    diagnosis,
    many,
    size,
    some,
)
from persist.commit.location import Location
from persist.commit.system import Clock, SystemIds
from persist.copies.backup_store import BackupStore, Listed
from persist.copies.shard_facts import Fault
from persist.core.blob_keys import BEATS, is_beat_key
from persist.core.errors import InvalidUsage, Unavailable
from persist.formats.store_errors import translated
from persist.inspect.readonly_location import ReadOnlyLocation, read_only
from persist.telemetry.metrics import MachineMetrics

SQLITE = "sqlite:///"
BEAT_MS = 60_000  # a beat tells the minute


def mispaired(found: list[Fault]) -> Iterator[Diagnosis]:
    """What does not fit together, of a location as `location_summary` tells it."""
    for one in found:
        if one.what.startswith("persist.json"):
            yield diagnosis(
                "marker-wrong",
                None,
                one.what,
                cause="the directory was copied without it, or something else wrote it",
                remedy="copy persist.json from a backup of the directory, or from one of the same version",
            )
        elif "upgrade" in one.what:
            yield diagnosis(
                "format-newer",
                None,
                one.what,
                cause="a newer persist has switched a later format version on in this location",
                remedy="upgrade this program",
            )
        else:
            yield diagnosis(
                "stores-mispaired",
                None,
                one.what,
                cause="one of the two URLs is wrong, a store was restored without the other, or another home took over",
                remedy="give two stores that belong together; where the log is lost, begin it anew from the blob store",
                command="persist backup recover --dry-run",
            )


def maintenance_away(look: ReadOnlyLocation, newest_commit_ms: int) -> Iterator[Diagnosis]:
    """Maintenance says each minute that it is at work. Commits that came long after that had none."""
    with translated():
        beats = [stat.key for stat in look.blob.list(BEATS) if is_beat_key(stat.key)]
    if not beats:
        return
    beat_ms = max(int(key.rpartition("/")[2]) for key in beats) * BEAT_MS
    away_ms = newest_commit_ms - beat_ms
    if away_ms > HOUR_MS:
        yield diagnosis(
            "maintenance-away",
            None,
            f"maintenance was last at work {at(beat_ms)}, and shards were written {age(away_ms)} after that",
            cause="no server with maintenance, and no persist maintain run, has run since",
            remedy="start a server, or persist maintain run; look at its log if one runs",
            command="persist maintain run --once",
        )


def disk_full(look: ReadOnlyLocation, limits: CheckThresholds) -> Iterator[Diagnosis]:
    """The disks of stores that are files here. Of other stores nobody can ask."""
    places = [("the blob store", look.blob.url), ("the consensus store", look.consensus.url)]
    found: dict[int, tuple[str, Path]] = {}
    for what, url in places:
        path = path_of(url)
        if path is None or not path.exists():
            continue
        device = path.stat().st_dev
        both = f"{found[device][0]} and {what}" if device in found else what
        found[device] = (both, path)
    for what, path in found.values():
        usage = shutil.disk_usage(path)
        free, unit = usage.free * 100 / max(1, usage.total), size(usage.free)
        inodes = _free_inodes_percent(path)
        if inodes is not None and inodes < free:
            free, unit = inodes, "of its inodes"
        if free < limits.free_percent:
            yield diagnosis(
                "disk-full",
                None,
                f"the disk of {what} has {free:.1f}% free ({unit}): soon nothing can be written",
                cause="something fills the disk, persist or another program",
                remedy="make room; persist inspect usage says what takes it, and persist maintain gc deletes without "
                "writing",
                command="persist inspect usage",
            )


def open_places(*urls: str) -> list[Path]:
    """Which of the stores at these URLs every user of this machine may read."""
    return [path for path in map(path_of, urls) if path is not None and is_open(path)]


def files_open(look: ReadOnlyLocation) -> Iterator[Diagnosis]:
    """What lies in files is read by whoever may read the files, and no token is asked for."""
    for path in open_places(look.blob.url, look.consensus.url):
        yield diagnosis(
            "files-open",
            None,
            f"every user of this machine may read {path}, and so all rows, whatever tokens say",
            cause="an older persist made it so, or somebody opened it",
            remedy="run chmod -R o-rwx on it; persist makes what it adds there as open as its directory is",
        )


def _free_inodes_percent(path: Path) -> float | None:
    if not hasattr(os, "statvfs"):
        return None
    told = os.statvfs(path)
    return told.f_favail * 100 / told.f_files if told.f_files else None


def path_of(url: str) -> Path | None:
    """Where a store lies on a disk of this machine. None: it does not."""
    if url.startswith("file:"):
        return Path(unquote(urlsplit(url).path))
    return Path(url.removeprefix(SQLITE)) if url.startswith(SQLITE) else None


# What lies beside a location: backups, tokens, and what a server has counted since it began.


FINE = ("ok", "lost", "BlobNotFound", "BlobExists")  # outcomes of calls that tell nothing of a store's health


@dataclass(frozen=True, slots=True)
class TokenSeen:
    """A token: its id, when it ends, and what another one in its place has to have."""

    name: str
    expires_ms: int
    scope: str = "read"
    prefixes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BackupsSeen:
    """The backups of a store, at `url`, which has no secrets."""

    url: str
    listed: Listed


@dataclass(frozen=True, slots=True)
class Served:
    """What a server has counted: of shards in memory by name, and calls, (store, verb, outcome) -> how often.

    `clock_agrees`: whether its clock and the blob store's agreed when they were compared last. None: they were not.
    """

    shards: Mapping[str, MachineMetrics]
    calls: dict[tuple[str, str, str], int]
    clock_agrees: bool | None


@dataclass(frozen=True, slots=True)
class Beside:
    """What is known besides the stores. None: it was not asked for, or is not to be told to who asks."""

    backups: BackupsSeen | None = None
    tokens: Sequence[TokenSeen] | None = None
    served: Served | None = None


NOTHING_BESIDE = Beside()


# --- backups


def look_at_backups(url: str, clock: Clock) -> BackupsSeen:
    """List the backups of a store. Nothing is written. Raises InvalidUsage: it is none; Unavailable."""
    with translated():
        try:
            blob = open_blob(url, makes=False)
        except BlobMisconfigured as error:
            if str(error).endswith("does not exist"):
                raise Unavailable(str(error)) from error
            raise
        try:
            store = BackupStore(read_only(blob), clock, SystemIds())
            store.open(None)
            return BackupsSeen(without_secrets(url), store.listed())
        finally:
            blob.close()


def check_location(seen: BackupsSeen, location: str | None) -> None:
    """Raises InvalidUsage: the backups are of another location."""
    others = {one.location for one in seen.listed.backups} - {location}
    if location is not None and others:
        raise InvalidUsage(f"{seen.url} has backups of location {min(others)}, and this is {location}")


def backups(seen: BackupsSeen, now_ms: int, limits: CheckThresholds) -> Iterator[Diagnosis]:
    """Backups that cannot be read, and a newest one that is too old."""
    command = f"persist backup create --to {seen.url}"
    for unread in seen.listed.unread:
        yield diagnosis(
            "backup-unreadable",
            None,
            f"backup {unread.id} cannot be read",
            cause=unread.why.message,
            remedy="make a new one; persist backup prune --damaged takes this one away",
            command=command,
        )
    newest = max(seen.listed.backups, key=lambda one: one.shown_ms, default=None)
    if newest is not None and now_ms - newest.shown_ms <= limits.backup_ms:
        return
    what = f"there is no backup in {seen.url} that can be read"
    if newest is not None:
        what = f"the newest backup, {newest.id}, is {age(now_ms - newest.shown_ms)} old"
    yield diagnosis(
        "backup-old",
        None,
        what,
        cause=f"no backup was made for {age(limits.backup_ms)}; who makes them has stopped, or fails",
        remedy="make one now, and look why the usual one was not made",
        command=command,
    )


def lacking(seen: BackupsSeen, shards: Sequence[tuple[str, int]]) -> Iterator[Diagnosis]:
    """Shards that are in no backup, though they were there when the newest one was made; each with when it was."""
    newest = max(seen.listed.backups, key=lambda one: one.taken_ms, default=None)
    if newest is None:
        return
    known = {shard.name for backup in seen.listed.backups for shard in backup.shards}
    found = sorted(name for name, first_ms in shards if name not in known and 0 < first_ms < newest.taken_ms)
    if found:
        yield diagnosis(
            "backup-lacks",
            None,
            f"{many(len(found), 'shard')} {'is' if len(found) == 1 else 'are'} in no backup: {some(found)}",
            cause="backups are made of some shards, and these are not among them",
            remedy="make one of all shards, or name these too",
            command=f"persist backup create --to {seen.url}",
        )


# --- tokens


def tokens(found: Sequence[TokenSeen], now_ms: int, limits: CheckThresholds) -> Iterator[Diagnosis]:
    """Tokens that end soon, or have ended: who still uses one is refused."""
    for token in found:
        left_ms = token.expires_ms - now_ms
        if left_ms > limits.token_ms:
            continue
        ends = f"ends in {age(left_ms)}, {at(token.expires_ms)}" if left_ms > 0 else f"has ended {at(token.expires_ms)}"
        yield diagnosis(
            "token-expires",
            None,
            f"the token {token.name!r} {ends}",
            cause="the tokens file says so: from then on its bearer is refused",
            remedy="mint another one with its scopes and prefixes, name it where a file of quotas names this one, "
            "and give it to its bearer; then take this one out of the file",
            command=" ".join(
                (
                    f"persist token {token.name}-next --file FILE --scope {token.scope}",
                    *(f"--prefix {prefix}" for prefix in token.prefixes),
                )
            ),
        )


# --- a server


def served_by(location: Location) -> Served:
    """What a server's location has counted."""
    shards = {machine.name: machine.metrics for machine in location.machines()}
    calls = {(key[0], key[1], key[2]): count for key, (count, _, _) in location.store_calls.totals().items()}
    return Served(shards, calls, location.clock_agrees)


def races_lost(served: Served, names: frozenset[str]) -> Iterator[Diagnosis]:
    """Shards to which others commit as well, so that this server often has to begin anew."""
    for name, one in served.shards.items():
        tried = one.commits + one.races_lost
        if name not in names or one.races_lost < RACES_MANY or one.races_lost * 100 < tried * RACES_PERCENT_MAX:
            continue
        yield diagnosis(
            "races-lost",
            name,
            f"this server has lost {one.races_lost:,} of {tried:,} races to commit since it began: each costs a commit "
            "the time of another one",
            cause="another server, or a program that opens the stores itself, commits to the same shard",
            remedy="give all clients the same list of servers: each shard then has one server",
            command=f"persist history {name} --commits 20",
        )


def store_failing(served: Served) -> Iterator[Diagnosis]:
    """Calls to a store that failed more often than now and then."""
    sums: dict[tuple[str, str], int] = {}
    failed: dict[tuple[str, str], dict[str, int]] = {}
    for (store, verb, outcome), count in sorted(served.calls.items()):
        sums[store, verb] = sums.get((store, verb), 0) + count
        if outcome not in FINE and count:
            failed.setdefault((store, verb), {})[outcome] = count
    for (store, verb), outcomes in failed.items():
        count = sum(outcomes.values())
        if count < FAILURES_MANY or count * 100 <= sums[store, verb] * FAILURES_PERCENT_MAX:
            continue
        yield diagnosis(
            "store-failing",
            None,
            f"{count:,} of {sums[store, verb]:,} calls of {verb!r} to the {store} store have failed since the server "
            f"began: {', '.join(outcomes)}",
            cause="the store is away now and then, refuses, or is too slow",
            remedy="look at the store, and at the log of the server: it has the reasons",
        )


def server_clock(served: Served) -> Iterator[Diagnosis]:
    """A server compares its clock with the blob store's every few minutes in which it commits."""
    if served.clock_agrees is False:
        yield diagnosis(
            "clock-off",
            None,
            "the clocks of this server and of the blob store do not agree: nothing is settled, or goes, by age",
            cause="one of the two clocks is wrong by more than 10 seconds",
            remedy="set the clocks by NTP, of the machine of the server and of that of the blob store",
        )
