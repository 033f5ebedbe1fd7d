"""The state of a shard handle: its transport, its settings, and the schema that it knows."""

from __future__ import annotations

import threading
from functools import partial
from typing import TypeVar

from persist.client.deadlines import Timeable
from persist.client.idempotency import RetriedCall, call_with_retries, send, send_for
from persist.client.read_leases import HandleSettings
from persist.client.transport import OneShard, Transport
from persist.core import commands as c
from persist.core.shard_view import ShardDetails, ShardView, ViewRequest
from persist.parts import ShardSchema, current_schema, newest, valid_schemas
from persist.parts.schema_evolution import current_for_names

R = TypeVar("R", bound=c.Result)


class ShardBase(Timeable):
    """The base of the classes that make up `Shard`, which says more."""

    def __init__(self, transport: Transport, name: str, view: ShardView, settings: HandleSettings) -> None:
        self._transport = OneShard(transport, view.shard_id)
        self._settings = settings
        self._lock = threading.Lock()
        self._requests = self._answered = 0  # refreshes of the schema: how many began, and the last one that was used
        self._newest_id = view.schema_id
        self._schema_id, self._schema = current_schema(view.schemas)
        self.name = name

    @property
    def schema(self) -> ShardSchema:
        """The schema as this handle knows it; `refresh_schema` loads the current one."""
        return self._schema

    def refresh_schema(self) -> ShardSchema:
        """Load the current schema, which this handle uses from then on. Raises what every call may."""
        with self._lock:
            self._requests = turn = self._requests + 1
        view = self.view()
        current = current_schema(view.schemas)
        with self._lock:
            # Another thread may have asked later and been answered first: its newer answer is kept.
            if turn > self._answered or view.schema_id > self._newest_id:
                self._answered = max(turn, self._answered)
                self._newest_id = view.schema_id
                self._schema_id, self._schema = current
            return self._schema

    def view(self, *, with_service_times: bool = False) -> ShardView:
        """Frontiers and schemas as of now. Raises what every call may.

        Args:
            with_service_times: also the intervals of times that inserts and other verbs, or a recovery, have taken.
        """
        return self._transport.view(self.name, ViewRequest(with_batches=False, with_service_times=with_service_times))

    def _changing(self) -> tuple[int, tuple[int, ShardSchema]]:
        """The id of the newest schema as of now, and the current one with its id. The handle keeps its own schema.

        Raises InvalidUsage if a name that the handle knows means another column by now.
        """
        view = self.view()
        schemas = valid_schemas(view.schemas)
        current_for_names(schemas, self._current_schema()[0])
        return view.schema_id, newest(schemas)

    def _changed(self, newest_id: int, current: tuple[int, ShardSchema]) -> ShardSchema:
        """The schema after a change by this handle, which it uses from then on.

        The handle does not take over later changes by others: they may have moved names that its caller uses.
        """
        number, schema = current
        schema = valid_schemas(self.view().schemas).get(number, schema)  # the last schema also has former names
        with self._lock:
            if newest_id > self._newest_id:
                self._newest_id, self._schema_id, self._schema = newest_id, number, schema
            return self._schema

    def _newest_schema(self) -> tuple[int, ShardSchema]:
        """The id of the newest schema, and the current schema, as the handle knows them."""
        with self._lock:
            return self._newest_id, self._schema

    def _current_schema(self) -> tuple[int, ShardSchema]:
        """The id of the schema that the handle knows, and the schema."""
        with self._lock:
            return self._schema_id, self._schema

    def _send(self, command: c.Command) -> c.Result:
        return send(self._transport, self.name, command, self._settings.write.retry_s)

    def _send_for(self, kind: type[R], command: c.Command) -> R:
        return send_for(kind, self._transport, self.name, command, self._settings.write.retry_s)

    def _details(self) -> ShardDetails:
        """The settings, tags and critical readers as of now."""
        request = ViewRequest(with_batches=False, with_details=True)
        call = RetriedCall(f"a view of shard {self.name!r}", self.name)
        retry_s, ask = self._settings.write.retry_s, partial(self._transport.view, self.name, request)
        view = call_with_retries(ask, call, self._transport, retry_s, remedy="repeat it", lapses=True)
        assert view.details is not None
        return view.details
