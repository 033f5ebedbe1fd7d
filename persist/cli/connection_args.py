"""The arguments by which commands find a location: a directory, the URLs of two stores, or a server."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blob import without_secrets
from persist.client.arguments import ClientTls, checked_token
from persist.client.client import Client, Connection
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.commit.location import Location, LocationSettings, open_location, open_stores, url_path
from persist.commit.location import check_there as check_there
from persist.core.errors import InvalidUsage
from persist.core.shard_settings import DEFAULT_HISTORY, bytes_of, history_ms

DEFAULT_DIRECTORY = "persist-data"
SIZE_MAX = 1 << 50
URL, TOKEN = "PERSIST_URL", "PERSIST_TOKEN"
CA, CERTIFICATE = "PERSIST_CA_FILE", "PERSIST_CERTIFICATE_FILE"
STORES = ("PERSIST_DIRECTORY", "PERSIST_BLOB", "PERSIST_CONSENSUS")


@dataclass(frozen=True)
class Where:
    """A directory, or the URLs of both stores; without either, the default directory."""

    directory: str | None = None
    blob: str | None = field(default=None, repr=False)
    consensus: str | None = field(default=None, repr=False)  # which may hold a password

    @property
    def path(self) -> Path:
        """The directory, unless URLs are given."""
        return Path(self.directory or DEFAULT_DIRECTORY).absolute()

    def urls(self) -> tuple[str, str] | None:
        """The URLs of the blob store and the consensus store; None: a directory. Raises InvalidUsage."""
        if not (self.blob or self.consensus):
            return None
        if self.directory or not (self.blob and self.consensus):
            raise InvalidUsage("give either --dir, or both --blob and --consensus")
        return self.blob, self.consensus

    def open(
        self, settings: LocationSettings | None = None, *, must_exist: bool = False, reads_only: bool = False
    ) -> Location:
        """Open the location; `reads_only`: as for a dry run, which creates no store. Raises InvalidUsage."""
        urls, path = self.urls(), self.path
        if urls is not None:
            if must_exist:
                check_there(urls[0])
            return open_stores(*urls, reads_only=reads_only, settings=settings)
        if must_exist and not path.exists():
            raise InvalidUsage(f"{path} does not exist; give --dir, or --blob and --consensus")
        return open_location(f"persist://{url_path(path)}", reads_only=reads_only, settings=settings)


def read_size(option: str, text: str) -> int:
    """Parse a size option such as `128MiB` to bytes. Raises InvalidUsage."""
    try:
        size = bytes_of(text)
    except InvalidUsage:
        size = 0
    if not 0 < size <= SIZE_MAX:
        raise InvalidUsage(f"{option} is {text!r:.100}; it must be a size such as '128MiB', up to {SIZE_MAX >> 40}TiB")
    return size


def read_age_ms(option: str, text: str) -> int:
    """Parse an age option such as `24h`, `50ms` or `none` to milliseconds. Raises InvalidUsage."""
    try:
        age_ms = history_ms(text, option, takes_zero=True)
    except InvalidUsage:
        age_ms = None
    if age_ms is None:
        raise InvalidUsage(f"{option} is {text!r:.100}; it must be an age such as '7d' (ms, s, m, h, d or w)")
    return age_ms


def check_given(arguments: argparse.Namespace, *names: str) -> None:
    """Raise InvalidUsage if one of these arguments is an empty string, for example an unset shell variable."""
    for name in names:
        if getattr(arguments, name) == "":
            raise InvalidUsage(f"--{name.replace('_', '-')} is empty: give a value, or leave it out")


def add_subcommand(sub: Any, name: str, what: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    """The parser of a subcommand, which `run` executes. `sub` is what `add_subparsers` returned."""
    parser: argparse.ArgumentParser = sub.add_parser(name, help=what, description=what)
    parser.set_defaults(run=run)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --dir, --blob and --consensus; PERSIST_DIRECTORY, PERSIST_BLOB, PERSIST_CONSENSUS are their defaults."""
    parser.add_argument("--dir", metavar="PATH", help=f"directory of the location (default ./{DEFAULT_DIRECTORY})")
    parser.add_argument("--blob", metavar="URL", help="blob store: file:///dir, s3://bucket/prefix, …")
    parser.add_argument("--consensus", metavar="URL", help="consensus store; put passwords in PERSIST_CONSENSUS")


