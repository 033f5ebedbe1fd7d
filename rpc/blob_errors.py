"""What only the door to blobs says."""

from __future__ import annotations

from persist.core.errors import InvalidUsage


class BlobMissing(InvalidUsage):
    """There is no blob of that key (any more), or it ends before the range does."""

    kind = "blob_missing"
