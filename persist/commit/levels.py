"""The level of a location: the version of the durable bytes that are written there.

Every build writes the level of the location, not the newest one that it knows, so that two builds can serve one
location. An administrator raises the level (`persist upgrade`) when no older build is left. A new location has the
newest level of the build that first uses it. The level is kept in write-once blobs, `level/3`, `level/4`, …: it is the
last of them without a gap.
"""

from __future__ import annotations

import contextlib

from blob import Blob, BlobExists
from persist.core.errors import UpgradeNeeded
from persist.formats.state_frames import FIRST_LEVEL, Build
from persist.formats.store_errors import translated

LEVELS = "level/"


def read_level(blob: Blob, build: Build) -> int:
    """The level of the location. Raises UpgradeNeeded when the build does not know it."""
    level = FIRST_LEVEL
    with translated():
        while blob.stat(_key(level + 1)) is not None:
            level += 1
    if level not in build.levels:
        raise UpgradeNeeded(f"this location has level {level}; this persist knows {build.known}: upgrade it")
    return level


def raise_level(blob: Blob, build: Build) -> tuple[int, int]:
    """Raise the location to the last level that the build knows; the levels before and after. May be repeated."""
    before, after = read_level(blob, build), max(build.levels)
    for level in range(before + 1, after + 1):
        with translated(), contextlib.suppress(BlobExists):  # somebody else raises it too
            blob.put(_key(level), b"")
    return before, after


def _key(level: int) -> str:
    return f"{LEVELS}{level}"
