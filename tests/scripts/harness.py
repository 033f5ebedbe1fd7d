"""Data-driven scripts: commands, `----`, and what they print.

    # A comment, kept as it is.
    command argument key=value
    another 'quoted argument'
    ----
    what the first command printed
    what the second one printed
    (a blank line ends the block)

Commands on one line separated by ` ; ` belong together; the interpreter decides what that means. A refused command
prints `error <kind>: message`. `pytest --rewrite` puts what was printed in the place of what was expected.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from persist.core.errors import PersistError

SEPARATOR = "----"
TOGETHER = " ; "


class ScriptError(Exception):
    """The script itself is wrong: its grammar, a verb or an argument."""


@dataclass(frozen=True)
class Block:
    """One block and the comments and blank lines before it. `line` is where its first command is, from 1."""

    preamble: tuple[str, ...]
    commands: tuple[str, ...]
    expected: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class Script:
    blocks: tuple[Block, ...]
    epilogue: tuple[str, ...]


class Arguments:
    """The words after a verb. Every word must be used: `finish` refuses what is left."""

    def __init__(self, verb: str, words: Sequence[str]) -> None:
        self.verb = verb
        self._positional = [w for w in words if "=" not in w]
        self._named = dict(w.split("=", 1) for w in words if "=" in w)

    def next(self, what: str) -> str:
        if not self._positional:
            raise ScriptError(f"{self.verb} needs {what}")
        return self._positional.pop(0)

    def rest(self) -> list[str]:
        words, self._positional = self._positional, []
        return words

    def flag(self, name: str) -> bool:
        if name not in self._positional:
            return False
        self._positional.remove(name)
        return True

    def named(self, name: str, default: str | None = None) -> str:
        value = self._named.pop(name, default)
        if value is None:
            raise ScriptError(f"{self.verb} needs {name}=...")
        return value

    def optional(self, name: str) -> str | None:
        return self._named.pop(name, None)

    def number(self, name: str, default: int) -> int:
        return int(self.named(name, str(default)))

    def finish(self) -> None:
        if self._positional or self._named:
            raise ScriptError(f"{self.verb} does not know {[*self._positional, *self._named]}")


# What one line of a script does: takes the commands that belong together, gives what they print.
Interpreter = Callable[[list[Arguments]], list[str]]


def parse(text: str) -> Script:
    blocks: list[Block] = []
    preamble: list[str] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        if not lines[at].strip() or lines[at].startswith("#"):
            preamble.append(lines[at])
            at += 1
            continue
        first = at
        while at < len(lines) and lines[at] != SEPARATOR:
            if not lines[at].strip():
                raise ScriptError(f"line {first + 1}: the commands are not followed by {SEPARATOR}")
            at += 1
        if at == len(lines):
            raise ScriptError(f"line {first + 1}: the commands are not followed by {SEPARATOR}")
        commands = tuple(lines[first:at])
        start = at = at + 1
        while at < len(lines) and lines[at].strip():
            at += 1
        blocks.append(Block(tuple(preamble), commands, tuple(lines[start:at]), first + 1))
        preamble = []
    return Script(tuple(blocks), tuple(preamble))


def render(script: Script, outputs: Sequence[Sequence[str]]) -> str:
    """The script's text with `outputs` in the place of what was expected."""
    lines: list[str] = []
    for block, output in zip(script.blocks, outputs, strict=True):
        lines += [*block.preamble, *block.commands, SEPARATOR, *output]
    lines += script.epilogue
    return "\n".join(lines).rstrip("\n") + "\n"


def arguments(command: str) -> Arguments:
    words = shlex.split(command)
    if not words:
        raise ScriptError("a command is missing")
    return Arguments(words[0], words[1:])


def print_error(error: PersistError) -> str:
    return f"error {error.kind}: {error}"


def execute(block: Block, interpreter: Interpreter) -> list[str]:
    """What the block's commands print."""
    output: list[str] = []
    for number, line in enumerate(block.commands, block.line):
        try:
            printed = interpreter([arguments(command) for command in line.split(TOGETHER)])
        except (ScriptError, ValueError) as error:
            raise ScriptError(f"line {number}: {line}: {error}") from error
        output += [shown for text in printed for shown in text.splitlines() if shown.strip()]
    return output


def run(path: Path, interpreter: Interpreter, rewrite: bool = False) -> None:
    """Run the script; raises AssertionError with the difference unless it prints what is expected."""
    text = path.read_text(encoding="utf-8")
    script = parse(text)
    actual = render(script, [execute(block, interpreter) for block in script.blocks])
    if rewrite:
        if actual != text:
            path.write_text(actual, encoding="utf-8")
        return
    expected = render(script, [block.expected for block in script.blocks])
    if actual != expected:
        names = (f"{path.name} (expected)", f"{path.name} (printed)")
        changes = difflib.unified_diff(expected.splitlines(), actual.splitlines(), *names, lineterm="", n=6)
        raise AssertionError("\n".join(changes))
