"""What this server knows of its region, and of home."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from persist.client.wall_clock import instant_text
from persist.core.commands import READ
from persist.regions.index import index_json
from persist.regions.replica import Replica
from rpc.auth import Principal
from rpc.route import Router
from rpc.service import principal_of, service_of

router = Router(prefix="/v1", tags=["location"])
SHARDS_TOLD_MAX = 1_000


@router.on("GET", "/regions", (READ,), summary="Which region this is, and how far behind home it is")
async def regions(request: Request) -> dict[str, Any]:
    """`role` is `home`, or `copy` for a server that only reads.

    Of a copy: `published` is the last wall clock at which home said something, and `shards` are those that somebody
    reads here, the first 1,000: `version` is shown, `known` was published, and `lacking` names blobs that have not
    come. `index` is the index of regions, where this server was given one.
    """
    service, principal = service_of(request), principal_of(request)
    location, settings = service.location, service.settings
    told: dict[str, Any] = {"region": settings.region or None, "role": "copy" if location.is_copy else "home"}
    binding = await service.work.run(location.identity.check)
    told |= {"location": binding.location_id, "epoch": binding.epoch}
    if service.index is not None:
        told["index"] = index_json(service.index.now())
        told["index_failed"] = _failed(principal, service.index.failed or None)
    if not isinstance(location, Replica):
        return told
    follower = location.follower
    names = [name for name in follower.followed_names() if principal.sees(name)][:SHARDS_TOLD_MAX]
    published_ms = follower.published_ms
    return {
        **told,
        "of": location.home.region or None,
        "home": list(location.home.urls),
        "published": instant_text(published_ms) if published_ms else None,
        "failed": _failed(principal, None if follower.failed is None else follower.failed.message),
        "bad_blobs": follower.bad_blobs,
        "holds": _holds(location, principal),
        "shards": [_shard(location, name) for name in names],
    }


def _holds(location: Replica, principal: Principal) -> dict[str, Any] | None:
    """How many shards are held at home, and why the last try failed; None: nothing is to be held."""
    holds = location.holds
    if holds is None:
        return None
    failed = _failed(principal, None if holds.failed is None else holds.failed.message)
    return {"shards": holds.count if principal.is_unlimited else None, "failed": failed}


def _failed(principal: Principal, why: str | None) -> str | None:
    """Why something failed. It may name shards, so that a token for some of them is told no more than that."""
    return why if why is None or principal.is_unlimited else "it failed; a token for all shards is told why"


def _shard(location: Replica, name: str) -> dict[str, Any]:
    found = location.follower.followed(name)
    if found is None:
        return {"shard": name, "version": None}
    told: dict[str, Any] = {"shard": name, "version": int(found.seqno), "known": int(found.known), "upper": found.upper}
    lag = {"lag_seconds": location.behind_s(name), "lacking": list(found.lacking), "why": list(found.why)}
    return told | lag
