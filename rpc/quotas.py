"""Quotas: request and row rates of tokens, shards and bytes of prefixes, and their check before each commit."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar

from persist.client.transport import AsCaller, Transport
from persist.commit.system import Clock
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.batch import Part
from persist.core.errors import Forbidden, Indeterminate, Overloaded, PersistError
from persist.core.state import State
from persist.core.transitions.writers import parts_of
from persist.formats.exposition import COUNTER, GAUGE, Family, Labelled, one
from rpc.auth import ANYBODY, MAINTENANCE, Principal
from rpc.prefix_usage import Tally, within
from rpc.quota_file import QuotaFile, Rules

# Token buckets: so much a second, with bursts, by a clock that the caller gives.


BURST_S = 5.0  # what was not used for so long may be used at once
DEBT_S_MAX = 3_600.0  # a single request of any size is paid off in an hour


class RateBucket:
    """Fills by `rate` a second. It lets everything through while it is not empty, and may so be overdrawn.

    So a request that is larger than a burst is possible, and those after it wait for longer.
    """

    __slots__ = ("_at_s", "_level", "rate")

    def __init__(self, rate: int, now_s: float) -> None:
        self.rate = rate
        self._at_s = now_s
        self._level = rate * BURST_S

    def change(self, rate: int) -> None:
        """Another rate from now on. A debt stays as many seconds long."""
        self._level = self._level * rate / self.rate
        self.rate = rate

    def wait_s(self, now_s: float) -> float:
        """For how long it lets nothing through; 0: it does."""
        self._level = min(self.rate * BURST_S, self._level + self.rate * max(0.0, now_s - self._at_s))
        self._at_s = now_s
        return 0.0 if self._level > 0 else (1.0 - self._level) / self.rate

    def take(self, count: int) -> None:
        """Take what was let through."""
        self._level = max(self._level - count, -self.rate * DEBT_S_MAX)

    def used(self, now_s: float) -> float:
        """What is used of the rate: all of it, or more, where nothing is let through."""
        self.wait_s(now_s)
        return self.rate - self._level / BURST_S


# Quotas: how many requests and rows a second a token may ask for, and how much all shards of a prefix may hold.
#
# Rates are counted by this process alone. What shards hold is what the tally knows. The server's own maintenance has no
# quota.


TOKENS_MAX = 10_000  # that are counted at once
SHOWN_MAX = 100  # tokens, and prefixes, with series of their own
RETRY_AFTER_S = 60.0  # where something has to be given up first
STAGED_MAX = 10_000  # parts of a prefix that came through this server and are still to be committed
STAGED_S = 24 * 3600.0  # for so long such a part counts
FREED_TIMES, FREED_BYTES = 2, 1 << 20  # what may be written to take rows away: so often what was there, and some more
_GIVEN_UP_BY = {"shards": "drop some", "bytes": "delete rows, let history go, or drop shards"}
CHARGED: ContextVar[list[Callable[[], None]] | None] = ContextVar("persist.charged", default=None)
"""What gives back each thing that was counted for the request under way: the edge calls it where that is refused."""


class QuotaFull(Overloaded):
    """Goes out with its parent's kind, which every client knows.

    Details: `quota`, `used`, `most`, `of` (the token or prefix) and `retry_after_s`.
    """


class TokenRates:
    """The rates of one token."""

    def __init__(self, most: Mapping[str, int], now_s: float) -> None:
        self._buckets: dict[str, RateBucket] = {}
        self.change(most, now_s)

    def change(self, most: Mapping[str, int], now_s: float) -> None:
        """Other rates from now on. What was used counts on."""
        self.most = most
        buckets = {quota: self._buckets.get(quota) or RateBucket(rate, now_s) for quota, rate in most.items()}
        for quota, bucket in buckets.items():
            bucket.change(most[quota])
        self._buckets = buckets

    def bucket(self, quota: str) -> RateBucket | None:
        """What counts a rate; None: there is no limit."""
        return self._buckets.get(quota)


class StagedBytes:
    """Bytes of parts that came through this server and that nobody has committed yet, by key. Not thread-safe.

    What was never committed the orphan sweep takes away. Of more than STAGED_MAX the oldest count on without their
    keys, whatever becomes of them.
    """

    def __init__(self) -> None:
        self._parts: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._sum = self._rest = 0
        self._rest_until_s = 0.0

    def bytes(self, now_s: float, but: Sequence[str] = ()) -> int:
        """Of all but these keys."""
        while self._parts and next(iter(self._parts.values()))[1] <= now_s:
            self._sum -= self._parts.popitem(last=False)[1][0]
        if self._rest_until_s <= now_s:
            self._rest = 0
        return self._sum + self._rest - sum(self._parts[key][0] for key in but if key in self._parts)

    def add(self, key: str, size: int, now_s: float) -> bool:
        """Whether it is new."""
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
    """How much all shards of a prefix may hold together."""

    def __init__(self, name: str, most: Mapping[str, int]) -> None:
        self.name = name
        self.most = most
        self.staged = StagedBytes()
        self._freed = self._freed_from = 0  # bytes beyond the quota that took rows away, and what was there before

    def may_free(self, used: int, count: int) -> bool:
        """Whether so many bytes more may take rows away where `used` leaves no room.

        All that was there can go so, and not more: retractions of rows that are not there are bytes, too.
        """
        if used <= self.most["bytes"]:
            self._freed = 0
        if not self._freed:
            self._freed_from = used
        return self._freed + count <= FREED_TIMES * self._freed_from + FREED_BYTES

    def free(self, count: int) -> None:
        """Count such bytes, or give them back."""
        self._freed = max(0, self._freed + count)


class Quotas:
    """What callers may use of one server. Thread-safe, but for `look`, which belongs to the event loop's thread."""

    def __init__(self, file: QuotaFile | None, clock: Clock, tally: Tally) -> None:
        self._file = file
        self._clock = clock
        self._tally = tally
        self._lock = threading.Lock()
        self._rules = Rules() if file is None else file.rules
        self._tokens: OrderedDict[str, TokenRates] = OrderedDict()
        self._prefixes: dict[str, PrefixRoom] = {}
        self._refused = 0
        self._apply()

    def look(self) -> bool:
        """Read the file again if it has changed; whether other quotas hold now."""
        if self._file is None or not self._file.look():
            return False
        with self._lock:
            self._rules = self._file.rules
            self._apply()
        return True

    def request(self, principal: Principal, *, writes: bool = False) -> None:
        """Count a request. `writes`: it will write rows, so that it is not even read where none are left.

        Raises QuotaFull.
        """
        self._take(principal, requests_per_s=1, **({"rows_per_s": 0} if writes else {}))  # a request stays one

    def rows(self, principal: Principal, count: int) -> None:
        """Count rows that are written. Raises QuotaFull."""
        taken = self._take(principal, rows_per_s=count)
        if count and taken:
            self._charged(lambda: self._give_back(taken, count))

    def room_for(self, principal: Principal, shard: str, size: int = 1) -> None:
        """Raises QuotaFull where there is no room for so many bytes. Counts nothing."""
        with self._lock:
            self._check_room(self._rooms(principal, shard, "bytes"), size, ())

    def uploads(self, principal: Principal, shard: str, key: str, size: int) -> None:
        """Count a part that goes through this server, until it is committed. Raises QuotaFull."""
        rooms = self._rooms(principal, shard, "bytes")
        with self._lock:
            self._check_room(rooms, size, (key,))
            new = [room for room in rooms if room.staged.add(key, size, self._clock.monotonic())]
        if new:
            self._charged(lambda: self._forget(new, (key,)))  # it did not get there

    def committed(
        self, principal: Principal, shard: str, keys: Sequence[str], known: Callable[[], State | None]
    ) -> None:
        """A command that brought these parts is done: those that the shard's State has count there."""
        rooms = self._rooms(principal, shard, "bytes")
        named = {key for key in keys if any(key in room.staged for room in rooms)}
        state = known() if named else None
        if state is not None:  # what another replica, or an earlier try, has brought is answered, and names no part
            self._forget(rooms, [part.key for part in state.trace.parts() if part.key in named])

    def bounds_bytes(self, principal: Principal, shard: str) -> bool:
        """Whether some quota is of the bytes that a shard holds."""
        return bool(self._rooms(principal, shard, "bytes"))

    def creates(self, principal: Principal, shard: str) -> None:
        """Count a shard that is to be made, unless it is there. Raises QuotaFull."""
        if self._prefixes and not self._tally.has(shard):
            self.adds(principal, shard, "shards")

    def adds(
        self,
        principal: Principal,
        shard: str,
        quota: str,
        count: int = 1,
        *,
        frees: bool = False,
        staged: Sequence[str] = (),
    ) -> Callable[[], None]:
        """Count what is to be added to a shard, under all prefixes or none; what gives it back. Raises QuotaFull.

        `frees`: it takes rows away, for which there is some room beyond the quota. `staged`: the keys of parts that it
        commits, which may be counted already.
        """
        rooms = self._rooms(principal, shard, quota)
        if not rooms:
            return _nothing
        beyond: list[PrefixRoom] = []
        with self._lock:
            for room in rooms:
                used = self._used(room, quota, staged)
                if used + count <= room.most[quota]:
                    continue
                if not frees or not room.may_free(used, count):
                    raise self._no_room(room, quota, used)
                beyond.append(room)
            for room in beyond:
                room.free(count)
            turn = self._tally.admit(shard, quota, count)

        def give_back() -> None:
            self._tally.take_back(shard, quota, count, turn)
            with self._lock:
                for room in beyond:
                    room.free(-count)

        once = _once(give_back)
        self._charged(once)
        return once

    def families(self, principal: Principal) -> Iterator[Family]:
        """What is used, and the most, of the tokens and prefixes of which the caller may know."""
        used: list[Labelled] = []
        most: list[Labelled] = []
        with self._lock:
            now_s = self._clock.monotonic()
            tokens = [
                (name, rates)
                for name, rates in self._tokens.items()
                if principal.is_unlimited or name == principal.name
            ]
            for name, rates in tokens[:SHOWN_MAX]:
                for quota, allowed in rates.most.items():
                    bucket = rates.bucket(quota)
                    used.append((("token", name, quota), max(0.0, bucket.used(now_s)) if bucket else 0.0))
                    most.append((("token", name, quota), allowed))
            rooms = [room for room in self._prefixes.values() if _knows(principal, room.name)]
            for room in rooms[:SHOWN_MAX]:
                for quota, allowed in room.most.items():
                    used.append((("prefix", room.name, quota), self._used(room, quota)))
                    most.append((("prefix", room.name, quota), allowed))
        names = ("kind", "of", "quota")
        yield Family("persist_quota_used", GAUGE, "What is used of a quota, as far as it is known here", names, used)
        yield Family("persist_quota_most", GAUGE, "What a quota allows", names, most)
        yield one("persist_quota_refusals_total", COUNTER, "Requests refused by a quota", self._refused)
        unreadable = float(self._file is not None and bool(self._file.unreadable))
        yield one("persist_quota_file_unreadable", GAUGE, "Whether older quotas hold, as the file is bad", unreadable)

    def _rates_of(self, principal: Principal) -> TokenRates | None:
        """The rates by which a request goes. Most often there are none, and then this costs next to nothing."""
        if self._file is None or principal is MAINTENANCE or principal is ANYBODY:
            return None
        found = self._tokens.get(principal.name)
        if found is None:
            with self._lock:
                found = TokenRates(self._rules.of_token(principal.name), self._clock.monotonic())
                self._tokens[principal.name] = found
                if len(self._tokens) > TOKENS_MAX:
                    self._tokens.popitem(last=False)
        return found if found.most else None

    def _rooms(self, principal: Principal, shard: str, quota: str) -> list[PrefixRoom]:
        """The prefixes with this quota in which a shard is. Whoever is not let in to it uses nothing of them."""
        if not self._prefixes or principal is MAINTENANCE or not principal.sees(shard):
            return []
        rooms = [self._prefixes[prefix] for prefix in within(shard, self._prefixes.keys())]
        return [room for room in rooms if quota in room.most]

    def _used(self, room: PrefixRoom, quota: str, but: Sequence[str] = ()) -> int:
        """What is there, with parts that are still to be committed, but for those of these keys."""
        staged = room.staged.bytes(self._clock.monotonic(), but) if quota == "bytes" else 0
        return self._tally.used(room.name, quota) + staged

    def _take(self, principal: Principal, **counts: int) -> list[RateBucket]:
        """Count so much by each rate, or nothing at all; what counted it. Raises QuotaFull."""
        rates = self._rates_of(principal)
        if rates is None:
            return []
        with self._lock:
            now_s = self._clock.monotonic()
            found = [(quota, bucket) for quota in counts if (bucket := rates.bucket(quota)) is not None]
            for quota, bucket in found:
                if (wait_s := bucket.wait_s(now_s)) > 0:
                    label, used = f"the token {principal.name!r}", max(0.0, bucket.used(now_s))
                    raise self._full(label, principal.name, quota, rates.most, used, wait_s)
            for quota, bucket in found:
                bucket.take(counts[quota])
        return [bucket for _, bucket in found]

    def _check_room(self, rooms: Sequence[PrefixRoom], size: int, keys: Sequence[str]) -> None:
        for room in rooms:
            used = self._used(room, "bytes", keys)
            if used + size > room.most["bytes"]:
                raise self._no_room(room, "bytes", used)

    def _forget(self, rooms: Sequence[PrefixRoom], keys: Sequence[str]) -> None:
        with self._lock:
            for room in rooms:
                room.staged.forget(keys)

    def _give_back(self, taken: list[RateBucket], count: int) -> None:
        with self._lock:
            for bucket in taken:
                bucket.take(-count)

    @staticmethod
    def _charged(give_back: Callable[[], None]) -> None:
        charged = CHARGED.get()
        if charged is not None:
            charged.append(give_back)

    def _apply(self) -> None:
        """Have the rules hold."""
        now_s = self._clock.monotonic()
        for name, rates in self._tokens.items():
            rates.change(self._rules.of_token(name), now_s)
        before, prefixes = self._prefixes, {}
        for prefix in self._rules.prefixes:
            most = self._rules.of_prefix(prefix)
            if (known := before.get(prefix)) is not None:
                known.most = most
            if most:
                prefixes[prefix] = known or PrefixRoom(prefix, most)
        self._prefixes = prefixes
        self._tally.watch(prefixes)

    def _no_room(self, room: PrefixRoom, quota: str, used: int) -> QuotaFull:
        return self._full(f"all shards under {room.name!r} together", room.name, quota, room.most, used)

    def _full(
        self, label: str, of: str, quota: str, limits: Mapping[str, int], used: float, wait_s: float = RETRY_AFTER_S
    ) -> QuotaFull:
        self._refused += 1
        most = limits[quota]
        if quota in _GIVEN_UP_BY:
            what, remedy = f"{used:.0f} {quota} are there, {most} are allowed", _GIVEN_UP_BY[quota]
        else:
            what, remedy = f"{most} {quota.removesuffix('_per_s')} a second are allowed", "slow down"
        return QuotaFull(
            f"{label} has no {quota} left: {what}; {remedy}, or ask {self._rules.ask} for more",
            quota=quota,
            used=round(used),
            most=most,
            of=of,
            retry_after_s=wait_s,
        )


