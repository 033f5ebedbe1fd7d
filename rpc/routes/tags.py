"""Tags: times of a shard that stay readable although since has passed them."""

from __future__ import annotations

import json
from datetime import datetime
from functools import partial
from typing import Annotated, Any

from fastapi import Query, Request
from starlette.responses import Response

from persist.client.tags import ShardTag, keep_ms, set_tag
from persist.client.transport import AsCaller, Transport
from persist.client.wall_clock import as_of_at, instant_ms, instant_text, resolved
from persist.core import commands as c
from persist.core.commands import MANAGE, READ
from persist.core.errors import NotReadable
from persist.core.ids import check_shard_name
from persist.core.tags import Tag, check_tag_name
from rpc.route import Router
from rpc.routes.parameters import At, caller_of
from rpc.service import WAIT_S_MAX, Service, service_of, shard_of

router = Router(prefix="/v1/shards", tags=["history"])


@router.on("GET", "/{name}/tags", (READ,), summary="The tags of a shard")
async def tags(request: Request) -> Response:
    service, name = service_of(request), check_shard_name(shard_of(request))
    found = await _tags(service, name)
    return _json({"tags": [_shown(ShardTag.of(tag, found[tag])) for tag in sorted(found)]})


@router.on("GET", "/{name}/tags/{tag}", (READ,), summary="One tag")
async def one(request: Request, tag: str) -> Response:
    """410 where there is no such tag."""
    service, name = service_of(request), check_shard_name(shard_of(request))
    found = (await _tags(service, name)).get(check_tag_name(tag))
    if found is None:
        raise NotReadable(f"shard {name!r} has no tag {tag!r}", as_of=None, tag=tag)
    return _json(_shown(ShardTag.of(tag, found)))


@router.on(
    "PUT",
    "/{name}/tags/{tag}",
    (MANAGE,),
    audit="set tag",
    summary="Keep a time readable under a name, when since passes it too",
)
async def put(
    request: Request,
    tag: str,
    at: At,
    keep: Annotated[str | None, Query(description="For so long, as `400d`; else for ever.", max_length=32)] = None,
) -> Response:
    """A tag that is there keeps its time, and gets this `keep`. 409 where it is at another time."""
    service, name = service_of(request), check_shard_name(shard_of(request))
    asking = AsCaller(service.transport, caller_of(request))
    wait_s = WAIT_S_MAX
    found = await service.work.run(partial(_set, asking, name, check_tag_name(tag), at, keep_ms(keep), wait_s))
    return _json(_shown(found))


@router.on(
    "DELETE", "/{name}/tags/{tag}", (MANAGE,), audit="remove tag", summary="Take a tag away: its time may be forgotten"
)
async def delete(request: Request, tag: str) -> Response:
    """`removed` tells whether it was there. Repeating it is safe."""
    service, name = service_of(request), check_shard_name(shard_of(request))
    found = await service.apply(name, c.RemoveTag(check_tag_name(tag)), caller_of(request))
    assert isinstance(found, c.TagRemoved)
    return _json({"tag": tag, "removed": found.tag is not None})


def _set(
    transport: Transport, name: str, tag: str, at: int | datetime | None, kept: int | None, wait_s: float
) -> ShardTag:
    if isinstance(at, datetime):
        at = as_of_at(name, resolved(transport, name, at, 0.0, wait_s))
    return set_tag(transport, name, tag, at, kept, wait_s)


async def _tags(service: Service, name: str) -> dict[str, Tag]:
    found = await service.apply(name, c.ReadTags())
    assert isinstance(found, c.TagsAre)
    return dict(found.tags)


def _shown(tag: ShardTag) -> dict[str, Any]:
    until = None if tag.until is None else instant_text(instant_ms("until", tag.until))
    return {"tag": tag.name, "time": tag.time, "until": until}


def _json(value: dict[str, Any]) -> Response:
    return Response(json.dumps(value, separators=(",", ":")), media_type="application/json")
