"""Routes of the server itself: health, its location, regions, and the console's files."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from typing import Any

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from persist.client.timestamps import instant_text
from persist.core.commands import ADMIN, READ
from persist.core.errors import Overloaded, PersistError, Unavailable
from persist.core.record import asdict
from persist.formats.http_messages import PROTOCOL_VERSION
from persist.regions.region_index import index_json
from persist.regions.replica import ReplicaLocation
from rpc.app_state import principal_of, service_of
from rpc.auth import Principal
from rpc.metrics import CONTENT_TYPE
from rpc.route_table import Router

PAGE = "index.html"
MEDIA_TYPES: Mapping[str, str] = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""What the browser may load and do: our own scripts, styles and requests, none of them inline. Text stays text."""


@dataclass(frozen=True, slots=True)
class ConsoleFile:
    """A file, and the ETag of its bytes."""

    name: str
    media_type: str
    data: bytes
    etag: str


def console_files() -> Mapping[str, ConsoleFile]:
    """All files of the console by their names, which have no slash."""
    return {one.name: one for one in _read()}


def _read() -> Iterator[ConsoleFile]:
    for entry in sorted(files("rpc.console").joinpath("static").iterdir(), key=lambda found: found.name):
        kind = MEDIA_TYPES.get(entry.name.rpartition(".")[2])
        if kind is not None:
            data = entry.read_bytes()
            yield ConsoleFile(entry.name, kind, data, f'"{sha256(data).hexdigest()[:32]}"')


# Is the server alive, can it serve, and how does it do?


router = Router(tags=["health"])
_log = logging.getLogger("persist.rpc")


@router.on("GET", "/healthz", None, summary="The process answers")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.on("GET", "/readyz", None, summary="Both stores answer", responses={503: {"description": "A store does not"}})
async def readyz(request: Request) -> dict[str, Any]:
    """Where there are tokens, only `admin` on all shards is told where the stores are, and what is wrong with one.

    Others may be told what was found a second ago.
    """
    service, tells_all = service_of(request), _tells_all(principal_of(request))
    try:
        unwritable = await (service.work.run(service.location.check) if tells_all else service.readiness.told())
    except Overloaded:  # the server itself has too much to do: nothing is known of the stores
        raise
    except PersistError as error:
        if tells_all:
            raise
        _log.warning("a store does not answer", extra={"why": error.message})
        raise Unavailable("a store does not answer; the server's log says which") from None
    status = {"status": "read-only" if unwritable else "ok"}
    if not tells_all:
        return status
    stores = {"blob": service.location.blob.url, "consensus": service.location.consensus.url}
    return {**status, **({"why": unwritable} if unwritable else {}), **stores}


def _tells_all(principal: Principal) -> bool:
    return ADMIN in principal.scopes and principal.is_unlimited


@router.on("GET", "/metrics", (READ,), summary="Counters in Prometheus' text format", response_class=Response)
async def metrics(request: Request) -> Response:
    """Of shards that the token does not see there is nothing. A token for some shards sees of tokens itself alone."""
    service, principal = service_of(request), principal_of(request)
    return Response(await service.work.run(service.metrics.text, principal), media_type=CONTENT_TYPE)


# Where the shards of this server are, for clients that move parts themselves.


location_router = Router(prefix="/v1", tags=["location"])


@location_router.on("GET", "/location", (READ,), summary="Where blobs are, and the inline limits")
async def location(request: Request) -> dict[str, Any]:
    """`blob.url` is without secrets. A client that opens it and finds `blob.proof` may use the store itself.

    `id` and `epoch` tell this location from others; cuts have them. `copy`: it shows a copy of it, and only reads;
    `home` has the servers at home. `regions`: it tells an index of regions.
    """
    service = service_of(request)
    binding = await service.work.run(service.location.identity.check)
    return {
        "version": PROTOCOL_VERSION,
        "id": binding.location_id,
        "epoch": binding.epoch,
        "blob": {"url": service.location.blob.url, "proof": service.proof},
        "policy": asdict(service.location.settings.policy),
        "copy": service.location.is_copy,
        "of": service.settings.of,
        "home": list(service.settings.home_urls),
        "regions": service.index is not None,
        "now_ms": service.location.clock.now_ms(),
    }


# What this server knows of its region, and of home.


regions_router = Router(prefix="/v1", tags=["location"])
SHARDS_TOLD_MAX = 1_000


@regions_router.on("GET", "/regions", (READ,), summary="Which region this is, and how far behind home it is")
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
    if not isinstance(location, ReplicaLocation):
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


def _holds(location: ReplicaLocation, principal: Principal) -> dict[str, Any] | None:
    """How many shards are held at home, and why the last try failed; None: nothing is to be held."""
    holds = location.holds
    if holds is None:
        return None
    failed = _failed(principal, None if holds.failed is None else holds.failed.message)
    return {"shards": holds.count if principal.is_unlimited else None, "failed": failed}


def _failed(principal: Principal, why: str | None) -> str | None:
    """Why something failed. It may name shards, so that a token for some of them is told no more than that."""
    return why if why is None or principal.is_unlimited else "it failed; a token for all shards is told why"


def _shard(location: ReplicaLocation, name: str) -> dict[str, Any]:
    found = location.follower.followed(name)
    if found is None:
        return {"shard": name, "version": None}
    told: dict[str, Any] = {"shard": name, "version": int(found.seqno), "known": int(found.known), "upper": found.upper}
    lag = {"lag_seconds": location.behind_s(name), "lacking": list(found.lacking), "why": list(found.why)}
    return told | lag


# The console's files. They are the same for everybody and tell nothing, so they need no token.


console_router = Router(tags=["console"], include_in_schema=False)
HOME = "/console"
_FILES = console_files()
PATHS = frozenset({HOME, HOME + "/", *(f"{HOME}/{name}" for name in _FILES)})
"""Every path that is served here."""


@console_router.on("GET", HOME, None)
async def page(request: Request) -> Response:
    return _sent(request, _FILES[PAGE])


@console_router.on("GET", HOME + "/", None)
async def with_slash() -> Response:
    """To the page, by an address that a proxy may serve below a path: files are asked for beside the page."""
    return Response(status_code=307, headers={"location": f"..{HOME}", "content-security-policy": POLICY.decode()})


@console_router.on("GET", HOME + "/{file}", None)
async def file(request: Request, file: str) -> Response:
    found = _FILES.get(file)
    if found is None:
        raise HTTPException(404)
    return _sent(request, found)


def _sent(request: Request, found: ConsoleFile) -> Response:
    """The file, or 304 where the browser has it. It is asked for each time, so that a new version is seen at once."""
    headers = {"etag": found.etag, "cache-control": "no-cache", "content-security-policy": POLICY.decode()}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.data, media_type=found.media_type, headers=headers)