def where_of(arguments: argparse.Namespace) -> Where:
    """Read the arguments of `add_arguments`, or else the environment."""
    if arguments.dir or arguments.blob or arguments.consensus:
        blob = arguments.blob or (os.environ.get("PERSIST_BLOB") if arguments.consensus else None)
        consensus = arguments.consensus or (os.environ.get("PERSIST_CONSENSUS") if arguments.blob else None)
        return Where(arguments.dir, blob, consensus)
    return Where(*(os.environ.get(name) for name in STORES))


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `add_arguments`, --url and --ca-file, for a command that also works through a server."""
    add_arguments(parser)
    parser.add_argument("--url", metavar="URL", help=f"a server, not the stores (or {URL}); its token is in {TOKEN}")
    parser.add_argument("--ca-file", metavar="FILE", help="PEM file of trusted CAs, for --url https://…")


def add_shard_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the name of a shard, and the arguments of `add_client_arguments`."""
    parser.add_argument("name", metavar="NAME", help="the shard")
    add_client_arguments(parser)


def connection_to(url: str, ca_file: str | None) -> Connection:
    """Connect to a server with the token of the environment. Raises InvalidUsage."""
    check_url(url)
    trust = trust_in(ca_file)
    return Connection(url, token=token_of_environment(), ca_file=trust.ca_file, certificate_file=trust.certificate_file)


def check_url(url: str) -> None:
    """Raise InvalidUsage if it is not an HTTP URL. The message redacts credentials in the URL."""
    if not url.lower().startswith(("http://", "https://")):
        raise InvalidUsage(f"--url is {without_secrets(url)!r:.200}; it must be http(s)://host:port, or use --dir")


def token_of_environment() -> str | None:
    """The token in PERSIST_TOKEN, or None. Raises InvalidUsage if it is malformed."""
    return checked_token(TOKEN, os.environ.get(TOKEN))


def trust_in(ca_file: str | None) -> ClientTls:
    """The TLS settings: trusted CAs from `ca_file` or the environment, and the client certificate from the latter."""
    return ClientTls(ca_file or os.environ.get(CA) or None, os.environ.get(CERTIFICATE) or None)


def url_of(arguments: argparse.Namespace) -> str | None:
    """The server URL of the arguments or the environment; None: the stores are opened. Raises InvalidUsage."""
    check_given(arguments, "url", "dir", "blob", "consensus", "ca_file")
    stores = [name for name in ("dir", "blob", "consensus") if getattr(arguments, name)]
    if arguments.url and stores:
        raise InvalidUsage(f"--url and --{stores[0]} are both given: give either a server or the stores")
    url: str | None = arguments.url
    if url is None and not stores and (url := os.environ.get(URL) or None) is not None:
        set_names = [name for name in STORES if os.environ.get(name)]
        if set_names:
            raise InvalidUsage(f"{URL} and {set_names[0]} are both set: give --url, or --dir, or unset one of them")
    if url is None and arguments.ca_file:
        raise InvalidUsage(f"--ca-file requires a server: give --url, or set {URL}")
    return url


@contextmanager
def client_of(arguments: argparse.Namespace, *, must_exist: bool = True) -> Iterator[Client]:
    """Yield the client of the arguments of `add_client_arguments`: of a server, or of stores opened in this process.

    `must_exist`: a missing directory is an error instead of being created. Raises InvalidUsage, Unavailable.
    """
    url = url_of(arguments)
    if url is None:
        kept = LocationSettings(history=DEFAULT_HISTORY)  # as `persist.connect` does
        client = Client(EmbeddedTransport(where_of(arguments).open(kept, must_exist=must_exist)))
    else:
        connection = connection_to(url, arguments.ca_file)
        client = Client(connection.transport(), connection.handles, connection)
    with client:
        yield client


@contextmanager
def shard_of(arguments: argparse.Namespace) -> Iterator[Shard]:
    """Yield the shard that the arguments of `add_shard_arguments` name. Raises UnknownShard, and as `client_of`."""
    with client_of(arguments) as client:
        yield client.shard(arguments.name)
