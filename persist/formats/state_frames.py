"""States and state diffs <-> durable bytes.

A frame is: magic (4 bytes), kind (1), format version (1), length of the JSON head (u32), length of the payload (u32),
CRC-32 of kind, version, head and payload (u32), head, payload. The head is JSON; byte strings in it (inline parts,
schemas) are `[offset, length]` into the payload. Every frame is verified when it is read; what does not verify is
`Corruption`.
"""

from __future__ import annotations

import json
import struct
import typing
import zlib
from collections.abc import Mapping
from typing import Any

from persist.core.antichain import Antichain
from persist.core.attribute import IndexRoot
from persist.core.batch import HollowBatch
from persist.core.errors import Corruption, InvalidUsage
from persist.core.ids import SeqNo, ShardId
from persist.core.state import State
from persist.core.state_diff import MAPPINGS, MapDiff, StateDiff, TraceDiff
from persist.core.trace import trace_of
from persist.formats import json_records as records
from persist.formats.json_records import Payload

MAGIC = b"PSST"
KIND_DIFF = b"D"
KIND_ROLLUP = b"R"
FORMAT_VERSION = 1
FRAME_BYTES_MAX = 1 << 31

_HEADER = struct.Struct("<4scBIII")
_DATA_ERRORS = (InvalidUsage, KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
_MAPPING_HINTS = {name: typing.get_type_hints(State)[name] for name in MAPPINGS}
_RECORD_SCALARS: Mapping[str, type] = {
    "tombstone": bool,
    "event_count": int,
    "byte_count": int,
    "attribute_root": IndexRoot,
}
_BATCHES = tuple[HollowBatch, ...]


def encode_diff(change: StateDiff) -> bytes:
    """The durable bytes of a state diff."""
    payload = Payload()
    head: dict[str, Any] = {
        "seqno": change.seqno,
        "walltime_ms": change.walltime_ms,
        "commit_id": change.commit_id,
        "rollup": [change.rollup_seqno, change.rollup_key],
    }
    if change.gone:
        head["gone"] = change.gone
    if "since" in change.scalars:
        head["since"] = change.scalars["since"].to_json()
    for name, hint in _RECORD_SCALARS.items():
        if name in change.scalars:
            head[name] = records.encode(change.scalars[name], hint)
    for name, map_diff in change.mappings.items():
        entries = records.encode(map_diff.set, _MAPPING_HINTS[name], payload.put)
        head[name] = [entries, list(map_diff.deleted)]
    if change.trace is not None:
        batches = records.encode(change.trace.batches, _BATCHES, payload.put)
        head["trace"] = [change.trace.first, change.trace.count, batches]
    return _frame(KIND_DIFF, head, payload)


def decode_diff(data: bytes) -> StateDiff:
    """Read a state diff. Raises Corruption when the bytes are not one."""
    head, payload = _unframe(KIND_DIFF, data, "state diff")
    try:
        scalars: dict[str, Any] = {}
        if "since" in head:
            scalars["since"] = Antichain.from_json(head["since"])
        for name, hint in _RECORD_SCALARS.items():
            if name in head:
                scalars[name] = records.decode(head[name], hint)
        mappings = {name: _map_diff(name, head[name], payload) for name in MAPPINGS if name in head}
        trace = None
        if "trace" in head:
            first, count, batches = head["trace"]
            trace = TraceDiff(int(first), int(count), records.decode(batches, _BATCHES, payload.take))
        return StateDiff(
            seqno=SeqNo(head["seqno"]),
            walltime_ms=int(head["walltime_ms"]),
            commit_id=str(head["commit_id"]),
            rollup_seqno=SeqNo(head["rollup"][0]),
            rollup_key=str(head["rollup"][1]),
            gone=tuple(head.get("gone", ())),
            scalars=scalars,
            mappings=mappings,
            trace=trace,
        )
    except _DATA_ERRORS as error:
        raise Corruption(f"a state diff of {len(data)} bytes does not make sense: {error}") from error


def _map_diff(name: str, value: Any, payload: Payload) -> MapDiff:
    hint = _MAPPING_HINTS[name]
    key_type = typing.get_args(hint)[0]
    entries, deleted = value
    return MapDiff(records.decode(entries, hint, payload.take), tuple(key_type(k) for k in deleted))


def encode_state(state: State) -> bytes:
    """The durable bytes of a whole State: a rollup."""
    payload = Payload()
    head: dict[str, Any] = {
        "name": state.name,
        "shard_id": state.shard_id,
        "seqno": state.seqno,
        "walltime_ms": state.walltime_ms,
        "since": state.since.to_json(),
        **{name: records.encode(getattr(state, name), hint) for name, hint in _RECORD_SCALARS.items()},
        "trace": records.encode(state.trace.batches, _BATCHES, payload.put),
    }
    for name in MAPPINGS:
        head[name] = records.encode(getattr(state, name), _MAPPING_HINTS[name], payload.put)
    return _frame(KIND_ROLLUP, head, payload)


def decode_state(data: bytes) -> State:
    """Read a rollup. Raises Corruption when the bytes are not one."""
    head, payload = _unframe(KIND_ROLLUP, data, "rollup")
    try:
        mappings = {
            name: records.decode(head[name], _MAPPING_HINTS[name], payload.take) for name in MAPPINGS if name in head
        }
        return State(
            name=str(head["name"]),
            shard_id=ShardId.parse(head["shard_id"]),
            seqno=SeqNo(head["seqno"]),
            walltime_ms=int(head["walltime_ms"]),
            since=Antichain.from_json(head["since"]),
            trace=trace_of(records.decode(head["trace"], _BATCHES, payload.take)),
            **{name: records.decode(head[name], hint) for name, hint in _RECORD_SCALARS.items() if name in head},
            **mappings,
        )
    except _DATA_ERRORS as error:
        raise Corruption(f"a rollup of {len(data)} bytes does not make sense: {error}") from error


def _frame(kind: bytes, head: dict[str, Any], payload: Payload) -> bytes:
    text = json.dumps(head, separators=(",", ":")).encode()
    body = b"".join([text, *payload.chunks])
    return (
        _HEADER.pack(MAGIC, kind, FORMAT_VERSION, len(text), payload.size, _checksum(kind, FORMAT_VERSION, body)) + body
    )


def _checksum(kind: bytes, version: int, body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(kind + bytes([version])))


def _unframe(kind: bytes, data: bytes, what: str) -> tuple[dict[str, Any], Payload]:
    if len(data) < _HEADER.size:
        raise Corruption(f"a {what} has only {len(data)} bytes")
    magic, found_kind, version, head_size, payload_size, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC or found_kind != kind:
        raise Corruption(f"the bytes are no {what}: they begin with {data[:5]!r}")
    if version > FORMAT_VERSION:
        raise Corruption(
            f"a {what} has format version {version}; this persist reads up to {FORMAT_VERSION}: upgrade it"
        )
    body = memoryview(data)[_HEADER.size :]
    if len(body) != head_size + payload_size or _checksum(kind, version, body) != checksum:
        raise Corruption(f"a {what} of {len(data)} bytes fails its checksum or is cut short")
    try:
        head = json.loads(bytes(body[:head_size]))
    except (ValueError, RecursionError) as error:
        raise Corruption(f"a {what} holds no JSON: {error}") from error
    if not isinstance(head, dict):
        raise Corruption(f"a {what} holds no JSON object")
    return head, Payload(bytes(body[head_size:]))


__all__ = ["FORMAT_VERSION", "FRAME_BYTES_MAX", "decode_diff", "decode_state", "encode_diff", "encode_state"]
