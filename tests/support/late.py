"""A way to the shards on which one request is held up, and comes when it is let go: what a stopped server does."""

from __future__ import annotations

from collections.abc import Callable

from persist.client.transport import ForwardingTransport
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.errors import Indeterminate, PersistError
from persist.core.shard_settings import ShardSettings
from persist.core.shard_view import ShardView
from persist.core.state import SchemaRecord


class LateTransport(ForwardingTransport):
    """After `hold` the next command of that kind, or the next creation, goes unanswered until `deliver`.

    The caller's next try goes through, as over another server.
    """

    _wanted: type[object] | None = None
    _meanwhile: Callable[[], object] | None = None
    _held: Callable[[], object] | None = None

    def hold(self, kind: type[object], meanwhile: Callable[[], object] | None = None) -> None:
        """Hold the next command of this kind; of SchemaRecord: the next creation. `meanwhile` happens as it is held."""
        self._wanted, self._meanwhile = kind, meanwhile

    def deliver(self) -> object:
        """Let the held request happen: what it came to, which nobody hears; of a refusal the error."""
        assert self._held is not None, "no request was held"
        try:
            return self._held()
        except PersistError as error:
            return error

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        self._hold_up(command, lambda: self.inner.apply(name, command, caller))
        return super().apply(name, command, caller)

    def create(
        self, name: str, schema: SchemaRecord, follows: str | None = None, settings: ShardSettings | None = None
    ) -> ShardView:
        self._hold_up(schema, lambda: self.inner.create(name, schema, follows, settings))
        return super().create(name, schema, follows, settings)

    def _hold_up(self, request: object, ask: Callable[[], object]) -> None:
        if self._wanted is not None and isinstance(request, self._wanted):
            self._wanted, self._held = None, ask
            if self._meanwhile is not None:
                self._meanwhile()
            raise Indeterminate("the server went away during the request")
