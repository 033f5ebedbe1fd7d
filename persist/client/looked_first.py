"""Changes of a schema for which what the shard holds is looked at first: they land only if nobody wrote since."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from persist.client.retry import send
from persist.client.snapshot import ReadSettings
from persist.client.transport import OneShard
from persist.core import commands as c
from persist.core.antichain import Antichain
from persist.core.errors import UpperMismatch
from persist.parts import ShardSchema

RACES_MAX = 1_000  # lost, by one change; each means that somebody else wrote


@dataclass(frozen=True)
class LookedFirst(ABC):
    """One change of one shard, whose newest schema has the id `expected_id`."""

    transport: OneShard
    name: str
    expected_id: int
    read: ReadSettings
    retry_s: float

    @abstractmethod
    def _command(self, after: ShardSchema, upper: Antichain | None) -> c.Command:
        """It gives the shard this schema, if its upper is that one still (None: whatever it is)."""

    def _send(self, after: ShardSchema, upper: Antichain | None) -> int:
        """The id of the schema. Raises SchemaMismatch where others changed it, UpperMismatch where they wrote."""
        found = send(self.transport, self.name, self._command(after, upper), self.retry_s)
        assert isinstance(found, c.SchemaRegistered)
        return found.schema_id

    def _landed(self, after: ShardSchema, upper: Antichain) -> int | None:
        """The id of the schema; None: somebody wrote."""
        try:
            return self._send(after, upper)
        except UpperMismatch:
            return None

    def _lost(self, what: str, upper: Antichain) -> UpperMismatch:
        """What is told after RACES_MAX lost races: what was tried, and the upper that was seen last."""
        return UpperMismatch(
            f"others wrote to shard {self.name!r} before each of {RACES_MAX} tries to {what}; nothing was changed: try "
            "again",
            expected=upper.to_json(),
            actual=upper.to_json(),
            stays=False,
        )
