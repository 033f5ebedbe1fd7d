"""The client's transport over HTTP: commands, views, and routing to regions."""

from __future__ import annotations

import json
import weakref
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from msgspec import Struct

from blob import Blob
from blob.metrics import MeteredBlob
from persist.client import deadlines
from persist.client.client import Connection
from persist.client.deadlines import Deadline, Patience
from persist.client.idempotency import RetriedCall, call_with_retries
from persist.client.lease_pool import LeasePool
from persist.commit.clocks_and_ids import Clock, SystemClock, SystemIds
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller, EntryPlace, HistoryPage
from persist.core.batch import Run
from persist.core.errors import Corruption, InvalidUsage, Unavailable, UnknownShard, UpgradeNeeded
from persist.core.ids import IdSource, ShardId, check_shard_name
from persist.core.shard_settings import ShardSettings, history_text
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.state import Policy, SchemaRecord
from persist.formats import http_messages
from persist.formats.exposition import COUNTER, Family, Labelled
from persist.formats.http_messages import PROTOCOL_VERSION, RECORD, StagedRuns, decode_view
from persist.formats.records import encoded
from persist.http_client.http_calls import Call, HttpCalls, calls_of, decoded_json
from persist.http_client.http_connection import Reply
from persist.regions.region_index import region_of
from persist.regions.replica import CopyBlob, Home
from persist.telemetry.metrics import StoreCalls, Storms, retried, stores
from rpc.client.http_stores import HttpBlob, opened_here
from rpc.listen_frames import caller_headers

# Routing for shards of another region: reads go to nearby servers, writes to its home. `persist.client.client`, which
# is a lower layer, looks this up beside `open_transport`.

_REGIONS = Call("GET", "/v1/regions")


def routed(connection: Connection, name: str, *, writes: bool) -> Connection:
    """The connection for reads or writes (`writes`) of this shard; the same one if the shard is at home there.

    A server whose index has a later epoch of its region is no longer home, and only reads what it had.

    Raises InvalidUsage if the index lacks the region, or names no server for the purpose, and Unavailable.
    """
    region = region_of(name)
    if not region:
        return connection
    document = _regions_of(connection)
    index = document.get("index")
    if not index or (document.get("region") == region and _is_home(document, index.get(region))):
        return connection
    if region not in index:
        raise InvalidUsage(
            f"{connection.url} knows no region {region!r}, of shard {name!r}; its index has {', '.join(sorted(index))}"
        )
    if not writes and document.get("of") == region:
        return connection
    urls = index[region]["write" if writes else "read"]
    if document.get("region") == region and not writes:
        # A former home only has what it had: another nearby server reads, else the current home.
        urls = [url for url in urls if url not in (connection.url or "").split(",")] or index[region]["write"]
    if not urls:
        purpose = "home servers of" if writes else "nearby server that reads"
        raise InvalidUsage(f"the index of {connection.url} names no {purpose} region {region!r}; see `persist region`")
    return replace(connection, url=",".join(urls))


def _is_home(document: dict[str, Any], entry: dict[str, Any] | None) -> bool:
    """Whether this server of the region is its home: by its index, no other one has a later epoch."""
    later = (entry or {}).get("epoch") or 0
    return document.get("role") != "copy" and later <= document.get("epoch", later)


def _regions_of(connection: Connection) -> dict[str, Any]:
    """The document of /v1/regions; empty for an older server."""
    calls = calls_of(connection, SystemClock())
    try:
        return decoded_json(calls.call(_REGIONS), dict[str, Any])
    except (InvalidUsage, UnknownShard):
        return {}
    finally:
        calls.close()


# `open_transport` for `http(s)://` URLs.

_VIEW = {"accept": RECORD}
_CREATE = {"content-type": "application/json", **_VIEW}
_LOCATION = Call("GET", "/v1/location")
_COMMAND = {"content-type": RECORD}
MAINTAINED_S = 3600.0  # for one request of maintenance, which may be a large merge


class _Names(Struct):
    shards: list[str]


class _Version(Struct):
    version: int


class _BlobAt(Struct):
    url: str
    proof: str


class _Location(Struct):
    blob: _BlobAt
    policy: dict[str, int]
    id: str = ""
    epoch: int = 0
    copy: bool = False
    of: str = ""
    home: tuple[str, ...] = ()
    regions: bool = False


