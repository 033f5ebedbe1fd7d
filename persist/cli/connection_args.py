"""The arguments by which commands find their shards: a directory, the URLs of two stores, or a server."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blob import without_secrets
from persist.client.connect import Client, Connection
from persist.client.embedded import EmbeddedTransport
from persist.client.server_address import Trust, checked_token
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
    """Either a directory or both URLs; nothing means the default directory."""

    directory: str | None = None
    blob: str | None = field(default=None, repr=False)
    consensus: str | None = field(default=None, repr=False)  # which may hold a password

    def open(self, settings: LocationSettings | None = None, *, must_exist: bool = False) -> Location:
        """Open the location. Raises InvalidUsage saying what is wrong with the arguments."""
        if self.blob or self.consensus:
            if self.directory or not (self.blob and self.consensus):
                raise InvalidUsage("give either --dir, or both --blob and --consensus")
            if must_exist:
                check_there(self.blob or "")
            return open_stores(self.blob or "", self.consensus or "", settings=settings)
        path = Path(self.directory or DEFAULT_DIRECTORY).absolute()
        at = url_path(path)
        if must_exist and not path.exists():
            raise InvalidUsage(f"{path} does not exist; give --dir, or --blob and --consensus")
        return open_location(f"persist://{at}", settings=settings)


def read_size(option: str, text: str) -> int:
    """The bytes that the text of an option means, such as `128MiB`. Raises InvalidUsage."""
    try:
        size = bytes_of(text)
    except InvalidUsage:
        size = 0
    if not 0 < size <= SIZE_MAX:
        raise InvalidUsage(
            f"{option} is {text!r:.100}; it must be a size such as '128MiB', at most {SIZE_MAX >> 40}TiB"
        )
    return size


def read_age_ms(option: str, text: str) -> int:
    """The milliseconds that the text of an option means, such as `24h`, `50ms` or `none`. Raises InvalidUsage."""
    try:
        age_ms = history_ms(text, option)
    except InvalidUsage:
        age_ms = None
    if age_ms is None:
        raise InvalidUsage(f"{option} is {text!r:.100}; it must be an age such as '7d' (ms, s, m, h, d or w)")
    return age_ms


def check_given(arguments: argparse.Namespace, *names: str) -> None:
    """Raises InvalidUsage where one of these arguments is given and empty, as by a variable of a shell that is not set.

    Then who gave it would not get what was asked for, and not be told.
    """
    for name in names:
        if getattr(arguments, name) == "":
            raise InvalidUsage(f"--{name.replace('_', '-')} is empty: give a value, or leave it out")


def add_subcommand(
    commands: Any, name: str, what: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """The parser of a subcommand, which `run` executes. `commands` is what `add_subparsers` returned."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=what, description=what)
    parser.set_defaults(run=run)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --dir, --blob and --consensus; PERSIST_DIRECTORY, PERSIST_BLOB, PERSIST_CONSENSUS are their defaults."""
    parser.add_argument(
        "--dir", metavar="PATH", help=f"directory that holds the shards (default ./{DEFAULT_DIRECTORY})"
    )
    parser.add_argument("--blob", metavar="URL", help="blob store: file:///dir, s3://bucket/prefix, …")
    parser.add_argument(
        "--consensus", metavar="URL", help="consensus store; a password is better kept in PERSIST_CONSENSUS"
    )


def where_of(arguments: argparse.Namespace) -> Where:
    """What the arguments say, or else the environment."""
    if arguments.dir or arguments.blob or arguments.consensus:
        blob = arguments.blob or (os.environ.get("PERSIST_BLOB") if arguments.consensus else None)
        consensus = arguments.consensus or (os.environ.get("PERSIST_CONSENSUS") if arguments.blob else None)
        return Where(arguments.dir, blob, consensus)
    return Where(*(os.environ.get(name) for name in STORES))


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `add_arguments` adds, --url and --ca-file, for a command that works through a server as well."""
    add_arguments(parser)
    parser.add_argument(
        "--url",
        metavar="URL",
        help=f"a server in the place of the stores (or {URL}); its token goes in {TOKEN}",
    )
    parser.add_argument("--ca-file", metavar="FILE", help="PEM file of whom to trust, for --url https://…")


def connection_to(url: str, ca_file: str | None) -> Connection:
    """The connection to a server, with the token of the environment. Raises InvalidUsage."""
    check_url(url)
    trust = trust_in(ca_file)
    return Connection(url, token=token_of_environment(), ca_file=trust.ca_file, certificate_file=trust.certificate_file)


def check_url(url: str) -> None:
    """Raises InvalidUsage: it is of no server. What it says before an @ may be a password, and is not shown."""
    if not url.lower().startswith(("http://", "https://")):
        raise InvalidUsage(
            f"--url is {without_secrets(url)!r:.200}; it must be http(s)://host:port: a directory is given by --dir"
        )


def token_of_environment() -> str | None:
    """None: there is none. Raises InvalidUsage: it is none."""
    return checked_token(TOKEN, os.environ.get(TOKEN))


def trust_of(arguments: argparse.Namespace) -> Trust:
    """What --ca-file and the environment say."""
    return trust_in(arguments.ca_file)


def trust_in(ca_file: str | None) -> Trust:
    """TLS of a command: whom to trust, by `ca_file` or else the environment, which also names our certificate."""
    return Trust(ca_file or os.environ.get(CA) or None, os.environ.get(CERTIFICATE) or None)


def url_of(arguments: argparse.Namespace) -> str | None:
    """The server that is meant, by the arguments or else by the environment; None: the stores. Raises InvalidUsage."""
    check_given(arguments, "url", "dir", "blob", "consensus", "ca_file")
    stores = [name for name in ("dir", "blob", "consensus") if getattr(arguments, name)]
    if arguments.url and stores:
        raise InvalidUsage(f"--url and --{stores[0]} are both given: give a server or the stores, not both")
    url: str | None = arguments.url
    if url is None and not stores and (url := os.environ.get(URL) or None) is not None:
        known = [name for name in STORES if os.environ.get(name)]
        if known:
            raise InvalidUsage(f"{URL} and {known[0]} are both set: give --url, or --dir, or unset one of them")
    if url is None and arguments.ca_file:
        raise InvalidUsage(f"--ca-file is for a server: give --url, or set {URL}")
    return url


@contextmanager
def client_of(arguments: argparse.Namespace, *, must_exist: bool = True) -> Iterator[Client]:
    """The client that the arguments of `add_client_arguments` ask for: of a server, or of stores that it opens here.

    `must_exist`: a directory that is missing is refused, and not made. Raises InvalidUsage, Unavailable.
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
