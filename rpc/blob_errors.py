"""Errors that only the routes for blobs raise."""

from __future__ import annotations

from persist.core.errors import InvalidUsage


class BlobMissing(InvalidUsage):
    """There is no blob of that key (any more), or it ends before the range does."""

    kind = "blob_missing"
