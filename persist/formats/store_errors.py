"""Translates errors of the stores into errors of `persist.core.errors`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from blob import Blob, BlobError, BlobExists, BlobMisconfigured, BlobNotFound, BlobNotWritable
from consensus import (
    ConsensusDamaged,
    ConsensusError,
    ConsensusIndeterminate,
    ConsensusMisconfigured,
    ConsensusNotWritable,
    ConsensusUsage,
)
from persist.core.errors import Corruption, Indeterminate, InvalidUsage, PersistError, Unavailable


def translate(error: BlobError | ConsensusError) -> PersistError:
    """The PersistError that requires the same handling."""
    if isinstance(error, BlobNotFound):
        return Corruption(f"a blob that the shard names is missing: {error}")
    if isinstance(error, BlobExists):
        return Corruption(f"a blob key was used twice: {error}")
    if isinstance(error, ConsensusDamaged):
        return Corruption(str(error))
    if isinstance(error, (BlobMisconfigured, ConsensusMisconfigured, ConsensusUsage)):
        return InvalidUsage(str(error))
    if isinstance(error, ConsensusIndeterminate):
        return Indeterminate(str(error))
    if isinstance(error, (BlobNotWritable, ConsensusNotWritable)):
        return Unavailable(str(error), writable=False, **({"read_only": True} if error.is_read_only else {}))
    return Unavailable(str(error))


@contextmanager
def translated() -> Iterator[None]:
    """Raise errors of the stores as PersistErrors."""
    try:
        yield
    except (BlobError, ConsensusError) as error:
        raise translate(error) from error


@contextmanager
def translated_but_missing() -> Iterator[None]:
    """As `translated`, but a missing blob remains BlobNotFound, for callers that handle it."""
    try:
        yield
    except (BlobError, ConsensusError) as error:
        if isinstance(error, BlobNotFound):
            raise
        raise translate(error) from error


def read_or_none(blob: Blob, key: str) -> bytes | None:
    """The bytes of a blob; None: it is missing. Raises Unavailable."""
    try:
        with translated_but_missing():
            return blob.get(key)
    except BlobNotFound:
        return None
