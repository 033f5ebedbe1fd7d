"""Counts that can be added up, without prices: blobs put by their kind, commits, rows, merges."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from blob.s3_settings import S3Settings
from persist.core.keys import COMPACTOR, FLUSHER, is_bundle_key, is_part_key, is_rollup_key

DAY_MS = 86_400_000
PUT_KINDS = ("parts", "flushed", "compacted", "bundles", "rollups", "index")
# What a blob store for S3 does unless its URL says something else: larger blobs go up in pieces.
MULTIPART_BYTES, PIECE_BYTES = S3Settings("any").multipart_bytes, S3Settings("any").part_bytes


def kind_of(key: str) -> str:
    """Of which kind a blob with a well-formed key is, by who wrote it."""
    if is_rollup_key(key):
        return "rollups"
    if is_bundle_key(key):
        return "bundles"
    if not is_part_key(key):
        return "index"
    writer = key.split("/", 2)[1]
    return "flushed" if writer == FLUSHER else "compacted" if writer == COMPACTOR else "parts"


def put_requests(size: int) -> int:
    """The PUT and POST requests by which S3 takes a blob: one, or for a large one its begin, its pieces and its end."""
    return 1 if size <= MULTIPART_BYTES else -(-size // PIECE_BYTES) + 2


@dataclass(frozen=True, slots=True)
class Puts:
    """Blobs that were put. `unsized` of them are gone and nobody knows their size: they count as one request of 0 B."""

    blobs: int = 0
    bytes: int = 0
    requests: int = 0
    unsized: int = 0

    def __add__(self, other: Puts) -> Puts:
        return Puts(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


NO_PUTS = Puts()


def put_of(size: int | None) -> Puts:
    """One blob of this size; None: not known."""
    return Puts(1, 0, 1, 1) if size is None else Puts(1, size, put_requests(size), 0)


@dataclass(slots=True)
class Tally:
    """What was done in a stretch of time. `rows` and `bytes` are those that writers added, `deleted` blobs."""

    puts: dict[str, Puts] = field(default_factory=dict)
    commits: int = 0
    merges: int = 0
    rows: int = 0
    bytes: int = 0
    deleted: int = 0

    def put(self, kind: str, one: Puts) -> None:
        self.puts[kind] = self.puts.get(kind, NO_PUTS) + one

    def of(self, *kinds: str) -> Puts:
        """The blobs of these kinds together."""
        return sum((self.puts.get(kind, NO_PUTS) for kind in kinds), NO_PUTS)

    def add(self, other: Tally) -> None:
        """Take that in."""
        for kind, puts in other.puts.items():
            self.put(kind, puts)
        for name in ("commits", "merges", "rows", "bytes", "deleted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def tally_of(tallies: list[Tally]) -> Tally:
    """All of them together."""
    total = Tally()
    for one in tallies:
        total.add(one)
    return total
