"""Errors of blob stores, named by what the caller does next.

A blob is written once and never changed, so *every* failed call may be repeated: there is no "may have
happened" class here. A put that failed after the bytes landed is simply confirmed by the retry.

    BlobError
      BlobNotFound        no blob of that key
      BlobExists          the key holds other bytes; a caller's bug, never retry
      BlobUnavailable     the store did not answer or refused for now; retrying is safe
        BlobNotWritable   the disk is full or read-only: reads and deletions may work
      BlobMisconfigured   a setting is wrong; retrying cannot help; also a key that breaks the rules
"""

from __future__ import annotations

import importlib
from typing import Any


class BlobError(Exception):
    """Root of every error a blob store raises on purpose."""


class BlobNotFound(BlobError):
    """No blob of that key; for a range read also: the blob ends before the range does."""


class BlobExists(BlobError):
    """The key already holds different bytes. Keys are single-use, so this is a bug of the caller."""


class BlobUnavailable(BlobError):
    """The store did not answer in time, broke the connection or refused for now. Retrying is safe."""


class BlobNotWritable(BlobUnavailable):
    """The disk is full or read-only, and nothing was written. Reads work, and on a full disk deletions."""


class BlobMisconfigured(BlobError):
    """A setting, a URL, a key or an argument is wrong. The message names it. Retrying cannot help."""


# Libraries that only some installations have.


def optional(module: str, what: str, install: str, error: type[Exception]) -> Any:
    """Import `module`. Where a library that it needs is missing, raise `error`: `what` needs it, `pip install` so."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise error(f'{what} needs {missing.name}: pip install "{install}"') from missing
