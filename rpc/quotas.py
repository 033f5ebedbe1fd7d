"""Quotas: their file, request and row rates of tokens, shards and bytes of prefixes, and checks before each commit."""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Annotated, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType, ValidationError, convert, to_builtins

from persist.client.arguments import read_bounded
from persist.client.transport import AsCaller, Transport
from persist.commit.clocks_and_ids import Clock
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.batch import Part, parts_of
from persist.core.errors import Forbidden, Indeterminate, InvalidUsage, Overloaded, PersistError
from persist.core.state import State
from persist.formats.exposition import COUNTER, GAUGE, Family, Labelled, single_series
from persist.formats.http_messages import named_once
from rpc.auth import ANONYMOUS, MAINTENANCE, Principal
from rpc.prefix_usage import PrefixUsage, prefixes_of
from rpc.settings import ServerSettings
from rpc.tls import ChangedFiles

_log = logging.getLogger("persist.rpc")
T = TypeVar("T")

# The quotas file: limits for each token and for all shards under a prefix. It is reloaded when it changes.
#
#     {"ask": "ops@example.org",
#      "default": {"requests_per_s": 100},
#      "tokens": {"etl": {"requests_per_s": null, "rows_per_s": 100000}},
#      "prefixes": {"eu/": {"shards": 200, "bytes": 1099511627776}}}
#
# `default` applies to each token; an entry of a token overrides it, and `null` means no limit. Tokens have rates,
# prefixes have counts.


ENTRIES_MAX = 10_000  # tokens, and prefixes
FILE_BYTES_MAX = 16 * 1024 * 1024
ASK_CHARS_MAX = 200
_MOST = 2**53  # the largest integer that every JSON reader keeps exactly
_Rate = Annotated[int, Meta(ge=1, le=_MOST)] | None | UnsetType  # None: no limit
_Count = Annotated[int, Meta(ge=0, le=_MOST)] | None | UnsetType
_TokenId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9-]{1,64}\Z")]
_Prefix = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}(/[A-Za-z0-9._-]{0,128})?\Z")]


class TokenQuota(Struct, frozen=True, forbid_unknown_fields=True):
    """Rates of a token at one server."""

    requests_per_s: _Rate = UNSET
    rows_per_s: _Rate = UNSET


class PrefixQuota(Struct, frozen=True, forbid_unknown_fields=True):
    """Totals of all shards under a prefix."""

    shards: _Count = UNSET
    bytes: _Count = UNSET


RATES, COUNTS = TokenQuota.__struct_fields__, PrefixQuota.__struct_fields__


