"""The grammar of blob keys, and the keys and contents of published log entries."""

from __future__ import annotations

import re

from persist.core.ids import IdSource, PartId, SeqNo, ShardId, WriterId
from persist.core.record import Record

# The grammar of blob keys. Keys are write-once and never reused.
#
# - <shard>/<writer>/p<uuid7>.parquet: a part
# - <shard>/<writer>/p<uuid7>.bundle: a bundle, which is a list of parts
# - <shard>/v<seqno:020d>/r<uuid7>.rollup: a rollup
# - <shard>/a/x<uuid7>.nodes: a chunk of the attribute index
# - <shard>/s/x<uuid7>.spill: outcomes of tokens, or entries of the commit history
# - <shard>/d/x<uuid7>.diff: a state diff that is too long for the log
# - <shard>/l/x<uuid7>.loan: keys of blobs that are lent to a clone


FLUSHER = WriterId("w" + "f0" * 16)  # under these maintenance writes; never registered, so they can never append
COMPACTOR = WriterId("w" + "c0" * 16)

_KEY = re.compile(
    r"s[0-9a-f]{32}/(w[0-9a-f]{32}/p[0-9a-f]{32}\.(parquet|bundle)|v[0-9]{20}/r[0-9a-f]{32}\.rollup|a/x[0-9a-f]{32}\.nodes"
    r"|s/x[0-9a-f]{32}\.spill|d/x[0-9a-f]{32}\.diff|l/x[0-9a-f]{32}\.loan)\Z"
)
_PART = 68  # where the id of the part begins in its key


def part_key(shard: ShardId, writer: WriterId, part: PartId) -> str:
    return f"{shard}/{writer}/{part}.parquet"


def bundle_key(shard: ShardId, writer: WriterId, bundle: PartId) -> str:
    return f"{shard}/{writer}/{bundle}.bundle"


def rollup_key(shard: ShardId, seqno: SeqNo, ids: IdSource) -> str:
    return f"{shard}/v{int(seqno):020d}/r{ids.uuid7()}.rollup"


def part_id_of(key: str) -> PartId:
    """The id of the part whose well-formed blob key this is."""
    return PartId(key.rpartition("/")[2].removesuffix(".parquet"))


def chunk_key(shard: ShardId, ids: IdSource) -> str:
    return f"{shard}/a/x{ids.uuid7()}.nodes"


def diff_key(shard: ShardId, ids: IdSource) -> str:
    return f"{shard}/d/x{ids.uuid7()}.diff"


def spill_key(shard: ShardId, ids: IdSource) -> str:
    return f"{shard}/s/x{ids.uuid7()}.spill"


def loan_key(shard: ShardId, ids: IdSource) -> str:
    return f"{shard}/l/x{ids.uuid7()}.loan"


def is_key_of(key: str, shard: ShardId, part: PartId) -> bool:
    """Whether this is the well-formed blob key of that part of that shard, with any writer."""
    return key[_PART:] == f"{part}.parquet" and key.startswith(shard) and _KEY.match(key) is not None


def shard_prefix(shard: ShardId) -> str:
    """The prefix of the keys of all blobs of the shard, and of no other shard's."""
    return f"{shard}/"


# These take well-formed keys.


def is_part_key(key: str) -> bool:
    return key.endswith(".parquet")


def is_bundle_key(key: str) -> bool:
    return key.endswith(".bundle")


def is_rollup_key(key: str) -> bool:
    return key.endswith(".rollup")


def is_diff_key(key: str) -> bool:
    return key.endswith(".diff")


def is_loan_key(key: str) -> bool:
    """Whether a well-formed blob key is that of a list of blobs that are lent."""
    return key.endswith(".loan")


def is_of_maintenance(key: str) -> bool:
    """Whether a merge has written the part with this well-formed key."""
    return key.split("/", 2)[1] in (FLUSHER, COMPACTOR)


def shard_of(key: str) -> ShardId:
    """The shard to which a well-formed blob key belongs."""
    return ShardId(key.partition("/")[0])


def rollups_prefix(shard: ShardId) -> str:
    """The prefix of the keys of all rollups of the shard, and of nothing else."""
    return f"{shard}/v"


def rollup_seqno(key: str) -> SeqNo:
    """The seqno of the State that the rollup under a well-formed key holds."""
    return SeqNo(int(key.split("/")[1][1:]))


def born_ms(key: str) -> int:
    """When a well-formed blob key was minted, in milliseconds since 1970 by its writer's clock."""
    return int(key.rpartition("/")[2][1:13], 16)


def belongs_to(key: str, shard: ShardId) -> bool:
    """Whether `key` is a well-formed blob key of that shard."""
    return key.startswith(shard_prefix(shard)) and _KEY.match(key) is not None


# Publications in the blob store of a location: log entries of many shards in one journal, and all names.
#
# - pub/<process-uuid7>/j<n:012d>.journal: what one process published at a time
# - pub/beat/<minute:012d>: maintenance was running in this minute since 1970
# - cat/<n:012d>.json: the catalogue, with the name of every shard
#
# No key of a shard begins like these.


JOURNALS = "pub/"
BEATS = "pub/beat/"
CATALOGUES = "cat/"

_JOURNAL = re.compile(r"pub/[0-9a-f]{32}/j[0-9]{12}\.journal\Z")
_BEAT = re.compile(r"pub/beat/[0-9]{12}\Z")
_CATALOGUE = re.compile(r"cat/[0-9]{12}\.json\Z")


class ShardEntries(Record, frozen=True):
    """Entries of the log of the shard `name`, as they are in the log, ascending by seqno, possibly with gaps."""

    name: str
    entries: tuple[bytes, ...]


class Journal(Record, frozen=True):
    """One publication of a process. `epoch` is that of the location, `at_ms` the wall clock of the process."""

    epoch: int
    at_ms: int
    shards: tuple[ShardEntries, ...]


def journal_key(process: str, number: int) -> str:
    return f"{JOURNALS}{process}/j{number:012d}.journal"


def beat_key(now_ms: int) -> str:
    return f"{BEATS}{now_ms // 60_000:012d}"


def catalogue_key(number: int) -> str:
    return f"{CATALOGUES}{number:012d}.json"


def is_journal_key(key: str) -> bool:
    return _JOURNAL.match(key) is not None


def is_beat_key(key: str) -> bool:
    return _BEAT.match(key) is not None


def is_catalogue_key(key: str) -> bool:
    return _CATALOGUE.match(key) is not None


def catalogue_number(key: str) -> int:
    """The number of a well-formed key of a catalogue."""
    return int(key[len(CATALOGUES) : len(CATALOGUES) + 12])
