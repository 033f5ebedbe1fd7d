"""A server that is none of persist: whatever is asked, it gives one answer."""

from __future__ import annotations

import http.server
import threading
from typing import Any


class Answers:
    """A server that gives one answer, and keeps the tokens that it was sent."""

    def __init__(self, status: int, body: bytes, **headers: str) -> None:
        self.tokens: list[str | None] = []
        self.paths: list[str] = []
        seen = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                seen.tokens.append(self.headers.get("authorization"))
                seen.paths.append(self.path)
                self.send_response(status)
                for name, value in {"content-length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                return

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
