"""Long work on one shard through a handle, and what it came to as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from persist.client.shard import Shard
from persist.core.ids import check_shard_name
from persist.core.shard_view import ViewRequest
from rpc.app_state import principal_of, service_of, shard_of
from rpc.route_table import route_of
from rpc.routes.parameters import asking_for


class Told(Protocol):
    def to_json(self) -> dict[str, Any]: ...


async def worked(request: Request, work: Callable[[Shard], Told]) -> Response:
    """Do it on the shard of the request, in the name of who asks, and tell what it came to."""
    service, name = service_of(request), check_shard_name(shard_of(request))
    asking = asking_for(request)

    def done() -> Told:
        view = asking.view(name, ViewRequest(with_batches=False))  # of a dropped shard too: it knows its tokens
        return work(Shard(asking, name, view, service.handles))

    with service.snapshots:  # it takes as much memory as one
        found = await service.work.run(done)
    return Response(json.dumps(found.to_json()), media_type="application/json")


async def worked_with_body(request: Request, bytes_max: int, work: Callable[[Shard, bytes], Told]) -> Response:
    """The same with the body of the request, which is held meanwhile."""
    service, name = service_of(request), check_shard_name(shard_of(request))
    async with service.body(request, bytes_max) as data:
        principal = principal_of(request)
        service.quotas.rows(principal, 0)
        if not route_of(request).frees:
            service.quotas.room_for(principal, name)
        return await worked(request, lambda shard: work(shard, data))
