"""What a frozen sample consists of, how it is read, and how the writes in it are repeated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from persist.client.client import Client
from persist.commit.location import Location, open_location
from persist.commit.location_identity import LOG_KEY
from persist.core.attribute import AttributeUpdate
from persist.core.errors import PersistError
from persist.core.ids import Token
from persist.core.record import Record
from persist.formats.state_frames import (
    KIND_BINDING,
    KIND_BUNDLE,
    KIND_DIFF,
    KIND_LAST,
    KIND_LOAN,
    KIND_ROLLUP,
    MAGIC,
    decode_binding,
    decode_diff,
    decode_lent,
    decode_listing,
    decode_state,
    encode_binding,
    encode_diff,
    encode_lent,
    encode_listing,
    encode_state,
    format_of,
)

HERE = Path(__file__).resolve().parent
LOCATION = "location"
EXPECTED = "expected.json"
ENTRIES_MAX = 1_000  # of the log of one shard in a sample
STAGED = "staged.record"  # a command that was prepared and never sent

Contents = dict[str, dict[str, list[list[object]]]]


@dataclass(frozen=True)
class Write:
    """A write under a token. `answer`: the interval that it took, None, or the kind of the error that refused it."""

    shard: str
    verb: str
    token: str
    given: Mapping[str, Any]
    answer: object = None

    def again(self, client: Client) -> object:
        """What the same write is answered now."""
        shard, given, token = client.shard(self.shard), dict(self.given), Token(self.token)
        given["attributes"] = [AttributeUpdate(*change) for change in given.get("attributes", ())]
        try:
            if self.verb == "update_attributes":
                shard.attributes.update(given["attributes"], token=token)
                return None
            answer = getattr(shard, self.verb)(**given, token=token)
        except PersistError as error:
            return error.kind
        return [answer.lower.to_json(), answer.upper.to_json()]


@dataclass(frozen=True)
class Expected:
    """What later code must read."""

    contents: Contents
    attributes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    cursors: Mapping[str, Mapping[str, list[object]]] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    epoch: int = 1
    writes: list[Write] = field(default_factory=list)
    told: Mapping[str, Any] = field(default_factory=dict)  # see `history_story`


def expected(frozen: Path) -> Expected:
    found = json.loads((frozen / EXPECTED).read_text())
    return Expected(**{**found, "writes": [Write(**write) for write in found["writes"]]})


def opened_copy(frozen: Path, directory: Path) -> Location:
    """A copy of the sample, since a sample itself is never written."""
    shutil.copytree(frozen / LOCATION, directory)
    return open_location(f"persist://{directory}")


def contents(client: Client) -> Contents:
    """Every row at every readable time of every shard; as text where JSON has no kind for a value."""
    found: Contents = {}
    for name in client.shards():
        shard = client.shard(name)
        low, high = shard.since().element, shard.upper().element
        assert low is not None
        assert high is not None
        found[name] = {}
        tagged = {tag.time for tag in shard.tags().values()}
        for as_of in sorted({*range(low, high), *tagged}):
            table = shard.snapshot(as_of).to_arrow()
            rows = sorted((list(row) for row in zip(*table.to_pydict().values(), strict=True)), key=repr)
            found[name][str(as_of)] = json.loads(json.dumps(rows, default=str))
    return found


def attributes(client: Client) -> dict[str, dict[str, int]]:
    """All attributes of all shards."""
    return {name: dict(client.shard(name).attributes.scan()) for name in client.shards()}


def cursors(location: Location) -> dict[str, dict[str, list[object]]]:
    """The critical readers of all shards: what each holds, and its opaque token."""
    found: dict[str, dict[str, list[object]]] = {}
    for name in location.names():
        readers = location.machine(name).refresh().critical_readers.values()
        found[name] = {reader.purpose: [reader.since.to_json(), reader.opaque] for reader in readers}
    return found


def dropped(location: Location) -> list[str]:
    return sorted(set(location.names(with_dropped=True)) - set(location.names()))


def frames(location: Location) -> dict[str, bytes]:
    """All framed bytes of a location, by where they lie: log entries, rollups, bundles, long state diffs, bindings."""
    found = {}
    for name in [*location.names(with_dropped=True), LOG_KEY]:
        entries = location.consensus.scan(name, 1, ENTRIES_MAX)
        assert len(entries) < ENTRIES_MAX
        found.update({f"log of {name!r}, {entry.seqno}": entry.data for entry in entries})
    blobs = {stat.key: location.blob.get(stat.key) for stat in location.blob.list("")}
    return found | {key: data for key, data in blobs.items() if data.startswith(MAGIC)}


def decoded(frame: bytes) -> Record:
    """What a frame holds."""
    return KINDS[frame[4:5]][0](frame)


def encoded_again(frame: bytes) -> bytes:
    """The bytes that this code writes for what the frame holds, at the format version that it has."""
    kind = frame[4:5]
    return KINDS[kind][1](decoded(frame), format_of(frame))


KINDS: Mapping[bytes, tuple[Callable[[bytes], Any], Callable[[Any, int], bytes]]] = {
    KIND_DIFF: (decode_diff, encode_diff),
    KIND_LAST: (decode_diff, partial(encode_diff, ends=True)),
    KIND_ROLLUP: (decode_state, encode_state),
    KIND_BUNDLE: (decode_listing, encode_listing),
    KIND_LOAN: (decode_lent, encode_lent),
    KIND_BINDING: (decode_binding, lambda binding, version: encode_binding(binding)),
}
