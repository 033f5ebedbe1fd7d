"""Checks of the location itself: its stores, marker, format, disks and maintenance; its backups, tokens and servers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from blob import open_blob
from blob.errors import without_secrets
from blob.private_files import is_open
from persist.check.findings import HOUR_MS, CheckThresholds, Diagnosis, age, at, diagnosis, is_or_are, many, size, some
from persist.commit.clocks_and_ids import Clock, SystemIds
from persist.commit.location import Location
from persist.copies.backup_store import BackupListing, BackupStore
from persist.copies.blob_store_scan import last_heartbeat_ms
from persist.copies.shard_facts import Fault
from persist.core.errors import InvalidUsage
from persist.formats.store_errors import translated
from persist.inspect.readonly_location import ReadOnlyBlob, ReadOnlyLocation, open_existing
from persist.telemetry.metrics import MachineMetrics

SQLITE = "sqlite:///"


def mispaired(faults: list[Fault]) -> Iterator[Diagnosis]:
    """Turn the faults of `location_summary` into findings."""
    for fault in faults:
        finding_id, command = "stores-mispaired", "persist backup recover --dry-run"
        cause = "one of the two URLs is wrong, a store was restored without the other, or another home took over"
        remedy = "give the two stores of one location; if the log is lost, restart it from the blob store"
        if fault.what.startswith("persist.json"):
            finding_id, command = "marker-wrong", ""
            cause = "the directory was copied without it, or another program wrote it"
            remedy = "copy persist.json from a backup of the directory, or from a location of the same version"
        elif "upgrade" in fault.what:
            finding_id, command = "format-newer", ""
            cause = "a newer persist has upgraded the format version of this location"
            remedy = "upgrade this program"
        yield diagnosis(finding_id, fault.what, cause=cause, remedy=remedy, command=command or None)


def maintenance_away(location: ReadOnlyLocation, newest_commit_ms: int) -> Iterator[Diagnosis]:
    """Maintenance writes a heartbeat each minute. Commits long after the last one had no maintenance."""
    beat_ms = last_heartbeat_ms(location.blob)
    if beat_ms is not None and newest_commit_ms - beat_ms > HOUR_MS:
        away = age(newest_commit_ms - beat_ms)
        yield diagnosis(
            "maintenance-away",
            f"the last heartbeat of maintenance was {at(beat_ms)}, and shards were written {away} after that",
            cause="no server with maintenance, and no persist maintain run, has run since",
            remedy="start a server, or persist maintain run; see its log if one is running",
            command="persist maintain run --once",
        )


def disk_full(location: ReadOnlyLocation, limits: CheckThresholds) -> Iterator[Diagnosis]:
    """The disks of stores on this machine. Other stores do not report their free space."""
    devices: dict[int, tuple[str, Path]] = {}
    for store, url in (("the blob store", location.blob.url), ("the consensus store", location.consensus.url)):
        path = path_of(url)
        if path is not None and path.exists():
            device = path.stat().st_dev
            devices[device] = (f"{devices[device][0]} and {store}" if device in devices else store, path)
    for what, path in devices.values():
        usage = shutil.disk_usage(path)
        free, unit = usage.free * 100 / max(1, usage.total), size(usage.free)
        statistics = os.statvfs(path)
        inodes = statistics.f_favail * 100 / statistics.f_files if statistics.f_files else free
        if inodes < free:
            free, unit = inodes, "of its inodes"
        if free < limits.free_percent:
            yield diagnosis(
                "disk-full",
                f"the disk of {what} has {free:.1f}% free ({unit}): writes will fail when it is full",
                cause="the disk is filled by persist or another program",
                remedy="free space; persist inspect usage shows what uses it, and persist maintain gc deletes without "
                "writing",
                command="persist inspect usage",
            )


def open_places(*urls: str) -> list[Path]:
    """The stores at these URLs that every user of this machine can read."""
    return [path for path in map(path_of, urls) if path is not None and is_open(path)]


def files_open(location: ReadOnlyLocation) -> Iterator[Diagnosis]:
    """Files that are readable by every user bypass tokens."""
    for path in open_places(location.blob.url, location.consensus.url):
        yield diagnosis(
            "files-open",
            f"every user of this machine can read {path}, and thus all rows, regardless of tokens",
            cause="an older persist created it so, or its permissions were changed",
            remedy="run chmod -R o-rwx on it; new files get the permissions of their directory",
        )


def path_of(url: str) -> Path | None:
    """The path of a store on this machine. None: it is elsewhere."""
    if url.startswith("file:"):
        return Path(unquote(urlsplit(url).path))
    return Path(url.removeprefix(SQLITE)) if url.startswith(SQLITE) else None


# Checks beyond the stores: backups, tokens, and the metrics of a server.


FINE = ("ok", "lost", "BlobNotFound", "BlobExists")  # outcomes of calls that do not indicate a problem of the store
RACES_MANY = 20  # commits that lost a race
RACES_PERCENT_MAX = 10  # of all attempts
FAILURES_MANY = 5  # calls to a store that failed
FAILURES_PERCENT_MAX = 1  # of all calls of that kind


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """A token: its id, when it expires, and the scope and prefixes that its replacement needs."""

    name: str
    expires_ms: int
    scope: str = "read"
    prefixes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BackupFacts:
    """The backups of a store at `url`, which contains no secrets."""

    url: str
    listed: BackupListing


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The metrics of a server: of shards in memory by name, and calls, (store, verb, outcome) -> count.

    `clock_agrees`: whether its clock and the blob store's agreed when last compared. None: they were not compared.
    """

    shards: Mapping[str, MachineMetrics]
    calls: dict[tuple[str, str, str], int]
    clock_agrees: bool | None


