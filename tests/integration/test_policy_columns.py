"""A policy of rows knows its column by a name, which others give to another column at that very moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime
from typing import Any

import pyarrow as pa
import pytest

from persist import Conflict, InvalidUsage, SchemaMismatch, Shard
from persist.commit.committer import Machine
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.shard_settings import NO_SETTINGS
from persist.core.state import initial_state
from persist.core.transitions import Context, step
from persist.core.transitions.context import Verdict
from persist.parts.schema_changes import DropColumn, RenameColumn
from tests.support.clocks import World
from tests.support.embedded import client_of
from tests.support.location import memory_location

COLUMNS = pa.schema([("id", pa.int64()), ("made", pa.timestamp("us")), ("seen", pa.timestamp("us"))])
SWAP = RenameColumn("made", "x"), RenameColumn("seen", "made"), RenameColumn("x", "seen")
POLICY = {"column": "made", "column_age": "1d"}


@pytest.fixture
def location() -> Iterator[Location]:
    with closing(memory_location(small_merges=False)) as found:
        yield found


@pytest.fixture
def shard(location: Location) -> Shard:
    return client_of(location).create_shard("s", COLUMNS, ["id"], history="7d")


@pytest.fixture
def other(location: Location, shard: Shard) -> Shard:
    return client_of(location).shard("s")


def before_sending(monkeypatch: pytest.MonkeyPatch, kind: type[c.Command], work: Callable[[], object]) -> None:
    """Have something done once, when all was looked at for such a command and it is about to be committed."""
    real, done = Machine._applied, []

    def applied(self: Machine, command: c.Command, verdict: Verdict, *more: Any) -> c.Result:
        if isinstance(command, kind) and not done:
            done.append(command)
            work()
        return real(self, command, verdict, *more)

    monkeypatch.setattr(Machine, "_applied", applied)


@pytest.mark.parametrize("changes", [SWAP, (DropColumn("made"),), (RenameColumn("made", "x"),)])
def test_the_columns_changed_their_names_after_they_were_looked_at(
    changes: tuple[Any, ...], shard: Shard, other: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_sending(monkeypatch, c.SetSettings, lambda: other.alter(*changes))
    with pytest.raises(Conflict, match="settings of shard 's' have version 2, not the expected 1"):
        shard.retain(POLICY, confirm=True)
    assert shard.retention().policy is None


def test_a_policy_was_set_while_its_column_was_renamed(
    shard: Shard, other: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_sending(monkeypatch, c.EvolveSchema, lambda: other.retain(POLICY, confirm=True))
    with pytest.raises(InvalidUsage, match="a row policy uses column 'made'"):
        shard.alter(*SWAP)
    assert shard.refresh_schema().arrow.names == COLUMNS.names


def test_one_try_of_a_change_is_refused_where_the_settings_changed_meanwhile(
    shard: Shard, other: Shard, location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = client_of(location).create_shard("t", COLUMNS, ["id"]).alter(*SWAP)
    before_sending(monkeypatch, c.EvolveSchema, lambda: other.retain(POLICY, confirm=True))
    with pytest.raises(SchemaMismatch, match="settings of shard 's' changed while its columns were being changed"):
        location.machine("s").apply(c.EvolveSchema(1, schema.to_record()))
    assert shard.refresh_schema().arrow.names == COLUMNS.names


def test_columns_that_come_or_move_leave_the_settings(
    shard: Shard, other: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_sending(monkeypatch, c.SetSettings, lambda: other.add_column("more", pa.int64(), default=7))
    assert shard.retain(POLICY, confirm=True).version == 2
    shard.move_column("seen", after="id")
    shard.rename_column("seen", "looked")
    assert shard.retention().version == 3


def test_a_shard_without_settings_gets_none_by_a_change_of_its_columns(shard: Shard, location: Location) -> None:
    after = shard.alter(*SWAP).to_record()
    first = location.machine("s").state().schemas[1]
    old = initial_state("s", first, 0, NO_SETTINGS)
    context = Context(0, location.settings.policy, verdict=Verdict(settings=0))
    following, _ = step(old, c.EvolveSchema(1, after), context)
    assert (following.schema_id, following.settings) == (2, NO_SETTINGS)


@pytest.mark.parametrize("kind", [c.Rewrite, c.RegisterReader])
def test_rows_that_were_looked_for_before_a_swap_stay(monkeypatch: pytest.MonkeyPatch, kind: type[c.Command]) -> None:
    """The settings have another version by then, whose policy goes by a column of the same name."""
    client = World().machine().client
    shard = client.create_shard("s", COLUMNS, ["id"], history="7d")
    other = client.shard("s")
    old, new = datetime(2020, 1, 1), datetime(2100, 1, 1)  # noqa: DTZ001
    shard.insert([{"id": 1, "made": old, "seen": new}, {"id": 2, "made": new, "seen": old}])
    shard.retain(POLICY, confirm=True)

    def swap() -> None:
        other.retain(None)
        other.alter(*SWAP)
        other.retain(POLICY, confirm=True)

    before_sending(monkeypatch, kind, swap)
    with pytest.raises(Conflict):
        shard.run_retention()
    assert shard.count() == 2
    assert shard.run_retention().why == ("column",)
    assert [row["id"] for row in other.snapshot().to_arrow().to_pylist()] == [1]
