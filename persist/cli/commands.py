"""Which commands there are, in groups: where each lives, and what it does in one line."""

from __future__ import annotations

import argparse
import difflib
import importlib
from types import ModuleType
from typing import Any, NoReturn

import persist
from blob import without_secrets
from persist.cli.terminal import Screen, without_secrets_of

# group -> command -> (module, one line of help). Modules are loaded when asked for: `persist gc` needs no FastAPI.
GROUPS = {
    "Rows": {
        "create": ("persist.cli.create", "make a shard"),
        "import": ("persist.cli.import_job", "write the rows of files to a shard: CSV, Parquet, NDJSON, Arrow"),
        "cat": ("persist.cli.cat", "the rows of a shard, in a terminal as a table; or their number"),
        "tail": ("persist.cli.tail", "the latest changes of a shard; with -f those to come as well"),
        "diff": ("persist.cli.diff", "what differs between two times of a shard, or between two shards"),
        "schema": ("persist.cli.schema", "the columns of a shard: show, add, rename, drop, move or widen them"),
        "export": ("persist.cli.export", "write the rows of a shard to a file"),
        "drop": ("persist.cli.drop", "drop shards, by names or a prefix"),
    },
    "Looking": {
        "shards": ("persist.cli.shards", "list shards, or show one"),
        "inspect": ("persist.cli.inspect", "look at shards and stores, also damaged ones; writes nothing"),
        "check": ("rpc.cli.check", "what is wrong with a location, why, and what helps; --repair repairs a shard"),
        "history": ("persist.cli.history", "how much history a shard keeps, and which time a wall clock names"),
    },
    "Keeping and letting go": {
        "restore": ("persist.cli.restore", "make the contents of a shard again what they were"),
        "constraints": ("persist.cli.constraints", "what a shard asks of its rows: unique keys, no nulls, checks"),
        "tag": ("persist.cli.tag", "keep single times of a shard readable, by name"),
        "retention": ("persist.cli.retention", "which rows a shard keeps, and what holds its policy back"),
        "cut": ("persist.cli.cut", "a frontier for each of many shards, by which they are truncated later"),
        "truncate": ("persist.cli.truncate", "take away what was in a shard before a time and still is"),
        "erase": ("persist.cli.erase", "take rows of a shard away for good"),
        "erased": ("persist.cli.erased", "what still shows rows that are gone, or the receipt that nothing does"),
    },
    "Copies": {
        "clone": ("persist.cli.clone", "make a shard with the contents of another one; no row is copied"),
        "backup": ("persist.cli.backup", "copies of a location in a blob store of their own"),
        "state": ("persist.cli.state", "the State of a shard as a JSON file, and a shard made of one"),
        "recover": (
            "persist.cli.recover",
            "begin logs anew from the blob store alone, once the consensus store is lost",
        ),
    },
    "Regions": {
        "regions": (
            "persist.cli.regions",
            "the index by which clients find servers, and what regions hold at a home",
        ),
        "replicate": ("persist.cli.replicate", "copy the blob store of a location to another region"),
        "switch": ("persist.cli.switch", "make a copy home as planned: nothing is lost"),
        "promote": ("persist.cli.promote", "make a copy home, once the home is lost"),
        "salvage": ("persist.cli.salvage", "write what only an old home has to files"),
        "demote": ("persist.cli.demote", "turn an old home into a copy of the new one"),
    },
    "Running": {
        "serve": ("rpc.cli.serve", "serve shards over HTTP"),
        "compactor": ("compactor.cli.compactor", "merge batches in the background"),
        "gc": ("compactor.cli.gc", "delete what no reader can need any more"),
        "token": ("rpc.cli.token", "mint, list and revoke bearer tokens of a server"),
        "completion": ("persist.cli.completion", "a script by which bash, zsh or fish complete commands"),
    },
}
COMMANDS = {name: found for commands in GROUPS.values() for name, found in commands.items()}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the words without the secrets of the URLs among them."""

    _words: tuple[str, ...] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = tuple(args or ())
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        super().error(without_secrets_of(self._words, message))


def parser_of(command: str) -> tuple[ModuleType, argparse.ArgumentParser]:
    """The module of a command, and the parser of its arguments."""
    path, what = COMMANDS[command]
    module = importlib.import_module(path)
    parser = _Parser(prog=f"persist {command}", description=what)
    module.add_arguments(parser)
    return module, parser


def help_text(screen: Screen) -> str:
    """What `persist --help` prints: a line for each command."""
    width = max(map(len, COMMANDS))
    lines = ["usage: persist COMMAND …", "", "Tables that change, each of their times readable.", ""]
    for group, commands in GROUPS.items():
        lines.append(screen.bold(group))
        lines += [f"  {name:{width}}  {what}" for name, (_, what) in commands.items()]
        lines.append("")
    lines.append("persist COMMAND --help tells the arguments of one; persist --version the version.")
    return "\n".join(lines)


# Commands that remove what may be needed: a typo must not lead to one of them.
DESTRUCTIVE = frozenset(("drop", "restore", "truncate", "erase", "recover", "switch", "promote", "demote", "gc"))


def unknown(command: str) -> str:
    """What is said where there is no such command."""
    close = difflib.get_close_matches(command, COMMANDS.keys() - DESTRUCTIVE, 1)
    meant = f"did you mean {close[0]!r}?" if close else "`persist --help` lists them"
    return f"there is no command {without_secrets(command)!r:.100}: {meant}"


def version() -> str:
    """What `persist --version` prints."""
    return f"persist {persist.__version__}"
