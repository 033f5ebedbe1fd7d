"""Operations on many shards: stream cuts and truncation by them, listing what shards hold, and dropping them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any, Final, TypeVar

from persist.client.arguments import check_int, checked
from persist.client.commit_info import Info, info_bytes
from persist.client.contents_diff import NamedTime
from persist.client.idempotency import send
from persist.client.optimistic_loop import RETRIES_MAX, read_facts
from persist.client.read_leases import HandleSettings
from persist.client.restore_and_truncate import Truncated, TruncateOperation
from persist.client.row_retention import policy_json
from persist.client.timestamps import INSTANT_MAX, instant_ms, instant_of, record_json, resolve_time, to_datetime
from persist.client.transport import OneShard, Transport
from persist.commit.location import all_names
from persist.core import commands as c
from persist.core import errors, ids
from persist.core.errors import InvalidUsage, PersistError, UnknownShard, UpperMismatch, shown
from persist.core.frontier import TIME_MAX, Antichain, join, meet
from persist.core.ids import ShardId, check_shard_name, incarnation_of, shard_id_of
from persist.core.shard_phases import dropped
from persist.core.shard_view import ShardView, ViewRequest
from persist.formats.http_messages import named_once

# A cut: a frontier for each of many shards, taken together. The application keeps it, and truncates by it later.
#
# A shard that is not in a cut has no rows before it. So `meet` keeps the shards that both cuts have, `join` all.

Names = tuple[str, ...] | None  # None: those with a prefix
VERSION = 1
SHARDS_MAX = 10_000  # of one cut
CURSORS_MAX = 100  # of one cut
TEXT_CHARS_MAX = 16 * 1024 * 1024  # of one in JSON
EPOCH_MAX = 2**53
UPPER: Final = "upper"  # of each shard, when it was asked
TIMESTAMP: Final = "timestamp"  # the upper of each shard at one wall clock
CURSORS: Final = "cursors"  # what all of some critical readers have passed
TIMES: Final = "times"  # computed from others
KINDS = (UPPER, TIMESTAMP, CURSORS, TIMES)
_FIELDS = frozenset({"v", "location", "epoch", "taken_ms", "kind", "shards", "lives", "crc"})


@dataclass(frozen=True)
class Cut:
    """A frontier for each of at most 10,000 shards of one location; `Client.cut` takes one.

    It can be pickled and written as JSON. `cut["orders"]` is the frontier of a shard, before which times are covered.
    `kind` is `upper`, `timestamp`, `cursors`, or `times` if it was computed from others; `taken_ms` is when it was
    taken, by the client's clock. It is no hold: its times stay readable only as long as the shard keeps them.
    """

    location: str
    epoch: int
    taken_ms: int
    kind: str
    shards: Mapping[str, Antichain]
    lives: Mapping[str, int] = field(default_factory=dict)  # the incarnation of a name, unless it is the first

    def __post_init__(self) -> None:
        for name, frontier in self.shards.items():
            if not isinstance(name, str) or not isinstance(frontier, Antichain):
                raise InvalidUsage(f"a cut has a frontier, an Antichain, for each name: not {shown({name: frontier})}")

    def __getitem__(self, shard: str) -> Antichain:
        """The frontier of a shard. Raises UnknownShard if it is not in the cut."""
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
        """When it was taken, in UTC, by the client's clock."""
        return to_datetime(self.taken_ms)

    def shard_id(self, name: str) -> ShardId:
        """The id of the shard: a name that was dropped and used again is another shard."""
        return shard_id_of(name, self.lives.get(name, 0))

    def meet(self, other: Cut) -> Cut:
        """The earlier frontier of each shard that both have. Raises InvalidUsage (different locations or shards)."""
        both = self.shards.keys() & other.shards.keys()
        return self._with(other, both, lambda name: meet((self[name], other[name])), min)

    def join(self, other: Cut) -> Cut:
        """The later frontier of each shard of either. Raises InvalidUsage (as `meet`, or too many)."""
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
        """Parse a cut. Raises InvalidUsage (it is damaged), UpgradeNeeded (of a later version)."""
        if not isinstance(text, (str, bytes)) or len(text) > TEXT_CHARS_MAX:
            raise InvalidUsage(f"a cut is text of at most {TEXT_CHARS_MAX} characters, as Cut.to_json() returns it")
        try:
            return cls.of(json.loads(text, object_pairs_hook=named_once))
        except (ValueError, RecursionError) as error:
            raise InvalidUsage(f"this is no cut: it cannot be read as JSON ({error})") from error

    @classmethod
    def of(cls, read: object) -> Cut:
        """The cut from parsed JSON. Raises as `from_json`."""
        if not isinstance(read, dict) or "v" not in read:
            raise InvalidUsage(f"this is no cut: {shown(read)}; give what Cut.to_json() returned")
        if type(read["v"]) is int and read["v"] > VERSION:
            raise errors.UpgradeNeeded(f"the cut has version {read['v']}; this persist knows {VERSION}: upgrade it")
        try:
            cut = _cut(read)
        except (KeyError, TypeError, AttributeError, InvalidUsage) as error:
            raise InvalidUsage(f"the cut is damaged: {error}; use what Cut.to_json() returned") from error
        if read.keys() - _FIELDS or zlib.crc32(_text(cut._body()).encode()) != read.get("crc"):
            raise InvalidUsage("the cut is damaged: its checksum differs; use what Cut.to_json() returned")
        _check_count(len(cut.shards))
        return cut


