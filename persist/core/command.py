"""The base classes of the commands on a shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from persist.core.audit_log import DIGEST_BYTES
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
"""The scopes that each scope includes."""

TIME_MS_MAX = 2**48 - 1  # that the key of a blob can hold
LEASE_MS = 900_000  # of a writer
LEASE_MS_MAX = 24 * 3600 * 1000  # of a reader, a writer or a claim


class Command(Record, frozen=True, kw_only=True, tag=snake):
    """A command on a shard. `shard`: the addressed shard; another life of its name refuses the command.

    `scopes`: any one of them permits it.
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
    """A write with a token. The first one of a writer registers it for `lease_ms`; each one renews its lease.

    A caller's token has the writer `writer_of(token)`, which is never registered. Expired: the writer was retired, or
    its lease lapsed, or it is older than the shard.
    """

    writer: Annotated[WriterId, written(WriterId)]
    token: Annotated[Token, written(Token)]


class ManagedCommand(WriteCommand, frozen=True):
    """A write that cannot be undone, or that affects other clients."""

    scopes: ClassVar[tuple[str, ...]] = (MANAGE,)


class ManageCommand(Command, frozen=True):
    scopes: ClassVar[tuple[str, ...]] = (MANAGE,)


class MaintainCommand(Command, frozen=True):
    scopes: ClassVar[tuple[str, ...]] = (MAINTAIN,)


def kinds(base: type[Any]) -> list[type[Any]]:
    """The classes below `base` that have no class below them: `kinds(Command)` are all commands."""
    below = base.__subclasses__()
    return [kind for cls in below for kind in kinds(cls)] if below else [base]
