"""The metrics of /metrics: requests, tokens, and those of the location and its shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import persist
from persist.client.embedded import location_families, location_pools, newest, shard_families
from persist.commit.location import Location
from persist.formats.exposition import COUNTER, GAUGE, Family, Labelled, exposition, single_series
from persist.regions.replica import ReplicaLocation
from persist.telemetry.metrics import Durations, of_process, pools
from rpc.auth import ANONYMOUS, Principal, label_of

Pools = Callable[[], Mapping[str, tuple[int, int]]]  # by name: the current use, and the limit


COUNTED_TOKENS_MAX = 100  # with their own series; the rest share OTHER
OTHER = "_other"  # no token id has an underscore


class TokenFigures:
    """Counts of each token. All methods but `families` belong to the event loop's thread."""

    def __init__(self, tokens_max: int = COUNTED_TOKENS_MAX) -> None:
        self._most = tokens_max
        self._known: set[str] = set()
        self._requests: Counter[tuple[str, ...]] = Counter()
        self._bytes: Counter[tuple[str, ...]] = Counter()
        self._refused: Counter[tuple[str, ...]] = Counter()

    def observe(self, token: str, received: int, sent: int) -> None:
        """Count a request and the bytes of its body and of the response body."""
        token = self._named(token)
        self._requests[token,] += 1
        self._bytes[token, "in"] += received
        self._bytes[token, "out"] += sent

    def refused(self, token: str, kind: str) -> None:
        self._refused[self._named(token), kind] += 1

    def families(self, only: str | None) -> Iterator[Family]:
        """The metrics of all tokens, or of the token `only`."""
        for name, text, labels, counts in (
            ("requests", "Requests by token", ("token",), self._requests),
            ("bytes", "Bytes of bodies by token", ("token", "direction"), self._bytes),
            ("refusals", "Requests refused or failed by token", ("token", "kind"), self._refused),
        ):
            shown: list[Labelled] = [(key, n) for key, n in list(counts.items()) if only in (None, key[0])]
            yield Family(f"persist_token_{name}_total", COUNTER, text, labels, shown)

    def _named(self, token: str) -> str:
        if token not in self._known:
            if len(self._known) >= self._most:
                return OTHER
            self._known.add(token)
        return token


class ServerMetrics:
    """The counters of one server. `observe` is called once a request, on the event loop's thread."""

    def __init__(
        self,
        location: Location,
        pools: Pools,
        shards_max: int,
        others: Callable[[Principal], Iterator[Family]] = lambda _: iter(()),
    ) -> None:
        self.tokens = TokenFigures()
        self._location = location
        self._pools = pools
        self._shards_max = shards_max
        self._others = others
        self._seconds = Durations()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._errors: Counter[tuple[str, str]] = Counter()

    def observe(self, verb: str, status: int, seconds: float) -> None:
        """Count a request. `verb` comes from a fixed set, so that clients cannot create series."""
        self._requests[verb, status] += 1
        self._seconds.observe((verb,), seconds)

    def count_error(self, verb: str, kind: str, principal: Principal | None = None) -> None:
        self._errors[verb, kind] += 1
        self.tokens.refused(label_of(principal), kind)

    def text(self, principal: Principal = ANONYMOUS) -> bytes:
        """All metrics of the server, and those of the shards and tokens that the principal may see."""
        return exposition(self.families(principal))

    def families(self, principal: Principal = ANONYMOUS) -> Iterator[Family]:
        location = self._location
        requests: list[Labelled] = [((verb, str(status)), n) for (verb, status), n in list(self._requests.items())]
        yield Family("persist_requests_total", COUNTER, "Requests answered", ("verb", "status"), requests)
        errors: list[Labelled] = list(self._errors.items())
        yield Family("persist_errors_total", COUNTER, "Requests refused or failed", ("verb", "kind"), errors)
        yield self._seconds.family("persist_request_seconds", "Seconds to the answer", ("verb",))
        yield from self.tokens.families(None if principal.is_unlimited else principal.name)
        yield from self._others(principal)
        yield from location_families(location)
        yield from pools({**self._pools(), **location_pools(location)})
        yield from of_process(persist.__version__)
        machines = newest(
            [machine for machine in location.machines() if principal.sees(machine.name)], self._shards_max
        )
        yield from shard_families(location, machines)
        if isinstance(location, ReplicaLocation):
            yield from _of_replica(location)
            yield from _of_followed([machine.name for machine in machines], location)


def _of_followed(names: list[str], replica: ReplicaLocation) -> Iterator[Family]:
    """The replication state of each shard that is read here."""
    known = [(name, shard) for name in names if (shard := replica.follower.followed(name)) is not None]
    lag: list[Labelled] = [((name,), replica.behind_s(name) or 0.0) for name, _ in known]
    lacking: list[Labelled] = [((name,), len(shard.lacking)) for name, shard in known]
    version: list[Labelled] = [((name,), shard.seqno) for name, shard in known]
    missing = "Blobs that newer versions wait for, the first 20"
    yield Family("persist_region_lag_seconds", GAUGE, "Replication lag", ("shard",), lag)
    yield Family("persist_region_missing_blobs", GAUGE, missing, ("shard",), lacking)
    yield Family("persist_region_accepted_seqno", GAUGE, "The version that is served", ("shard",), version)


def _of_replica(replica: ReplicaLocation) -> Iterator[Family]:
    """The replication state of the location."""
    follower = replica.follower
    age_s = max(0.0, (replica.clock.now_ms() - follower.published_ms) / 1000)
    is_up = float(follower.failed is None)
    bad = follower.bad_blobs
    yield single_series(
        "persist_region_published_age_seconds", GAUGE, "Seconds since the last publication of the home", age_s
    )
    yield single_series("persist_region_link_up", GAUGE, "Whether the last read of the copy succeeded", is_up)
    yield single_series("persist_region_bad_blobs_total", COUNTER, "Blobs of publications that could not be read", bad)