def _check_count(count: int) -> None:
    if count > SHARDS_MAX:
        raise InvalidUsage(f"a cut has at most {SHARDS_MAX} shards, not {count}; make several, of longer prefixes")


def _cut(read: dict[str, Any]) -> Cut:
    """Convert without a look at the checksum. Raises KeyError, TypeError, AttributeError or InvalidUsage."""
    shards = {check_shard_name(name): Antichain.from_json(upper) for name, upper in read["shards"].items()}
    lives = {name: _number(life, 1, ids.INCARNATION_MAX) for name, life in read.get("lives", {}).items()}
    if type(read["v"]) is not int or read["v"] != VERSION:
        raise InvalidUsage("its version is none")
    if read["kind"] not in KINDS or not isinstance(read["location"], str):
        raise InvalidUsage("its kind or location is none")
    if lives.keys() - shards.keys():
        raise InvalidUsage("it has the incarnation of a shard that it does not name")
    epoch, taken_ms = _number(read["epoch"], 1, EPOCH_MAX), _number(read["taken_ms"], 0, INSTANT_MAX)
    return Cut(read["location"], epoch, taken_ms, read["kind"], shards, lives)


def _number(value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise InvalidUsage(f"{shown(value)} is no whole number in [{least}, {most}]")
    return value


def _text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"))


ASKED_AT_ONCE = 8  # shards, unless the caller says otherwise
TRUNCATED_AT_ONCE = 2  # each takes as much memory as a snapshot
AT_ONCE_MAX = 64
_T = TypeVar("_T")


@dataclass(frozen=True)
class ShardTruncated:
    """The result of a truncation by a cut in one shard: `done`, or the `error` that refused it."""

    shard: str
    done: Truncated | None
    error: PersistError | None

    def to_json(self) -> dict[str, Any]:
        """The same for JSON: what `Truncated.to_json` gives, or `kind`, `detail` and `details` of the error."""
        if self.error is not None:
            return {"shard": self.shard, "error": error_json(self.error)}
        assert self.done is not None
        return {"shard": self.shard, **self.done.to_json()}


@dataclass(frozen=True)
class CutTruncated:
    """The result of a truncation by a cut: an outcome for each of its shards, by name."""

    outcomes: tuple[ShardTruncated, ...]

    @property
    def complete(self) -> bool:
        """Whether every shard is truncated that far, none `pending`. Otherwise repeat the call."""
        return all(outcome.done is not None and not outcome.done.pending for outcome in self.outcomes)

    @property
    def failed(self) -> tuple[ShardTruncated, ...]:
        """The outcomes of the shards that refused."""
        return tuple(outcome for outcome in self.outcomes if outcome.error is not None)

    def to_json(self) -> dict[str, Any]:
        """The same for JSON."""
        return {"complete": self.complete, "shards": [outcome.to_json() for outcome in self.outcomes]}


@dataclass(frozen=True)
class CutRequest:
    """Which cut to take: of the shards `names`, or of those whose names begin with `prefix`."""

    names: Names
    prefix: str | None
    at: datetime | None = None
    cursors: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises InvalidUsage if arguments contradict each other, or one is invalid."""
        check_names_or_prefix(self.names, self.prefix, "cut")
        if self.at is not None and self.cursors:
            raise InvalidUsage("at and cursors are both given; give one of them")
        if self.at is not None:
            checked("at", self.at, datetime)
            instant_ms("at", self.at)
        if len(self.cursors) > CURSORS_MAX:
            raise InvalidUsage(f"a cut is by at most {CURSORS_MAX} cursors, not {len(self.cursors)}")
        if self.names is not None and not 0 < len(set(self.names)) <= SHARDS_MAX:
            raise InvalidUsage(f"a cut has 1 to {SHARDS_MAX} shards, not {len(set(self.names))}")


def check_names_or_prefix(names: Names, prefix: str | None, verb: str) -> None:
    """Raise InvalidUsage unless shards are chosen either by their names or by a prefix of them."""
    if (names is None) == (prefix is None):
        raise InvalidUsage(f"give either the names of the shards to {verb}, or a prefix of names")
    checked("prefix", prefix, str, type(None))
    for name in names or ():
        check_shard_name(name)


def chosen_names(transport: Transport, names: Names, prefix: str | None, count_max: int) -> tuple[str, ...]:
    """The names of the chosen shards, ascending; of those with the prefix at most one more than `count_max`."""
    if names is not None:
        return tuple(sorted(set(names)))
    return tuple(islice(all_names(transport.names, prefix or ""), count_max + 1))


def take_cut(transport: Transport, request: CutRequest, settings: HandleSettings, at_once: int) -> Cut:
    """The cut. Raises what `Client.cut` says."""
    request.check()
    check_at_once(at_once)
    names = chosen_names(transport, request.names, request.prefix, SHARDS_MAX)
    if len(names) > SHARDS_MAX:
        raise InvalidUsage(f"more than {SHARDS_MAX} shards begin with {request.prefix!r}; cut by longer prefixes")
    location, epoch = transport.belongs()
    taken_ms, retry_s = transport.clock.now_ms(), settings.read.retry_s

    def frontier_of(name: str) -> tuple[ShardId, Antichain] | None:
        view = transport.view(name, ViewRequest(with_batches=False, with_details=bool(request.cursors)))
        if view.is_dropped:
            if request.names is None:  # it was dropped since it was listed
                return None
            raise UnknownShard(dropped(name))
        return view.shard_id, _frontier(OneShard(transport, view.shard_id), name, view, request, retry_s)

    frontiers = zip(names, map_names(frontier_of, names, at_once), strict=True)
    cut_frontiers = {name: frontier for name, frontier in frontiers if frontier is not None}
    if not cut_frontiers:
        raise InvalidUsage(f"there is no shard whose name begins with {request.prefix!r}: a cut needs one at least")
    lives = {name: incarnation_of(name, shard) for name, (shard, _) in cut_frontiers.items()}
    return Cut(
        location,
        epoch,
        taken_ms,
        TIMESTAMP if request.at is not None else CURSORS if request.cursors else UPPER,
        {name: upper for name, (_, upper) in cut_frontiers.items()},
        {name: life for name, life in lives.items() if life},
    )


@dataclass(frozen=True)
class TruncationRequest:
    """The options of a truncation by a cut, as in `Client.truncate`."""

    dry_run: bool = False
    retries: int = 0
    info: Info | None = None
    at_once: int = TRUNCATED_AT_ONCE


def truncate_by_cut(transport: Transport, cut: Cut, settings: HandleSettings, asked: TruncationRequest) -> CutTruncated:
    """Truncate every shard of the cut. Raises what `Client.truncate` says."""
    checked("cut", cut, Cut)
    checked("dry_run", asked.dry_run, bool)
    check_int("retries", asked.retries, 0, RETRIES_MAX)
    check_at_once(asked.at_once)
    info = info_bytes("info", asked.info)
    location, epoch = transport.belongs()
    if cut.location != location:
        raise InvalidUsage(f"the cut is of location {cut.location}, and this is {location}: use it where it was taken")
    if cut.epoch > epoch:
        raise InvalidUsage(
            f"the cut is of epoch {cut.epoch}, and this location is at epoch {epoch}: another one has taken over"
        )

    def truncate_one(name: str) -> ShardTruncated:
        try:
            before = cut[name].element
            if before is None or before > TIME_MAX:
                closed = f"shard {name!r} was closed when the cut was taken: nothing can be truncated in it"
                raise UpperMismatch(closed, expected=None, actual=[])
            shard = OneShard(transport, cut.shard_id(name))
            truncation = TruncateOperation.of(shard, name, settings, NamedTime(before), info=info)
            derived = ids.token_of_key(f"truncate by cut {cut.taken_ms} before {before}")
            done = truncation.run(None, asked.retries, dry_run=asked.dry_run, derived=derived)
        except PersistError as error:
            return ShardTruncated(name, None, error)
        return ShardTruncated(name, done, None)

    return CutTruncated(tuple(map_names(truncate_one, sorted(cut.shards), asked.at_once)))


def error_json(error: PersistError) -> dict[str, Any]:
    """The error of one shard of many, for JSON."""
    return {"kind": error.kind, "detail": error.message, "details": dict(error.details)}


def check_at_once(at_once: int) -> None:
    """Raises InvalidUsage unless so many shards can be processed at once."""
    check_int("at_once", at_once, 1, AT_ONCE_MAX)


def map_names(work: Callable[[str], _T], names: Iterable[str], at_once: int) -> list[_T]:
    """The results of `work` for each name, in order. The first error ends it. 1 at once: on this thread."""
    if at_once == 1:
        return [work(name) for name in names]
    context = copy_context()  # the deadline of this call applies to the threads, too
    with ThreadPoolExecutor(at_once, thread_name_prefix="persist-cut") as pool:
        try:
            return list(pool.map(lambda name: context.copy().run(work, name), names))
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _frontier(transport: OneShard, name: str, view: ShardView, request: CutRequest, retry_s: float) -> Antichain:
    if request.at is not None:
        return resolve_time(transport, name, request.at, 0.0, retry_s).upper
    if view.details is None:
        return view.upper
    frontiers = [view.upper]
    for cursor in request.cursors:
        since = view.details.cursors.get(ids.critical_reader_id_of(cursor))
        if since is None:
            raise InvalidUsage(
                f"shard {name!r} has no critical reader {cursor!r}, so its progress is unknown; give other cursors, or "
                "only shards that it reads"
            )
        frontiers.append(since)
    return meet(frontiers)


# What shards hold, page by page, and drops of many shards.

PAGE_MAX = 100  # shards with details on one page
DROPPED_MAX = 1_000  # by one call


@dataclass(frozen=True)
class ShardSummary:
    """What a shard holds; `Client.summaries` returns it.

    `rows` exist now (None: not known), `bytes` are stored, with all history. `oldest` is the wall clock from which its
    earliest readable time is shown (None: not known). `policy` is its row policy, as `Shard.retain` takes it.
    """

    name: str
    since: Antichain
    upper: Antichain
    rows: int | None
    bytes: int
    oldest: datetime | None
    policy: dict[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        """The same for JSON; the wall clock in RFC 3339."""
        return record_json(self)


@dataclass(frozen=True)
class ShardDropped:
    """The outcome for one shard: `error` is what refused it (None: it was dropped, or would be)."""

    shard: str
    error: PersistError | None

    def to_json(self) -> dict[str, Any]:
        """The same for JSON."""
        return {"shard": self.shard, "error": None if self.error is None else error_json(self.error)}


@dataclass(frozen=True)
class ShardsDropped:
    """The result of `Client.drop_shards`. `done` is false if it only listed the shards of a prefix."""

    done: bool
    outcomes: tuple[ShardDropped, ...]

    @property
    def complete(self) -> bool:
        """Whether all of them were dropped. Otherwise look at the errors, and repeat the call."""
        return self.done and all(outcome.error is None for outcome in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """The same for JSON."""
        shards = [outcome.to_json() for outcome in self.outcomes]
        return {"done": self.done, "complete": self.complete, "count": len(shards), "shards": shards}


def check_dropped(names: Names, prefix: str | None) -> None:
    """Raise InvalidUsage unless shards to drop are chosen either by their names or by a prefix of them."""
    check_names_or_prefix(names, prefix, "drop")
    if prefix == "":
        raise InvalidUsage("the prefix of shards to drop must not be empty")


def summary_page(
    transport: Transport, settings: HandleSettings, prefix: str, after: str, limit: int
) -> tuple[list[ShardSummary], str | None]:
    """A page of shards beyond `after`, ascending, and the name after which the next page begins (None: no more)."""
    names = transport.names(prefix, after, limit)
    summaries = map_names(lambda name: _summary(transport, name, settings.read.retry_s), names, ASKED_AT_ONCE)
    return [summary for summary in summaries if summary is not None], names[-1] if len(names) == limit else None


def drop_shards(
    transport: Transport, retry_s: float, chosen: Names, prefix: str | None, confirm: int | None, force: bool
) -> ShardsDropped:
    """Drop the shards. Raises what `Client.drop_shards` says."""
    check_dropped(chosen, prefix)
    checked("force", force, bool)
    names = chosen_names(transport, chosen, prefix, DROPPED_MAX)
    if len(names) > DROPPED_MAX:
        raise InvalidUsage(f"one call drops at most {DROPPED_MAX} shards; give fewer names, or a longer prefix")
    if confirm is None and prefix is not None:
        return ShardsDropped(False, tuple(ShardDropped(name, None) for name in names))
    if confirm not in (None, len(names)):
        raise InvalidUsage(
            f"confirm is {confirm}, and {len(names)} shards are selected: look at them, then confirm that many",
            count=len(names),
        )

    def drop_one(name: str) -> ShardDropped:
        try:
            view = transport.view(name, ViewRequest(with_batches=False))
            if not view.is_dropped:
                send(OneShard(transport, view.shard_id), name, c.Drop(force), retry_s)
        except PersistError as error:
            return ShardDropped(name, error)
        return ShardDropped(name, None)

    return ShardsDropped(True, tuple(map_names(drop_one, names, ASKED_AT_ONCE)))


def _summary(transport: Transport, name: str, retry_s: float) -> ShardSummary | None:
    """The summary; None: the shard was dropped since it was listed."""
    try:
        answer = read_facts(transport, name, retry_s)
    except UnknownShard:
        return None
    facts = answer.facts
    policy = None if facts.policy is None else policy_json(facts.policy)
    oldest = None
    if facts.since.element is not None:
        with suppress(InvalidUsage, errors.NotReadable):  # nothing was written yet, or no wall clocks are known
            oldest = instant_of(transport, name, facts.since.element, retry_s)
    return ShardSummary(name, facts.since, facts.upper, answer.rows, facts.stored_bytes, oldest, policy)
