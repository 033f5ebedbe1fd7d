"""`persist completion bash|zsh|fish`: a script by which a shell completes commands, options, values and shard names.

The script calls this command with `--line` for the candidates. Shard names are those of the location in the line. If
there are no candidates, the shell completes file names.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from persist.cli.connection_args import add_client_arguments, client_of
from persist.core.errors import PersistError
from rpc.cli.program import COMMANDS, parser_for

_SHARD_NAMES = frozenset({"name", "names", "source", "other"})
_SCRIPTS = {
    "bash": """\
# Completion of persist for bash: source <(persist completion bash)
_persist() {
    local IFS=$'\\n'
    COMPREPLY=($(persist completion bash --line "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
}
complete -o default -F _persist persist
""",
    "zsh": """\
# Completion of persist for zsh, after compinit: source <(persist completion zsh)
_persist() {
    local -a known
    known=(${(f)"$(persist completion zsh --line "${(j: :)words[1,CURRENT]}" 2>/dev/null)"})
    if (( $#known )); then compadd -a known; else _files; fi
}
compdef _persist persist
""",
    "fish": """\
# Completion of persist for fish: persist completion fish | source
complete -c persist -a '(persist completion fish --line (commandline -cp) 2>/dev/null)'
""",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=_SCRIPTS, help="the shell; its script is printed")
    parser.add_argument("--line", metavar="TEXT", help="print the candidates for the end of this command line instead")


def run(arguments: argparse.Namespace) -> int:
    if arguments.line is None:
        print(_SCRIPTS[arguments.shell], end="")
    else:
        for word in candidates(arguments.line):
            print(word)
    return 0


def candidates(line: str) -> list[str]:
    """The candidates for the end of a command line, by the parsers of the commands."""
    _, *words = line.split()
    current = "" if line[-1:].isspace() or not words else words.pop()
    parser = parser_for(words[0] if words and words[0] in COMMANDS else None)
    return [word for word in _following(parser, words, current) if word.startswith(current)]


def _following(parser: argparse.ArgumentParser, words: Sequence[str], current: str) -> Iterable[str]:
    positionals = [action for action in parser._actions if not action.option_strings]
    option: argparse.Action | None = None  # that takes the next word
    count = 0
    for number, word in enumerate(words):
        if option is not None:
            option = None
        elif word.startswith("-"):
            option = parser._option_string_actions.get(word)
            if option is not None and option.nargs == 0:
                option = None
        else:
            subcommands = next(
                (action for action in positionals if isinstance(action, argparse._SubParsersAction)), None
            )
            if subcommands is not None:
                inner = subcommands.choices.get(word)
                return [] if inner is None else _following(inner, words[number + 1 :], current)
            count += 1
    if option is not None:
        return _values(option, words, current)
    if current.startswith("-"):
        return parser._option_string_actions
    if not positionals or (count >= len(positionals) and positionals[-1].nargs not in ("*", "+")):
        return []
    return _values(positionals[min(count, len(positionals) - 1)], words, current)


def _values(action: argparse.Action, words: Sequence[str], current: str) -> Iterable[str]:
    if action.choices is not None:
        return action.choices
    return _shard_names(words, current) if action.dest in _SHARD_NAMES else []


def _shard_names(words: Sequence[str], prefix: str) -> Iterable[str]:
    where = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    add_client_arguments(where)
    try:
        with client_of(where.parse_known_args(words)[0]) as client:
            return list(client.shards(prefix))
    except (argparse.ArgumentError, PersistError):
        return []