class HttpTransport:
    """Implements `persist.client.transport.Transport` over one or more servers. Thread-safe; open one per process."""

    def __init__(
        self, calls: HttpCalls, blob: Blob, policy: Policy, clock: Clock, ids: IdSource, proof: str = ""
    ) -> None:
        self.shows_copy = False
        self.knows_regions = False
        self.proof = proof  # of the server's blob store; see `persist.client.transport`
        self._calls = calls
        self._store_calls = StoreCalls(calls.tracer)
        self._blob: Blob = MeteredBlob(blob, self._store_calls.observer("blob"))
        self.leases: LeasePool | None = None
        self._patience = Patience()
        self.policy = policy
        self.clock = clock
        self.ids = ids

    def __repr__(self) -> str:
        return ", ".join(self.servers)

    @property
    def servers(self) -> tuple[str, ...]:
        """Base URLs of the known servers."""
        return self._calls.servers.urls

    @property
    def blob(self) -> Blob:
        return self._patience.blob(self._blob)

    @property
    def listening_moves_since(self) -> bool:
        """Whether there is a token. The server requires the scope `manage` for moving since."""
        return self._calls.has_token

    @property
    def storms(self) -> Storms:
        return self._calls.storms

    def families(self) -> Iterator[Family]:
        calls, labels = self._calls, ("method", "outcome")
        totals = calls.durations.totals()
        counts: list[Labelled] = [(key, count) for key, (count, _, _) in totals.items()]
        sent = sum(nbytes for _, _, nbytes in totals.values())
        moved: list[Labelled] = [(("out",), sent), (("in",), calls.received)]
        yield Family("persist_client_requests_total", COUNTER, "Requests to servers", labels, counts)
        yield calls.durations.family("persist_client_request_seconds", "Seconds to the answer", labels)
        yield Family("persist_client_bytes_total", COUNTER, "Bytes of bodies", ("direction",), moved)
        yield from retried(self.storms)
        yield from stores(self._store_calls)

    def belongs(self) -> tuple[str, int]:
        location = _location(self._calls.call(_LOCATION))
        if not location.epoch:
            raise UpgradeNeeded("the server does not identify its location, which cuts need: upgrade the server")
        return location.id, location.epoch

    def create(
        self, name: str, schema: SchemaRecord, follows: str | None = None, settings: ShardSettings | None = None
    ) -> ShardView:
        body: dict[str, object] = {"schema": b64encode(schema.arrow).decode(), "key": list(schema.key)}
        if settings is not None:
            body["history"] = history_text(settings.history_ms)
        query = "" if follows is None else f"?follows={_quoted(follows)}"
        return self._create("PUT", _path(name, query), name, body, RetriedCall(f"the creation of shard {name!r}", name))

    def clone(self, source: str, name: str, keep_policies: bool = False) -> ShardView:
        body = {"source": check_shard_name(source), "name": check_shard_name(name), "keep_policies": keep_policies}
        return self._create("POST", "/v1/clones", name, body, RetriedCall(f"the clone {name!r}", name))

    def _create(self, method: str, path: str, name: str, body: dict[str, object], what: RetriedCall) -> ShardView:
        """Create a shard by a call that may be repeated."""
        call = Call(method, path, name, json.dumps(body).encode(), _CREATE, safe=False)
        remedy = "check whether the shard exists"
        reply = call_with_retries(lambda: self._calls.call(call), what, self, self._calls.timeout_s, remedy=remedy)
        return decode_view(reply.data)

    def names(self, prefix: str, after: str, limit: int) -> list[str]:
        path = f"/v1/shards?prefix={_quoted(prefix)}&after={_quoted(after)}&limit={limit}"
        return decoded_json(self._calls.call(Call("GET", path)), _Names).shards

    def vouched(self, shard: ShardId, runs: tuple[Run, ...]) -> tuple[Run, ...]:
        return runs

    def receipted(self, name: str, runs: tuple[Run, ...]) -> tuple[Run, ...]:
        reply = self._call("POST", name, "/receipts", body=encoded(StagedRuns(runs)), headers=_COMMAND)
        return http_messages.decode_staged(reply.data, Corruption)

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        headers = _COMMAND if caller == NOBODY else {**_COMMAND, **caller_headers(caller)}
        reply = self._call("POST", name, "/commands", body=encoded(command), headers=headers, safe=False)
        return http_messages.decode_result(reply.data)

    def history(self, name: str, before: EntryPlace | None, limit: int, maintenance: bool) -> HistoryPage:
        query = f"limit={limit}&maintenance={str(maintenance).lower()}"
        if before is not None:
            query += f"&before={before.seqno}.{before.number}"
        return http_messages.decode_history(self._call("GET", name, f"/history?{query}", headers=_VIEW).data)

    def view(self, name: str, request: ViewRequest) -> ShardView:
        wait_s = deadlines.at_most(request.timeout_s)
        query: dict[str, Any] = {
            "timeout": f"{wait_s:.3f}",
            "min_seqno": int(request.min_seqno),
            "lower": "[]" if request.lower.element is None else request.lower.element,
            "past": request.past,
            "service_times": "true" if request.with_service_times else None,
            "reader": request.reader,
            "tag": request.tag or None,
            "details": "true" if request.with_details else None,
            "batches": str(request.with_batches).lower(),
        }
        parameters = urlencode({key: value for key, value in query.items() if value is not None})
        headers = _VIEW
        if request.seen is not None:
            headers = {**_VIEW, "persist-seen": f"{int(request.seen.seqno)}.{request.seen.commit_id}"}
        return decode_view(self._call("GET", name, f"?{parameters}", headers=headers, wait_s=wait_s).data)

    def erased_before(self, name: str, before: int) -> dict[str, Any]:
        return decoded_json(self._call("GET", name, f"/erasures?before={before}"), dict[str, Any])

    def maintain(self, name: str, verb: str) -> dict[str, Any]:
        return decoded_json(self._call("POST", name, f"/{verb}", wait_s=MAINTAINED_S), dict[str, Any])

    def _call(self, method: str, name: str, rest: str, **more: Any) -> Reply:
        """A call for a shard; `rest` is the part of the path after its name, `more` are fields of the call."""
        return self._calls.call(Call(method, _path(name, rest), name, **more))

    def close(self) -> None:
        if self.leases is not None:
            self.leases.close()
        self._blob.close()
        self._calls.close()


