"""The console's files. They are the same for everybody and tell nothing, so they need no token."""

from __future__ import annotations

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from rpc.console.files import PAGE, POLICY, ConsoleFile, console_files
from rpc.route import Router

router = Router(tags=["console"], include_in_schema=False)
HOME = "/console"
_FILES = console_files()
PATHS = frozenset({HOME, HOME + "/", *(f"{HOME}/{name}" for name in _FILES)})
"""Every path that is served here."""


@router.on("GET", HOME, None)
async def page(request: Request) -> Response:
    return _sent(request, _FILES[PAGE])


@router.on("GET", HOME + "/", None)
async def with_slash() -> Response:
    """To the page, by an address that a proxy may serve below a path: files are asked for beside the page."""
    return Response(status_code=307, headers={"location": f"..{HOME}", "content-security-policy": POLICY.decode()})


@router.on("GET", HOME + "/{file}", None)
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
