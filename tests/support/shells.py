"""The commands of pages, run in a shell as a reader would type them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.forked import Forked
from tests.support.pages import Block, commands

COMMAND_S = 120.0
_ALONE = re.compile(r"(?:(.*\S)\s*\|\s*)?persist (.*)", re.DOTALL)  # `persist` last, after one pipe or none


def environment(**more: str) -> dict[str, str]:
    """`persist` on the path, as in an activated environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PERSIST_")}
    return {**kept, "PATH": path, **more}


def run_shell(block: Block, directory: Path) -> None:
    """Run the commands of a block there. What they print together is what stands below it, if anything does.

    `persist` is forked from a process that has loaded it, unless the shell has to do more than to pipe into it.
    """
    said = ""
    for command in commands(block.text):
        ran = _run(command, directory)
        assert ran.returncode == 0, f"line {block.line}: {command}\n{ran.stdout}\n{ran.stderr}"
        said += ran.stdout
    if block.prints is not None:
        assert _plain(said) == _plain(block.prints), f"line {block.line}: {block.text}"


def _run(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    alone = _ALONE.fullmatch(command)
    words = shlex.shlex(alone[2], posix=True, punctuation_chars=True) if alone else ()
    if alone is None or "$" in command or any(set(word) <= set("();<>|&") for word in words):
        return _in_shell(command, directory)
    with TemporaryDirectory() as beside:
        source = Path(beside) / "stdin"
        before = _in_shell(alone[1] or ":", directory)
        if before.returncode:
            return before
        source.write_text(before.stdout)
        process = Forked(shlex.split(alone[2]), environment(), directory=directory, before=partial(_read, source))
        printed, said = process.communicate()
    return subprocess.CompletedProcess(command, process.wait(), printed, said)


def _in_shell(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, shell=True, cwd=directory, env=environment(), capture_output=True, text=True, timeout=COMMAND_S
    )


def _read(source: Path) -> None:
    """In the process that was forked: the file is its standard input."""
    with source.open("rb") as file:
        os.dup2(file.fileno(), 0)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)


def _plain(text: str) -> str:
    """Without what the last newline and the spacing of JSON may be."""
    return re.sub(r"(?<=[:,]) ", "", text.strip().replace("\r\n", "\n"))
