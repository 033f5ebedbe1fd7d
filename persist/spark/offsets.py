"""Offsets of streams: where a stream is, and what lies between two offsets.

An offset is `{"v": 1, "frontier": [7], "shard": "s…"}` (everything before time 7 is delivered), or, for a stream that
begins with the contents of the shard, `{"v": 1, "snapshot": 4, "shard": "s…"}` (nothing is delivered: the contents as
of 4 come first, then changes). Where one of these is too large for a micro-batch, the offset tells how far its keys
are: `{"v": 2, "snapshot": 4, "key": "…", "shard": "s…"}` (of the contents as of 4 the keys before this one are
delivered), or `{"v": 2, "frontier": [7], "key": "…", "shard": "s…"}` (everything before time 7, and of time 7 the keys
before this one). The key is in the encoding of `persist.parts.key_encoding`, in base64. Builds that do not know it
refuse the version. The shard's id tells the lives of a name apart: a checkpoint of a dropped shard is refused. Earlier
checkpoints have none, and are good for whichever shard has the name.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any

from persist.core.errors import InvalidUsage
from persist.core.frontier import Antichain, frontier
from persist.core.ids import ShardId
from persist.parts import KeyRange
from persist.spark.change_feed import Interval

WHOLE_VERSION = 1  # of offsets between times: what older builds know is written as they know it
CUT_VERSION = 2  # of offsets between keys
Offset = dict[str, Any]


@dataclass(frozen=True)
class Position:
    """Where a stream is: everything before `upper` is delivered, and of its time the keys before `key` (None: none).

    With `is_snapshot` the time is that of the contents with which the stream begins, of which the same is true.
    `shard` None: of whichever shard has the name.
    """

    upper: Antichain
    is_snapshot: bool = False
    key: bytes | None = None
    shard: ShardId | None = None

    @classmethod
    def of(cls, offset: Offset) -> Position:
        """Raises InvalidUsage where it is not an offset that this persist knows."""
        version, given = offset.get("v"), offset.get("key")
        is_known = version == (WHOLE_VERSION if given is None else CUT_VERSION)
        if not is_known or ("snapshot" in offset) == ("frontier" in offset):
            raise _unknown(offset)
        is_snapshot = "snapshot" in offset
        upper = frontier(offset["snapshot"]) if is_snapshot else Antichain.from_json(offset["frontier"])
        key = None if given is None else _key(offset, given)
        if upper.element is None and (is_snapshot or key is not None):
            raise _unknown(offset)
        return cls(upper, is_snapshot, key, offset.get("shard"))

    @property
    def offset(self) -> Offset:
        found: Offset = {"v": WHOLE_VERSION if self.key is None else CUT_VERSION}
        if self.is_snapshot:
            found["snapshot"] = self.upper.element
        else:
            found["frontier"] = self.upper.to_json()
        if self.key is not None:
            found["key"] = b64encode(self.key).decode()
        return found if self.shard is None else {**found, "shard": self.shard}

    @property
    def held(self) -> Antichain:
        """The since that a stream here still needs; `[]`, which is none, at the end of a closed shard."""
        element = self.upper.element
        if self.is_snapshot or element is None:
            return self.upper
        return Antichain(max(element - 1, 0))

    def is_before(self, other: Position) -> bool:
        """Whether a stream comes to the other position later than to this one."""
        return self._order < other._order

    @property
    def _order(self) -> tuple[bool, int, bool, bytes]:
        """The contents as of a time come after the time, and before the next one."""
        element = self.upper.element
        at = 0 if element is None else element - (not self.is_snapshot)
        return element is None, at, not self.is_snapshot, self.key or b""

    def with_upper(self, upper: Antichain) -> Position:
        """Everything before `upper` is delivered."""
        return Position(upper, shard=self.shard)

    def with_key(self, time: int, key: bytes) -> Position:
        """Of this time, or of the contents with which the stream begins, the keys before this one are delivered."""
        return Position(Antichain(time), self.is_snapshot, key, self.shard)


def _key(offset: Offset, given: object) -> bytes:
    try:
        if isinstance(given, str) and (key := b64decode(given, validate=True)):
            return key
    except (binascii.Error, ValueError):
        pass
    raise _unknown(offset)


def _unknown(offset: Offset) -> InvalidUsage:
    return InvalidUsage(
        f"the stream's offset {offset!r:.300} is not one that this persist writes; use a new checkpoint, or the newer "
        "persist that wrote it"
    )


def offset_at(upper: Antichain, shard: ShardId) -> Offset:
    return Position(upper, shard=shard).offset


def snapshot_offset(as_of: int, shard: ShardId) -> Offset:
    return Position(Antichain(as_of), True, shard=shard).offset


def between(start: Position, end: Position) -> list[Interval]:
    """What a stream delivers from one position to another, in time order: at most three intervals, none of them empty.

    The same whenever it is asked: it knows nothing of the shard. Raises InvalidUsage where no stream comes from the one
    to the other.
    """
    time = start.upper.element
    if time is None or not start.is_before(end):
        return []
    if start.upper == end.upper and start.is_snapshot == end.is_snapshot:
        return [Interval(time, Antichain(time + 1), start.is_snapshot, KeyRange(start.key, end.key))]
    if end.is_snapshot:
        raise _unknown(end.offset)
    if start.is_snapshot and start.key is None:
        return [Interval(time, end.upper, True), *_last(end)]
    found = []
    if start.key is not None:
        found.append(Interval(time, Antichain(time + 1), start.is_snapshot, KeyRange(start.key, None)))
        time += 1
    if Antichain(time) < end.upper:
        found.append(Interval(time, end.upper, False))
    return [*found, *_last(end)]


def _last(end: Position) -> list[Interval]:
    """The keys of the last time that are delivered."""
    time = end.upper.element
    if end.key is None or time is None:
        return []
    return [Interval(time, Antichain(time + 1), False, KeyRange(None, end.key))]
