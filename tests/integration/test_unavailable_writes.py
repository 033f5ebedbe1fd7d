"""A write that is answered with Unavailable has not happened, wherever the connection is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pytest

from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.client.transport import ForwardingTransport
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.errors import Indeterminate, Unavailable
from persist.core.ids import token_of_key
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.state import State
from tests.support.clocks import World

NAME = "orders"
SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.int64())])
CALLS_MAX = 60  # more than a verb makes
TOKEN = token_of_key("once")
VERBS: dict[str, Callable[[Shard], object]] = {
    "insert": lambda s: s.insert([{"id": 9, "v": 1}], token=TOKEN),
    "upsert": lambda s: s.upsert([{"id": 1, "v": 7}], token=TOKEN),
    "update": lambda s: s.update({"v": 3}, where="id = 1", token=TOKEN),
    "delete": lambda s: s.delete(where="id = 1", token=TOKEN),
    "merge": lambda s: (
        s.merge([{"id": 2, "v": 3}]).when_matched_update().when_not_matched_insert().execute(token=TOKEN)
    ),
    "overwrite": lambda s: s.overwrite([{"id": 5, "v": 5}], token=TOKEN),
    "restore": lambda s: s.restore(1, token=TOKEN),
    "truncate": lambda s: s.truncate(2, token=TOKEN),
    "truncate of nothing": lambda s: s.truncate(0, token=TOKEN),
    "drop": lambda s: s.truncate(2, mode="drop", token=TOKEN),
    "drop of nothing": lambda s: s.truncate(1, mode="drop", token=TOKEN),
    "erase": lambda s: s.erase(keys=[1], token=TOKEN),
    "tag": lambda s: s.tag("month", 1),
    "add a column": lambda s: s.add_column("w", pa.int64()),
    "set constraints": lambda s: s.set_constraints(not_null=["v"]),
    "configure": lambda s: s.configure(history="9d"),
    "retain": lambda s: s.retain({"age": "900d"}),
    "compare_and_append": lambda s: s.compare_and_append([{"id": 9, "v": 1, "__time": 4}], 4, 5),
    "untag": lambda s: s.untag("first"),
    "forget": lambda s: s.forget(2),
}
FED = ("truncate", "drop", "erase")  # what a shard that is fed by `append` takes, and keeps as pending


class LostAfter(ForwardingTransport):
    """Loses its connection after so many calls, each of which was answered."""

    def __init__(self, world: World, calls: int) -> None:
        super().__init__(EmbeddedTransport(world.machine().location))
        self.calls_left = calls

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        self._call()
        return super().apply(name, command, caller)

    def view(self, name: str, request: ViewRequest) -> ShardView:
        self._call()
        return super().view(name, request)

    def _call(self) -> None:
        if self.calls_left <= 0:
            raise Unavailable("the connection is lost")
        self.calls_left -= 1


def made(world: World, *, fed: bool) -> None:
    shard = world.machine().client.create_shard(NAME, SCHEMA, ["id"], history="7d")
    for number in range(4):
        rows = pa.table({"id": [number], "v": [number]}, schema=SCHEMA)
        if fed:
            shard.append(rows.append_column("__time", pa.array([number])), number, number + 1)
        else:
            shard.insert(rows)
        world.pass_ms(1_000)
    shard.tag("first", 0)


def what_is_there(world: World) -> dict[str, Any]:
    """What a write changes of the State; leases and registrations are not part of it."""
    state: State = world.machine().location.machine(NAME).refresh()
    names = ("upper", "since", "outcomes", "truncations", "drops", "erasures", "tags", "schemas", "settings", "cuts")
    kept = {name: getattr(state, name) for name in names}
    return {"rows": state.trace.batches, **{name: dict(v) if isinstance(v, Mapping) else v for name, v in kept.items()}}


@pytest.mark.parametrize(
    ("verb", "fed"), [*((verb, False) for verb in VERBS), *((verb, True) for verb in FED)], ids=str
)
def test_a_write_that_landed_is_never_answered_as_unavailable(verb: str, fed: bool) -> None:
    for calls in range(CALLS_MAX):
        world = World()
        made(world, fed=fed)
        before = what_is_there(world)
        transport = LostAfter(world, CALLS_MAX)
        shard = Client(transport).shard(NAME)
        transport.calls_left = calls
        try:
            VERBS[verb](shard)
        except Indeterminate:
            continue
        except Unavailable:
            assert what_is_there(world) == before, f"{verb} happened before the connection was lost after {calls} calls"
        else:
            return
    raise AssertionError(f"{verb} makes more than {CALLS_MAX} calls")
