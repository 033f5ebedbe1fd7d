"""`persist COMMAND`. Each command is a module with `add_arguments(parser)` and `run(args) -> int`: see `commands`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from blob import without_secrets
from persist.cli.commands import COMMANDS as COMMANDS
from persist.cli.commands import help_text, parser_of, unknown, version
from persist.cli.output_files import OutputLost, drop_output, take_streams
from persist.cli.terminal import Screen, complain
from persist.core.errors import InvalidUsage, PersistError

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
FOUND_IS_1 = frozenset({"inspect", "check"})  # their exit code 1 means that something is wrong there
# Arrow reads it once, when it is loaded. Its own allocators keep what is freed, each thread by itself, and what writes
# Parquet takes this one whatever `pyarrow.set_memory_pool` says: servers would stay as large as their largest rows.
ARROW_ALLOCATOR = ("ARROW_DEFAULT_MEMORY_POOL", "system")
_SURROGATE = re.compile("[\ud800-\udfff]")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code: 0, 1 after an error of persist, 2 where the words are no command.

    Errors of persist are one line on standard error. Without `argv` this is the process of the command.
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
            sys.stdout.flush()  # here, where it is told what is wrong with it
    except PersistError as error:
        complain(name, error.message, words)
        return EXIT_ERROR
    except BrokenPipeError:  # who reads the output has seen enough, as `head` has
        drop_output(sys.stdout)
        return EXIT_ERROR
    except OutputLost as error:
        drop_output(sys.stdout)
        complain(name, f"standard output cannot be written: {error.strerror}", words)
        return EXIT_ERROR
    except UnicodeEncodeError as error:  # of the working directory, or of a name that was found
        complain(name, f"{error.object!r:.200} is no Unicode text", words)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(help_text(Screen.of(sys.stdout)), flush=True)
        return 0 if words else EXIT_USAGE
    if words[0] == "--version":
        print(version(), flush=True)
        sys.exit(0)
    command, arguments = words[0], words[1:]
    if command not in COMMANDS:
        complain("persist", unknown(command), arguments)
        sys.exit(EXIT_USAGE)
    try:
        _check_texts(arguments)
    except InvalidUsage as error:
        complain(f"persist {command}", error.message, arguments)
        return EXIT_USAGE if command in FOUND_IS_1 else EXIT_ERROR
    module, parser = parser_of(command)
    return int(module.run(parser.parse_args(arguments)))


def _check_texts(arguments: Sequence[str]) -> None:
    """Raises InvalidUsage where an argument or a variable is no text in the encoding of the system, which is UTF-8.

    Python has half a surrogate pair for each such byte, which no store and no server takes.
    """
    for word in arguments:
        if _SURROGATE.search(word):
            raise InvalidUsage(
                f"an argument is {without_secrets(word)!r:.200}, which is no Unicode text: write it as UTF-8"
            )
    for name, value in os.environ.items():
        if name.startswith("PERSIST_") and _SURROGATE.search(value):  # which may be a token, so it is not shown
            raise InvalidUsage(f"the variable {name} holds no Unicode text: write it as UTF-8")


if __name__ == "__main__":
    sys.exit(main())
