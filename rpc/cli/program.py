"""`persist COMMAND`: the program, the table of its commands, and shell completion.

A command is a module with `add_arguments(parser)` and, unless its subcommands set another default for `run`,
`run(arguments) -> int`; in a module of several commands these are `add_NAME` and `run_NAME`. A module is imported only
for its command: `persist cat` needs no FastAPI.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import persist
from blob import without_secrets
from persist.cli.output_files import OutputLost, drop_output, take_streams
from persist.cli.terminal import complain, print_line, without_secrets_of
from persist.core.errors import InvalidUsage, PersistError

# group -> command -> (module, one line of help)
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "shards and rows": {
        "create": ("persist.cli.shards", "make a shard"),
        "import": ("persist.cli.import_job", "write the rows of files to a shard: CSV, Parquet, NDJSON, Arrow"),
        "export": ("persist.cli.row_commands", "write the rows of a shard to a file"),
        "cat": ("persist.cli.row_commands", "show the rows of a shard, or count them"),
        "tail": ("persist.cli.row_commands", "show the latest changes of a shard; with -f, also later ones"),
        "diff": ("persist.cli.row_commands", "show the difference of two times of a shard, or of two shards"),
        "schema": ("persist.cli.schema", "show and change the columns and the constraints of a shard"),
        "drop": ("persist.cli.shards", "drop shards, by names or a prefix"),
        "shards": ("persist.cli.shards", "list shards, or show one"),
        "clone": ("persist.cli.shards", "make a shard with the contents of another one; no row is copied"),
    },
    "history": {
        "history": ("persist.cli.history", "show and set how much history a shard keeps; list its commits"),
        "restore": ("persist.cli.history", "give a shard its earlier contents again"),
        "tag": ("persist.cli.history", "keep single times of a shard readable, by name"),
        "retention": ("persist.cli.retention", "delete rows by age or size: policies, truncation, stream cuts"),
        "erase": ("persist.cli.retention", "delete rows of a shard for good, and show the progress"),
    },
    "faults and copies": {
        "check": ("rpc.cli.check", "find faults with causes and remedies; --repair repairs a shard"),
        "inspect": ("persist.cli.inspect", "show the internals of shards and stores, also of damaged ones"),
        "backup": ("persist.cli.backup", "back up and restore a location, and recover from lost stores"),
        "region": ("persist.cli.region", "replicate to other regions, switch over, fail over"),
    },
    "services": {
        "serve": ("rpc.cli.serve", "serve shards over HTTP"),
        "maintain": ("compactor.cli.maintain", "merge batches and delete garbage in the background"),
        "token": ("rpc.cli.token", "create, list and revoke bearer tokens of a server"),
    },
    "shell": {
        "completion": ("rpc.cli.program", "print a script by which bash, zsh or fish complete commands"),
    },
}
EXAMPLES = {
    "create": 'orders --schema "id int64, state string" --key id',
    "import": "orders orders.csv --upsert",
    "export": "orders orders.parquet --as-of 17",
    "cat": "orders --where \"state = 'new'\"",
    "tail": "orders -n 20 -f",
    "diff": "orders 16 17",
    "schema": "show orders",
    "drop": "orders --yes",
    "shards": "--prefix eu/",
    "clone": "orders orders-test --at 17",
    "history": "orders --keep 90d",
    "restore": "orders --at 2026-11-01T00:00:00Z",
    "tag": "set orders eom-2026-10 --at 416 --keep 400d",
    "retention": "set orders --age 90d",
    "erase": "start orders --keys keys.json --deadline 30d",
    "check": "--deep --rate 50MiB",
    "inspect": "state orders",
    "backup": "create --to s3://backups/shop",
    "region": "list --index regions.json",
    "serve": "--dir shop --port 8000",
    "maintain": "run --dir shop --once",
    "token": "create etl --scope write --prefix eu/ --file tokens.json",
    "completion": "bash",
}
COMMANDS = {name: command for commands in GROUPS.values() for name, command in commands.items()}
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
FOUND_IS_1 = frozenset({"inspect", "check"})  # their exit code 1 means that there are findings
# Arrow reads this when it is loaded. Its own allocators keep freed memory per thread, and the Parquet writer uses the
# default allocator whatever `pyarrow.set_memory_pool` sets: a server would keep the memory of its largest rows.
ARROW_ALLOCATOR = ("ARROW_DEFAULT_MEMORY_POOL", "system")
_SURROGATE = re.compile("[\ud800-\udfff]")


class _StoreOnce(argparse._StoreAction):
    """An option with one value, which is refused if it is given twice: the first value would be ignored."""

    _is_given = False

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if self._is_given and self.option_strings:
            raise argparse.ArgumentError(self, "given twice, which takes one value")
        self._is_given = True
        super().__call__(parser, namespace, values, option_string)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors do not show the secrets in URLs."""

    _words: tuple[str, ...] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "allow_abbrev": False})
        for action in (None, "store"):
            self.register("action", action, _StoreOnce)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = tuple(args or ())
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        super().error(without_secrets_of(self._words, message))


