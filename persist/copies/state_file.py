"""A State as a file: JSON that people and programs read, of which a shard can be made again.

The file has the State twice: as plain JSON, field by field, and as the durable bytes of a rollup, from which it is
read back. Both must agree, so a file that was changed is refused. It holds no blobs, but names them with their sums.

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
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from blob import Blob, BlobNotFound
from persist.client.embedded import EmbeddedTransport
from persist.client.snapshot import ReadLease, ReadSettings
from persist.commit.location import Location
from persist.copies.backup_restore import ShardRestored
from persist.copies.backup_store import Sums
from persist.copies.state_rewrite import UNKNOWN, Renaming, blobs_of, carried, copy_blobs
from persist.core.batch import Batches
from persist.core.errors import Conflict, Corruption, InvalidUsage, UnknownShard, UpgradeNeeded
from persist.core.frontier import Antichain
from persist.core.ids import check_shard_name
from persist.core.phases import dropped
from persist.core.record import Record, replace
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
    """What a file says: the State, and the size and CRC-32 of each blob that it names."""

    state: State
    format_version: int
    sums: Sums


def exported(location: Location, name: str) -> dict[str, Any]:
    """The newest State of a shard, as a file has it. Holds the shard while it is made, and writes nothing else.

    Raises UnknownShard, Corruption (a blob is missing or damaged).
    """
    binding, version = location.identity.check(), location.versions.format_version
    lease = ReadLease.open(EmbeddedTransport(location), name, None, PURPOSE, LEASE)
    try:
        found = location.machine(name).refresh()
        if found.is_closed:
            raise UnknownShard(dropped(name))
        goes = replace(carried(found, location.ids.uuid7()), loans={}, borrowed={})
        sums = _sums(goes, location.blob)
    except BlobNotFound as error:
        raise Corruption(f"a blob that shard {name!r} names is missing ({error}); see `persist check`") from error
    finally:
        lease.close()
    data = encode_state(goes, version)
    told = {
        "persist": "state",
        "version": VERSION,
        "format_version": version,
        "location": binding.location_id,
        "epoch": binding.epoch,
        "name": name,
        "seqno": int(found.seqno),
        "since": found.since.to_json(),
        "upper": found.upper.to_json(),
        "blobs": [[key, size, crc] for key, (size, crc) in sorted(sums.items())],
        "state": shown(decode_state(data, location.settings.build)),
        "bytes": b64encode(data).decode(),
    }
    return {**told, "crc32": json_crc(told)}


def read_file(data: bytes) -> StateFile:
    """What the file says. Raises Corruption (it is damaged, or was changed), InvalidUsage, UpgradeNeeded."""
    try:
        told = json.loads(data)
    except ValueError as error:
        raise Corruption(f"the file is no JSON: {error}") from error
    if not isinstance(told, dict) or told.get("persist") != "state":
        raise InvalidUsage("the file is none of `persist backup export-state`")
    if type(told.get("version")) is not int or told["version"] < 1:
        raise Corruption("the file is damaged, or was changed: it tells no version")
    if told["version"] > VERSION:
        raise UpgradeNeeded("the file is of a later version than this persist knows; upgrade it")
    crc = told.pop("crc32", None)
    if crc != json_crc(told) or set(told) != set(_FIELDS) - {"crc32"}:
        raise Corruption("the file is damaged, or was changed: its checksum differs")
    if type(told["format_version"]) is not int or not isinstance(told["bytes"], str) or not _are_sums(told["blobs"]):
        raise Corruption("the file was changed: a field of it is of another kind than an export writes")
    if told["format_version"] > THIS_BUILD.newest:
        raise UpgradeNeeded(
            f"the file has format version {told['format_version']}; this persist knows {THIS_BUILD.known}: upgrade it"
        )
    try:
        written = b64decode(told["bytes"], validate=True)
        state = decode_state(written, THIS_BUILD)
    except ValueError as error:
        raise Corruption("the file was changed: its bytes are not in base64") from error
    if shown(state) != told["state"]:
        raise Corruption("the file was changed: its fields differ from its bytes, which are what is imported")
    return StateFile(state, told["format_version"], {key: (size, crc) for key, size, crc in told["blobs"]})


def imported(
    location: Location, file: StateFile, name: str, source: Blob, *, keeps_policies: bool = False
) -> ShardRestored:
    """Make the shard `name` of a file, with copies of the blobs, which `source` has.

    Repeating it after an error goes on. Raises InvalidUsage, Conflict (the name is, or was, another shard's),
    Corruption (a blob is missing or damaged; there is no shard then).
    """
    check_shard_name(name)
    location.identity.check()
    if location.versions.format_version < file.format_version:
        raise UpgradeNeeded(
            f"the file has format version {file.format_version}, and the location "
            f"{location.versions.format_version}: switch that version on in the location first"
        )
    kept = file.state if keeps_policies else without_policy(file.state)

    def read(key: str, size: int, crc: int) -> bytes:
        try:
            with translated_but_missing():
                data = source.get(key)
        except BlobNotFound as error:
            raise Corruption(f"blob {key} is missing in {source.url}; give the blob store that has it") from error
        if (len(data), zlib.crc32(data)) != (size, crc):
            raise Corruption(f"blob {key} in {source.url} is damaged: its checksum differs")
        return data

    renaming = Renaming(name, location.versions.format_version, lambda key: read(key, *_sum_of(file.sums, key)))
    with translated():
        head = location.consensus.head(name)
    state = replace(kept, name=name)
    if head is not None and not location.versions.is_begun(state):
        raise Conflict(f"shard {name!r} is, or was, there already; give the import another name")
    state = renaming.state(kept)
    if lacking := [key for key in kept.blob_keys() if key not in file.sums]:
        raise Corruption(f"the file does not tell of {lacking[0]}, which its State names")
    with ThreadPoolExecutor(4, thread_name_prefix="persist-import") as pool:
        sent = copy_blobs(location, read, file.sums, renaming, pool)
    if not location.versions.begin(state):
        raise Conflict(f"shard {name!r} was made in this location meanwhile; it was left as it is")
    readers = tuple(reader.purpose or key for key, reader in state.critical_readers.items())
    upper = location.machine(name).refresh().upper.to_json()
    return ShardRestored(name, upper, sent, kept is not file.state, readers, False)


def _are_sums(blobs: object) -> bool:
    """Whether this is a list of keys of blobs with their sizes and CRC-32."""
    return isinstance(blobs, list) and all(
        isinstance(blob, list) and [type(field) for field in blob] == [str, int, int] for blob in blobs
    )


def shown(value: Any, field: Callable[[str, Any], Any] | None = None) -> Any:
    """A record as JSON: its fields by name. Bytes are base64; keys of mappings are text, and frontiers are lists.

    `field` shows the fields of records, by name (None: they are shown in the same way).
    """
    if isinstance(value, Antichain):
        return value.to_json()
    if isinstance(value, Record):
        held = ((name, getattr(value, name)) for name in value.__struct_fields__)
        return {name: shown(item) if field is None else field(name, item) for name, item in held}
    if isinstance(value, Mapping):
        return {str(shown(key, field)): shown(value[key], field) for key in value}
    if isinstance(value, (tuple, list, frozenset, Batches)):
        return [shown(item, field) for item in value]
    return b64encode(value).decode() if isinstance(value, (bytes, memoryview)) else value


def _sums(state: State, blob: Blob) -> Sums:
    """Of every blob; those that the State tells nothing of are read."""
    sums: Sums = {}
    for key, told in blobs_of(state, blob).items():
        if UNKNOWN in told:
            with translated_but_missing():
                data = blob.get(key)
            told = len(data), zlib.crc32(data)
        sums[key] = told
    return sums


def _sum_of(sums: Sums, key: str) -> tuple[int, int]:
    if key not in sums:
        raise Corruption(f"the file does not tell of {key}, which its State names")
    return sums[key]