class Rules(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a quotas file."""

    ask: Annotated[str, Meta(min_length=1, max_length=ASK_CHARS_MAX)] = "the operator of this server"
    default: TokenQuota = TokenQuota()
    tokens: Annotated[dict[_TokenId, TokenQuota], Meta(max_length=ENTRIES_MAX)] = {}
    prefixes: Annotated[dict[_Prefix, PrefixQuota], Meta(max_length=ENTRIES_MAX)] = {}

    def of_token(self, name: str) -> dict[str, int]:
        return _limits(self.default, self.tokens.get(name, TokenQuota()))

    def of_prefix(self, prefix: str) -> dict[str, int]:
        """The limits of all shards under a prefix together."""
        return _limits(self.prefixes[prefix])


def _limits(*entries: TokenQuota | PrefixQuota) -> dict[str, int]:
    """The limits by the names of quotas; later entries override earlier ones."""
    limits: dict[str, int | None] = {}
    for entry in entries:
        limits |= to_builtins(entry)
    return {quota: most for quota, most in limits.items() if most is not None}


class QuotaFile:
    """The rules of a file, which is reloaded when it changes. While it is invalid, the previous rules apply.

    The constructor raises InvalidUsage if the file is invalid, or limits tokens at a server without tokens
    (`has_tokens`); after a reload this is logged. Used from the event loop's thread.
    """

    def __init__(self, path: str, now_s: Callable[[], float], *, has_tokens: bool = True) -> None:
        self._path = path
        self._has_tokens = has_tokens
        self._file = ChangedFiles([path], now_s)
        self.rules = read_rules(path)
        self.unreadable = ""  # why the file is invalid now
        if self._limits_no_token:
            raise InvalidUsage(
                f"the quotas file {path} limits tokens, but this server has none: "
                "give --tokens FILE, or quotas of prefixes alone"
            )

    @property
    def _limits_no_token(self) -> bool:
        """Whether the rules limit tokens although there are none."""
        return not self._has_tokens and (bool(self.rules.tokens) or self.rules.default != TokenQuota())

    def reload(self) -> bool:
        """Reload the file if it has changed; returns whether its rules changed."""
        if not self._file.check():
            return False
        before = self.rules
        try:
            self.rules, self.unreadable = read_rules(self._path), ""
        except InvalidUsage as error:
            self._file.again()  # the cause may be temporary
            if str(error) != self.unreadable:
                _log.error("the quotas file is invalid; the previous quotas apply", extra={"why": str(error)[:500]})
            self.unreadable = str(error)
        if self.rules != before and self._limits_no_token:
            _log.warning("the quotas file limits tokens, but this server has none")
        return self.rules != before


def quota_file_of(settings: ServerSettings, now_s: Callable[[], float]) -> QuotaFile | None:
    """The quotas file of a server; None: it has none. Raises InvalidUsage."""
    if settings.quotas is None:
        return None
    return QuotaFile(settings.quotas, now_s, has_tokens=settings.tokens_file is not None)


def read_rules(path: str) -> Rules:
    """The rules in a file. Raises InvalidUsage naming the invalid entry."""
    data = read_bounded(f"the quotas file {path}", path, FILE_BYTES_MAX, own=True)
    try:
        document = json.loads(data, object_pairs_hook=named_once)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"the quotas file {path} is not JSON: {error}") from error
    if isinstance(document, dict):
        for kind, entry_type in (("tokens", TokenQuota), ("prefixes", PrefixQuota)):
            entries = document.get(kind)
            for name, entry in entries.items() if isinstance(entries, dict) else ():
                _convert(entry, entry_type, f"{kind} {name!r:.100} in the quotas file {path}")
    rules = _convert(document, Rules, f"the quotas file {path}")
    if not rules.ask.isprintable():
        raise InvalidUsage(f"ask in the quotas file {path} must be printable text")
    return rules


def _convert(value: object, kind: type[T], place: str) -> T:
    try:
        return convert(value, kind)
    except ValidationError as error:
        raise InvalidUsage(f"{place} is invalid: {error}") from error


# Token buckets: a rate per second, with bursts. The caller passes the clock.

BURST_S = 5.0  # seconds of unused rate that may be used at once
DEBT_S_MAX = 3_600.0  # the longest time for which one request can exhaust a bucket


class RateBucket:
    """Fills by `rate` a second. A request passes if the bucket is not empty, and may overdraw it.

    So requests larger than a burst are possible, and delay those after them.
    """

    __slots__ = ("_at_s", "_level", "rate")

    def __init__(self, rate: int, now_s: float) -> None:
        self.rate = rate
        self._at_s = now_s
        self._level = rate * BURST_S

    def change(self, rate: int) -> None:
        """Set another rate. A debt keeps its length in seconds."""
        self._level = self._level * rate / self.rate
        self.rate = rate

    def wait_s(self, now_s: float) -> float:
        """How long until the next request may pass; 0: now."""
        self._level = min(self.rate * BURST_S, self._level + self.rate * max(0.0, now_s - self._at_s))
        self._at_s = now_s
        return 0.0 if self._level > 0 else (1.0 - self._level) / self.rate

    def take(self, count: int) -> None:
        """Take `count` from the bucket."""
        self._level = max(self._level - count, -self.rate * DEBT_S_MAX)

    def used(self, now_s: float) -> float:
        """The used part of the rate; the whole rate or more if the bucket is empty."""
        self.wait_s(now_s)
        return self.rate - self._level / BURST_S


# Quotas: requests and rows per second of a token, and the total content of all shards under a prefix.
#
# Rates are counted by each server separately; usage of prefixes is that of `PrefixUsage`. The server's own maintenance
# has no quota.

TOKENS_MAX = 10_000  # counted at a time
SHOWN_MAX = 100  # tokens, and prefixes, with their own series
RETRY_AFTER_S = 60.0  # for quotas that require deletions
STAGED_MAX = 10_000  # uncommitted parts of a prefix that came through this server
STAGED_S = 24 * 3600.0  # how long such a part counts
# Bytes that deletions may write beyond a quota: a multiple of the usage, plus some.
FREED_TIMES, FREED_BYTES = 2, 1 << 20
_REMEDIES = {"shards": "drop some", "bytes": "delete rows, forget history, or drop shards"}
REFUNDS: ContextVar[list[Callable[[], None]] | None] = ContextVar("persist.charged", default=None)
"""Refunds of what was counted for the current request; the middleware calls them if the request is refused."""


class QuotaFull(Overloaded):
    """A quota is exhausted. It has its parent's kind, which every client knows.

    Details: `quota`, `used`, `most`, `of` (the token or prefix) and `retry_after_s`.
    """


class StagedBytes:
    """Bytes of uncommitted parts that came through this server, by key. Not thread-safe.

    The orphan sweep deletes parts that are never committed. Beyond STAGED_MAX the oldest parts count without their
    keys, whether or not they are committed.
    """

    def __init__(self) -> None:
        self._parts: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._sum = self._rest = 0
        self._rest_until_s = 0.0

    def bytes(self, now_s: float, but: Sequence[str] = ()) -> int:
        """The bytes of all parts except these."""
        while self._parts and next(iter(self._parts.values()))[1] <= now_s:
            self._sum -= self._parts.popitem(last=False)[1][0]
        if self._rest_until_s <= now_s:
            self._rest = 0
        return self._sum + self._rest - sum(self._parts[key][0] for key in but if key in self._parts)

    def add(self, key: str, size: int, now_s: float) -> bool:
        """Add a part; returns whether it is new."""
        is_new = key not in self._parts
        self.forget((key,))
        self._parts[key] = (size, now_s + STAGED_S)
        self._sum += size
        if len(self._parts) > STAGED_MAX:
            oldest, self._rest_until_s = self._parts.popitem(last=False)[1]
            self._sum -= oldest
            self._rest += oldest
        return is_new

    def __contains__(self, key: str) -> bool:
        return key in self._parts

    def forget(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._sum -= self._parts.pop(key, (0, 0.0))[0]


class PrefixRoom:
    """The limits of one prefix, and what counts against them beside `PrefixUsage`."""

    def __init__(self, name: str, most: Mapping[str, int]) -> None:
        self.name = name
        self.most = most
        self.staged = StagedBytes()
        self._freed = self._freed_from = 0  # bytes that deletions wrote beyond the quota, and the usage before them

    def may_free(self, used: int, count: int) -> bool:
        """Whether deletions may write `count` more bytes although `used` exceeds the quota.

        That suffices to delete everything, and is bounded, because retractions of absent rows take bytes, too.
        """
        if used <= self.most["bytes"]:
            self._freed = 0
        if not self._freed:
            self._freed_from = used
        return self._freed + count <= FREED_TIMES * self._freed_from + FREED_BYTES

    def free(self, count: int) -> None:
        """Count such bytes; a negative count returns them."""
        self._freed = max(0, self._freed + count)


class Quotas:
    """The quotas of the callers of one server. Thread-safe except for `reload`, which belongs to the event loop."""

    def __init__(self, file: QuotaFile | None, clock: Clock, usage: PrefixUsage) -> None:
        self._file = file
        self._clock = clock
        self._usage = usage
        self._lock = threading.Lock()
        self._rules = Rules() if file is None else file.rules
        self._tokens: OrderedDict[str, Mapping[str, RateBucket]] = OrderedDict()  # by the names of quotas
        self._prefixes: dict[str, PrefixRoom] = {}
        self._refused = 0
        self._apply()

    def reload(self) -> bool:
        """Reload the file if it has changed; returns whether its rules changed."""
        if self._file is None or not self._file.reload():
            return False
        with self._lock:
            self._rules = self._file.rules
            self._apply()
        return True

    def count_request(self, principal: Principal, *, writes: bool = False) -> None:
        """Count a request. One that `writes` rows is refused if the quota of rows is used up.

        Raises QuotaFull.
        """
        self._take(principal, requests_per_s=1, **({"rows_per_s": 0} if writes else {}))  # never refunded

    def count_rows(self, principal: Principal, count: int) -> None:
        """Count rows that are written. Raises QuotaFull."""
        taken = self._take(principal, rows_per_s=count)
        if count and taken:
            self._add_refund(lambda: self._give_back(taken, count))

    def check_room(self, principal: Principal, shard: str, size: int = 1) -> None:
        """Raises QuotaFull if there is no room for `size` bytes. Counts nothing."""
        with self._lock:
            self._check_size(self._rooms(principal, shard, "bytes"), size, ())

    def count_upload(self, principal: Principal, shard: str, key: str, size: int) -> None:
        """Count a part that is uploaded through this server until it is committed. Raises QuotaFull."""
        rooms = self._rooms(principal, shard, "bytes")
        with self._lock:
            self._check_size(rooms, size, (key,))
            new = [room for room in rooms if room.staged.add(key, size, self._clock.monotonic())]
        if new:
            self._add_refund(lambda: self._forget(new, (key,)))

    def admit(self, principal: Principal, shard: str, command: c.Command) -> None:
        """Count what a command uses, once its parts are validated. Raises QuotaFull."""
        if isinstance(command, c.Recreate):
            self.add(principal, shard, "shards")
        elif isinstance(command, c.WRITES_ROWS):
            parts = list(parts_of(command.runs))
            self.count_rows(principal, sum(part.rows for part in parts))
            size, staged = sum(part.size for part in parts), _keys_of(parts)
            self.add(principal, shard, "bytes", size, frees=frees(command), staged=staged)

    def settle(self, principal: Principal, shard: str, command: c.Command, known: Callable[[], State | None]) -> None:
        """After a command: stop counting its staged parts that are in the shard's State."""
        if not isinstance(command, c.WRITES_ROWS):
            return
        rooms = self._rooms(principal, shard, "bytes")
        named = {key for key in _keys_of(parts_of(command.runs)) if any(key in room.staged for room in rooms)}
        state = known() if named else None
        if state is not None:  # a retry or another replica may have been answered without committing these parts
            self._forget(rooms, [part.key for part in state.trace.parts() if part.key in named])

    def bounds_bytes(self, principal: Principal, shard: str) -> bool:
        return bool(self._rooms(principal, shard, "bytes"))

    def count_shard(self, principal: Principal, shard: str) -> None:
        """Count a shard that is to be created, unless it exists. Raises QuotaFull."""
        if self._prefixes and not self._usage.has(shard):
            self.add(principal, shard, "shards")

    def add(
        self,
        principal: Principal,
        shard: str,
        quota: str,
        count: int = 1,
        *,
        frees: bool = False,
        staged: Sequence[str] = (),
    ) -> Callable[[], None]:
        """Count an addition to a shard under all of its prefixes, or none; returns its refund. Raises QuotaFull.

        `frees`: it deletes rows, for which there is some room beyond the quota. `staged`: the keys of the parts that it
        commits, which may be counted already.
        """
        rooms = self._rooms(principal, shard, quota)
        if not rooms:
            return lambda: None
        beyond: list[PrefixRoom] = []
        with self._lock:
            for room in rooms:
                used = self._used(room, quota, staged)
                if used + count <= room.most[quota]:
                    continue
                if not frees or not room.may_free(used, count):
                    raise self._full(room.name, quota, room.most[quota], used)
                beyond.append(room)
            for room in beyond:
                room.free(count)
            number = self._usage.admit(shard, quota, count)

        def give_back() -> None:
            self._usage.take_back(shard, quota, count, number)
            with self._lock:
                for room in beyond:
                    room.free(-count)

        refund = cache(give_back)  # at most once
        self._add_refund(refund)
        return refund

    def families(self, principal: Principal) -> Iterator[Family]:
        """The usage and limits of the tokens and prefixes that the principal may see."""
        used: list[Labelled] = []
        most: list[Labelled] = []
        with self._lock:
            now_s = self._clock.monotonic()
            tokens = [
                (name, buckets)
                for name, buckets in self._tokens.items()
                if principal.is_unlimited or name == principal.name
            ]
            for name, buckets in tokens[:SHOWN_MAX]:
                for quota, bucket in buckets.items():
                    used.append((("token", name, quota), max(0.0, bucket.used(now_s))))
                    most.append((("token", name, quota), bucket.rate))
            rooms = [room for room in self._prefixes.values() if principal.covers(room.name)]
            for room in rooms[:SHOWN_MAX]:
                for quota, limit in room.most.items():
                    used.append((("prefix", room.name, quota), self._used(room, quota)))
                    most.append((("prefix", room.name, quota), limit))
        names = ("kind", "of", "quota")
        yield Family("persist_quota_used", GAUGE, "The usage of a quota, as far as it is known here", names, used)
        yield Family("persist_quota_most", GAUGE, "The limit of a quota", names, most)
        yield single_series("persist_quota_refusals_total", COUNTER, "Requests refused by a quota", self._refused)
        unreadable = float(self._file is not None and bool(self._file.unreadable))
        yield single_series(
            "persist_quota_file_unreadable", GAUGE, "Whether older quotas apply, as the file is invalid", unreadable
        )

    def _buckets_of(self, principal: Principal) -> Mapping[str, RateBucket]:
        """The rates of a caller; usually none."""
        if self._file is None or principal is MAINTENANCE or principal is ANONYMOUS:
            return {}
        buckets = self._tokens.get(principal.name)
        if buckets is None:
            with self._lock:
                buckets = _with_rates({}, self._rules.of_token(principal.name), self._clock.monotonic())
                self._tokens[principal.name] = buckets
                if len(self._tokens) > TOKENS_MAX:
                    self._tokens.popitem(last=False)
        return buckets

    def _rooms(self, principal: Principal, shard: str, quota: str) -> list[PrefixRoom]:
        """The prefixes of a shard that have this quota; none for a principal that may not access the shard."""
        if not self._prefixes or principal is MAINTENANCE or not principal.sees(shard):
            return []
        rooms = [self._prefixes[prefix] for prefix in prefixes_of(shard, self._prefixes.keys())]
        return [room for room in rooms if quota in room.most]

    def _used(self, room: PrefixRoom, quota: str, but: Sequence[str] = ()) -> int:
        """The usage including uncommitted parts other than these."""
        staged = room.staged.bytes(self._clock.monotonic(), but) if quota == "bytes" else 0
        return self._usage.used(room.name, quota) + staged

    def _take(self, principal: Principal, **counts: int) -> list[RateBucket]:
        """Count against each of the rates or none; returns the buckets that were used. Raises QuotaFull."""
        buckets = self._buckets_of(principal)
        if not buckets:
            return []
        with self._lock:
            now_s = self._clock.monotonic()
            limited = [(quota, bucket) for quota in counts if (bucket := buckets.get(quota)) is not None]
            for quota, bucket in limited:
                if (wait_s := bucket.wait_s(now_s)) > 0:
                    raise self._full(principal.name, quota, bucket.rate, max(0.0, bucket.used(now_s)), wait_s)
            for quota, bucket in limited:
                bucket.take(counts[quota])
        return [bucket for _, bucket in limited]

    def _check_size(self, rooms: Sequence[PrefixRoom], size: int, keys: Sequence[str]) -> None:
        for room in rooms:
            used = self._used(room, "bytes", keys)
            if used + size > room.most["bytes"]:
                raise self._full(room.name, "bytes", room.most["bytes"], used)

    def _forget(self, rooms: Sequence[PrefixRoom], keys: Sequence[str]) -> None:
        with self._lock:
            for room in rooms:
                room.staged.forget(keys)

    def _give_back(self, taken: list[RateBucket], count: int) -> None:
        with self._lock:
            for bucket in taken:
                bucket.take(-count)

    @staticmethod
    def _add_refund(refund: Callable[[], None]) -> None:
        refunds = REFUNDS.get()
        if refunds is not None:
            refunds.append(refund)

    def _apply(self) -> None:
        """Apply the rules. Usage so far continues to count."""
        now_s = self._clock.monotonic()
        for name, buckets in self._tokens.items():
            self._tokens[name] = _with_rates(buckets, self._rules.of_token(name), now_s)
        before, prefixes = self._prefixes, {}
        for prefix in self._rules.prefixes:
            most = self._rules.of_prefix(prefix)
            if (known := before.get(prefix)) is not None:
                known.most = most
            if most:
                prefixes[prefix] = known or PrefixRoom(prefix, most)
        self._prefixes = prefixes
        self._usage.watch(prefixes)

    def _full(self, of: str, quota: str, most: int, used: float, wait_s: float = RETRY_AFTER_S) -> QuotaFull:
        self._refused += 1
        kind, state, remedy = "token", f"{most} {quota.removesuffix('_per_s')} a second are allowed", "slow down"
        if quota in _REMEDIES:
            kind, state, remedy = "prefix", f"{used:.0f} of {most} {quota} are used", _REMEDIES[quota]
        return QuotaFull(
            f"the {kind} {of!r} has no {quota} left: {state}; {remedy}, or ask {self._rules.ask} for more",
            quota=quota,
            used=round(used),
            most=most,
            of=of,
            retry_after_s=wait_s,
        )


def _with_rates(buckets: Mapping[str, RateBucket], rates: Mapping[str, int], now_s: float) -> dict[str, RateBucket]:
    """Buckets with these rates; those that exist keep their level."""
    changed = {quota: buckets.get(quota) or RateBucket(rate, now_s) for quota, rate in rates.items()}
    for quota, bucket in changed.items():
        bucket.change(rates[quota])
    return changed


def _keys_of(parts: Iterable[Part]) -> list[str]:
    """The keys of the parts that are blobs."""
    return [part.key for part in parts if part.key is not None]


def check_only_deletes(command: c.Command, known: Callable[[], State | None]) -> None:
    """Raise Forbidden if a rewrite by a principal without the scope `write` adds rows.

    A truncation may contain insertions if rows have negative multiplicities, which need an earlier retraction.
    """
    if not isinstance(command, c.Rewrite) or all(part.diff_max <= 0 for part in parts_of(command.runs)):
        return
    state = known()
    if state is None or not any(part.diff_min < 0 for part in state.trace.parts()):
        raise Forbidden(
            "the command adds rows, and the shard holds no retractions that these could cancel: adding rows needs the "
            "scope 'write'"
        )


def frees(command: c.Command) -> bool:
    """Whether a command only deletes rows, by the validated statistics of its parts.

    It is then possible without room in the quota of bytes.
    """
    if not isinstance(command, c.Rewrite) or not (c.effects(command).removes or command.operation == "delete"):
        return False
    return all(part.diff_max < 0 for part in parts_of(command.runs))


# Commits that the server makes on behalf of a caller count against the caller's quota of bytes.


class WithinQuotas(AsCaller):
    """A transport that commits on behalf of a principal within its quota of bytes. Other quotas are counted earlier."""

    def __init__(self, inner: Transport, caller: Caller, quotas: Quotas, principal: Principal) -> None:
        super().__init__(inner, caller)
        self._quotas = quotas
        self._principal = principal

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        """Also raises QuotaFull, before anything is committed."""
        if not isinstance(command, c.WRITES_ROWS):
            return super().apply(name, command, caller)
        size = sum(part.size for part in parts_of(command.runs))
        refund = self._quotas.add(self._principal, name, "bytes", size, frees=frees(command))
        try:
            return super().apply(name, command, caller)
        except Indeterminate:
            raise
        except PersistError:
            refund()
            raise
