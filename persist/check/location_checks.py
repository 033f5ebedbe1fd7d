"""The location as a whole: both stores, the marker of a directory, the format version, the disks, maintenance."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from blob.private_files import is_open
from persist.check.findings import HOUR_MS, Diagnosis, Limits, age, at, diagnosis, size
from persist.core.blob_keys import BEATS, is_beat_key
from persist.formats.store_errors import translated
from persist.inspect.documents import Finding
from persist.inspect.readonly_location import Look

SQLITE = "sqlite:///"
BEAT_MS = 60_000  # a beat tells the minute


def mispaired(found: list[Finding]) -> Iterator[Diagnosis]:
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
                command="persist recover --dry-run",
            )


def maintenance_away(look: Look, newest_commit_ms: int) -> Iterator[Diagnosis]:
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
            cause="no server with maintenance, and no persist compactor, has run since",
            remedy="start a server, or persist compactor --gc; look at its log if one runs",
            command="persist compactor --gc --once",
        )


def disk_full(look: Look, limits: Limits) -> Iterator[Diagnosis]:
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
                remedy="make room; persist inspect usage says what takes it, and persist gc deletes without writing",
                command="persist inspect usage",
            )


def open_places(*urls: str) -> list[Path]:
    """Which of the stores at these URLs every user of this machine may read."""
    return [path for path in map(path_of, urls) if path is not None and is_open(path)]


def files_open(look: Look) -> Iterator[Diagnosis]:
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
