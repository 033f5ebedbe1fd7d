"""`persist completion bash|zsh|fish`: a script by which a shell completes commands, options, files and names of shards.

It is made of the parsers of the commands. Names of shards are those that `persist shards --names` tells of the place
that the line names.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from persist.cli.commands import COMMANDS, parser_of

SHELLS = ("bash", "zsh", "fish")
SHARD, FILE, NOTHING = "shard", "file", "none"
_SHARD_NAMES = frozenset({"name", "names", "source", "other"})
_FILE_WORDS = frozenset({"FILE", "PATH", "DIR"})
PLACES = ("--dir", "--blob", "--consensus", "--url", "--ca-file")


@dataclass(frozen=True)
class Line:
    """What may follow a command: its options, what the value of an option is, and what stands at each place.

    A kind is SHARD, FILE, NOTHING or the words themselves with commas.
    """

    command: str
    options: tuple[str, ...]
    values: dict[str, str]
    places: tuple[str, ...]
    is_last_repeated: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="which one; its script goes to standard output")


def run(arguments: argparse.Namespace) -> int:
    lines = list(lines_of_all())
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[arguments.shell](lines), end="")
    return 0


def lines_of_all() -> Iterator[Line]:
    """Every command; those with actions also once for each of these, as `backup create`."""
    for command in COMMANDS:
        yield from _lines(command, parser_of(command)[1])


def _lines(command: str, parser: argparse.ArgumentParser) -> Iterator[Line]:
    options: list[str] = []
    values: dict[str, str] = {}
    places: list[str] = []
    is_repeated = False
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            places.append(",".join(action.choices))
            for name, inner in action.choices.items():
                yield from _lines(f"{command} {name}", inner)
        elif action.option_strings:
            options += action.option_strings
            if action.nargs != 0:
                values.update(dict.fromkeys(action.option_strings, _kind(action)))
        else:
            places.append(_kind(action))
            is_repeated = action.nargs in ("*", "+")
    yield Line(command, tuple(options), values, tuple(places), is_repeated)


def _kind(action: argparse.Action) -> str:
    if action.choices is not None:
        return ",".join(map(str, action.choices))
    if action.dest in _SHARD_NAMES:
        return SHARD
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    return FILE if metavar in _FILE_WORDS or action.dest in ("file", "files") else NOTHING


def _cases(lines: list[Line]) -> str:
    """A branch of a `case` for each command, in the words that bash and zsh share."""
    found = []
    for line in lines:
        values = " ".join(f"{option}={kind}" for option, kind in line.values.items())
        places = " ".join(line.places)
        found.append(
            f'        "{line.command}") options="{" ".join(line.options)}"\n'
            f'            values="{values}"\n'
            f'            places="{places}" repeated={int(line.is_last_repeated)} ;;'
        )
    return "\n".join(found)


def _with_actions(lines: list[Line]) -> str:
    return "|".join(sorted({line.command.partition(" ")[0] for line in lines if " " in line.command}))


# What both shells do with the words of the line: `line` has those before the one that is completed, `$1` and on.
_SHARED = """
_persist_table() {{
    case "$1" in
{cases}
        *) return 1 ;;
    esac
}}

# What may stand next: sets `kind`. Its arguments are the word to complete, and the words before it.
_persist_kind() {{
    local current="$1" command="$2" options values places repeated word last_value="" pair count=0 is_value
    shift 2
    case "$command" in
        {with_actions}) if [ $# -gt 0 ]; then command="$command $1"; shift; fi ;;
    esac
    kind=none
    _persist_table "$command" || return
    for word in "$@"; do
        if [ -n "$last_value" ]; then last_value=""; continue; fi
        case "$word" in
            -*) case " $values" in *" $word="*) last_value="$word" ;; esac ;;
            *) count=$((count + 1)) ;;
        esac
    done
    if [ -n "$last_value" ]; then
        kind="${{values#*"$last_value="}}"
        kind="${{kind%% *}}"
        return
    fi
    case "$current" in -*) kind="$(printf '%s' "$options" | tr ' ' ',')"; return ;; esac
    while [ $count -gt 0 ]; do
        case "$places" in
            *" "*) places="${{places#* }}" ;;
            *) [ "$repeated" = 1 ] || places="none"; count=0 ;;
        esac
        count=$((count - 1))
    done
    kind="${{places%% *}}"
    if [ -z "$kind" ]; then kind=none; fi
}}

