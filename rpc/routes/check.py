"""The findings of a quick check of a location, with those that the server itself adds."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import Depends, Query, Request
from starlette.responses import Response

from persist.check.beside import Beside, served_by
from persist.check.examining import examined
from persist.check.limits import AGES, FREE, Limits, read_limits
from persist.core.commands import ADMIN
from persist.inspect.looking import look_into
from persist.inspect.shard_patterns import prefix_of
from rpc.auth import Principal
from rpc.ending_tokens import tokens_seen
from rpc.route import Router
from rpc.service import Service, principal_of, service_of

router = Router(prefix="/v1", tags=["check"])


def _limits(
    held: Annotated[str, Query(description=AGES["held"], max_length=32)] = "",
    behind: Annotated[str, Query(description=AGES["behind"], max_length=32)] = "",
    token_age: Annotated[str, Query(description=AGES["token_age"], max_length=32)] = "",
    free: Annotated[str, Query(description=FREE, max_length=32)] = "",
) -> Limits:
    return read_limits(held, behind, "", token_age, free)


@router.on("GET", "/check", (ADMIN,), summary="What is wrong with the location and its shards, why, and what helps")
async def check(
    request: Request,
    limits: Annotated[Limits, Depends(_limits)],
    pattern: Annotated[str, Query(description="Shards whose names match, such as eu/*.", max_length=256)] = "",
) -> Response:
    """The document is that of `persist check --quick --json`; docs/check.md has a paragraph for each `id` of a finding.

    The server adds what it knows: races that it lost, calls to the stores that failed, its clock, tokens that end. A
    token that is good for some prefixes only is told nothing of other tokens, of disks and of calls. It counts as a
    snapshot while it is made.
    """
    service, principal = service_of(request), principal_of(request)
    principal.require_prefix(prefix_of(pattern) if pattern else "")
    with service.snapshots:
        text = await service.work.run(_examined, service, principal, pattern, limits)
    return Response(text, media_type="application/json")


def _examined(service: Service, principal: Principal, pattern: str, limits: Limits) -> str:
    if not principal.is_unlimited:
        limits = replace(limits, free_percent=0)
    look = look_into(service.location, principal.prefixes)
    return examined(look, pattern or None, limits, _beside(service, principal)).text()


def _beside(service: Service, principal: Principal) -> Beside:
    """What the server knows: all of it for who may see all, else what is of the shards."""
    served = served_by(service.location)
    if not principal.is_unlimited:
        return Beside(served=replace(served, calls={}))
    tokens = tokens_seen([] if service.tokens is None else service.tokens.ending())
    return Beside(tokens=tokens, served=served)
