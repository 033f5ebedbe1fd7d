"""`persist token NAME`: mint a bearer token and keep its hash in a tokens file. It also lists them, and revokes one."""

from __future__ import annotations

import argparse
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from persist.client.arguments import named_once
from persist.core.errors import InvalidUsage
from rpc.auth import SCOPES, mint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="the token's id, which logs show")
    parser.add_argument("--file", required=True, help="the tokens file; made when it is missing")
    does = parser.add_mutually_exclusive_group()
    does.add_argument("--list", action="store_true", help="show the tokens of the file, a line of JSON each")
    does.add_argument("--revoke", action="store_true", help="take this token out of the file")
    parser.add_argument(
        "--scope", choices=SCOPES, help="read (the default), write or admin: admin includes write, write includes read"
    )
    parser.add_argument("--prefix", action="append", default=[], help="only shards with this prefix; may be repeated")
    parser.add_argument("--expires", metavar="DATE", help="ISO date or time after which it is refused (UTC)")


def run(arguments: argparse.Namespace) -> int:
    path = Path(arguments.file)
    if arguments.list == (arguments.name is not None):
        raise InvalidUsage("give the id of a token, or --list")
    mints = not (arguments.list or arguments.revoke)
    if not mints and (arguments.scope or arguments.prefix or arguments.expires):
        raise InvalidUsage("--scope, --prefix and --expires are for a token that is minted")
    if not mints and not path.exists():
        raise InvalidUsage(f"the tokens file {path} does not exist")
    tokens = _tokens(path)
    if arguments.list:
        for entry in tokens:
            print(json.dumps(_told(entry)))
    elif arguments.revoke:
        left = [entry for entry in tokens if entry.get("id") != arguments.name]
        if len(left) == len(tokens):
            raise InvalidUsage(f"{path} has no token {arguments.name!r}")
        _replace(path, {"tokens": left})
    else:
        print(_minted(arguments, path, tokens))
    return 0


def _told(entry: dict[str, Any]) -> dict[str, Any]:
    """A token without its hash."""
    until = _instant(entry.get("expires"))
    told = {name: entry.get(name) for name in ("id", "scopes", "prefixes", "expires")}
    return {**told, "expired": until is not None and until <= datetime.now(UTC)}


def _instant(text: object) -> datetime | None:
    """When a token expires. Raises InvalidUsage."""
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(str(text))
    except ValueError as error:
        raise InvalidUsage(f"a token expires on {text!r}; it must be a date such as 2030-01-31") from error
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _minted(arguments: argparse.Namespace, path: Path, tokens: list[dict[str, Any]]) -> str:
    if any(entry.get("id") == arguments.name for entry in tokens):
        raise InvalidUsage(f"{path} has a token {arguments.name!r} already; revoke it, or take another name")
    token, digest = mint(arguments.name)
    entry: dict[str, Any] = {"id": arguments.name, "sha256": digest, "scopes": [arguments.scope or "read"]}
    if arguments.prefix:
        entry["prefixes"] = arguments.prefix
    if arguments.expires is not None:
        until = _instant(arguments.expires)
        if until is not None and until <= datetime.now(UTC):
            raise InvalidUsage(f"--expires is {arguments.expires!r}, which is past: nobody could use the token")
        entry["expires"] = arguments.expires
    _replace(path, {"tokens": [*tokens, entry]})
    return token


def _tokens(path: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=named_once)["tokens"]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidUsage(f"the tokens file {path} cannot be read: {error}") from error
    if not isinstance(found, list):
        raise InvalidUsage(f"the tokens file {path} does not hold a list of tokens")
    return found


def _replace(path: Path, content: dict[str, Any]) -> None:
    """Write the file whole, for its owner only: a server that reads it meanwhile sees the old or the new one."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as error:
        raise InvalidUsage(f"the tokens file {path} cannot be written: {error.strerror}") from error
