"""`persist drop NAME…`: drops shards. It asks first in a terminal; elsewhere it needs --yes."""

from __future__ import annotations

import argparse
import json
import sys

from persist.cli.connection_args import add_client_arguments, client_of
from persist.cli.terminal import plain
from persist.client.shard_listing import ShardsDropped

REFUSED = 2
SHOWN_MAX = 20  # names in the question


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="the shards; or give --prefix")
    add_client_arguments(parser)
    parser.add_argument("--prefix", help="the shards whose names begin with this")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--force", action="store_true", help="also those that readers hold")


def run(arguments: argparse.Namespace) -> int:
    with client_of(arguments) as client:
        names, prefix, force = arguments.names or None, arguments.prefix, arguments.force
        chosen = client.drop_shards(names, prefix=prefix, force=force)
        count = len(chosen.outcomes)
        if not arguments.yes and not _asked(chosen):
            print(f"persist drop: nothing was dropped: {count} would be; give --yes to drop them", file=sys.stderr)
            return REFUSED
        done = client.drop_shards(names, prefix=prefix, confirm=count, force=force) if count else chosen
    print(json.dumps(done.to_json()))
    return 0 if done.complete or not count else 1


def _asked(chosen: ShardsDropped) -> bool:
    """Whether a person at the terminal says yes."""
    if not sys.stdin.isatty():
        return False
    names = [plain(one.shard) for one in chosen.outcomes[:SHOWN_MAX]]
    more = f" and {len(chosen.outcomes) - SHOWN_MAX} more" if len(chosen.outcomes) > SHOWN_MAX else ""
    print(f"drop {', '.join(names)}{more}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
