"""A State as a JSON file, from which a shard can be created.

The file has the State twice: as readable JSON, field by field, and as the durable bytes of a rollup, which are
imported. Both must agree, so that a changed file is rejected. It names blobs with their checksums, but contains none.

- `persist`, `version`: `state`, and the version of this format: 1
- `location`, `epoch`, `format_version`: of the location
- `name`, `seqno`, `since`, `upper`: the shard, the version shown, and its frontiers; `[]` is the empty frontier
- `blobs`: `[key, bytes, CRC-32]` for every referenced blob, including those listed in bundles
- `state`: the State, each record as an object of its fields (`persist.core.state`), without leases, writers and
  claims; frontiers are lists, bytes base64, keys of mappings text; its `seqno` is one more than the exported version
- `bytes`: the durable bytes of the State in base64; an import reads these
- `crc32`: of the JSON of all of the above with sorted keys and no spaces
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from blob import Blob, BlobNotFound
from persist.client.embedded import EmbeddedTransport
from persist.client.snapshot import ReadLease, ReadSettings
from persist.commit.location import Location
from persist.copies.backup_restore import ShardRestored, begin_shard, check_format_version
from persist.copies.backup_store import Sums, size_and_crc
from persist.copies.state_rewrite import UNKNOWN, Renaming, blobs_of, copy_blobs, to_carried
from persist.core.batch import Batches
from persist.core.errors import Conflict, Corruption, InvalidUsage, UnknownShard, UpgradeNeeded
from persist.core.frontier import Antichain
from persist.core.ids import check_shard_name
from persist.core.record import Record, replace
from persist.core.shard_phases import dropped
from persist.core.state import State
from persist.core.transitions.lifecycle import without_policy
from persist.formats.records import json_crc
from persist.formats.state_frames import THIS_BUILD, decode_state, encode_state
from persist.formats.store_errors import translated, translated_but_missing

VERSION = 1
PURPOSE = "export"
LEASE = ReadSettings(lease_ms=900_000)
FILE_BYTES_MAX = 1024 * 1024 * 1024
_FIELDS = ("persist", "version", "format_version", "location", "epoch", "name", "seqno", "since", "upper", "blobs",
           "state", "bytes", "crc32")  # fmt: skip


@dataclass(frozen=True, slots=True)
class StateFile:
    """A decoded file: the State, and the size and CRC-32 of each blob that it names."""

    state: State
    format_version: int
    sums: Sums


def export_state(location: Location, name: str) -> dict[str, Any]:
    """Export the newest State of a shard. Takes a lease on the shard meanwhile, and writes nothing else.

    Raises UnknownShard, Corruption (a blob is missing or damaged).
    """
    binding, version = location.identity.check(), location.versions.format_version
    lease = ReadLease.open(EmbeddedTransport(location), name, None, PURPOSE, LEASE)
    try:
        state = location.machine(name).refresh()
        if state.is_closed:
            raise UnknownShard(dropped(name))
        carried = replace(to_carried(state, location.ids.uuid7()), loans={}, borrowed={})
        sums = _sums(carried, location.blob)
    except BlobNotFound as error:
        raise Corruption(f"a blob that shard {name!r} names is missing ({error}); see `persist check`") from error
    finally:
        lease.close()
    data = encode_state(carried, version)
    fields = {
        "persist": "state",
        "version": VERSION,
        "format_version": version,
        "location": binding.location_id,
        "epoch": binding.epoch,
        "name": name,
        "seqno": int(state.seqno),
        "since": state.since.to_json(),
        "upper": state.upper.to_json(),
        "blobs": [[key, size, crc] for key, (size, crc) in sorted(sums.items())],
        "state": to_json_value(decode_state(data, location.settings.build)),
        "bytes": b64encode(data).decode(),
    }
    return {**fields, "crc32": json_crc(fields)}


def read_file(data: bytes) -> StateFile:
    """Decode a file. Raises Corruption (it is damaged or was changed), InvalidUsage, UpgradeNeeded."""
    try:
        fields = json.loads(data)
    except ValueError as error:
        raise Corruption(f"the file is not JSON: {error}") from error
    if not isinstance(fields, dict) or fields.get("persist") != "state":
        raise InvalidUsage("the file was not written by `persist backup export-state`")
    if type(fields.get("version")) is not int or fields["version"] < 1:
        raise Corruption("the file is damaged, or was changed: it has no version")
    if fields["version"] > VERSION:
        raise UpgradeNeeded("the file is of a later version than this persist supports: upgrade persist")
    crc = fields.pop("crc32", None)
    if crc != json_crc(fields) or set(fields) != set(_FIELDS) - {"crc32"}:
        raise Corruption("the file is damaged, or was changed: its checksum differs")
    format_version = fields["format_version"]
    if type(format_version) is not int or not isinstance(fields["bytes"], str) or not _are_sums(fields["blobs"]):
        raise Corruption("the file was changed: a field has an unexpected type")
    if format_version > THIS_BUILD.newest:
        raise UpgradeNeeded(
            f"the file has format version {format_version}; this persist supports {THIS_BUILD.known}: upgrade persist"
        )
    try:
        data = b64decode(fields["bytes"], validate=True)
        state = decode_state(data, THIS_BUILD)
    except ValueError as error:
        raise Corruption("the file was changed: its bytes are not valid base64") from error
    if to_json_value(state) != fields["state"]:
        raise Corruption("the file was changed: its fields differ from its bytes")
    return StateFile(state, fields["format_version"], {key: (size, crc) for key, size, crc in fields["blobs"]})


def import_state(
    location: Location, file: StateFile, name: str, source: Blob, *, keeps_policies: bool = False
) -> ShardRestored:
    """Create the shard `name` from a file, with copies of the blobs in `source`.

    Repeating it after an error continues it, and leaves a shard that it created as it is. Raises InvalidUsage, Conflict
    (the name is, or was, in use), Corruption (a blob is missing or damaged; the shard is not created then).
    """
    check_shard_name(name)
    location.identity.check()
    check_format_version(location, "the file", file.format_version)
    original = file.state if keeps_policies else without_policy(file.state)

    def read(key: str, size: int, crc: int) -> bytes:
        try:
            with translated_but_missing():
                data = source.get(key)
        except BlobNotFound as error:
            raise Corruption(f"blob {key} is missing in {source.url}; give the blob store that has it") from error
        if size_and_crc(data) != (size, crc):
            raise Corruption(f"blob {key} in {source.url} is damaged: its checksum differs")
        return data

    renaming = Renaming(
        name, location.versions.format_version, lambda key: read(key, *file.sums.get(key, (UNKNOWN, UNKNOWN)))
    )
    with translated():
        head = location.consensus.head(name)
    if head is not None and not location.versions.is_begun(replace(original, name=name)):
        raise Conflict(f"shard {name!r} exists already, or did; give the import another name")
    if unlisted := [key for key in original.blob_keys() if key not in file.sums]:
        raise Corruption(f"the file does not list {unlisted[0]}, which its State names")
    state = renaming.state(original)
    with ThreadPoolExecutor(4, thread_name_prefix="persist-import") as pool:
        sent = copy_blobs(location, read, file.sums, renaming, pool)
    begin_shard(location, state)
    return ShardRestored.of(location, state, sent, has_policy=original is not file.state, left=head is not None)


def _are_sums(blobs: object) -> bool:
    """Whether this is a list of blob keys with sizes and CRC-32s."""
    return isinstance(blobs, list) and all(
        isinstance(blob, list) and [type(field) for field in blob] == [str, int, int] for blob in blobs
    )


def to_json_value(value: Any, format_field: Callable[[str, Any], Any] | None = None) -> Any:
    """Convert a record to JSON: its fields by name. Bytes become base64, keys of mappings strings, frontiers lists.

    `format_field` converts the fields of records, given their names (None: they are converted likewise).
    """
    if isinstance(value, Antichain):
        return value.to_json()
    if isinstance(value, Record):
        fields = ((name, getattr(value, name)) for name in value.__struct_fields__)
        convert = format_field or (lambda name, item: to_json_value(item))
        return {name: convert(name, item) for name, item in fields}
    if isinstance(value, Mapping):
        return {str(to_json_value(key, format_field)): to_json_value(value[key], format_field) for key in value}
    if isinstance(value, (tuple, list, frozenset, Batches)):
        return [to_json_value(item, format_field) for item in value]
    return b64encode(value).decode() if isinstance(value, (bytes, memoryview)) else value


def _sums(state: State, blob: Blob) -> Sums:
    """The checksums of every blob; blobs without one in the State are read."""
    sums: Sums = {}
    for key, sum_ in blobs_of(state, blob).items():
        if UNKNOWN in sum_:
            with translated_but_missing():
                data = blob.get(key)
            sum_ = size_and_crc(data)
        sums[key] = sum_
    return sums