def _nothing() -> None:
    """Gives back nothing."""


def _once(give_back: Callable[[], None]) -> Callable[[], None]:
    """The same, which does nothing the second time."""
    left = [give_back]
    return lambda: left.pop()() if left else None


def _knows(principal: Principal, prefix: str) -> bool:
    """Whether a caller may know what is used under a prefix: all of it is open to it."""
    return principal.is_unlimited or prefix.startswith(principal.prefixes)


# What a command uses of the quotas of who gives it, before it is committed.


def check_room(quotas: Quotas, principal: Principal, command: c.Command) -> None:
    """Raises QuotaFull where no more rows may be written: then nobody looks at what the command brings."""
    if isinstance(command, c.WRITES_ROWS):
        quotas.rows(principal, 0)


def admit(quotas: Quotas, principal: Principal, shard: str, command: c.Command) -> None:
    """Count what a command uses, once it is known that its parts are what it says. Raises QuotaFull."""
    if isinstance(command, c.Recreate):
        quotas.adds(principal, shard, "shards")
    elif isinstance(command, c.WRITES_ROWS):
        parts = list(parts_of(command.runs))
        quotas.rows(principal, sum(part.rows for part in parts))
        quotas.adds(
            principal, shard, "bytes", sum(part.size for part in parts), frees=frees(command), staged=keys_of(parts)
        )


