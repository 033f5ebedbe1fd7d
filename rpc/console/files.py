"""The files of the console as they are sent: each with its type, its tag, and what the browser may do with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files

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
"""What the browser may load and do: our own scripts, styles and requests, none of them inline. Text stays text."""


@dataclass(frozen=True, slots=True)
class ConsoleFile:
    """A file, and the ETag of its bytes."""

    name: str
    media_type: str
    data: bytes
    etag: str


def console_files() -> Mapping[str, ConsoleFile]:
    """All files of the console by their names, which have no slash."""
    return {one.name: one for one in _read()}


def _read() -> Iterator[ConsoleFile]:
    for entry in sorted(files("rpc.console").joinpath("static").iterdir(), key=lambda found: found.name):
        kind = MEDIA_TYPES.get(entry.name.rpartition(".")[2])
        if kind is not None:
            data = entry.read_bytes()
            yield ConsoleFile(entry.name, kind, data, f'"{sha256(data).hexdigest()[:32]}"')
