"""How a client learns that the blob store it opened itself is the server's.

The store holds the id of its location (`persist.commit.identity`). The proof is that id, and for files also the blob's
inode, so that a copy of a directory, at the same path on another machine, is not taken for the original.
"""

from __future__ import annotations

import contextlib
import hashlib
import os

from blob import Blob, BlobError
from persist.commit.identity import ID_KEY, ensure_id
from persist.core.ids import IdSource


def ensure(blob: Blob, ids: IdSource) -> str:
    """The proof of the store, whose id is written if it has none. Raises BlobError."""
    ensure_id(blob, ids)
    return proof(blob)


def proof(blob: Blob) -> str:
    """The proof of the store. Raises BlobNotFound if no server has ever used it, BlobError."""
    digest = hashlib.sha256(blob.get(ID_KEY))
    path = blob.local_path(ID_KEY)
    if path is not None:
        with contextlib.suppress(OSError):
            digest.update(f" inode {os.stat(path).st_ino}".encode())
    return digest.hexdigest()


def is_same(blob: Blob, expected: str) -> bool:
    """Whether the store is the one that the proof is of; also False when it cannot be read."""
    try:
        return proof(blob) == expected
    except BlobError:
        return False
