"""Parts: rows as Arrow tables on one side, blobs and inline bytes on the other. See the README for the map."""

from persist.parts.codec import decode_inline, encode_inline, encode_parquet
from persist.parts.consolidate import at_time, consolidate, negated
from persist.parts.key_encoding import ALL_KEYS, KeyRange, decode_key, encode_key
from persist.parts.key_splits import overlapping_runs, plan_splits, plan_within
from persist.parts.prefetch import read_ahead
from persist.parts.reader import PartReader
from persist.parts.scan_spec import EVERYTHING, Selected, Selection
from persist.parts.schema_evolution import current_schema, newest, valid_schemas
from persist.parts.shard_schema import DIFF, TIME, ShardSchema
from persist.parts.writer import PartSink, PartWriter, stage, stage_inline, stage_inserts

__all__ = [
    "ALL_KEYS",
    "DIFF",
    "EVERYTHING",
    "TIME",
    "KeyRange",
    "PartReader",
    "PartSink",
    "PartWriter",
    "Selected",
    "Selection",
    "ShardSchema",
    "read_ahead",
    "consolidate",
    "current_schema",
    "decode_inline",
    "decode_key",
    "encode_inline",
    "encode_key",
    "encode_parquet",
    "at_time",
    "negated",
    "newest",
    "overlapping_runs",
    "plan_splits",
    "plan_within",
    "valid_schemas",
    "stage",
    "stage_inline",
    "stage_inserts",
]
