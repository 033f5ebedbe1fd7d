"""What every command on a shard is: the bases of the records in `commands`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from persist.core.dedup import DIGEST_BYTES
from persist.core.ids import ShardId, Token, WriterId, written
from persist.core.record import Meta, Record
from persist.core.results import snake

READ, WRITE, MANAGE, MAINTAIN, ADMIN = SCOPES = "read", "write", "manage", "maintain", "admin"
INCLUDED: Mapping[str, frozenset[str]] = {
    READ: frozenset({READ}),
    WRITE: frozenset({READ, WRITE}),
    MANAGE: frozenset({READ, WRITE, MANAGE}),
    MAINTAIN: frozenset({READ, MAINTAIN}),
    ADMIN: frozenset(SCOPES),
}
"""Of each scope all those that it opens, itself too."""

TIME_MS_MAX = 2**48 - 1  # that the key of a blob can hold
LEASE_MS = 900_000  # of a writer
LEASE_MS_MAX = 24 * 3600 * 1000  # of a reader, a writer or a claim


class Command(Record, frozen=True, kw_only=True, tag=snake):
    """What can be asked of a shard. `shard`: the one that is meant. Another life of its name refuses the command.

    `scopes`: each of them is enough to send it.
    """

    scopes: ClassVar[tuple[str, ...]] = (ADMIN,)
    shard: Annotated[ShardId, written(ShardId)] | None = None


class ReadCommand(Command, frozen=True):
    scopes: ClassVar[tuple[str, ...]] = (READ,)


class WriteCommand(Command, frozen=True):
    scopes: ClassVar[tuple[str, ...]] = (WRITE,)


class TokenCommand(WriteCommand, frozen=True, kw_only=True):
    """The fields of a `WriterCommand` that have defaults. `digest` is of the request; empty: unknown."""

    digest: Annotated[bytes, Meta(max_length=DIGEST_BYTES)] = b""
    lease_ms: Annotated[int, Meta(gt=0, le=LEASE_MS_MAX)] = LEASE_MS


class WriterCommand(TokenCommand, frozen=True):
    """A write with a token. The first one of a writer registers it for `lease_ms`; each one begins its lease anew.

    A token that a caller gave comes with `writer_of(token)`, which is never registered. Expired: the writer was
    retired, or its lease lapsed, or it is older than the shard.
    """

    writer: Annotated[WriterId, written(WriterId)]
    token: Annotated[Token, written(Token)]


class ManagedCommand(WriteCommand, frozen=True):
    """What is as good as a write, but cannot be undone, or holds others back."""

    scopes: ClassVar[tuple[str, ...]] = (MANAGE,)


class ManageCommand(Command, frozen=True):
    scopes: ClassVar[tuple[str, ...]] = (MANAGE,)


class MaintainCommand(Command, frozen=True):
    scopes: ClassVar[tuple[str, ...]] = (MAINTAIN,)


def kinds(base: type[Any]) -> list[type[Any]]:
    """The classes below `base` that have no class below them: `kinds(Command)` are all commands."""
    below = base.__subclasses__()
    return [kind for cls in below for kind in kinds(cls)] if below else [base]
