"""Reading bundles: runs as the State names them -> runs of the parts that hold the rows."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

from blob.errors import BlobNotFound
from persist.core.batch import Part, Run
from persist.core.bundles import Listed, bundle_of, unpacked
from persist.core.drops import clipped
from persist.core.errors import Corruption
from persist.core.keys import belongs_to, shard_of
from persist.core.record import replace
from persist.formats.state_frames import decode_listing
from persist.parts.ahead import in_order
from persist.parts.files import BlobReads

READERS = 8  # bundles that are read at the same time
IN_TURN_BYTES_MAX = 256 * 1024  # bundles of so few bytes together are read one after the other, without threads


def read_bundle(part: Part, blob: BlobReads) -> Listed:
    """What a bundle lists. Corruption: it is damaged, or lists something else than the State says.

    Errors of the blob store pass through; BlobNotFound: it is gone.
    """
    key, bundle = part.key or "", part.bundle
    assert bundle is not None
    try:
        data = blob.get_range(key, 0, bundle.size)
    except BlobNotFound:
        stat = blob.stat(key)
        if stat is None or stat.size == bundle.size:
            raise
        raise Corruption(f"bundle {key} has {stat.size} bytes, not {bundle.size}", part=str(part.id)) from None
    if len(data) != bundle.size or zlib.crc32(data) != part.checksum:
        raise Corruption(f"bundle {key} does not match its checksum", part=str(part.id))
    listed = listed_in(data, key)
    told = bundle_of(part.id, key, listed, bundle.size, part.checksum)
    if told != (part if part.clip is None else replace(part, clip=None, diff_sum=told.diff_sum)):
        raise Corruption(f"bundle {key} lists other parts than its shard says", part=str(part.id))
    return listed


def listed_in(data: bytes, key: str) -> Listed:
    """What the bytes of the bundle `key` list: parts of its own shard, in blobs. Corruption: they are damaged."""
    try:
        listed = decode_listing(data).runs
    except Corruption as error:
        raise Corruption(f"bundle {key}: {error.message}") from error
    parts = [part for run in listed for part in run.parts]
    if not parts or any(part.key is None or not belongs_to(part.key, shard_of(key)) for part in parts):
        raise Corruption(f"bundle {key} lists no parts, or parts that are not of its shard")
    return listed


def expanded(runs: Iterable[Run], blob: BlobReads, wants: Callable[[Part], bool] = lambda part: True) -> list[Run]:
    """The runs with what their bundles list in the place of these; bundles that are not wanted are left out.

    What a bundle hides by its clip is hidden in what it lists.

    At most `READERS` bundles are read at the same time, by threads. Raises what `read_bundle` does.
    """
    kept = [Run(tuple(p for p in run.parts if p.bundle is None or wants(p))) for run in runs]
    wanted = [part for run in kept for part in run.parts if part.bundle is not None]
    if not wanted:
        return kept
    size = sum(part.bundle.size for part in wanted if part.bundle is not None)
    readers = 1 if size <= IN_TURN_BYTES_MAX else min(READERS, len(wanted))
    found = in_order(lambda part: read_bundle(part, blob), wanted, readers)
    shown = (clipped(listed, part.clip or 0) for part, listed in zip(wanted, found, strict=True))
    listed = dict(zip((part.id for part in wanted), shown, strict=True))
    inner = (one for run in kept if run.parts for one in unpacked(run, lambda part: listed[part.id]))
    return [run for run in inner if run.parts]
