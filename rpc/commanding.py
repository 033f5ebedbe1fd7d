"""One command in, one result out: the path of every rich client."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from persist.core.commands import Command
from persist.core.errors import InvalidUsage
from persist.core.ids import check_shard_name
from persist.formats.http_messages import COMMAND_FRAME, command_from_frame, command_from_json, result_to_json
from rpc.auth import Principal, scope_of

if TYPE_CHECKING:
    from rpc.service import Service


async def answer(service: Service, name: str, principal: Principal, data: bytes, media_type: str) -> bytes:
    """Commit the command of a body; the body of the answer. Raises the error with which it was refused.

    The body is JSON unless its media type is that of a frame.
    """
    command = command_from_frame(data) if media_type == COMMAND_FRAME else _from_json(data)
    principal.require(scope_of(command), check_shard_name(name))
    result = await service.apply(name, command)
    return json.dumps(result_to_json(result), separators=(",", ":")).encode()


def _from_json(data: bytes) -> Command:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"the body is not JSON: {error}") from error
    return command_from_json(value)
