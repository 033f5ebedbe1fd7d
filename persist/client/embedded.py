"""The embedded transport: machines in this process, directly on the stores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from blob import Blob
from persist.client import deadlines, transport
from persist.client.arguments import check_int
from persist.client.deadlines import Patience
from persist.client.erasure_api import wait_json
from persist.client.lease_pool import LeasePool
from persist.client.location_metrics import location_families, location_pools
from persist.client.maintenance_api import Maintain
from persist.client.timestamps import instant_text
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller, EntryPlace, HistoryPage
from persist.core.batch import Run
from persist.core.erasure_progress import gone_at, is_rewritten, states_held, waits
from persist.core.errors import InvalidUsage, ShardExists, UnknownShard
from persist.core.frontier import TIME_MAX
from persist.core.ids import ShardId, check_shard_name
from persist.core.record import replace
from persist.core.shard_settings import ShardSettings
from persist.core.shard_view import ShardView, ViewRequest, view_of
from persist.core.state import SchemaRecord, State, initial_state
from persist.formats.exposition import Family
from persist.formats.http_messages import validate_caller, validate_command
from persist.maintenance.clones_and_loans import Cloning
from persist.maintenance.erasure_scan import scan_shard
from persist.parts import current_schema
from persist.parts.schema_changes import check_new
from persist.parts.schema_evolution import check_first
from persist.telemetry.metrics import Storms, pools


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
        raise InvalidUsage(f"time {at} of shard {name!r} is not complete: its upper is {state.upper}")
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
