"""`persist token`: create, list and revoke the bearer tokens of a tokens file, which stores their hashes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from blob.private_files import locked
from persist.cli.connection_args import add_subcommand
from persist.cli.output_files import replacing
from persist.core.commands import SCOPES
from persist.core.errors import InvalidUsage, Unavailable
from rpc.auth import entries_of, expiry_of, mint, parse_tokens, read_tokens_file
from rpc.tls import checked_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="SUBCOMMAND")
    create = add_subcommand(commands, "create", "create a token, and print it", _create)
    listing = add_subcommand(commands, "list", "list the tokens of the file, a line of JSON each", _list)
    revoke = add_subcommand(commands, "revoke", "remove a token from the file", _revoke)
    for subcommand in (create, revoke):
        subcommand.add_argument("id", metavar="ID", help="the token's id, which appears in logs")
    for subcommand in (create, listing, revoke):
        subcommand.add_argument("--file", required=True, help="the tokens file; `create` makes a missing one")
    create.add_argument(
        "--scope",
        choices=SCOPES,
        help="read (the default); write and maintain include read, manage includes write, admin includes all",
    )
    create.add_argument("--prefix", action="append", default=[], help="only shards with this prefix; can be repeated")
    create.add_argument(
        "--certificate",
        metavar="NAME",
        help="instead of a token, a client certificate with this name: DNS:…, URI:…, email:…, IP:… or subject:CN=…",
    )
    create.add_argument("--expires", metavar="DATE", help="ISO date or time of its expiry (UTC)")


def _create(arguments: argparse.Namespace) -> int:
    path = Path(arguments.file)
    with _locked(path):
        tokens = _tokens(path)
        token = _mint(arguments, path, tokens)
        try:
            sys.stdout.write(f"{token}\n")
            sys.stdout.flush()
        except OSError:  # it was not shown, and cannot be shown again
            _replace(path, tokens)
            raise
    return 0


def _list(arguments: argparse.Namespace) -> int:
    path = _existing(arguments)
    tokens = _tokens(path)
    _checked(path, tokens)
    for entry in tokens:
        print(json.dumps(_listed(entry)))
    return 0


def _revoke(arguments: argparse.Namespace) -> int:
    path = _existing(arguments)
    with _locked(path):
        tokens = _tokens(path)
        left = [entry for entry in tokens if entry.get("id") != arguments.id]
        if len(left) == len(tokens):
            raise InvalidUsage(f"{path} has no token {arguments.id!r}")
        _replace(path, left)
    return 0


def _existing(arguments: argparse.Namespace) -> Path:
    path = Path(arguments.file)
    if not path.exists():
        raise InvalidUsage(f"the tokens file {path} does not exist")
    return path


def _listed(entry: dict[str, Any]) -> dict[str, Any]:
    """A token without its hash."""
    until = entry.get("expires")
    listed = {name: entry.get(name) for name in ("id", "scopes", "prefixes", "expires")}
    if "certificate" in entry:
        listed["certificate"] = entry["certificate"]
    return {**listed, "expired": until is not None and expiry_of(until) <= datetime.now(UTC)}


def _mint(arguments: argparse.Namespace, path: Path, tokens: list[dict[str, Any]]) -> str:
    if any(entry.get("id") == arguments.id for entry in tokens):
        raise InvalidUsage(f"{path} has a token {arguments.id!r} already; revoke it, or use another id")
    token, digest = mint(arguments.id)
    entry: dict[str, Any] = {"id": arguments.id, "sha256": digest, "scopes": [arguments.scope or "read"]}
    if arguments.certificate is not None:
        del entry["sha256"]
        try:
            entry["certificate"] = token = checked_name(arguments.certificate)
        except ValueError as error:
            raise InvalidUsage(f"--{error}") from error
    if arguments.prefix:
        if "" in arguments.prefix:
            raise InvalidUsage("--prefix is empty: give a prefix, or omit it for all shards")
        entry["prefixes"] = arguments.prefix
    if arguments.expires is not None:
        try:
            is_past = expiry_of(arguments.expires) <= datetime.now(UTC)
        except ValueError as error:
            raise InvalidUsage(f"--expires is {arguments.expires!r}; it must be a date such as 2030-01-31") from error
        if is_past:
            raise InvalidUsage(f"--expires is {arguments.expires!r}, which is in the past")
        entry["expires"] = arguments.expires
    _replace(path, [*tokens, entry])
    return token


def _tokens(path: Path) -> list[dict[str, Any]]:
    try:
        return entries_of(read_tokens_file(str(path)), str(path))
    except FileNotFoundError:
        return []


def _checked(path: Path, tokens: list[dict[str, Any]]) -> bytes:
    """The content of a file with these tokens. Raises InvalidUsage if a server would reject it."""
    data = (json.dumps({"tokens": tokens}, indent=2) + "\n").encode()
    parse_tokens(data, str(path))
    return data


def _replace(path: Path, tokens: list[dict[str, Any]]) -> None:
    """Replace the file atomically, readable for its owner only.

    An invalid file is never written, since a server would reject all tokens.
    """
    data = _checked(path, tokens)
    with replacing(path, owner_only=True) as file:
        file.write(data)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the file against concurrent `persist token` commands, which would lose an update.

    Raises InvalidUsage if it cannot be locked, Unavailable if another command holds the lock for long.
    """
    target = Path(os.path.realpath(path))
    lock = target.with_name(f".{target.name}.lock")
    with ExitStack() as held:
        try:
            held.enter_context(locked(lock))
        except TimeoutError as error:
            raise Unavailable(
                f"another `persist token` has held {lock} for some seconds; {path} is unchanged: retry"
            ) from error
        except OSError as error:
            raise InvalidUsage(f"the tokens file {path} cannot be written: lock {lock}: {error.strerror}") from error
        yield
