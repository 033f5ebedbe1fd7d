"""A cut: a frontier for each of many shards, taken together. The application keeps it, and truncates by it later.

A shard that a cut does not name has no rows before it. So `meet` keeps the shards that both cuts have, `join` all.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from persist.client.wall_clock import INSTANT_MAX, shown_instant
from persist.core.antichain import Antichain, join, meet
from persist.core.errors import InvalidUsage, UnknownShard, UpgradeNeeded, shown
from persist.core.ids import INCARNATION_MAX, ShardId, check_shard_name, shard_id_of
from persist.formats.http_messages import named_once

VERSION = 1
SHARDS_MAX = 10_000  # of one cut
TEXT_CHARS_MAX = 16 * 1024 * 1024  # of one in JSON
EPOCH_MAX = 2**53
UPPER: Final = "upper"  # what each shard had when it was asked
TIMESTAMP: Final = "timestamp"  # what each shard had by one wall clock
CURSORS: Final = "cursors"  # what all of some critical readers have passed
TIMES: Final = "times"  # made of others
KINDS = (UPPER, TIMESTAMP, CURSORS, TIMES)
_FIELDS = frozenset({"v", "location", "epoch", "taken_ms", "kind", "shards", "lives", "crc"})


@dataclass(frozen=True)
class Cut:
    """A frontier for each of at most 10,000 shards of one location; `Client.cut` takes one.

    It can be pickled and written as JSON. `cut["orders"]` is the frontier of a shard: times before it are meant.
    `kind` is `upper`, `timestamp`, `cursors`, or `times` where it was made of others; `taken_ms` is when, by the clock
    of who took it. It holds nothing: what it says stays readable only as long as the shard keeps it.
    """

    location: str
    epoch: int
    taken_ms: int
    kind: str
    shards: Mapping[str, Antichain]
    lives: Mapping[str, int] = field(default_factory=dict)  # which life of a name is meant; the first is left out

    def __post_init__(self) -> None:
        for name, frontier in self.shards.items():
            if not isinstance(name, str) or not isinstance(frontier, Antichain):
                raise InvalidUsage(f"a cut has a frontier, an Antichain, for each name: not {shown({name: frontier})}")

    def __getitem__(self, shard: str) -> Antichain:
        """The frontier of a shard. Raises UnknownShard where the cut does not name it."""
        try:
            return self.shards[shard]
        except (KeyError, TypeError):
            raise UnknownShard(f"this cut does not name shard {shown(shard)}") from None

    def __len__(self) -> int:
        return len(self.shards)

    def __repr__(self) -> str:
        return f"Cut(kind={self.kind!r}, shards={len(self.shards)}, taken={self.taken.isoformat()})"

    @property
    def taken(self) -> datetime:
        """When it was taken, in UTC, by the clock of who took it."""
        return shown_instant(self.taken_ms)

    def shard_id(self, name: str) -> ShardId:
        """The id of the shard that is meant: a name that was dropped and used again is another one."""
        return shard_id_of(name, self.lives.get(name, 0))

    def meet(self, other: Cut) -> Cut:
        """The earlier frontier of each shard that both name. Raises InvalidUsage (of different locations or lives)."""
        both = self.shards.keys() & other.shards.keys()
        return self._with(other, both, lambda name: meet((self[name], other[name])), min)

    def join(self, other: Cut) -> Cut:
        """The later frontier of each shard that one of them names. Raises InvalidUsage (as `meet`, or too many)."""
        every = self.shards.keys() | other.shards.keys()

        def later(name: str) -> Antichain:
            mine, others = self.shards.get(name), other.shards.get(name)
            return join(mine, others) if mine is not None and others is not None else mine or others or other[name]

        return self._with(other, every, later, max)

    def _with(
        self, other: Cut, names: set[str], frontier_of: Callable[[str], Antichain], taken: Callable[[int, int], int]
    ) -> Cut:
        if not isinstance(other, Cut):
            raise InvalidUsage(f"{shown(other)} is no cut")
        if self.location != other.location:
            raise InvalidUsage(f"one cut is of location {self.location}, the other of {other.location}")
        for name in sorted(names):
            if name in self.shards and name in other.shards and self.shard_id(name) != other.shard_id(name):
                raise InvalidUsage(f"shard {name!r} was dropped between the two cuts: they mean different shards")
        _check_count(len(names))
        lives = {**other.lives, **self.lives}
        return Cut(
            self.location,
            max(self.epoch, other.epoch),
            taken(self.taken_ms, other.taken_ms),
            self.kind if self.kind == other.kind else TIMES,
            {name: frontier_of(name) for name in sorted(names)},
            {name: lives[name] for name in sorted(names) if name in lives},
        )

    def to_json(self) -> str:
        """The cut as text, which `from_json` reads. Raises nothing."""
        body = self._body()
        return _text({**body, "crc": zlib.crc32(_text(body).encode())})

    def _body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"v": VERSION, "location": self.location, "epoch": self.epoch}
        body |= {"taken_ms": self.taken_ms, "kind": self.kind}
        body["shards"] = {name: self.shards[name].to_json() for name in sorted(self.shards)}
        if self.lives:
            body["lives"] = {name: self.lives[name] for name in sorted(self.lives)}
        return body

    @classmethod
    def from_json(cls, text: str | bytes) -> Cut:
        """The cut that a text tells. Raises InvalidUsage (it is damaged), UpgradeNeeded (of a later version)."""
        if not isinstance(text, (str, bytes)) or len(text) > TEXT_CHARS_MAX:
            raise InvalidUsage(f"a cut is a text of at most {TEXT_CHARS_MAX} characters, as Cut.to_json() gives it")
        try:
            return cls.of(json.loads(text, object_pairs_hook=named_once))
        except (ValueError, RecursionError) as error:
            raise InvalidUsage(f"this is no cut: it cannot be read as JSON ({error})") from error

    @classmethod
    def of(cls, read: object) -> Cut:
        """The cut that was read from JSON. Raises as `from_json`."""
        if not isinstance(read, dict) or "v" not in read:
            raise InvalidUsage(f"this is no cut: {shown(read)}; give what Cut.to_json() gave")
        if type(read["v"]) is int and read["v"] > VERSION:
            raise UpgradeNeeded(f"the cut has version {read['v']}; this persist knows {VERSION}: upgrade it")
        try:
            found = _cut(read)
        except (KeyError, TypeError, AttributeError, InvalidUsage) as error:
            raise InvalidUsage(f"the cut is damaged: {error}; take what Cut.to_json() gave") from error
        if read.keys() - _FIELDS or zlib.crc32(_text(found._body()).encode()) != read.get("crc"):
            raise InvalidUsage("the cut is damaged: its checksum differs; take what Cut.to_json() gave")
        _check_count(len(found.shards))
        return found


def check_belongs(cut: Cut, location: str, epoch: int) -> None:
    """Raises InvalidUsage where the cut is of another location, or of a later epoch of this one."""
    if cut.location != location:
        raise InvalidUsage(f"the cut is of location {cut.location}, and this is {location}: use it where it was taken")
    if cut.epoch > epoch:
        raise InvalidUsage(
            f"the cut is of epoch {cut.epoch}, and this location is at epoch {epoch}: another one has taken over"
        )


def _check_count(count: int) -> None:
    if count > SHARDS_MAX:
        raise InvalidUsage(f"a cut has at most {SHARDS_MAX} shards, not {count}; make several, of longer prefixes")


def _cut(read: dict[str, Any]) -> Cut:
    """The cut as it says it is. Raises KeyError, TypeError, AttributeError or InvalidUsage where it cannot be one."""
    shards = {check_shard_name(name): Antichain.from_json(upper) for name, upper in read["shards"].items()}
    lives = {name: _number(life, 1, INCARNATION_MAX) for name, life in read.get("lives", {}).items()}
    if type(read["v"]) is not int or read["v"] != VERSION:
        raise InvalidUsage("its version is none")
    if read["kind"] not in KINDS or not isinstance(read["location"], str):
        raise InvalidUsage("its kind or location is none")
    if lives.keys() - shards.keys():
        raise InvalidUsage("it tells the life of a shard that it does not name")
    epoch, taken_ms = _number(read["epoch"], 1, EPOCH_MAX), _number(read["taken_ms"], 0, INSTANT_MAX)
    return Cut(read["location"], epoch, taken_ms, read["kind"], shards, lives)


def _number(value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise InvalidUsage(f"{shown(value)} is no whole number in [{least}, {most}]")
    return value


def _text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"))
