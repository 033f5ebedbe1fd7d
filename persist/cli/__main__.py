"""`persist COMMAND`. Each command is a module of this package with `add_arguments(parser)` and `run(args) -> int`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import persist
from persist.core.errors import PersistError

# command -> (module, one line of help). Modules are loaded when asked for: `persist gc` needs no FastAPI.
COMMANDS = {
    "serve": ("rpc.cli.serve", "serve shards over HTTP"),
    "compactor": ("compactor.cli.compactor", "merge batches in the background"),
    "gc": ("compactor.cli.gc", "delete what no reader can need any more"),
    "shards": ("persist.cli.shards", "list shards, or show one"),
    "inspect": ("persist.cli.inspect", "look at shards and stores, also damaged ones; writes nothing"),
    "cat": ("rpc.cli.cat", "the rows of a shard, as NDJSON or CSV"),
    "history": ("persist.cli.history", "how much history a shard keeps, and which time a wall clock names"),
    "changes": ("persist.cli.changes", "what was added to a shard and removed between two times"),
    "restore": ("persist.cli.restore", "make the contents of a shard again what they were"),
    "cut": ("persist.cli.cut", "a frontier for each of many shards, by which they are truncated later"),
    "truncate": ("persist.cli.truncate", "take away what was in a shard before a time and still is"),
    "drop": ("persist.cli.drop", "drop shards, by names or a prefix"),
    "retention": ("persist.cli.retention", "which rows a shard keeps, and what holds its policy back"),
    "erase": ("persist.cli.erase", "take rows of a shard away for good"),
    "erased": ("persist.cli.erased", "what still shows rows that are gone, or the receipt that nothing does"),
    "tag": ("persist.cli.tag", "keep single times of a shard readable, by name"),
    "repair": ("persist.cli.repair", "find the parts of a shard that cannot be read, and mend it"),
    "verify": ("persist.cli.verify", "whether everything that shards need is there and sound"),
    "backup": ("persist.cli.backup", "copies of a location in a blob store of their own"),
    "clone": ("persist.cli.clone", "make a shard with the contents of another one; no row is copied"),
    "state": ("persist.cli.state", "the State of a shard as a JSON file, and a shard made of one"),
    "recover": ("persist.cli.recover", "begin logs anew from the blob store alone, once the consensus store is lost"),
    "replicate": ("persist.cli.replicate", "copy the blob store of a location to another region"),
    "promote": ("persist.cli.promote", "make a copy home, once the home is lost"),
    "switch": ("persist.cli.switch", "make a copy home as planned: nothing is lost"),
    "salvage": ("persist.cli.salvage", "write what only an old home has to files"),
    "demote": ("persist.cli.demote", "turn an old home into a copy of the new one"),
    "regions": (
        "persist.cli.regions",
        "the index by which clients find servers, and what regions hold at a home",
    ),
    "upgrade": ("persist.cli.upgrade", "let what older builds cannot read be written"),
    "token": ("rpc.cli.token", "mint a bearer token for a server"),
}
EXIT_ERROR = 1
EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. Errors of persist are one line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="persist", description="Durable, definite time-varying collections.")
    parser.add_argument("--version", action="version", version=f"persist {persist.__version__}")
    parser.add_argument("command", choices=list(COMMANDS), help="; ".join(f"{k}: {v[1]}" for k, v in COMMANDS.items()))
    if not arguments or arguments[0] in ("-h", "--help"):
        parser.print_help()
        return 0 if arguments else EXIT_USAGE
    command = parser.parse_args(arguments[:1]).command
    module = importlib.import_module(COMMANDS[command][0])
    sub = argparse.ArgumentParser(prog=f"persist {command}", description=COMMANDS[command][1])
    module.add_arguments(sub)
    try:
        code = int(module.run(sub.parse_args(arguments[1:])))
        sys.stdout.flush()
        return code
    except PersistError as error:
        print(f"persist {command}: {error.message}", file=sys.stderr)
        return EXIT_ERROR
    except BrokenPipeError:  # who reads the output has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