@dataclass(frozen=True, slots=True)
class ExternalState:
    """What is known beyond the stores. None: it was not requested, or the caller may not see it."""

    backups: BackupFacts | None = None
    tokens: Sequence[TokenFacts] | None = None
    served: ServerFacts | None = None


NO_EXTERNAL_STATE = ExternalState()


# --- backups


def list_backups(url: str, clock: Clock) -> BackupFacts:
    """List the backups of a store. Writes nothing. Raises InvalidUsage: it has none; Unavailable."""
    with translated(), closing(open_existing(lambda: open_blob(url, makes=False))) as blob:
        store = BackupStore(ReadOnlyBlob(blob), clock, SystemIds())
        store.open(None)
        return BackupFacts(without_secrets(url), store.listed())


def check_location(backups_seen: BackupFacts, location: str | None) -> None:
    """Raise InvalidUsage if the backups are of another location."""
    others = {backup.location for backup in backups_seen.listed.backups} - {location}
    if location is not None and others:
        raise InvalidUsage(f"{backups_seen.url} has backups of location {min(others)}, and this is {location}")


def backups(backups_seen: BackupFacts, now_ms: int, limits: CheckThresholds) -> Iterator[Diagnosis]:
    """Backups that cannot be read, and a newest backup that is too old."""
    command = f"persist backup create --to {backups_seen.url}"
    for unread in backups_seen.listed.unread:
        yield diagnosis(
            "backup-unreadable",
            f"backup {unread.id} cannot be read",
            cause=unread.error.message,
            remedy="make a new one; delete this one by persist backup prune --damaged",
            command=command,
        )
    newest = max(backups_seen.listed.backups, key=lambda backup: backup.shown_ms, default=None)
    what = f"there is no readable backup in {backups_seen.url}"
    if newest is not None:
        if now_ms - newest.shown_ms <= limits.backup_ms:
            return
        what = f"the newest backup, {newest.id}, is {age(now_ms - newest.shown_ms)} old"
    yield diagnosis(
        "backup-old",
        what,
        cause=f"no backup was made for {age(limits.backup_ms)}: the job that makes them has stopped, or fails",
        remedy="make one now, and find out why the regular one was not made",
        command=command,
    )