def parser_for(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of the program, with the arguments of this command only."""
    listed = (
        f"{group}:\n" + "".join(f"    {name:<10}  {what}\n" for name, (_, what) in commands.items())
        for group, commands in GROUPS.items()
    )
    parser = _Parser(
        prog="persist",
        usage="persist [-h] [--version] COMMAND ...",
        description="Shards: tables that change, each of their times readable.",
        epilog="\n".join(listed) + "\n`persist COMMAND --help` shows its options and an example.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"persist {persist.__version__}")
    commands = parser.add_subparsers(
        prog="persist", metavar="COMMAND", required=True, dest="command", help=argparse.SUPPRESS
    )
    for name, (module_name, what) in COMMANDS.items():
        subparser = commands.add_parser(name, description=what, epilog=f"example: persist {name} {EXAMPLES[name]}")
        if name == command:
            module = importlib.import_module(module_name)
            is_shared = hasattr(module, f"add_{name}")
            subparser.set_defaults(run=getattr(module, f"run_{name}" if is_shared else "run", None))
            getattr(module, f"add_{name}" if is_shared else "add_arguments")(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for an error of persist, 2 for an invalid command line.

    Errors of persist are one line on standard error. Without `argv` the arguments of the process are used.
    """
    if argv is None:
        take_streams()
        os.environ.setdefault(*ARROW_ALLOCATOR)
    words = list(sys.argv[1:] if argv is None else argv)
    name = f"persist {words[0]}" if words and words[0] in COMMANDS else "persist"
    try:
        try:
            return _run(words)
        finally:
            sys.stdout.flush()  # here, where its errors are handled
    except PersistError as error:
        complain(name, error.message, words)
        return EXIT_ERROR
    except BrokenPipeError:  # the reader of the output has ended, as `head` does
        drop_output(sys.stdout)
        return EXIT_ERROR
    except OutputLost as error:
        drop_output(sys.stdout)
        complain(name, f"standard output cannot be written: {error.strerror}", words)
        return EXIT_ERROR
    except UnicodeEncodeError as error:  # of the working directory, or of a name in the stores
        complain(name, f"{error.object!r:.200} is not valid Unicode text", words)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(words: Sequence[str]) -> int:
    command = words[0] if words and words[0] in COMMANDS else None
    if command is not None:
        try:
            _check_texts(words[1:])
        except InvalidUsage as error:
            complain(f"persist {command}", error.message, words)
            return EXIT_USAGE if command in FOUND_IS_1 else EXIT_ERROR
    arguments = parser_for(command).parse_args(words)
    return int(arguments.run(arguments))


def _check_texts(arguments: Sequence[str]) -> None:
    """Raises InvalidUsage if an argument or a variable is not in the encoding of the system, UTF-8.

    Python represents each invalid byte by a lone surrogate, which no store and no server accepts.
    """
    for word in arguments:
        if _SURROGATE.search(word):
            raise InvalidUsage(
                f"an argument is {without_secrets(word)!r:.200}, which is not valid Unicode text: write it as UTF-8"
            )
    for name, value in os.environ.items():
        if name.startswith("PERSIST_") and _SURROGATE.search(value):  # not shown, as it may be a token
            raise InvalidUsage(f"the variable {name} is not valid Unicode text: write it as UTF-8")


# The command `completion`. Its script calls it with `--line` for the candidates. Shard names are those of the location
# in the line. If there are no candidates, the shell completes file names.

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


def add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=_SCRIPTS, help="the shell; its script is printed")
    parser.add_argument("--line", metavar="TEXT", help="print the candidates for the end of this command line instead")


def run_completion(arguments: argparse.Namespace) -> int:
    if arguments.line is None:
        sys.stdout.write(_SCRIPTS[arguments.shell])
    else:
        for word in candidates(arguments.line):
            print_line(word)
    return 0


def candidates(line: str) -> list[str]:
    """The candidates for the end of a command line, by the parsers of the commands."""
    words = line.split()[1:]
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
            subcommands = next((each for each in positionals if isinstance(each, argparse._SubParsersAction)), None)
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
    from persist.cli.connection_args import add_client_arguments, client_of  # imports the client

    where = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    add_client_arguments(where)
    try:
        with client_of(where.parse_known_args(words)[0]) as client:
            return list(client.shards(prefix))
    except (argparse.ArgumentError, PersistError):
        return []
