"""One command in, one result out: the path of every rich client."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from persist.errors import InvalidUsage
from persist.ids import check_shard_name
from persist.wire import command_from_json, result_to_json
from rpc.auth import Principal, scope_of

if TYPE_CHECKING:
    from rpc.service import Service


async def answer(service: Service, name: str, principal: Principal, data: bytes) -> bytes:
    """Commit the command of a body; the body of the answer. Raises the error with which it was refused."""
    try:
        value = json.loads(data)
    except ValueError as error:
        raise InvalidUsage(f"the body is not JSON: {error}") from error
    command = command_from_json(value)
    principal.require(scope_of(command), check_shard_name(name))
    result = await service.apply(name, command)
    return json.dumps(result_to_json(result), separators=(",", ":")).encode()


__all__ = ["answer"]
