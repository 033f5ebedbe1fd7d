"""The format version of a location: the version of the durable bytes that are written there.

Every build writes the format version of the location, not the newest one that it knows, so that two builds can serve
one location. An administrator switches a later version on when no older build is left. A new location has the newest
version of the build that creates it. The version is kept in write-once blobs, `format/2`, `format/3`, …: it is the
last of them without a gap, and 1 without any.
"""

from __future__ import annotations

import contextlib

from blob import Blob, BlobExists
from persist.core.errors import UpgradeNeeded
from persist.formats.state_frames import FIRST_FORMAT, Build
from persist.formats.store_errors import translated

FORMATS = "format/"


def read_format(blob: Blob, build: Build) -> int:
    """The format version of the location. Raises UpgradeNeeded when the build does not know it."""
    version = FIRST_FORMAT
    with translated():
        while blob.stat(_key(version + 1)) is not None:
            version += 1
    if version not in build.formats:
        raise UpgradeNeeded(f"this location has format version {version}; this persist knows {build.known}: upgrade it")
    return version


def raise_format(blob: Blob, build: Build) -> tuple[int, int]:
    """Switch on the newest format version of the build; the versions before and after. Safe to repeat."""
    before, after = read_format(blob, build), build.newest
    for version in range(before + 1, after + 1):
        with translated(), contextlib.suppress(BlobExists):  # another process raises it too
            blob.put(_key(version), b"")
    return before, after


def _key(version: int) -> str:
    return f"{FORMATS}{version}"
