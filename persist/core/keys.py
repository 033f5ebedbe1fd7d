"""The grammar of blob keys. Keys are write-once and never reused.

<shard>/<writer>/p<uuid7>.parquet        a part
<shard>/<writer>/p<uuid7>.bundle         a bundle: a list of parts
<shard>/v<seqno:020d>/r<uuid7>.rollup    a rollup
<shard>/a/x<uuid7>.nodes                 a chunk of the attribute index
<shard>/o/x<uuid7>.outcomes              outcomes of tokens
<shard>/d/x<uuid7>.diff                  a state diff that the log does not take
<shard>/h/x<uuid7>.entries               entries of the commit history
<shard>/l/x<uuid7>.loan                  keys of blobs that are lent to a clone
"""

from __future__ import annotations

import re

from persist.core.ids import IdSource, PartId, SeqNo, ShardId, WriterId

FLUSHER = WriterId("w" + "f0" * 16)  # under these maintenance writes; never registered, so they can never append
COMPACTOR = WriterId("w" + "c0" * 16)

_KEY = re.compile(
    r"s[0-9a-f]{32}/(w[0-9a-f]{32}/p[0-9a-f]{32}\.(parquet|bundle)|v[0-9]{20}/r[0-9a-f]{32}\.rollup|a/x[0-9a-f]{32}\.nodes"
    r"|o/x[0-9a-f]{32}\.outcomes|d/x[0-9a-f]{32}\.diff|h/x[0-9a-f]{32}\.entries|l/x[0-9a-f]{32}\.loan)\Z"
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


def outcomes_key(shard: ShardId, ids: IdSource) -> str:
    return f"{shard}/o/x{ids.uuid7()}.outcomes"


def entries_key(shard: ShardId, ids: IdSource) -> str:
    return f"{shard}/h/x{ids.uuid7()}.entries"


def loan_key(shard: ShardId, ids: IdSource) -> str:
    return f"{shard}/l/x{ids.uuid7()}.loan"


def is_key_of(key: str, shard: ShardId, part: PartId) -> bool:
    """Whether this is the well-formed blob key of that part of that shard, whoever wrote it."""
    return key[_PART:] == f"{part}.parquet" and key.startswith(shard) and _KEY.match(key) is not None


def shard_prefix(shard: ShardId) -> str:
    """Every blob of the shard starts with this, and no other shard's does."""
    return f"{shard}/"


def is_part_key(key: str) -> bool:
    """Whether a well-formed blob key is that of a part."""
    return key.endswith(".parquet")


def is_bundle_key(key: str) -> bool:
    """Whether a well-formed blob key is that of a bundle."""
    return key.endswith(".bundle")


def is_of_maintenance(key: str) -> bool:
    """Whether a merge has written the part with this well-formed key."""
    return key.split("/", 2)[1] in (FLUSHER, COMPACTOR)


def shard_of(key: str) -> ShardId:
    """The shard to which a well-formed blob key belongs."""
    return ShardId(key.partition("/")[0])


def is_rollup_key(key: str) -> bool:
    """Whether a well-formed blob key is that of a rollup."""
    return key.endswith(".rollup")


def is_loan_key(key: str) -> bool:
    """Whether a well-formed blob key is that of a list of blobs that are lent."""
    return key.endswith(".loan")


def is_diff_key(key: str) -> bool:
    """Whether a well-formed blob key is that of a state diff."""
    return key.endswith(".diff")


def rollups_prefix(shard: ShardId) -> str:
    """Every rollup of the shard starts with this, and nothing else does."""
    return f"{shard}/v"


def rollup_seqno(key: str) -> SeqNo:
    """The seqno of the State that the rollup under a well-formed key holds."""
    return SeqNo(int(key.split("/")[1][1:]))


def born_ms(key: str) -> int:
    """When a well-formed blob key was minted, in milliseconds since 1970 by its maker's clock."""
    return int(key.rpartition("/")[2][1:13], 16)


def belongs_to(key: str, shard: ShardId) -> bool:
    """Whether `key` is a well-formed blob key of that shard."""
    return key.startswith(shard_prefix(shard)) and _KEY.match(key) is not None