# The names of the shards at the place that the words name.
_persist_shards() {{
    local word is_value=0
    local -a where
    where=()
    for word in "$@"; do
        if [ $is_value = 1 ]; then where+=("$word"); is_value=0; continue; fi
        case "$word" in
            {places}) where+=("$word"); is_value=1 ;;
        esac
    done
    persist shards --names "${{where[@]}}" 2>/dev/null
}}
"""

_BASH = """
_persist() {{
    local text="${{COMP_LINE:0:COMP_POINT}}" current kind
    local -a words
    read -ra words <<< "$text"
    case "$text" in *[[:space:]]) words+=("") ;; esac
    current="${{words[${{#words[@]}}-1]}}"
    unset "words[${{#words[@]}}-1]"
    COMPREPLY=()
    if [ ${{#words[@]}} -lt 2 ]; then
        COMPREPLY=($(compgen -W "{commands} --help --version" -- "$current"))
        return
    fi
    _persist_kind "$current" "${{words[@]:1}}"
    case "$kind" in
        none) ;;
        file) compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- "$current")) ;;
        shard) COMPREPLY=($(compgen -W "$(_persist_shards "${{words[@]:2}}")" -- "$current")) ;;
        *) COMPREPLY=($(compgen -W "${{kind//,/ }}" -- "$current")) ;;
    esac
}}

complete -F _persist persist
"""

_ZSH = """
_persist() {{
    local kind
    if [ $CURRENT -le 2 ]; then
        compadd -- {commands} --help --version
        return
    fi
    _persist_kind "${{words[CURRENT]}}" "${{(@)words[2,CURRENT-1]}}"
    case "$kind" in
        none) ;;
        file) _files ;;
        shard) compadd -- ${{(f)"$(_persist_shards "${{(@)words[3,CURRENT-1]}}")"}} ;;
        *) compadd -- ${{(s:,:)kind}} ;;
    esac
}}

compdef _persist persist
"""


def _shared(lines: list[Line]) -> str:
    return _SHARED.format(cases=_cases(lines), with_actions=_with_actions(lines), places="|".join(PLACES))


def _bash(lines: list[Line]) -> str:
    head = "# Completion of persist for bash: source <(persist completion bash)\n"
    return head + _shared(lines) + _BASH.format(commands=" ".join(COMMANDS))


def _zsh(lines: list[Line]) -> str:
    head = "# Completion of persist for zsh, after compinit: source <(persist completion zsh)\n"
    return head + _shared(lines) + _ZSH.format(commands=" ".join(COMMANDS))


def _fish(lines: list[Line]) -> str:
    """Fish tells by conditions which commands are meant."""
    found = [
        "# Completion of persist for fish: persist completion fish | source",
        "function __persist_shards",
        "    set -l where",
        "    set -l is_value 0",
        "    for word in (commandline -opc)",
        "        if test $is_value = 1",
        "            set -a where $word",
        "            set is_value 0",
        f"        else if contains -- $word {' '.join(PLACES)}",
        "            set -a where $word",
        "            set is_value 1",
        "        end",
        "    end",
        "    persist shards --names $where 2>/dev/null",
        "end",
        "complete -c persist -f",
    ]
    found += [
        f"complete -c persist -n __fish_use_subcommand -a {name} -d {_quoted(what)}"
        for name, (_, what) in COMMANDS.items()
    ]
    for line in lines:
        command, _, action = line.command.partition(" ")
        seen = f"__fish_seen_subcommand_from {command}" + (f"; and __fish_seen_subcommand_from {action}" * bool(action))
        where = f"complete -c persist -n {_quoted(seen)}"
        for kind in dict.fromkeys(line.places):
            found += [f"{where}{_of_fish(kind)}"] if kind != NOTHING else []
        for option in line.options:
            flag = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            given = line.values.get(option)
            value = "" if given is None else f" {'-r' if given == FILE else '-x'}{_of_fish(given)}"
            found.append(f"{where} {flag}{value}")
    return "\n".join(found) + "\n"


def _of_fish(kind: str) -> str:
    if kind == FILE:
        return " -F"
    if kind == SHARD:
        return " -a '(__persist_shards)'"
    return "" if kind == NOTHING else f" -a {_quoted(kind.replace(',', ' '))}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
