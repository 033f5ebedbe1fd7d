"""Blob stores: immutable bytes under keys. `open_blob(url)` opens one; `Blob` says what it promises."""

from __future__ import annotations

from blob.blob_urls import open_blob
from blob.errors import (
    ESCAPES,
    BlobError,
    BlobExists,
    BlobMisconfigured,
    BlobNotFound,
    BlobNotWritable,
    BlobUnavailable,
    describe_option,
    is_ambiguous,
    optional,
    without_secrets,
)
from blob.interface import Blob, BlobStat, Unfinished

__all__ = [
    "Blob",
    "BlobStat",
    "BlobError",
    "BlobExists",
    "BlobMisconfigured",
    "BlobNotFound",
    "BlobNotWritable",
    "BlobUnavailable",
    "ESCAPES",
    "Unfinished",
    "is_ambiguous",
    "open_blob",
    "describe_option",
    "optional",
    "without_secrets",
]
