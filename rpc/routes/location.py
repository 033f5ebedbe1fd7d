"""Where the shards of this server are, for clients that move parts themselves."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from persist.core.commands import READ
from persist.core.record import asdict
from persist.formats.http_messages import PROTOCOL_VERSION
from rpc.route import Router
from rpc.service import service_of

router = Router(prefix="/v1", tags=["location"])


@router.on("GET", "/location", (READ,), summary="Where blobs are, and the inline limits")
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
