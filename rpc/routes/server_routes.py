"""Routes of the server itself: health, metrics, its location, regions, and the console's files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
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
from persist.formats.exposition import CONTENT_TYPE
from persist.formats.http_messages import PROTOCOL_VERSION
from persist.regions.region_index import index_json
from persist.regions.replica import ReplicaLocation
from rpc.app_state import principal_of, service_of
from rpc.auth import Principal
from rpc.route import Router

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
"""What the browser may load: only our own scripts, styles and requests, none of them inline."""


@dataclass(frozen=True, slots=True)
class ConsoleFile:
    """A file, and the ETag of its bytes."""

    name: str
    media_type: str
    data: bytes
    etag: str


def console_files() -> Mapping[str, ConsoleFile]:
    """All files of the console by their names."""
    by_name = {}
    for entry in files("rpc.console").joinpath("static").iterdir():
        media_type = MEDIA_TYPES.get(entry.name.rpartition(".")[2])
        if media_type is not None:
            data = entry.read_bytes()
            by_name[entry.name] = ConsoleFile(entry.name, media_type, data, f'"{sha256(data).hexdigest()[:32]}"')
    return by_name


# Health and metrics.

router = Router(tags=["health"])
_log = logging.getLogger("persist.rpc")


@router.on("GET /healthz", None, "Whether the process answers")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.on("GET /readyz", None, "Whether both stores answer", responses={503: {"description": "A store does not"}})
async def readyz(request: Request) -> dict[str, Any]:
    """With tokens, only `admin` on all shards receives the URLs of the stores and their errors.

    Other callers may receive a result that is a second old.
    """
    service, principal = service_of(request), principal_of(request)
    sees_stores = ADMIN in principal.scopes and principal.is_unlimited
    try:
        unwritable = await (service.work.run(service.location.check) if sees_stores else service.readiness.check())
    except Overloaded:  # of the server itself, so it says nothing about the stores
        raise
    except PersistError as error:
        if sees_stores:
            raise error if isinstance(error, Unavailable) else Unavailable(error.message) from error
        _log.warning("a store does not answer", extra={"why": error.message})
        raise Unavailable("a store does not answer; see the server's log") from None
    status = {"status": "read-only" if unwritable else "ok"}
    if not sees_stores:
        return status
    stores = {"blob": service.location.blob.url, "consensus": service.location.consensus.url}
    return {**status, **({"why": unwritable} if unwritable else {}), **stores}


@router.on("GET /metrics", (READ,), "Counters in Prometheus' text format", response_class=Response)
async def metrics(request: Request) -> Response:
    """Omits shards that the token may not see. A token for some shards sees only its own metrics of tokens."""
    service, principal = service_of(request), principal_of(request)
    return Response(await service.work.run(service.metrics.text, principal), media_type=CONTENT_TYPE)


# The location, for clients that access its stores directly.

location_router = Router(prefix="/v1", tags=["location"])


@location_router.on("GET /location", (READ,), "The blob store, and the inline limits")
async def location(request: Request) -> dict[str, Any]:
    """`blob.url` has no secrets. A client that opens it and finds `blob.proof` may use the store directly.

    `id` and `epoch` identify this location; cuts contain them. `copy`: it is a read-only copy; `home` has the servers
    at home. `regions`: the server has an index of regions.
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


# The region of this server, and its replication.

regions_router = Router(prefix="/v1", tags=["location"])
SHARDS_LISTED_MAX = 1_000


@regions_router.on("GET /regions", (READ,), "The region, and its replication lag")
async def regions(request: Request) -> dict[str, Any]:
    """`role` is `home`, or `copy` for a read-only server.

    Of a copy: `published` is the wall clock of the last publication by the home, and `shards` are those that are read
    here, the first 1,000: `version` is served, `known` was published, and `lacking` names blobs that are not replicated
    yet. `index` is the index of regions, if this server has one.
    """
    service, principal = service_of(request), principal_of(request)
    location, settings = service.location, service.settings
    document: dict[str, Any] = {"region": settings.region or None, "role": "copy" if location.is_copy else "home"}
    binding = await service.work.run(location.identity.check)
    document |= {"location": binding.location_id, "epoch": binding.epoch}
    if service.index is not None:
        document["index"] = index_json(service.index.now())
        document["index_failed"] = _failed(principal, service.index.failed or None)
    if not isinstance(location, ReplicaLocation):
        return document
    follower = location.follower
    names = [name for name in follower.followed_names() if principal.sees(name)][:SHARDS_LISTED_MAX]
    published_ms = follower.published_ms
    return {
        **document,
        "of": location.home.region or None,
        "home": list(location.home.urls),
        "published": instant_text(published_ms) if published_ms else None,
        "failed": _failed(principal, None if follower.failed is None else follower.failed.message),
        "bad_blobs": follower.bad_blobs,
        "holds": _holds(location, principal),
        "shards": [_shard(location, name) for name in names],
    }


def _holds(location: ReplicaLocation, principal: Principal) -> dict[str, Any] | None:
    """How many shards are held at home, and why the last attempt failed; None: nothing is held."""
    holds = location.holds
    if holds is None:
        return None
    failed = _failed(principal, None if holds.failed is None else holds.failed.message)
    return {"shards": holds.count if principal.is_unlimited else None, "failed": failed}


def _failed(principal: Principal, why: str | None) -> str | None:
    """Why something failed. It may name shards, so it is only shown to a token for all shards."""
    return why if why is None or principal.is_unlimited else "it failed; the reason is shown to a token for all shards"


def _shard(location: ReplicaLocation, name: str) -> dict[str, Any]:
    followed = location.follower.followed(name)
    if followed is None:
        return {"shard": name, "version": None}
    return {
        "shard": name,
        "version": int(followed.seqno),
        "known": int(followed.known),
        "upper": followed.upper,
        "lag_seconds": location.behind_s(name),
        "lacking": list(followed.lacking),
        "why": list(followed.why),
    }


# The console's files. They contain no data, so they need no token.

console_router = Router(tags=["console"], include_in_schema=False)
HOME = "/console"
_FILES = console_files()
PATHS = frozenset({HOME, HOME + "/", *(f"{HOME}/{name}" for name in _FILES)})
"""Every path of the console."""


@console_router.on(f"GET {HOME}", None, "The page")
async def page(request: Request) -> Response:
    return _sent(request, _FILES[PAGE])


@console_router.on(f"GET {HOME}/", None, "The page")
async def with_slash() -> Response:
    """Redirects to the page by a relative address, since a proxy may serve it below a path."""
    return Response(status_code=307, headers={"location": f"..{HOME}", "content-security-policy": POLICY.decode()})


@console_router.on(f"GET {HOME}/{{file}}", None, "A file of the page")
async def file(request: Request, file: str) -> Response:
    console_file = _FILES.get(file)
    if console_file is None:
        raise HTTPException(404)
    return _sent(request, console_file)


def _sent(request: Request, console_file: ConsoleFile) -> Response:
    """The file, or 304 if the browser has it. Browsers revalidate each time, so that they use a new version at once."""
    headers = {"etag": console_file.etag, "cache-control": "no-cache", "content-security-policy": POLICY.decode()}
    if request.headers.get("if-none-match") == console_file.etag:
        return Response(status_code=304, headers=headers)
    return Response(console_file.data, media_type=console_file.media_type, headers=headers)
