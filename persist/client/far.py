"""A shard of another region: read from servers near here, written at its home."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from persist.client.shard import HandleSettings, Shard
from persist.client.transport import Transport
from persist.core.view import ShardView

# Every verb that changes the shard, whatever it reads on the way: it reads what it needs at home as well.
AT_HOME = (
    "add_column", "advance_upper", "allow_nulls", "alter", "append", "compare_and_append", "configure",
    "critical_reader", "delete", "downgrade_since", "drop", "drop_column", "erase", "erased", "erasures",
    "evolve_schema", "forget", "insert", "merge", "move_column", "open_writer", "overwrite", "pipelined_writer",
    "rename_column", "replace_where", "restore", "retain", "run_retention", "set_constraints", "tag", "truncate",
    "untag", "update", "upsert", "widen_column", "_update_attributes",
)  # fmt: skip


class FarShard(Shard):
    """As `Shard`. Reads show what the region near here has accepted, so a write is seen a few seconds later."""

    def __init__(
        self, transport: Transport, name: str, view: ShardView, settings: HandleSettings, home: Callable[[], Shard]
    ) -> None:
        super().__init__(transport, name, view, settings)
        self._open_home = home
        self._opened: Shard | None = None

    @property
    def at_home(self) -> Shard:
        """The same shard, read and written at its home: what was written is seen at once."""
        if self._opened is None:
            self._opened = self._open_home()
        return self._opened

    def close(self) -> None:
        super().close()
        if self._opened is not None:
            self._opened.close()


def _sent_home(verb: str) -> Callable[..., Any]:
    @wraps(getattr(Shard, verb))
    def sent(self: FarShard, *args: Any, **options: Any) -> Any:
        return getattr(self.at_home, verb)(*args, **options)

    return sent


for _verb in AT_HOME:
    setattr(FarShard, _verb, _sent_home(_verb))