def open_transport(connection: Connection) -> HttpTransport:
    """Connect to the servers of `connection.url`. Raises InvalidUsage, Unavailable if none of them answers."""
    assert connection.url is not None
    clock, ids = SystemClock(), SystemIds()
    calls = calls_of(connection, clock)
    try:
        location = _location(calls.call(_LOCATION))
        proof = location.blob.proof
        patience_s = min(connection.connect_s, connection.timeout_s or connection.connect_s)
        with deadlines.within(Deadline(deadlines.at_most(patience_s), clock)):
            blob = _open_blob(calls, location.blob.url, proof)
    except BaseException:
        calls.close()
        raise
    if location.copy:  # this client may have opened the store itself, and must not write to it
        blob = CopyBlob(blob, Home(location.of, location.home))
    policy = Policy(**{name: limit for name, limit in location.policy.items() if name in Policy.__struct_fields__})
    transport = HttpTransport(calls, blob, policy, clock, ids, proof)
    transport.shows_copy, transport.knows_regions = location.copy, location.regions
    transport.leases = None if location.copy else LeasePool(clock)
    # Spark's processes cache the last few transports, and close none that they evict.
    weakref.finalize(transport, calls.close).atexit = False
    return transport


def _location(reply: Reply) -> _Location:
    try:
        version = decoded_json(reply, _Version).version
        if version == PROTOCOL_VERSION:
            return decoded_json(reply, _Location)
    except Corruption as error:
        raise InvalidUsage("this is not a persist server: its /v1/location cannot be read") from error
    raise UpgradeNeeded(f"the server speaks version {version!r}, this client {PROTOCOL_VERSION}")


def _open_blob(calls: HttpCalls, url: str, proof: str) -> Blob:
    """The server's blob store itself if this client can and may open it, else the server's routes for blobs."""
    try:
        is_signed = urlsplit(url).scheme == "s3"
    except ValueError as error:
        raise InvalidUsage("this is not a persist server: the URL of its blob store is invalid") from error
    try:
        blob = Patience().ask("the store that the server names", lambda: opened_here(url, proof))
    except Unavailable:  # the store hangs: use the server instead
        blob = None
    return HttpBlob(calls, url, presigned=is_signed) if blob is None else blob


def _path(name: str, rest: str) -> str:
    return f"/v1/shards/{_quoted(check_shard_name(name))}{rest}"


def _quoted(text: str) -> str:
    return quote(text, safe="")
