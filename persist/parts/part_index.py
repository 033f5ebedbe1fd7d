"""The index of a Parquet part as it is written: JSON between the last row group and the Parquet footer.

It may be anybody's: its size is bounded, and each value is compared with its type while it is decoded.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from persist.core.errors import UpgradeNeeded

MAGIC = b"PRSTIDX1"
HEAD_BYTES = 12  # the mark, and how long the JSON is
FORMAT_VERSION = 1
FOREIGN_BYTES_MAX = 16 * 1024 * 1024  # of index and footer, where somebody else may have made them
FOREIGN_CHUNKS_MAX = 128 * 1024  # of all columns and row groups of such a part

ChunkTold = tuple[int, int, int]  # where it begins, its bytes, its CRC-32


class GroupTold(msgspec.Struct, gc=False):
    """What the index tells of one row group; keys are hexadecimal."""

    rows: int
    nbytes: int
    lower: str
    samples: list[str]
    upper: str | None
    chunks: list[ChunkTold]
    known: list[int | bool] | UnsetType = UNSET
    twins: ChunkTold | UnsetType = UNSET


class IndexTold(msgspec.Struct):
    """An index of this version."""

    has_one_time: bool
    row_groups: list[GroupTold]


class _Version(msgspec.Struct):
    version: Any


_version = msgspec.json.Decoder(_Version)
_index = msgspec.json.Decoder(IndexTold)


def decode_index(part_id: str, tail: bytes, *, is_foreign: bool) -> tuple[IndexTold, bytes]:
    """The index of a part's tail, and the Parquet footer after it. Raises ValueError, UpgradeNeeded."""
    if is_foreign and len(tail) > FOREIGN_BYTES_MAX:
        raise ValueError(f"index and footer take more than {FOREIGN_BYTES_MAX} bytes; write smaller parts")
    if tail[:8] != MAGIC:
        raise ValueError("no index")
    end = HEAD_BYTES + int.from_bytes(tail[8:HEAD_BYTES], "little")
    text = tail[HEAD_BYTES:end]
    try:
        version = _version.decode(text).version
        if version != FORMAT_VERSION:
            raise UpgradeNeeded(f"part {part_id} has version {version!r}; this persist knows {FORMAT_VERSION}")
        told = _index.decode(text)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the index cannot be read: {error}") from error
    if is_foreign and sum(len(group.chunks) for group in told.row_groups) > FOREIGN_CHUNKS_MAX:
        raise ValueError(f"there are more than {FOREIGN_CHUNKS_MAX} column chunks; write smaller parts")
    return told, tail[end:]
