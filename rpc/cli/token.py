"""`persist token NAME`: mint a bearer token and keep its hash in a tokens file."""

from __future__ import annotations

import argparse
import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

from persist.client.arguments import named_once
from persist.core.errors import InvalidUsage
from rpc.auth import SCOPES, mint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the token's id, which logs show")
    parser.add_argument("--file", required=True, help="tokens file to add it to; made when it is missing")
    parser.add_argument("--scope", choices=SCOPES, default="read", help="admin includes write, write includes read")
    parser.add_argument("--prefix", action="append", default=[], help="only shards with this prefix; may be repeated")
    parser.add_argument("--expires", metavar="DATE", help="ISO date or time after which it is refused (UTC)")


def run(arguments: argparse.Namespace) -> int:
    path = Path(arguments.file)
    tokens = _tokens(path)
    if any(entry.get("id") == arguments.name for entry in tokens):
        raise InvalidUsage(f"{path} has a token {arguments.name!r} already; remove it, or take another name")
    token, digest = mint(arguments.name)
    entry: dict[str, Any] = {"id": arguments.name, "sha256": digest, "scopes": [arguments.scope]}
    if arguments.prefix:
        entry["prefixes"] = arguments.prefix
    if arguments.expires is not None:
        try:
            datetime.fromisoformat(arguments.expires)
        except ValueError as error:
            raise InvalidUsage(f"--expires is {arguments.expires!r}; it must be a date such as 2030-01-31") from error
        entry["expires"] = arguments.expires
    _replace(path, {"tokens": [*tokens, entry]})
    print(token)
    return 0


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
