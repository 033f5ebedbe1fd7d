"""The embedded transport: machines in this process, directly on the stores; and the metrics of a location."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from blob import Blob
from persist.client import deadlines, transport
from persist.client.arguments import check_int
from persist.client.deadlines import Patience
from persist.client.erasure_api import wait_json
from persist.client.lease_pool import LeasePool
from persist.client.timestamps import instant_text
from persist.commit.clocks_and_ids import ThreadBackground
from persist.commit.committer import Machine
from persist.commit.location import MACHINES_MAX, Location
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller, EntryPlace, HistoryPage
from persist.core.batch import Run
from persist.core.erasure_progress import gone_at, is_rewritten, states_held, waits
from persist.core.errors import InvalidUsage, ShardExists, UnknownShard
from persist.core.frontier import TIME_MAX, Antichain
from persist.core.ids import ShardId, check_shard_name
from persist.core.readable_times import held_since
from persist.core.record import replace
from persist.core.shard_settings import ShardSettings
from persist.core.shard_view import ShardView, ViewRequest, view_of
from persist.core.state import SchemaRecord, State, initial_state
from persist.formats.exposition import COUNTER, GAUGE, Family, Labelled, single_series
from persist.formats.http_messages import validate_caller, validate_command
from persist.maintenance.clones_and_loans import Cloning
from persist.maintenance.erasure_scan import scan_shard
from persist.parts import current_schema
from persist.parts.schema_changes import check_new
from persist.parts.schema_evolution import check_first
from persist.telemetry.metrics import Storms, pools, retried, stores

OPTIMIZE, VACUUM = VERBS = ("optimize", "vacuum")
Maintain = Callable[[Location, str, str], dict[str, Any]]
"""Does one step of a verb on a shard of a location, as JSON; `more` says whether to call it again. It is injected,
since the packages that merge and collect depend on this one. Raises InvalidUsage, UnknownShard, Unavailable."""


def erased_before(location: Location, name: str, before: int) -> dict[str, Any]:
    """The answer of `persist erase status NAME --before T`: what holds such rows, or the receipt if nothing does.

    Args:
        before: the scan covers rows retracted before this time, and rows that truncations before it removed.
    Changes nothing; repeating it is safe. Raises InvalidUsage (the time is not complete), UnknownShard, Unavailable.
    """
    check_int("before", before, 0, TIME_MAX)
    machine = location.machine(check_shard_name(name))
    state = machine.refresh()
    at = gone_at(state, before)
    if not state.tombstone and state.upper.less_equal(at):
        raise InvalidUsage(f"a time before {before} of shard {name!r} is not complete: its upper is {state.upper}")
    scan = scan_shard(location, machine, at)
    state = machine.refresh()
    is_done = is_rewritten(state, at)
    held = states_held(state, int(state.seqno)) if is_done else waits(state, at)
    return {
        "shard": name,
        "before": before,
        "at": at,
        "phase": "erased" if scan.is_clean else "rewritten" if is_done else "retracted",
        "waits": [] if scan.is_clean else [wait_json(wait) for wait in held],
        "blobs_to_delete": {"count": scan.older_count, "bytes": scan.older_size, "keys": list(scan.older)},
        "unnamed_blobs": {"count": scan.unnamed_count, "keys": list(scan.unnamed)},
        "scanned_at": instant_text(scan.at_ms),
        "log_begins": scan.horizon,
        "scanned": {"log_entries": scan.entries, "blobs": scan.blobs, "bytes": scan.size},
    }


class EmbeddedTransport:
    """Implements `persist.client.transport.Transport` over a Location, which it closes when it is closed.

    `maintain` merges and collects a shard on request; None: this process does not.
    """

    listening_moves_since = True
    knows_regions = False

    def __init__(self, location: Location, maintain: Maintain | None = None) -> None:
        self.location = location
        self._maintain = maintain
        self.leases: LeasePool | None = None
        self._patience = Patience()
        self.clock = location.clock
        self.ids = location.ids
        self.policy = location.settings.policy

    def __repr__(self) -> str:
        return f"{self.location.blob.url} and {self.location.consensus.url}"

    @property
    def blob(self) -> Blob:
        return self._patience.blob(self.location.blob)

    @property
    def proof(self) -> str:
        return transport.ensure(self.location.blob, self.ids)

    @property
    def shows_copy(self) -> bool:
        return self.location.is_copy

    @property
    def storms(self) -> Storms:
        return self.location.sight.storms

    def families(self) -> Iterator[Family]:
        yield from location_families(self.location)
        yield from pools(location_pools(self.location))

    def belongs(self) -> tuple[str, int]:
        binding = self._patience.ask("the location", self.location.identity.check)
        return binding.location_id, binding.epoch

    def create(
        self,
        name: str,
        schema: SchemaRecord,
        follows: str | None = None,
        settings: ShardSettings | None = None,
        caller: Caller = NOBODY,
    ) -> ShardView:
        check_shard_name(name)
        new_settings = self.location.settings_of_new(name) if settings is None else settings
        first = validate_command(c.Recreate(schema, new_settings))
        self._check_schema(name, first.schema)
        fresh = initial_state(name, first.schema, self.clock.now_ms(), first.settings, validate_caller(caller))
        state = self._patience.ask(
            f"the creation of shard {name!r}", lambda: self.location.machine(name).create(fresh, follows), safe=False
        )
        known = (state.schemas[state.schema_id], state.schemas[current_schema(state.schemas)[0]])
        if not state.is_closed and schema not in known:
            raise ShardExists(f"shard {name!r} exists with another schema; open it, or evolve its schema")
        return view_of(state, ViewRequest(with_batches=False))

    def _check_schema(self, name: str, schema: SchemaRecord) -> None:
        """Raise InvalidUsage unless a new shard may have this schema. An existing one may have what is refused now."""
        first = check_first(schema)
        try:
            check_new(first)
        except InvalidUsage:
            try:
                state = self._patience.ask(_about(name), self.location.machine(name).state)
            except UnknownShard:
                state = None
            if state is None or schema not in state.schemas.values():
                raise

    def clone(self, source: str, name: str, keep_policies: bool = False, caller: Caller = NOBODY) -> ShardView:
        state = self._patience.ask(
            f"the clone {name!r}", lambda: Cloning(self.location).clone(source, name, keep_policies, caller), safe=False
        )
        return view_of(state, ViewRequest(with_batches=False))

    def names(self, prefix: str, after: str, limit: int) -> list[str]:
        return self._patience.ask("the list of shards", lambda: self.location.names(prefix, after, limit))

    def vouched(self, shard: ShardId, runs: tuple[Run, ...]) -> tuple[Run, ...]:
        return self.location.versions.receipts.sign(shard, runs)

    def receipted(self, name: str, runs: tuple[Run, ...]) -> tuple[Run, ...]:
        return self._patience.ask(_about(name), lambda: self.location.machine(name).receipted(runs))

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY, by_names: bool = False) -> c.Result:
        """`by_names`: SchemaMismatch if the rows of the command were not read by the current columns."""
        check_shard_name(name)
        ask = self._patience.ask
        return ask(_about(name), lambda: self.location.machine(name).apply(command, caller, by_names), safe=False)

    def history(self, name: str, before: EntryPlace | None, limit: int, maintenance: bool) -> HistoryPage:
        check_shard_name(name)
        return self._patience.ask(_about(name), lambda: self.location.history_page(name, before, limit, maintenance))

    def view(self, name: str, request: ViewRequest) -> ShardView:
        bounded = replace(request, timeout_s=deadlines.at_most(request.timeout_s))

        def ask() -> ShardView:
            state = view_state(self.location, name, bounded)
            self.location.machine(name).check_seen(state, bounded.seen)
            return view_of(state, bounded)

        return self._patience.ask(_about(check_shard_name(name)), ask)

    def erased_before(self, name: str, before: int) -> dict[str, Any]:
        return self._patience.ask(_about(name), lambda: erased_before(self.location, name, before))

    def maintain(self, name: str, verb: str) -> dict[str, Any]:
        maintain = self._maintain
        if maintain is None:
            self.location.identity.check_writable()  # a copy names its home in the error
            raise InvalidUsage(f"this process does not {verb} shards; a client of `persist.connect` or a server does")
        return self._patience.ask(_about(name), lambda: maintain(self.location, name, verb))

    def close(self) -> None:
        if self.leases is not None:
            self.leases.close()
        self.location.close()


def _about(name: str) -> str:
    return f"a call of shard {name!r}"


def view_state(location: Location, name: str, request: ViewRequest) -> State:
    """The State for a view request."""
    machine = location.machine(check_shard_name(name))
    location.identity.refuse_copy()

    def ready(state: State) -> bool:
        return request.past is None or not state.upper.less_equal(request.past)

    if request.min_seqno > 0:
        cached = machine.state()
        if cached.seqno >= request.min_seqno and ready(cached):
            return cached
    return machine.wait_for(ready, request.timeout_s, location.poll_s)


# The metrics of a location and of its shards, as a server, a worker and an embedded program export them.

COUNTED = {
    "commits": "Commits that won their compare-and-set",
    "commands": "Commands in these commits",
    "races_lost": "Compare-and-sets lost to another server",
    "retries": "Compare-and-sets repeated because the store gave no definite answer",
    "spills": "Commits whose inline rows went to one blob: they were many, or the State had no room for them",
    "flushes": "Small batches merged in the background, inline rows among them",
    "upkeep_bytes": "Bytes that small merges wrote",
    "upkeep_failed": "Rollups, flushes and small merges that could not be written",
    "upkeep_refused": "Small merges refused, because another had merged an input meanwhile",
}
OF_SHARDS = {
    "commits": "Commits of the shard that won their compare-and-set",
    "commands": "Commands in these commits",
    "races_lost": "Compare-and-sets of the shard lost to another server",
    "retries": "Compare-and-sets of the shard repeated for want of a definite answer",
    "queued_s": "Seconds that commands of the shard waited for their commit to begin",
    "commit_s": "Seconds that commits of the shard took",
    "upkeep_s": "Seconds that the upkeep of the shard took",
}
STATES: dict[str, tuple[str, Callable[[State], float]]] = {
    "upper": ("First time that is not complete (-1: closed)", lambda s: _time(s.upper)),
    "since": ("Earliest readable time (-1: closed)", lambda s: _time(s.since)),
    "batches": ("Batches", lambda s: len(s.trace.batches)),
    "rows": ("Updates in all batches", lambda s: sum(b.rows for b in s.trace.batches)),
    "bytes": ("Encoded bytes of all batches", lambda s: sum(b.size for b in s.trace.batches)),
    "inline_bytes": ("Bytes of rows inside the State", lambda s: sum(b.inline_size for b in s.trace.batches)),
    "readers": ("Leased readers", lambda s: len(s.leased_readers)),
    "writers": ("Registered writers", lambda s: len(s.writers)),
    "held_versions": ("Versions of the State that readers still hold", lambda s: s.seqno - s.seqno_since),
    "held_since": (
        "Earliest time that the history setting or a reader holds; since where nothing does (-1: closed)",
        lambda s: _time(held_since(s)),
    ),
}


def location_families(location: Location) -> Iterator[Family]:
    """Calls to the stores, commits, upkeep, caches and pools, of all shards together."""
    yield from stores(location.store_calls)
    counted = location.counted()
    for name, text in COUNTED.items():
        yield single_series(f"persist_{name}_total", COUNTER, text, getattr(counted, name))
    yield single_series("persist_group_commands_max", GAUGE, "Most commands in one commit", counted.group_max)
    sight = location.sight
    yield sight.commits.family("persist_commit_seconds", "Seconds that commits of a group took", ("outcome",))
    yield sight.queues.family("persist_queue_seconds", "Seconds that commands waited for their commit to begin", ())
    yield sight.upkeep.family("persist_upkeep_seconds", "Seconds that duties of upkeep took", ("kind",))
    yield from retried(sight.storms)
    yield single_series("persist_machines", GAUGE, "Shards with a cached State", len(location.machines()))
    yield from _caches(location)
    if isinstance(location.background, ThreadBackground):
        dropped = location.background.dropped
        yield single_series("persist_background_dropped_total", COUNTER, "Upkeep dropped as too much waited", dropped)


def location_pools(location: Location) -> dict[str, tuple[int, int]]:
    """The pools of a location: how much is in use, and the size."""
    sizes = {"machines": (len(location.machines()), MACHINES_MAX)}
    if isinstance(location.background, ThreadBackground):
        sizes["background"] = (location.background.taken, location.background.queue_max)
    return sizes


def shard_families(location: Location, machines: Sequence[Machine]) -> Iterator[Family]:
    """The metrics of these shards, whose number the caller bounds: of their States, and of the work done here."""
    states = [(machine.name, state) for machine in machines if (state := machine.cached) is not None]
    now_ms = location.clock.now_ms()
    for name, (text, value) in STATES.items():
        samples: list[Labelled] = [((shard,), value(state)) for shard, state in states]
        yield Family(f"persist_shard_{name}", GAUGE, text, ("shard",), samples)
    lags: list[Labelled] = [((shard,), max(0.0, (now_ms - state.walltime_ms) / 1000)) for shard, state in states]
    yield Family("persist_shard_lag_seconds", GAUGE, "Seconds since the last commit", ("shard",), lags)
    queued: list[Labelled] = [((machine.name,), machine.queued) for machine in machines]
    yield Family("persist_shard_commands_queued", GAUGE, "Commands waiting or being committed", ("shard",), queued)
    for name, text in OF_SHARDS.items():
        counts: list[Labelled] = [((machine.name,), getattr(machine.metrics, name)) for machine in machines]
        unit = f"{name[:-2]}_seconds" if name.endswith("_s") else name
        yield Family(f"persist_shard_{unit}_total", COUNTER, text, ("shard",), counts)


def newest(machines: Sequence[Machine], most: int) -> list[Machine]:
    """The `most` that were used last, of machines in the order of their use.

    Shards that do not exist do not count: clients may ask for any name.
    """
    existing = [machine for machine in machines if machine.cached is not None and not machine.cached.is_closed]
    return existing[-most:] if most > 0 else []


def _caches(location: Location) -> Iterator[Family]:
    nodes = location.nodes
    counts: dict[str, tuple[int, ...]] = {"nodes": (nodes.hits, nodes.reads, nodes.bytes_held, nodes.bytes_max)}
    if (blobs := location.blob_cache) is not None:
        counts["blobs"] = (blobs.hits, blobs.misses, blobs.cached_bytes, blobs.bytes_max)
    counts["states"] = (location.machines_found, location.machines_made)
    families = (
        ("hits_total", COUNTER, "Reads that a cache answered"),
        ("misses_total", COUNTER, "Reads that it did not"),
        ("bytes", GAUGE, "Bytes that a cache holds"),
        ("size_bytes", GAUGE, "Bytes that it may hold"),
    )
    for index, (name, kind, text) in enumerate(families):
        samples: list[Labelled] = [((cache,), of[index]) for cache, of in counts.items() if index < len(of)]
        yield Family(f"persist_cache_{name}", kind, text, ("cache",), samples)


def _time(frontier: Antichain) -> int:
    return -1 if frontier.element is None else frontier.element