def settle(
    quotas: Quotas, principal: Principal, shard: str, command: c.Command, known: Callable[[], State | None]
) -> None:
    """After a command was done: parts that it brought and the shard's State has count there."""
    if isinstance(command, c.WRITES_ROWS):
        quotas.committed(principal, shard, keys_of(parts_of(command.runs)), known)


def keys_of(parts: Iterable[Part]) -> list[str]:
    """The keys of those that are blobs."""
    return [part.key for part in parts if part.key is not None]


def check_takes_away(command: c.Command, known: Callable[[], State | None]) -> None:
    """Raise Forbidden where what is to take rows away adds some, for who may not write.

    Rows of a truncation add some only where others are there less often than not at all, which no shard has without a
    retraction.
    """
    if not isinstance(command, c.Rewrite) or all(part.diff_max <= 0 for part in parts_of(command.runs)):
        return
    state = known()
    if state is None or not any(part.diff_min < 0 for part in state.trace.parts()):
        raise Forbidden(
            "the rows of this command add some, and nothing in the shard was retracted that they could make up for: "
            "without the scope 'write' nobody adds rows"
        )


def frees(command: c.Command) -> bool:
    """Whether a command takes rows away, and adds none: what its parts say was compared with their rows.

    That is possible where no quota of bytes is left.
    """
    if not isinstance(command, c.Rewrite) or not (c.effects(command).removes or command.operation == "delete"):
        return False
    return all(part.diff_max < 0 for part in parts_of(command.runs))


# What a server commits in somebody's name counts in their quota of bytes, as what they commit by themselves does.


class WithinQuotas(AsCaller):
    """A transport for who asks through a server, within their quota of bytes. Others were counted as they came in."""

    def __init__(self, inner: Transport, caller: Caller, quotas: Quotas, principal: Principal) -> None:
        super().__init__(inner, caller)
        self._quotas = quotas
        self._principal = principal

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        """Also raises QuotaFull, before anything is committed."""
        if not isinstance(command, c.WRITES_ROWS):
            return super().apply(name, command, caller)
        size = sum(part.size for part in parts_of(command.runs))
        give_back = self._quotas.adds(self._principal, name, "bytes", size, frees=frees(command))
        try:
            return super().apply(name, command, caller)
        except Indeterminate:
            raise
        except PersistError:
            give_back()
            raise
