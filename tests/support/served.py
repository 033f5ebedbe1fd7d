"""A server in this process, over stores that tests hold as well: a thread with the real app and real HTTP."""

from __future__ import annotations

import socket
import threading
from functools import partial
from typing import Any, Self, cast

import uvicorn

from persist.commit.location import Location
from rpc.app import bind, create_app
from rpc.app_state import Service
from rpc.http_protocol import JoiningProtocol
from rpc.settings import ServerSettings
from tests.support.location import client_of
from tests.support.waiting import WAIT_S, wait_until


class _Server(uvicorn.Server):
    """Lets waits and streams end before it waits for requests."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.stop()
        await super().shutdown(sockets)


class Served:
    """Serves within a `with`. `client` is embedded in this process, over the same stores."""

    def __init__(self, location: Location, settings: ServerSettings | None = None) -> None:
        self.location = location
        self.client = client_of(location)
        app = create_app(location, settings)
        service: Service = app.state.service
        protocol = cast(Any, partial(JoiningProtocol, bounds=service.bounds))
        config = uvicorn.Config(app, http=protocol, ws="none", log_config=None, access_log=False)
        self._server = _Server(config, service)
        self._listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        wait_until(lambda: self._server.started, "the server has started")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(WAIT_S)
        self._listener.close()
