"""What every command on a shard is: the bases of the records in `commands`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from persist.core.ids import ShardId, written
from persist.core.record import Record
from persist.core.results import snake

READ, WRITE, ADMIN = "read", "write", "admin"  # scopes; each includes the ones before it

TIME_MS_MAX = 2**48 - 1  # that the key of a blob can hold


class Command(Record, frozen=True, kw_only=True, tag=snake):
    """What can be asked of a shard. `shard`: the one that is meant. Another life of its name refuses the command."""

    scope: ClassVar[str] = ADMIN
    shard: Annotated[ShardId, written(ShardId)] | None = None


class ReadCommand(Command, frozen=True):
    scope: ClassVar[str] = READ


class WriteCommand(Command, frozen=True):
    scope: ClassVar[str] = WRITE


def kinds(base: type[Any]) -> list[type[Any]]:
    """The classes below `base` that have no class below them: `kinds(Command)` are all commands."""
    below = base.__subclasses__()
    return [kind for cls in below for kind in kinds(cls)] if below else [base]
