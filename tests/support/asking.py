"""Clients of an app under test that say the type of each body, as servers without tokens want it."""

from __future__ import annotations

from typing import Any

from starlette.testclient import TestClient


def typed(client: TestClient) -> TestClient:
    """The client, which says `application/octet-stream` of a body of which the test says nothing."""
    hooks: dict[str, list[Any]] = {"request": [_say]}
    client.event_hooks = hooks
    return client


def _say(request: Any) -> None:
    if request.headers.get("content-length", "chunked") != "0" and request.method == "POST":
        request.headers.setdefault("content-type", "application/octet-stream")