def lacking(backups_seen: BackupFacts, shards: Sequence[tuple[str, int]]) -> Iterator[Diagnosis]:
    """Shards without a backup that existed when the newest backup was made, given with their creation times."""
    newest = max(backups_seen.listed.backups, key=lambda backup: backup.taken_ms, default=None)
    if newest is None:
        return
    known = {shard.name for backup in backups_seen.listed.backups for shard in backup.shards}
    missing = sorted(name for name, first_ms in shards if name not in known and 0 < first_ms < newest.taken_ms)
    if missing:
        yield diagnosis(
            "backup-lacks",
            f"{many(len(missing), 'shard')} {is_or_are(len(missing))} in no backup: {some(missing)}",
            cause="backups are made of some shards only",
            remedy="back up all shards, or name these too",
            command=f"persist backup create --to {backups_seen.url}",
        )


# --- tokens


def tokens(tokens_seen: Sequence[TokenFacts], now_ms: int, limits: CheckThresholds) -> Iterator[Diagnosis]:
    """Tokens that expire soon, or have expired."""
    for token in tokens_seen:
        remaining_ms = token.expires_ms - now_ms
        if remaining_ms > limits.token_ms:
            continue
        when = f"expires in {age(remaining_ms)}," if remaining_ms > 0 else "expired"
        yield diagnosis(
            "token-expires",
            f"the token {token.name!r} {when} {at(token.expires_ms)}",
            cause="its expiry in the tokens file; requests with it are rejected from then on",
            remedy="mint a replacement with its scopes and prefixes, name it in the quotas file if this one is there, "
            "give it to its users, and remove this one from the file",
            command=f"persist token create {token.name}-next --file FILE --scope {token.scope}"
            + "".join(f" --prefix {prefix}" for prefix in token.prefixes),
        )


# --- a server


def server_facts(location: Location) -> ServerFacts:
    """The metrics of a server's location."""
    shards = {machine.name: machine.metrics for machine in location.machines()}
    calls = {(key[0], key[1], key[2]): count for key, (count, _, _) in location.store_calls.totals().items()}
    return ServerFacts(shards, calls, location.clock_agrees)


def races_lost(served: ServerFacts, names: frozenset[str]) -> Iterator[Diagnosis]:
    """Shards to which others commit as well, so that this server often has to retry."""
    for name, metrics in served.shards.items():
        tried = metrics.commits + metrics.races_lost
        if name not in names or metrics.races_lost < RACES_MANY or metrics.races_lost * 100 < tried * RACES_PERCENT_MAX:
            continue
        yield diagnosis(
            "races-lost",
            f"this server has lost {metrics.races_lost:,} of {tried:,} races to commit since it started",
            cause="another server, or a program that opens the stores directly, commits to the same shard",
            remedy="give all clients the same list of servers: each shard then has one server",
            command=f"persist history {name} --commits 20",
            shard=name,
        )


def store_failing(served: ServerFacts) -> Iterator[Diagnosis]:
    """Calls to a store that fail often."""
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
            f"{count:,} of {sums[store, verb]:,} calls of {verb!r} to the {store} store have failed since the server "
            f"started: {', '.join(outcomes)}",
            cause="the store is intermittently unavailable, rejects requests, or is too slow",
            remedy="check the store; the log of the server has the errors",
        )


def server_clock(served: ServerFacts) -> Iterator[Diagnosis]:
    """A server compares its clock with the blob store's every few minutes while it commits."""
    if served.clock_agrees is False:
        yield diagnosis(
            "clock-off",
            "the clocks of this server and of the blob store differ: nothing is settled, or expires, by age",
            cause="one of the two clocks is wrong by more than 10 seconds",
            remedy="synchronize the clocks of the server and of the blob store by NTP",
        )
