"""`persist COMMAND`. Each command is a module with `add_arguments(parser)` and `run(args) -> int`: see `commands`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from persist.cli.commands import COMMANDS as COMMANDS
from persist.cli.commands import help_text, parser_of, unknown, version
from persist.cli.screen import Screen, complain
from persist.core.errors import PersistError

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code: 0, 1 after an error of persist, 2 where the words are no command.

    Errors of persist are one line on standard error.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
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
        module, parser = parser_of(command)
        code = int(module.run(parser.parse_args(arguments)))
        sys.stdout.flush()
        return code
    except PersistError as error:
        complain(f"persist {words[0]}", error.message, words)
        return EXIT_ERROR
    except BrokenPipeError:  # who reads the output has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
