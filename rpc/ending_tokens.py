"""Tokens that end, as the check sees them."""

from __future__ import annotations

from collections.abc import Iterable

from persist.check.beside import TokenSeen
from persist.core.commands import ADMIN, MAINTAIN, MANAGE, READ, WRITE
from rpc.auth import Principal

_WIDEST_FIRST = (ADMIN, MANAGE, WRITE, MAINTAIN, READ)


def tokens_seen(ending: Iterable[Principal]) -> list[TokenSeen]:
    """What the check needs of them, in the order of their ids."""
    found = []
    for one in sorted(ending, key=lambda one: one.name):
        assert one.expires_s is not None
        scope = next(scope for scope in _WIDEST_FIRST if scope in one.scopes)
        found.append(TokenSeen(one.name, int(one.expires_s * 1000), scope, one.prefixes))
    return found
