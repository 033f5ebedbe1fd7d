"""Writes the commands in docs/shell.md from the parsers: `python -m tests.support.cli_page`, or `make docs`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from rpc.cli.program import COMMANDS, parser_for
from tests.support.pages import ROOT

PAGE = ROOT / "docs" / "shell.md"
MARKS = ("<!-- commands: written by `make docs` -->\n", "<!-- end of commands -->\n")
OPTIONS_MAX = 15
"""The table leaves longer lists to `--help`."""
_EVERYWHERE = {"--help", "--dir", "--blob", "--consensus", "--url", "--ca-file", "--no-colour"}


def page(text: str) -> str:
    """The page `text` with its table of commands written anew. Raises ValueError if the marks are missing."""
    before, start, rest = text.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (start and end):
        raise ValueError(f"{PAGE.name} has no place for the commands")
    rows = "".join(f"{row}\n" for command in COMMANDS for row in _rows(command))
    return f"{before}{start}| command | what it does | options |\n| --- | --- | --- |\n{rows}{end}{after}"


def _rows(command: str) -> Iterator[str]:
    [subparsers] = _subparsers(parser_for(command))
    yield from _rows_of(command, subparsers.choices[command], COMMANDS[command][1])


def _rows_of(words: str, parser: argparse.ArgumentParser, what: str) -> Iterator[str]:
    subparsers = _subparsers(parser)
    if not subparsers:
        positional = [_shown(action) for action in parser._actions if not action.option_strings]
        options = [action.option_strings[-1] for action in parser._actions if action.option_strings and action.help]
        named = [name for name in options if name not in _EVERYWHERE]
        listed = f"`{' '.join(named)}`" if named else ""
        shown = listed if len(named) <= OPTIONS_MAX else "see `--help`"
        yield f"| `{' '.join([words, *positional])}` | {what} | {shown} |"
    for found in subparsers:
        helps = {one.dest: one.help or "" for one in found._choices_actions}
        for name, one in found.choices.items():
            yield from _rows_of(f"{words} {name}", one, helps.get(name, ""))


def _subparsers(parser: argparse.ArgumentParser) -> list[argparse._SubParsersAction[argparse.ArgumentParser]]:
    return [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]


def _shown(action: argparse.Action) -> str:
    """A positional argument as a usage line has it."""
    name = str(action.metavar or action.dest)
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ..."}.get(str(action.nargs), name).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
