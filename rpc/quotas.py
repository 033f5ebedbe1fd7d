"""Quotas of tokens and of prefixes: what is asked for is counted, and refused beyond them.

Rates are counted by this process alone. `leases` and `writers` of a token are those that it registered here and that
have not lapsed; all else that a token may have is what the shards that it sees hold, as the tally knows it. The
server's own maintenance has no quota, and of persist's own shards none is counted.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar

from persist.commit.system import Clock
from persist.core.commands import MAINTAIN
from persist.core.errors import Overloaded
from persist.core.ids import is_reserved
from persist.core.keys import is_of_maintenance
from persist.formats.exposition import COUNTER, GAUGE, Family, Labelled, one
from rpc.auth import ANYBODY, MAINTENANCE, Principal
from rpc.held import Held
from rpc.quota_file import RATES, QuotaFile, Rules
from rpc.rates import Bucket
from rpc.tally import Tally, within

OWNERS_MAX = 10_000  # tokens that are counted at once
SHOWN_MAX = 100  # tokens, and prefixes, with series of their own
RETRY_AFTER_S = 60.0  # where something has to be given up first
HELD_MAX = 1_000_000  # leases, or writers, that are remembered of one token whatever its quota says
UPLOADED_MAX = 10_000  # keys of parts that came through this server and are still to be committed
FREED_TIMES, FREED_BYTES = 2, 1 << 20  # what may be written to take rows away: so often what was there, and some more
STAGED_S = 24 * 3600.0  # for so long a part that came through this server counts unless it is committed
OF_OWN = ("leases", "writers")  # of a token: those that it registered itself
_GIVEN_UP_BY = {
    "shards": "drop some",
    "bytes": "delete rows, let history go, or drop shards",
    "leases": "give some up, or wait until they lapse",
    "cursors": "give some up",
    "attributes": "unset some",
    "writers": "expire some, or wait until they lapse",
}


_REQUEST = {"requests_per_s": 1}
_WRITE = {**_REQUEST, "rows_per_s": 0, "bytes_per_s": 0}
CHARGED: ContextVar[list[Callable[[], None]] | None] = ContextVar("persist.charged", default=None)
"""What gives back each thing that was counted for the request under way: the edge calls it where that is refused."""


class QuotaFull(Overloaded):
    """Goes out with its parent's kind, which every client knows.

    Details: `quota`, `used`, `most`, `of` (the token or prefix) and `retry_after_s`.
    """


class Owner:
    """A token, or all shards under a prefix: how much it may use, and what it has used here."""

    __slots__ = ("_buckets", "_freed", "_freed_from", "given", "held", "is_token", "most", "name", "prefixes", "staged")

    def __init__(self, name: str, given: tuple[str, ...], most: dict[str, int], now_s: float, is_token: bool):
        self.name = name
        self.is_token = is_token
        self.given = given
        within_another = {one for one in given for other in given if one != other and one.startswith(other)}
        self.prefixes = tuple(set(given) - within_another) or ("",)  # under which its shards are, each of them once
        self.held = {quota: Held() for quota in OF_OWN}
        self._buckets: dict[str, Bucket] = {}
        self.staged = Staged()
        self._freed = self._freed_from = 0  # bytes beyond the quota that took rows away, and what was there before
        self.change(most, now_s)

    @property
    def label(self) -> str:
        return f"the token {self.name!r}" if self.is_token else f"all shards under {self.name!r} together"

    def change(self, most: dict[str, int], now_s: float) -> None:
        """Other quotas from now on. What was used counts on."""
        self.most = most
        buckets = {}
        for quota in RATES:
            if quota in most:
                buckets[quota] = known = self._buckets.get(quota) or Bucket(most[quota], now_s)
                known.change(most[quota])
        self._buckets = buckets

    def wait_s(self, quota: str, now_s: float) -> float:
        bucket = self._buckets.get(quota)
        return 0.0 if bucket is None else bucket.wait_s(now_s)

    def take(self, quota: str, count: int) -> None:
        bucket = self._buckets.get(quota)
        if bucket is not None:
            bucket.take(count)

    def may_free(self, used: float, count: int) -> bool:
        """Whether so many bytes more may take rows away where `used` leaves no room.

        All that was there can go so, and not more: retractions of rows that are not there are bytes, too.
        """
        if not self._freed:
            self._freed_from = int(used)
        return self._freed + count <= FREED_TIMES * self._freed_from + FREED_BYTES

    def free(self, count: int) -> None:
        """Count such bytes, or give them back."""
        self._freed = max(0, self._freed + count)

    def has_room(self) -> None:
        """What is used is within the quota of bytes again."""
        self._freed = 0

    def used(self, quota: str, now_s: float, tally: Tally) -> float:
        """How much it uses of a quota that it has."""
        if quota in RATES:
            return max(0.0, self._buckets[quota].used(now_s))
        if self.is_token and quota in OF_OWN:
            self.held[quota].forget_lapsed(now_s)
            return len(self.held[quota])
        found = sum(tally.used(prefix, quota) for prefix in self.prefixes)
        return found + self.staged.bytes(now_s) if quota == "bytes" else found


class Staged:
    """Parts that came through this server and that nobody has committed yet: their bytes, by key. Not thread-safe.

    They count for STAGED_S. What was never committed then, the orphan sweep takes away. Of more than UPLOADED_MAX the
    oldest count on without their keys, whatever becomes of them.
    """

    __slots__ = ("_parts", "_rest", "_rest_until_s", "_sum")

    def __init__(self) -> None:
        self._parts: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._sum = self._rest = 0
        self._rest_until_s = 0.0

    def bytes(self, now_s: float) -> int:
        while self._parts and next(iter(self._parts.values()))[1] <= now_s:
            self._sum -= self._parts.popitem(last=False)[1][0]
        if self._rest_until_s <= now_s:
            self._rest = 0
        return self._sum + self._rest

    def __contains__(self, key: str) -> bool:
        return key in self._parts

    def of(self, keys: Sequence[str]) -> int:
        return sum(self._parts[key][0] for key in keys if key in self._parts) if self._parts else 0

    def add(self, key: str, size: int, now_s: float) -> None:
        self.forget((key,))
        self._parts[key] = (size, now_s + STAGED_S)
        self._sum += size
        if len(self._parts) > UPLOADED_MAX:
            oldest, self._rest_until_s = self._parts.popitem(last=False)[1]
            self._sum -= oldest
            self._rest += oldest

    def forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._sum -= self._parts.pop(key, (0, 0.0))[0]


class Quotas:
    """What callers may use of one server. Thread-safe, but for `look`, which belongs to the event loop's thread."""

    def __init__(self, file: QuotaFile | None, clock: Clock, tally: Tally) -> None:
        self._file = file
        self._clock = clock
        self._tally = tally
        self._lock = threading.Lock()
        self._rules = Rules() if file is None else file.rules
        self._tokens: OrderedDict[str, Owner] = OrderedDict()
        self._prefixes: dict[str, Owner] = {}
        self._uploaded: OrderedDict[str, bool] = OrderedDict()  # by the part's key: whether prefixes counted it, too
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

    @property
    def told(self) -> Mapping[str, int]:
        """How many tokens and prefixes the file names, for the audit."""
        return {"tokens": len(self._rules.tokens), "prefixes": len(self._rules.prefixes)}

    def owners(self, principal: Principal, shard: str | None) -> list[Owner]:
        """Those by whose quotas a request goes. Most often there is none, and then this costs next to nothing."""
        if self._file is None or principal is MAINTENANCE:
            return []
        found = []
        if principal is not ANYBODY:
            owner = self._tokens.get(principal.name)
            if owner is None or owner.given != principal.prefixes:
                owner = self._owner(principal)
            if owner.most:
                found.append(owner)
        # Whoever is not let in to a shard uses nothing of its prefixes.
        if (prefixes := self._prefixes) and shard is not None and not is_reserved(shard) and principal.sees(shard):
            found += [prefixes[prefix] for prefix in within(shard, prefixes.keys())]
        return found

    def request(self, principal: Principal, shard: str | None, *, writes: bool = False) -> None:
        """Count a request. `writes`: it will write rows, so that it is not even read where none are left.

        Raises QuotaFull.
        """
        counts = _WRITE if writes else _REQUEST
        self._take([(owner, counts) for owner in self.owners(principal, shard)])  # a request stays one

    def rates(self, owners: Iterable[Owner], **counts: int) -> None:
        """Count so much by each rate, of all owners or of none. Raises QuotaFull."""
        self.rates_of([(owner, counts) for owner in owners])

    def rates_of(self, wanted: Iterable[tuple[Owner, Mapping[str, int]]]) -> None:
        """Count what is said of each owner, of all or of none. Raises QuotaFull."""
        taken = self._take(wanted)
        if any(count for _, _, count in taken):
            self._charged(lambda: self._give_back(taken))

    def _take(self, wanted: Iterable[tuple[Owner, Mapping[str, int]]]) -> list[tuple[Owner, str, int]]:
        rated = [(owner, quota, counts[quota]) for owner, counts in wanted for quota in counts if quota in owner.most]
        if not rated:
            return []
        with self._lock:
            now_s = self._clock.monotonic()
            for owner, quota, _ in rated:
                if (wait_s := owner.wait_s(quota, now_s)) > 0:
                    raise self._full(owner, quota, owner.used(quota, now_s, self._tally), wait_s)
            for owner, quota, count in rated:
                owner.take(quota, count)
        return rated

    def _give_back(self, taken: Iterable[tuple[Owner, str, int]]) -> None:
        with self._lock:
            for owner, quota, count in taken:
                owner.take(quota, -count)

    @staticmethod
    def _charged(give_back: Callable[[], None]) -> None:
        charged = CHARGED.get()
        if charged is not None:
            charged.append(give_back)

    def adds(
        self,
        owners: Iterable[Owner],
        shard: str,
        quota: str,
        count: int = 1,
        *,
        frees: bool = False,
        staged: Sequence[str] = (),
    ) -> Callable[[], None]:
        """Count what is to be added to a shard, of all owners or of none; what gives it back. Raises QuotaFull.

        `frees`: it takes rows away, for which there is some room beyond the quota. `staged`: the keys of parts that it
        commits, which may be counted already.
        """
        counted = [owner for owner in owners if quota in owner.most and not (owner.is_token and quota in OF_OWN)]
        if is_reserved(shard) or not counted:
            return _nothing
        beyond: list[Owner] = []
        with self._lock:
            now_s = self._clock.monotonic()
            for owner in counted:
                used = owner.used(quota, now_s, self._tally) - owner.staged.of(staged)
                if quota == "bytes" and used <= owner.most[quota]:
                    owner.has_room()
                if used + count > owner.most[quota]:
                    if not frees or not owner.may_free(used, count):
                        raise self._full(owner, quota, used, RETRY_AFTER_S)
                    beyond.append(owner)
            for owner in beyond:
                owner.free(count)
            turn = self._tally.admit(shard, quota, count)

        def give_back() -> None:
            self._tally.take_back(shard, quota, count, turn)
            with self._lock:
                for owner in beyond:
                    owner.free(-count)

        once = _once(give_back)
        self._charged(once)
        return once

    def has_room(self, principal: Principal, shard: str, size: int = 1) -> None:
        """Raises QuotaFull where no such bytes are left. Where nobody knows yet how long it is, it is counted later."""
        self.adds(self.owners(principal, shard), shard, "bytes", size)

    def bound_bytes(self, principal: Principal, shard: str) -> bool:
        """Whether some quota is of the bytes that a shard holds."""
        return any("bytes" in owner.most for owner in self.owners(principal, shard))

    def creates(self, principal: Principal, shard: str) -> None:
        """Count a shard that is to be made, unless it is there. Raises QuotaFull."""
        owners = [owner for owner in self.owners(principal, shard) if "shards" in owner.most]
        if owners and not self._tally.has(shard):
            self.adds(owners, shard, "shards")

    def registers(self, owners: Iterable[Owner], quota: str, key: str, lease_s: float) -> None:
        """Count a lease, or a writer, of the token that registers it. Raises QuotaFull."""
        for owner in owners:
            if not owner.is_token or quota not in owner.most:
                continue
            with self._lock:
                held, now_s = owner.held[quota], self._clock.monotonic()
                most = min(owner.most[quota], HELD_MAX)
                is_new = key not in held
                if is_new and len(held) >= most and (used := owner.used(quota, now_s, self._tally)) >= most:
                    raise self._full(owner, quota, used, RETRY_AFTER_S)
                held.take(key, lease_s, now_s)
            if is_new:
                self._charged(lambda: self.gives_back(owners, quota, key))
            return

    def renews(self, owners: Iterable[Owner], quota: str, key: str) -> None:
        """What was registered lapses later."""
        for owner in owners:
            if owner.is_token and quota in owner.most:
                with self._lock:
                    owner.held[quota].renew(key, self._clock.monotonic())

    def gives_back(self, owners: Iterable[Owner], quota: str, key: str) -> None:
        """It was given up, or was not registered after all."""
        for owner in owners:
            if owner.is_token:
                with self._lock:
                    owner.held[quota].give_back(key)

    def writes(self, owners: Sequence[Owner], shard: str, rows: int, size: int) -> None:
        """Count rows that are written. Raises QuotaFull."""
        if owners:
            self.rates(owners, rows_per_s=rows, bytes_per_s=size)
            self.adds(owners, shard, "bytes", size)

    def uploads(self, principal: Principal, shard: str | None, key: str, size: int) -> None:
        """Count a part that goes through this server: its commit does not count it again. Raises QuotaFull.

        Until it is committed it counts as bytes that are there, unless it is of a merge, which makes room. `shard`: its
        name, where it is known.
        """
        owners = self.owners(principal, shard)
        if not owners:
            return
        merges = MAINTAIN in principal.scopes and is_of_maintenance(key)
        stored = [owner for owner in owners if "bytes" in owner.most and not merges]
        with self._lock:
            now_s = self._clock.monotonic()
            for owner in stored:
                used = owner.used("bytes", now_s, self._tally) - owner.staged.of((key,))
                if used + size > owner.most["bytes"]:
                    raise self._full(owner, "bytes", used, RETRY_AFTER_S)
            new = [owner for owner in stored if key not in owner.staged]
            for owner in stored:
                owner.staged.add(key, size, now_s)
        if new:
            self._charged(lambda: self.committed(new, (key,)))  # it did not get there
        if any("bytes_per_s" in owner.most for owner in owners):
            self.rates(owners, bytes_per_s=size)
            with self._lock:
                self._uploaded[key] = shard is not None
                if len(self._uploaded) > UPLOADED_MAX:
                    self._uploaded.popitem(last=False)

    def committed(self, owners: Iterable[Owner], keys: Sequence[str]) -> None:
        """These parts are what shards hold: they count there."""
        for owner in owners:
            with self._lock:
                owner.staged.forget(keys)

    def was_counted(self, key: str, owner: Owner) -> bool:
        """Whether the bytes of a part were counted as it came through this server."""
        found = self._uploaded.get(key)
        return found is not None and (owner.is_token or found)

    def families(self, principal: Principal) -> Iterator[Family]:
        """What is used, and the most, of the tokens and prefixes of which the caller may know."""
        with self._lock:
            tokens = [o for o in self._tokens.values() if principal.is_unlimited or o.name == principal.name]
            prefixes = [o for o in self._prefixes.values() if _knows(principal, o.name)]
            now_s = self._clock.monotonic()
            used: list[Labelled] = []
            most: list[Labelled] = []
            for kind, owners in (("token", tokens), ("prefix", prefixes)):
                for owner in [owner for owner in owners if owner.most][:SHOWN_MAX]:
                    for quota, allowed in owner.most.items():
                        labels = (kind, owner.name, quota)
                        used.append((labels, owner.used(quota, now_s, self._tally)))
                        most.append((labels, allowed))
        names = ("kind", "of", "quota")
        yield Family("persist_quota_used", GAUGE, "What is used of a quota, as far as it is known here", names, used)
        yield Family("persist_quota_most", GAUGE, "What a quota allows", names, most)
        yield one("persist_quota_refusals_total", COUNTER, "Requests refused by a quota", self._refused)
        unreadable = float(self._file is not None and bool(self._file.unreadable))
        yield one("persist_quota_file_unreadable", GAUGE, "Whether older quotas hold, as the file is bad", unreadable)

    def _owner(self, principal: Principal) -> Owner:
        with self._lock:
            most, now_s = self._rules.of_token(principal.name), self._clock.monotonic()
            owner = Owner(principal.name, principal.prefixes, most, now_s, is_token=True)
            if (known := self._tokens.get(principal.name)) is not None:
                owner.held, owner.staged = known.held, known.staged
            self._tokens[principal.name] = owner
            if len(self._tokens) > OWNERS_MAX:
                self._tokens.popitem(last=False)
            self._watch()
        return owner

    def _apply(self) -> None:
        """Have the rules hold."""
        now_s = self._clock.monotonic()
        for owner in self._tokens.values():
            owner.change(self._rules.of_token(owner.name), now_s)
        before, prefixes = self._prefixes, {}
        for prefix in self._rules.prefixes:
            most = self._rules.of_prefix(prefix)
            if (known := before.get(prefix)) is not None:
                known.change(most, now_s)
            prefixes[prefix] = known or Owner(prefix, (prefix,), most, now_s, is_token=False)
        self._prefixes = prefixes
        self._watch()

    def _watch(self) -> None:
        """Have the tally count what some quota is of."""
        wanted: set[str] = set()
        for owner in (*self._tokens.values(), *self._prefixes.values()):
            own = OF_OWN if owner.is_token else ()
            if any(quota not in RATES and quota not in own for quota in owner.most):
                wanted.update(owner.prefixes)
        self._tally.watch(wanted)

    def _full(self, owner: Owner, quota: str, used: float, retry_after_s: float) -> QuotaFull:
        self._refused += 1
        most, shown = owner.most[quota], f"{used:.0f}"
        if quota in RATES:
            what = f"{most} {quota.removesuffix('_per_s')} a second are allowed"
            remedy = "slow down"
        else:
            what, remedy = f"{shown} {quota} are there, {most} are allowed", _GIVEN_UP_BY[quota]
        return QuotaFull(
            f"{owner.label} has no {quota} left: {what}; {remedy}, or ask {self._rules.ask} for more",
            quota=quota,
            used=round(used),
            most=most,
            of=owner.name,
            retry_after_s=retry_after_s,
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
